#include "clock.h"

#include "prices.h"

#include <fnmatch.h>
#include <string.h>

typedef struct row {
    const char *what;
    uint64_t nanoseconds;
} row;

#define ROW(what, nanoseconds) {what, nanoseconds},
static const row of_host[] = {SIM_HOST_PRICES(ROW)};
static row of_device[] = {SIM_DEVICE_PRICES(ROW)};
#undef ROW
enum { KERNEL, DEVICE, LINK }; /* rows of the device, in their order */

uint64_t sim_host_time;

uint64_t sim_price_of(const char *function)
{
    size_t i = 0;

    while (fnmatch(of_host[i].what, function, 0) != 0) /* the last one fits all */
        i++;
    return of_host[i].nanoseconds;
}

uint64_t *sim_device_price(const char *what)
{
    for (size_t i = 0; what && i < sizeof of_device / sizeof *of_device; i++)
        if (strcmp(of_device[i].what, what) == 0)
            return &of_device[i].nanoseconds;
    return NULL;
}

static uint64_t of_bytes(int which, double bytes)
{
    return (uint64_t)(bytes / (double)(1 << 30) * (double)of_device[which].nanoseconds);
}

static uint64_t duration(const sim_work *work)
{
    switch (work->kind) {
    case SIM_WORK_KERNEL:
        return of_device[KERNEL].nanoseconds;
    case SIM_WORK_COPY: {
        const double bytes = (double)work->copy.width * (double)work->copy.rows;
        const bool within =
            work->copy.to_kind == SIM_ACCESS_DEVICE && work->copy.from_kind == SIM_ACCESS_DEVICE;
        return within ? of_bytes(DEVICE, 2 * bytes) : of_bytes(LINK, bytes);
    }
    case SIM_WORK_SET:
        return of_bytes(DEVICE, (double)work->set.width * (double)work->set.rows * (double)work->set.element);
    default: /* marks and waits; host functions, which run on the host */
        return 0;
    }
}

void sim_clock_queue(sim_stream *stream, const sim_work *work)
{
    sim_device *device = &sim_devices[stream->device];

    sim_stream_after(stream, sim_host_time);
    if (stream->blocking)
        sim_stream_after(stream, device->legacy->finish);
    else if (stream == device->legacy)
        sim_stream_after(stream, device->blocking_finish);
    stream->finish += duration(work);
    if (stream->blocking && device->blocking_finish < stream->finish)
        device->blocking_finish = stream->finish;
    if (device->finish < stream->finish)
        device->finish = stream->finish;
}

int simcuda_clock(int device, uint64_t *host, uint64_t *of_it)
{
    sim_lock();
    bool exists = sim_device_exists(device) && host && of_it;
    if (exists) {
        *host = sim_host_time;
        *of_it = sim_devices[device].finish;
    }
    sim_unlock();
    return exists ? 0 : -1;
}
