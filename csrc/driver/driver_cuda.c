#include "driver/driver_cuda.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "base/lock.h"
#include "driver/alias_test.h"
#include "driver/capture.h"
#include "driver/context.h"
#include "driver/forked.h"
#include "driver/peers.h"

/* ---- a call and its outcome ---------------------------------------------------------------------------------- */

static mo_driver_cuda *self(mo_driver *driver)
{
    return (mo_driver_cuda *)driver;
}

static bool gone(CUresult code)
{
    return code == CUDA_ERROR_DEINITIALIZED || code == CUDA_ERROR_NOT_INITIALIZED ||
           code == CUDA_ERROR_CONTEXT_IS_DESTROYED;
}

/* One driver call in its device's context; `code` is what the whole came to. */
#define CALL(driver_, code_, expression_)                                                                    \
    do {                                                                                                     \
        mo_context_scope scope_;                                                                             \
        code_ = mo_context_enter(self(driver_), &scope_);                                                    \
        if (!code_) {                                                                                        \
            const mo_cuda_api *api = scope_.api;                                                             \
            code_ = (expression_);                                                                           \
            mo_context_leave(&scope_);                                                                       \
        }                                                                                                    \
    } while (0)

#define CHECKED(driver_, code_, detail_, ...) checked(self(driver_)->api, (code_), (detail_), __VA_ARGS__)

