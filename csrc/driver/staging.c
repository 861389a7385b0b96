#include "driver/staging.h"

#include <string.h>

#include "base/size.h"
#include "driver/capture.h"

#define CAPACITY_MIN ((size_t)4096) /* a page: less cannot be pinned anyway */

static CUresult free_slot(const mo_cuda_api *api, mo_staging_slot *slot)
{
    CUresult code = CUDA_SUCCESS, last;

    if (slot->host) {
        last = api->host_free(slot->host);
        code = code ? code : last;
    }
    if (slot->device) {
        last = api->memory_free(slot->device);
        code = code ? code : last;
    }
    if (slot->done) {
        last = api->event_destroy(slot->done);
        code = code ? code : last;
    }
    *slot = (mo_staging_slot){0};
    return code;
}

static mo_status make_slot(const mo_cuda_api *api, size_t size, bool with_event, mo_staging_slot *out,
                           mo_detail *detail)
{
    mo_staging_slot slot = {.capacity = CAPACITY_MIN};
    mo_status status;

    while (slot.capacity < size && slot.capacity <= SIZE_MAX / 2)
        slot.capacity *= 2; /* so that a slowly growing model does not make a new slot a step */
    if (slot.capacity < size)
        return mo_fail(detail, MO_OVERFLOW, 0, "a table of %zu bytes does not fit", size);
    status = mo_cuda_check(api, api->host_alloc(&slot.host, slot.capacity, CU_MEMHOSTALLOC_PORTABLE),
                           "cuMemHostAlloc(chunk table)", detail);
    if (!status)
        status = mo_cuda_check(api, api->memory_alloc(&slot.device, slot.capacity), "cuMemAlloc(chunk table)",
                               detail);
    if (!status && with_event)
        status = mo_cuda_check(api, api->event_create(&slot.done, CU_EVENT_DISABLE_TIMING), "cuEventCreate",
                               detail);
    if (status) {
        free_slot(api, &slot);
        return status;
    }
    *out = slot;
    return MO_OK;
}

static mo_status put_captured(mo_staging *staging, const mo_cuda_api *api, CUstream stream, const void *table,
                              size_t size, size_t capacity, CUdeviceptr *out, mo_detail *detail)
{
    mo_staging_slot slot;
    mo_status status = make_slot(api, capacity, /* with_event */ false, &slot, detail);

    if (status)
        return status;
    memcpy(slot.host, table, size);
    status = mo_cuda_check(api, api->copy_to_device(slot.device, slot.host, size, stream),
                           "cuMemcpyHtoDAsync(chunk table)", detail);
    if (status) {
        free_slot(api, &slot);
        return status;
    }
    staging->counts.captured++;
    staging->counts.captured_bytes += slot.capacity;
    *out = slot.device;
    return MO_OK;
}

/* Brings slot->in_flight up to date. */
static mo_status look(const mo_cuda_api *api, mo_staging_slot *slot, mo_detail *detail)
{
    CUresult code = slot->in_flight ? api->event_query(slot->done) : CUDA_SUCCESS;

    if (code == CUDA_SUCCESS)
        slot->in_flight = false;
    return code == CUDA_ERROR_NOT_READY ? MO_OK : mo_cuda_check(api, code, "cuEventQuery", detail);
}

/* A slot that holds this very table and was last used on a stream of this handle, or NULL. */
static mo_staging_slot *find_equal(mo_staging *staging, CUstream stream, const void *table, size_t size,
                                   size_t capacity)
{
    for (int i = 0; i < MO_STAGING_SLOTS; i++) {
        mo_staging_slot *slot = &staging->slots[i];
        if (slot->size == size && slot->capacity >= capacity && slot->stream == stream &&
            memcmp(slot->host, table, size) == 0)
            return slot;
    }
    return NULL;
}

/* An empty place, or a free slot (one that is large enough if there is one), or the oldest after waiting for
 * it. */
