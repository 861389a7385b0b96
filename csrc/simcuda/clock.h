/* The virtual clock: what a program would have taken, had each call and each piece of work its stated price (prices.h).
 * No clock of the machine is read anywhere: the same calls take the same time in every run.
 *
 *     host       one clock a process, as if one thread made all calls: each adds its price as it begins
 *     stream     finish = when all that is queued on it so far is done; a piece of work begins at
 *                max(host, finish of its stream, marks it waits for, the legacy stream's order) and takes its price
 *     device     the latest finish of its streams
 *     a wait     host = max(host, finish of what was waited for); so is a query that finds it done, since nobody can see it
 *                earlier: with eager work, done when it is queued, each such query is a wait. Time is for lazy mode.
 *
 * So times are known when work is queued, whenever it really runs. Streams do not slow each other down, the device's engines
 * are without number, and libraries of mathematics (cuBLAS …) cost nothing: what they compute is not queued. */
#ifndef SIM_CLOCK_H
#define SIM_CLOCK_H

#include "streams.h"

extern uint64_t sim_host_time; /* nanoseconds since the process began */

static inline void sim_host_until(uint64_t when)
{
    if (sim_host_time < when)
        sim_host_time = when;
}

/* Queues nothing: the stream's next work begins at `when` at the earliest. */
static inline void sim_stream_after(sim_stream *stream, uint64_t when)
{
    if (stream->finish < when)
        stream->finish = when;
}

/* Gives work that is being queued its time: moves the stream's finish. */
void sim_clock_queue(sim_stream *stream, const sim_work *work);

uint64_t sim_price_of(const char *function);  /* its row's */
uint64_t *sim_device_price(const char *what); /* NULL for what is no row */

#endif