static mo_status checked(const mo_cuda_api *api, CUresult code, mo_detail *detail, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

static mo_status checked(const mo_cuda_api *api, CUresult code, mo_detail *detail, const char *format, ...)
{
    char what[160];
    va_list args;

    if (code == CUDA_SUCCESS)
        return MO_OK;
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    if (mo_forked())
        return mo_forked_refuse(what, detail);
    return mo_cuda_check(api, code, what, detail);
}

/* As checked(), for what releases: a driver that is gone has released everything. */
#define RELEASED(driver_, code_, detail_, ...)                                                               \
    (gone(code_) ? MO_OK : CHECKED((driver_), (code_), (detail_), __VA_ARGS__))

/* ---- addresses, physical memory, mappings ----------------------------------------------------------------------- */

static mo_status cuda_reserve(mo_driver *driver, size_t size, mo_detail *detail, mo_address *out)
{
    CUdeviceptr address = 0;
    CUresult code;
    CALL(driver, code, api->reserve(&address, size, 0, 0, 0));
    if (code)
        return CHECKED(driver, code, detail, "cuMemAddressReserve(%zu)", size);
    *out = (mo_address)address;
    return MO_OK;
}

static mo_status cuda_unreserve(mo_driver *driver, mo_address address, size_t size, mo_detail *detail)
{
    CUresult code;
    CALL(driver, code, api->unreserve(address, size));
    return RELEASED(driver, code, detail, "cuMemAddressFree(%#zx, %zu)", (size_t)address, size);
}

static CUmemAllocationProp pinned_on(const mo_driver_cuda *d, bool plain)
{
    CUmemAllocationProp properties;
    memset(&properties, 0, sizeof properties); /* every field that is not named must be 0 */
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    properties.location.id = d->handle;
    if (!plain && d->rdma)
        properties.allocFlags.gpuDirectRDMACapable = 1;
    if (!plain && d->exportable)
        properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    return properties;
}

static bool asks_for_more(mo_driver_cuda *d)
{
    return (d->rdma || d->exportable) && !atomic_load_explicit(&d->plain, memory_order_relaxed);
}

static mo_status cuda_create(mo_driver *driver, size_t size, mo_detail *detail, mo_physical *out)
{
    const bool more = asks_for_more(self(driver));
    CUmemAllocationProp properties = pinned_on(self(driver), !more);
    CUmemGenericAllocationHandle handle = 0;
    CUresult code;
    CALL(driver, code, api->create(&handle, size, &properties, 0));
    if (code && code != CUDA_ERROR_OUT_OF_MEMORY && more) {
        properties = pinned_on(self(driver), true);
        CALL(driver, code, api->create(&handle, size, &properties, 0));
        if (!code) /* so it was about what was asked for */
            atomic_store_explicit(&self(driver)->plain, true, memory_order_relaxed);
    }
    if (code)
        return CHECKED(driver, code, detail, "cuMemCreate(%zu)", size);
    *out = handle;
    return MO_OK;
}

static mo_status cuda_release(mo_driver *driver, mo_physical handle, mo_detail *detail)
{
    CUresult code;
    CALL(driver, code, api->release(handle));
    return RELEASED(driver, code, detail, "cuMemRelease(%#llx)", (unsigned long long)handle);
}

static mo_status cuda_map(mo_driver *driver, mo_address address, size_t size, mo_physical handle,
                          mo_detail *detail)
{
    CUresult code;
    CALL(driver, code, api->map(address, size, /* offset, must be */ 0, handle, /* flags */ 0));
    return CHECKED(driver, code, detail, "cuMemMap(%#zx, %zu)", (size_t)address, size);
}

static mo_status cuda_unmap(mo_driver *driver, mo_address address, size_t size, mo_detail *detail)
{
    CUresult code;
    CALL(driver, code, api->unmap(address, size));
    return RELEASED(driver, code, detail, "cuMemUnmap(%#zx, %zu)", (size_t)address, size);
}

static mo_status cuda_grant(mo_driver *driver, mo_address address, size_t size, mo_detail *detail)
{
    CUmemAccessDesc access[MO_MAX_DEVICES];
    const size_t count = mo_peers_access(self(driver), access);
    CUresult code;
    CALL(driver, code, api->grant(address, size, access, count));
    return CHECKED(driver, code, detail, "cuMemSetAccess(%#zx, %zu)", (size_t)address, size);
}

static mo_status cuda_test_aliases(mo_driver *driver, mo_detail *detail)
{
    return mo_alias_test(self(driver), detail);
}

/* ---- segments -------------------------------------------------------------------------------------------------- */

static mo_status cuda_segment_alloc(mo_driver *driver, size_t size, mo_detail *detail, mo_address *out)
{
    CUdeviceptr address = 0;
    CUresult code;
    CALL(driver, code, api->memory_alloc(&address, size));
    if (code)
        return CHECKED(driver, code, detail, "cuMemAlloc(%zu)", size);
    *out = (mo_address)address;
    return MO_OK;
}

static mo_status cuda_segment_free(mo_driver *driver, mo_address address, mo_detail *detail)
{
    CUresult code;
    CALL(driver, code, api->memory_free(address));
    return RELEASED(driver, code, detail, "cuMemFree(%#zx)", (size_t)address);
}

/* ---- order ------------------------------------------------------------------------------------------------------- */

static mo_status cuda_event_create(mo_driver *driver, mo_detail *detail, mo_event **out)
{
    CUevent event = NULL;
    CUresult code;
    CALL(driver, code, api->event_create(&event, CU_EVENT_DISABLE_TIMING));
    if (code)
        return CHECKED(driver, code, detail, "cuEventCreate()");
    *out = (mo_event *)event;
    return MO_OK;
}

static mo_status cuda_event_destroy(mo_driver *driver, mo_event *event, mo_detail *detail)
{
    CUresult code;
    CALL(driver, code, api->event_destroy((CUevent)event));
    return RELEASED(driver, code, detail, "cuEventDestroy()");
}

static mo_status cuda_event_record(mo_driver *driver, mo_event *event, mo_stream stream, mo_detail *detail)
{
    CUresult code;
    CALL(driver, code, api->event_record((CUevent)event, stream));
    return CHECKED(driver, code, detail, "cuEventRecord()");
}

static mo_status cuda_event_query(mo_driver *driver, mo_event *event, mo_detail *detail)
{
    CUresult code;
    CALL(driver, code, api->event_query((CUevent)event));
    return code == CUDA_ERROR_NOT_READY ? MO_NOT_READY : CHECKED(driver, code, detail, "cuEventQuery()");
}

static mo_status cuda_stream_wait(mo_driver *driver, mo_stream stream, mo_event *event, mo_detail *detail)
{
    CUresult code;
    CALL(driver, code, api->stream_wait(stream, (CUevent)event, 0));
    return CHECKED(driver, code, detail, "cuStreamWaitEvent()");
}

static mo_status cuda_capture_id(mo_driver *driver, mo_stream stream, mo_detail *detail, uint64_t *out)
{
    uint64_t id = 0;
    CUresult code;
    CALL(driver, code, mo_capture_id(api, stream, &id));
    if (code)
        return CHECKED(driver, code, detail, "cuStreamGetCaptureInfo()");
    *out = id;
    return MO_OK;
}

static mo_status cuda_synchronize(mo_driver *driver, mo_detail *detail)
{
    CUresult code;
    CALL(driver, code, api->context_synchronize());
    return CHECKED(driver, code, detail, "cuCtxSynchronize()");
}

/* ---- copies ------------------------------------------------------------------------------------------------------ */

static mo_status cuda_stream_create(mo_driver *driver, mo_detail *detail, mo_stream *out)
{
    CUstream stream = NULL;
    CUresult code;
    CALL(driver, code, api->stream_create(&stream, CU_STREAM_NON_BLOCKING));
    if (code)
        return CHECKED(driver, code, detail, "cuStreamCreate()");
    *out = stream;
    return MO_OK;
}

static mo_status cuda_stream_destroy(mo_driver *driver, mo_stream stream, mo_detail *detail)
{
    CUresult code;
    CALL(driver, code, api->stream_destroy(stream));
    return RELEASED(driver, code, detail, "cuStreamDestroy()");
}

static mo_status cuda_pinned_alloc(mo_driver *driver, size_t size, mo_detail *detail, void **out)
{
    void *block = NULL;
    CUresult code;
    CALL(driver, code, api->host_alloc(&block, size, CU_MEMHOSTALLOC_PORTABLE));
    if (code == CUDA_ERROR_OUT_OF_MEMORY)
        return mo_fail(detail, MO_NO_HOST_MEMORY, code,
                       "cuMemHostAlloc(%zu): the host cannot lock that much memory", size);
    if (code)
        return CHECKED(driver, code, detail, "cuMemHostAlloc(%zu)", size);
    *out = block;
    return MO_OK;
}

static mo_status cuda_pinned_free(mo_driver *driver, void *block, mo_detail *detail)
{
    CUresult code;
    CALL(driver, code, api->host_free(block));
    return RELEASED(driver, code, detail, "cuMemFreeHost()");
}

static mo_status cuda_copy_to_host(mo_driver *driver, mo_stream stream, void *to, mo_address from,
                                   size_t size, mo_detail *detail)
{
    CUresult code;
    CALL(driver, code, api->copy_to_host(to, from, size, stream));
    return CHECKED(driver, code, detail, "cuMemcpyDtoHAsync(%zu)", size);
}

static mo_status cuda_copy_to_device(mo_driver *driver, mo_stream stream, mo_address to, const void *from,
                                     size_t size, mo_detail *detail)
{
    CUresult code;
    CALL(driver, code, api->copy_to_device(to, from, size, stream));
    return CHECKED(driver, code, detail, "cuMemcpyHtoDAsync(%zu)", size);
}

static mo_status cuda_memory_info(mo_driver *driver, mo_detail *detail, size_t *free_bytes,
                                  size_t *total_bytes)
{
    size_t unused = 0, total = 0;
    CUresult code;
    CALL(driver, code, api->memory_info(&unused, &total));
    if (code)
        return CHECKED(driver, code, detail, "cuMemGetInfo()");
    *free_bytes = unused;
    *total_bytes = total;
    return MO_OK;
}

static uint64_t cuda_now(mo_driver *driver)
{
    struct timespec t;
    (void)driver;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * UINT64_C(1000000000) + (uint64_t)t.tv_nsec;
}

static void cuda_pause(mo_driver *driver, uint64_t duration)
{
    struct timespec t = {(time_t)(duration / UINT64_C(1000000000)), (long)(duration % UINT64_C(1000000000))};
    (void)driver;
    nanosleep(&t, NULL); /* a signal ends the rest early; "about" allows it */
}

/* ---- opening ------------------------------------------------------------------------------------------------------- */

static const mo_driver cuda_table = {
    .reserve = cuda_reserve,
    .unreserve = cuda_unreserve,
    .create = cuda_create,
    .release = cuda_release,
    .map = cuda_map,
    .unmap = cuda_unmap,
    .grant = cuda_grant,
    .test_aliases = cuda_test_aliases,
    .segment_alloc = cuda_segment_alloc,
    .segment_free = cuda_segment_free,
    .event_create = cuda_event_create,
    .event_destroy = cuda_event_destroy,
    .event_record = cuda_event_record,
    .event_query = cuda_event_query,
    .stream_wait = cuda_stream_wait,
    .capture_id = cuda_capture_id,
    .synchronize = cuda_synchronize,
    .stream_create = cuda_stream_create,
    .stream_destroy = cuda_stream_destroy,
    .pinned_alloc = cuda_pinned_alloc,
    .pinned_free = cuda_pinned_free,
    .copy_to_host = cuda_copy_to_host,
    .copy_to_device = cuda_copy_to_device,
    .memory_info = cuda_memory_info,
    .now = cuda_now,
    .pause = cuda_pause,
};

/* A driver that is older than the attribute does not know it. */
static bool offers(const mo_driver_cuda *d, CUdevice_attribute what)
{
    int offered = 0;

    return d->api->device_attribute(&offered, what, d->handle) == CUDA_SUCCESS && offered;
}

/* Bytes of the smallest physical block, 0 where the device or the driver has no virtual memory management; and what memory
 * can be asked for beside bytes. */
static mo_status find_granularity(mo_driver_cuda *d, mo_detail *detail, size_t *out)
{
    const mo_cuda_api *api = d->api;
    CUmemAllocationProp properties;
    int supported = 0;
    CUresult code;

    *out = 0;
    if (!api->reserve || !api->unreserve || !api->create || !api->release || !api->map || !api->unmap ||
        !api->grant || !api->granularity)
        return MO_OK;
    code =
        api->device_attribute(&supported, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, d->handle);
    if (!code && supported) {
        d->rdma = offers(d, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED);
        d->exportable = offers(d, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
        properties = pinned_on(d, false);
        code = api->granularity(out, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
        if (code && asks_for_more(d)) {
            atomic_store_explicit(&d->plain, true, memory_order_relaxed);
            properties = pinned_on(d, true);
            code = api->granularity(out, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
        }
    }
    return checked(api, code, detail, "querying virtual memory support of device %d", d->table.device);
}

mo_status mo_driver_cuda_open(const mo_cuda_api *api, int ordinal, mo_driver_cuda *out, mo_detail *detail)
{
    mo_driver_cuda d = {.table = cuda_table, .api = api};
    int count = 0;
    mo_status status;

    if (mo_forked())
        return checked(api, CUDA_ERROR_NOT_INITIALIZED, detail, "opening device %d", ordinal);
    status = checked(api, api->device_count(&count), detail, "cuDeviceGetCount()");
    if (status)
        return status;
    if (ordinal < 0 || ordinal >= count)
        return mo_fail(detail, MO_NO_DEVICE, 0, "there is no CUDA device %d: this process sees %d of them",
                       ordinal, count);
    mo_forked_watch(); /* for whoever has a table that is not the process's */
    status = checked(api, api->device_get(&d.handle, ordinal), detail, "cuDeviceGet(%d)", ordinal);
    if (status)
        return status;
    d.table.device = ordinal;
    status = find_granularity(&d, detail, &d.table.granularity);
    if (status)
        return status;
    status = checked(api, api->primary_retain(&d.context, d.handle), detail, "cuDevicePrimaryCtxRetain(%d)",
                     ordinal);
    if (status)
        return status;
    *out = d;
    return MO_OK;
}

mo_status mo_driver_cuda_close(mo_driver_cuda *driver, mo_detail *detail)
{
    mo_context_scope scope;
    CUresult code = mo_context_enter(driver, &scope); /* a child of a fork, or an ended driver, stops here */
    if (!code) {
        mo_context_leave(&scope);
        code = driver->api->primary_release(driver->handle);
    }
    return RELEASED(&driver->table, code, detail, "cuDevicePrimaryCtxRelease(%d)", driver->table.device);
}

mo_status mo_driver_cuda_get(int ordinal, mo_driver **out, mo_detail *detail)
{
    static mo_driver_cuda drivers[MO_MAX_DEVICES];
    static _Atomic(mo_driver *) ready[MO_MAX_DEVICES];
    static mo_lock lock = MO_LOCK_INIT;
    const mo_cuda_api *api = NULL;
    mo_driver *found;
    mo_status status;

    if (ordinal < 0 || ordinal >= MO_MAX_DEVICES)
        return mo_fail(detail, MO_NO_DEVICE, 0, "there is no CUDA device %d: memopt supports devices 0 to %d",
                       ordinal, MO_MAX_DEVICES - 1);
    found = atomic_load_explicit(&ready[ordinal], memory_order_acquire);
    if (!found) {
        /* Not past here in a child of a fork: another thread may have held these locks then. */
        if (mo_forked())
            return checked(NULL, CUDA_ERROR_NOT_INITIALIZED, detail, "opening device %d", ordinal);
        status = mo_cuda_api_get(&api, detail);
        if (status)
            return status;
        mo_lock_take(&lock);
        found = atomic_load(&ready[ordinal]);
        if (!found) {
            status = mo_driver_cuda_open(api, ordinal, &drivers[ordinal], detail);
            if (!status) {
                found = &drivers[ordinal].table;
                mo_peers_join(ordinal, drivers[ordinal].handle);
                atomic_store_explicit(&ready[ordinal], found, memory_order_release);
            }
        }
        mo_lock_give(&lock);
        if (status)
            return status;
    }
    *out = found;
    return MO_OK;
}