static mo_status find_free(mo_staging *staging, const mo_cuda_api *api, size_t size, mo_staging_slot **out,
                           mo_detail *detail)
{
    mo_staging_slot *found = NULL, *oldest = &staging->slots[0];

    for (int i = 0; i < MO_STAGING_SLOTS; i++) {
        mo_staging_slot *slot = &staging->slots[i];
        mo_status status;

        if (!slot->host) {
            if (!found)
                found = slot;
            continue;
        }
        status = look(api, slot, detail);
        if (status)
            return status;
        if (!slot->in_flight && (!found || (found->capacity < size && slot->capacity > found->capacity)))
            found = slot;
        if (slot->turn < oldest->turn)
            oldest = slot;
    }
    if (!found) {
        mo_status status =
            mo_cuda_check(api, api->event_synchronize(oldest->done), "cuEventSynchronize", detail);
        if (status)
            return status;
        staging->counts.waits++;
        oldest->in_flight = false;
        found = oldest;
    }
    *out = found;
    return MO_OK;
}

mo_status mo_staging_put(mo_staging *staging, const mo_cuda_api *api, CUstream stream, const void *table,
                         size_t size, size_t room, mo_staging_slot **out_slot, CUdeviceptr *out,
                         mo_detail *detail)
{
    uint64_t capture = 0;
    mo_staging_slot *slot;
    size_t capacity;
    mo_status status;

    if (!mo_add_ok(size, room, &capacity))
        return mo_fail(detail, MO_OVERFLOW, 0, "a table of %zu bytes and %zu more do not fit", size, room);
    status = mo_cuda_check(api, mo_capture_id(api, stream, &capture), "cuStreamGetCaptureInfo", detail);
    if (status)
        return status;
    *out_slot = NULL;
    if (capture)
        return put_captured(staging, api, stream, table, size, capacity, out, detail);

    slot = find_equal(staging, stream, table, size, capacity);
    if (slot) {
        if (slot->in_flight) /* behind the copy, also where the handle is another stream's by now */
            status = mo_cuda_check(api, api->stream_wait(stream, slot->done, 0), "cuStreamWaitEvent", detail);
        if (status)
            return status;
        staging->counts.repeats++;
    } else {
        status = find_free(staging, api, capacity, &slot, detail);
        if (status)
            return status;
        if (slot->capacity < capacity) {
            mo_staging_slot larger;
            status = make_slot(api, capacity, /* with_event */ true, &larger, detail);
            if (status)
                return status;
            status = mo_cuda_check(api, free_slot(api, slot), "cuMemFree(chunk table)", detail);
            *slot = larger;
            if (status)
                return status;
        }
        memcpy(slot->host, table, size);
        slot->size = 0;
        status = mo_cuda_check(api, api->copy_to_device(slot->device, slot->host, size, stream),
                               "cuMemcpyHtoDAsync(chunk table)", detail);
        if (status)
            return status;
        slot->size = size;
        staging->counts.uploads++;
    }
    slot->stream = stream;
    slot->turn = ++staging->turn;
    *out_slot = slot;
    *out = slot->device;
    return MO_OK;
}

mo_status mo_staging_used(const mo_cuda_api *api, mo_staging_slot *slot, mo_detail *detail)
{
    mo_status status;

    if (!slot)
        return MO_OK;
    status = mo_cuda_check(api, api->event_record(slot->done, slot->stream), "cuEventRecord", detail);
    if (status) { /* no event tells when it is free: wait now, so that the next user need not know */
        api->stream_synchronize(slot->stream);
        slot->size = 0;
    }
    slot->in_flight = !status;
    return status;
}

mo_status mo_staging_clear(mo_staging *staging, const mo_cuda_api *api, mo_detail *detail)
{
    mo_status status = MO_OK, last;

    for (int i = 0; i < MO_STAGING_SLOTS; i++) {
        mo_staging_slot *slot = &staging->slots[i];
        if (!slot->host)
            continue;
        last = slot->in_flight
                   ? mo_cuda_check(api, api->event_synchronize(slot->done), "cuEventSynchronize", detail)
                   : MO_OK;
        status = status ? status : last;
        last = mo_cuda_check(api, free_slot(api, slot), "cuMemFree(chunk table)", detail);
        status = status ? status : last;
    }
    return status;
}
