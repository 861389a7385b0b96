/* Events: names for marks in streams.
 *
 * An event refers to the mark of its latest record; each wait refers to the mark that was the latest when it
 * was queued. So destroying an event, or recording it again, changes nothing for those who wait already. */
#ifndef SIM_EVENTS_H
#define SIM_EVENTS_H

#include "streams.h"

typedef struct sim_event {
    unsigned references; /* its handle, and nodes of graphs that record it or wait for it */
    uint64_t handle;     /* 0 once destroyed */
    int device;
    unsigned flags;
    sim_mark *mark;              /* NULL when never recorded, or recorded last in a capture */
    struct sim_capture *capture; /* that it was last recorded in, else NULL */
    struct sim_node **point;     /* the nodes a wait depends on, then */
    size_t point_count;
} sim_event;

CUresult sim_event_new(unsigned flags, sim_event **out);
sim_event *sim_event_of(CUevent handle);
void sim_event_destroy(sim_event *event);
void sim_event_release(sim_event *event);

CUresult sim_event_record(sim_event *event, sim_stream *stream, unsigned flags);
CUresult sim_event_wait(sim_event *event, sim_stream *stream, unsigned flags);
CUresult sim_event_query(sim_event *event);
CUresult sim_event_synchronize(sim_event *event);
CUresult sim_event_elapsed(sim_event *from, sim_event *to, float *milliseconds);

#endif
