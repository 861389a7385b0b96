/* Built with -fexceptions: memopt_malloc is left by one. */
#include "alloc/torch_hooks.h"

#include <stdio.h>

#include "alloc/passthrough.h"
#include "alloc/torch_throw.h"
#include "base/units.h"
#include "driver/driver_cuda.h"

/* driver is NULL where the context itself had no room. */
static void describe_out_of_memory(char *text, size_t capacity, int device, mo_driver *driver, size_t size)
{
    char asked[MO_SIZE_TEXT], all[MO_SIZE_TEXT], left[MO_SIZE_TEXT], live[MO_SIZE_TEXT];
    size_t free_bytes = 0, total_bytes = 0;
    mo_passthrough_stats stats;
    int n;

    mo_passthrough_read(device, &stats);
    n = snprintf(text, capacity, "CUDA out of memory. Tried to allocate %s on GPU %d.",
                 mo_format_size(size, asked), device);
    if (driver && driver->memory_info(driver, NULL, &free_bytes, &total_bytes) == MO_OK)
        n += snprintf(text + n, capacity - (size_t)n, " It has %s in all, of which %s are free.",
                      mo_format_size(total_bytes, all), mo_format_size(free_bytes, left));
    snprintf(text + n, capacity - (size_t)n, " memopt's pass-through allocator holds %s in %llu blocks.",
             mo_format_size(stats.live_bytes, live), (unsigned long long)stats.live_blocks);
}

/* A captured graph refers to addresses for as long as it lives, and a free that goes straight to the driver takes
 * them away: the replay would touch memory that is no longer there. */
static mo_status refuse_capture(mo_driver *driver, mo_stream stream, mo_detail *detail)
{
    uint64_t capture = 0;
    mo_status status = driver->capture_id(driver, stream, detail, &capture);

    if (!status && capture)
        status = mo_fail(
            detail, MO_UNSUPPORTED, 0,
            "memopt's pass-through allocator cannot allocate while a CUDA graph is captured, since it "
            "keeps no memory for a graph: capture without memopt.cuda.allocator()");
    return status;
}

void *memopt_malloc(ssize_t size, int device, void *stream)
{
    mo_driver *driver = NULL;
    mo_address address = 0;
    mo_detail detail;
    mo_status status = mo_driver_cuda_get(device, &driver, &detail);

    if (!status && size < 0)
        status = mo_fail(&detail, MO_INVALID, 0, "memopt_malloc: the size %zd is negative", size);
    if (!status)
        status = refuse_capture(driver, stream, &detail);
    if (!status)
        status = mo_passthrough_alloc(driver, (size_t)size, &detail, &address);
    if (status == MO_NO_DEVICE_MEMORY) {
        describe_out_of_memory(detail.text, sizeof detail.text, device, driver, (size_t)size);
        mo_torch_throw_out_of_memory(detail.text);
    }
    if (status)
        mo_torch_throw_error(detail.text);
    return (void *)address;
}

void memopt_free(void *address, ssize_t size, int device, void *stream)
{
    mo_driver *driver = NULL;

    (void)stream;
    /* Whatever could be freed came through memopt_malloc, so the driver is there; refusals are counted below. */
    if (mo_driver_cuda_get(device, &driver, NULL) == MO_OK)
        mo_passthrough_free(driver, (mo_address)address, (size_t)size, NULL);
}
