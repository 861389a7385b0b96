#include <stdlib.h>

#include "driver/model_device_parts.h"

/* ---- streams ---------------------------------------------------------------------------------------------------- */

static mo_model_device_block *made_stream(mo_model_device *d, mo_stream stream)
{
    const uintptr_t at = (uintptr_t)stream;
    mo_model_device_block *s = mo_model_device_find(d, MO_MODEL_DEVICE_STREAM, at, at + 1);
    return s && s->low == at ? s : NULL;
}

static mo_status model_stream_create(mo_driver *driver, mo_detail *detail, mo_stream *out)
{
    mo_model_device *d = mo_model_device_of(driver);
    mo_status status = mo_model_device_enter(driver, MO_MODEL_DEVICE_stream_create, detail);
    if (status)
        return status;
    /* Names are never handed out twice: a stream's queue outlives it. */
    const uintptr_t name = (uintptr_t)0x7000000 + (uintptr_t)d->next_id++;
    *out = (mo_stream)mo_model_device_add(d, MO_MODEL_DEVICE_STREAM,
                                          (mo_model_device_block){.low = name, .high = name + 1})
               ->low;
    return mo_model_device_leave(driver, MO_OK);
}

static mo_status model_stream_destroy(mo_driver *driver, mo_stream stream, mo_detail *detail)
{
    mo_model_device *d = mo_model_device_of(driver);
    mo_model_device_block *s;
    mo_status status = mo_model_device_enter(driver, MO_MODEL_DEVICE_stream_destroy, detail);
    if (status)
        return status;
    s = made_stream(d, stream);
    if (!s)
        return mo_model_device_refuse(driver, detail, "stream_destroy: no such stream");
    mo_model_device_drop(d, MO_MODEL_DEVICE_STREAM, s);
    return mo_model_device_leave(driver, MO_OK);
}

/* ---- pinned memory: real bytes, so that threads of the host may use them ----------------------------------------- */

static mo_status model_pinned_alloc(mo_driver *driver, size_t size, mo_detail *detail, void **out)
{
    mo_model_device *d = mo_model_device_of(driver);
    void *block = NULL;
    mo_status status = mo_model_device_enter(driver, MO_MODEL_DEVICE_pinned_alloc, detail);
    if (status)
        return status;
    if (!size)
        return mo_model_device_refuse(driver, detail, "pinned_alloc: no bytes");
    if ((d->pinned_capacity && size > d->pinned_capacity - d->pinned) || posix_memalign(&block, 4096, size))
        return mo_model_device_leave(driver,
                                     mo_fail(detail, MO_NO_HOST_MEMORY, 0, "pinned_alloc: the host is full"));
    d->pinned += size;
    mo_model_device_add(
        d, MO_MODEL_DEVICE_PINNED,
        (mo_model_device_block){.low = (uintptr_t)block, .high = (uintptr_t)block + size, .size = size});
    *out = block;
    return mo_model_device_leave(driver, MO_OK);
}

static mo_status model_pinned_free(mo_driver *driver, void *block, mo_detail *detail)
{
    mo_model_device *d = mo_model_device_of(driver);
    const uintptr_t at = (uintptr_t)block;
    mo_model_device_block *pinned;
    mo_status status = mo_model_device_enter(driver, MO_MODEL_DEVICE_pinned_free, detail);
    if (status)
        return status;
    pinned = mo_model_device_find(d, MO_MODEL_DEVICE_PINNED, at, at + 1);
    if (!pinned || pinned->low != at)
        return mo_model_device_refuse(driver, detail, "pinned_free: not the start of a pinned block");
    mo_model_device_drain(d);
    d->pinned -= pinned->size;
    mo_model_device_drop(d, MO_MODEL_DEVICE_PINNED, pinned);
    free(block);
    return mo_model_device_leave(driver, MO_OK);
}

/* ---- copies: they use both ranges, and move nothing ------------------------------------------------------------------- */

static mo_status copy(mo_driver *driver, mo_model_device_call which, mo_stream stream, const void *host,
                      mo_address address, size_t size, mo_detail *detail)
{
    mo_model_device *d = mo_model_device_of(driver);
    const uintptr_t at = (uintptr_t)host;
    mo_model_device_block *pinned;
    mo_status status = mo_model_device_enter(driver, which, detail);
    if (status)
        return status;
    pinned = mo_model_device_find(d, MO_MODEL_DEVICE_PINNED, at, at + 1);
    if (!size || !pinned || at + size > pinned->high)
        return mo_model_device_refuse(driver, detail, "copy: not within one pinned block");
    mo_model_device_uses_copy(d, mo_model_device_stream_of(d, stream), pinned, at, address, size);
    return mo_model_device_leave(driver, MO_OK);
}

static mo_status model_copy_to_host(mo_driver *driver, mo_stream stream, void *to, mo_address from,
                                    size_t size, mo_detail *detail)
{
    return copy(driver, MO_MODEL_DEVICE_copy_to_host, stream, to, from, size, detail);
}

static mo_status model_copy_to_device(mo_driver *driver, mo_stream stream, mo_address to, const void *from,
                                      size_t size, mo_detail *detail)
{
    return copy(driver, MO_MODEL_DEVICE_copy_to_device, stream, from, to, size, detail);
}

void mo_model_device_copies_fill(mo_driver *table)
{
    table->stream_create = model_stream_create;
    table->stream_destroy = model_stream_destroy;
    table->pinned_alloc = model_pinned_alloc;
    table->pinned_free = model_pinned_free;
    table->copy_to_host = model_copy_to_host;
    table->copy_to_device = model_copy_to_device;
}
