/* A mo_driver under test, whichever it is, and the words that tests of it use: contract_look() at what it
 * holds, CHECK_REFUSED, CHECK_SAME, contract_session(). The tests of what driver.h promises are in
 * driver_contract_tests.h. */
#ifndef MEMOPT_DRIVER_CONTRACT_H
#define MEMOPT_DRIVER_CONTRACT_H

#include "driver/driver.h"
#include "test.h"

/* A device with nothing on it, of 32 granules or more, on whose streams work is over when the test says so.
 */
typedef struct contract_device {
    mo_driver *driver;
    mo_stream stream, other;   /* two streams, neither being captured */
    void (*submit)(mo_stream); /* queues one operation */
    void (*finish)(mo_stream); /* lets that stream run as far as the others allow */
    void (*begin_capture)(mo_stream);
    void (*end_capture)(mo_stream);
    size_t (*live)(void);               /* reservations, handles, mappings, segments, events, pinned blocks */
    const char *(*call_name)(int call); /* the functions that can be made to fail; NULL past the last */
    uint64_t (*calls)(int call);        /* how often it was called so far */
    void (*fail)(int call, uint64_t after); /* it lets so many pass and fails once */
    bool (*unheard)(int call,
                    uint64_t after); /* that failure is nobody's to hear; NULL: there is none such */
    void (*fail_never)(void);
} contract_device;

/* ---- what is there, before and after ------------------------------------------------------------------- */

typedef struct contract_state {
    size_t free_bytes, live;
} contract_state;

__attribute__((unused)) static contract_state contract_look(const contract_device *d)
{
    contract_state s;
    size_t total = 0;
    CHECK_EQ(d->driver->memory_info(d->driver, NULL, &s.free_bytes, &total), MO_OK);
    CHECK(s.free_bytes <= total);
    s.live = d->live();
    return s;
}

#define CHECK_SAME(device, before)                                                                           \
    do {                                                                                                     \
        contract_state now_ = contract_look(device);                                                         \
        CHECK_EQ(now_.free_bytes, (before).free_bytes);                                                      \
        CHECK_EQ(now_.live, (before).live);                                                                  \
    } while (0)

/* Refused, with a sentence, and nothing is other than it was. */
#define CHECK_REFUSED(device, call)                                                                          \
    do {                                                                                                     \
        contract_state before_ = contract_look(device);                                                      \
        mo_detail detail = {.status = MO_OK, .text = ""};                                                    \
        mo_status status_ = (call);                                                                          \
        CHECK(status_ != MO_OK);                                                                             \
        CHECK_EQ(detail.status, status_);                                                                    \
        CHECK(detail.text[0]);                                                                               \
        CHECK_SAME(device, before_);                                                                         \
    } while (0)

/* ---- shorthands: what must work ------------------------------------------------------------------------ */

__attribute__((unused)) static mo_address contract_reserve(mo_driver *m, size_t granules)
{
    mo_address a = 0;
    CHECK_EQ(m->reserve(m, granules * m->granularity, NULL, &a), MO_OK);
    CHECK(a && a % m->granularity == 0);
    return a;
}

__attribute__((unused)) static mo_physical contract_create(mo_driver *m, size_t granules)
{
    mo_physical h = 0;
    CHECK_EQ(m->create(m, granules * m->granularity, NULL, &h), MO_OK);
    CHECK(h);
    return h;
}

__attribute__((unused)) static void contract_map(mo_driver *m, mo_address a, size_t granules, mo_physical h)
{
    CHECK_EQ(m->map(m, a, granules * m->granularity, h, NULL), MO_OK);
    CHECK_EQ(m->grant(m, a, granules * m->granularity, NULL), MO_OK);
}

__attribute__((unused)) static mo_event *contract_event(mo_driver *m)
{
    mo_event *e = NULL;
    CHECK_EQ(m->event_create(m, NULL, &e), MO_OK);
    CHECK(e);
    return e;
}

#define CHECK_OVER(m, event)     CHECK_EQ((m)->event_query((m), (event), NULL), MO_OK)
#define CHECK_NOT_OVER(m, event) CHECK_EQ((m)->event_query((m), (event), NULL), MO_NOT_READY)
#define CHECK_OK(call)           CHECK_EQ(call, MO_OK)

/* ---- a session ----------------------------------------------------------------------------------------- */

/* Every call of the table, as an engine would go through them: the first that fails ends it, and what was
 * acquired is given back; a release that fails is repeated. */
__attribute__((unused)) static mo_status contract_session(const contract_device *d)
{
    mo_driver *m = d->driver;
    const size_t g = m->granularity;
    mo_address range = 0, segment = 0;
    mo_physical handle = 0;
    mo_event *event = NULL;
    mo_stream stream = NULL;
    void *pinned = NULL;
    bool mapped = false;
    uint64_t capture = 77;
    size_t free_bytes, total;
    mo_status status;

#define TRY(call)                                                                                            \
    status = (call);                                                                                         \
    if (status)                                                                                              \
        goto end;
#define UNTIL_DONE(call)                                                                                     \
    do {                                                                                                     \
        int failures_ = 0;                                                                                   \
        for (mo_status s_; (s_ = (call)) != MO_OK; failures_++, status = status ? status : s_)               \
            CHECK(failures_ < 3);                                                                            \
    } while (0)

    TRY(m->memory_info(m, NULL, &free_bytes, &total))
    TRY(m->reserve(m, 2 * g, NULL, &range))
    TRY(m->create(m, 2 * g, NULL, &handle))
    TRY(m->map(m, range, 2 * g, handle, NULL))
    mapped = true;
    TRY(m->grant(m, range, 2 * g, NULL))
    TRY(m->segment_alloc(m, 4096, NULL, &segment))
    TRY(m->stream_create(m, NULL, &stream))
    TRY(m->pinned_alloc(m, 4096, NULL, &pinned))
    TRY(m->copy_to_device(m, stream, segment, pinned, 4096, NULL))
    TRY(m->copy_to_host(m, stream, pinned, segment, 4096, NULL))
    TRY(m->event_create(m, NULL, &event))
    TRY(m->event_record(m, event, d->stream, NULL))
    TRY(m->stream_wait(m, d->other, event, NULL))
    TRY(m->capture_id(m, d->stream, NULL, &capture))
    TRY(m->synchronize(m, NULL))
    TRY(m->event_query(m, event, NULL))
end:
    if (pinned)
        UNTIL_DONE(m->pinned_free(m, pinned, NULL));
    if (stream)
        UNTIL_DONE(m->stream_destroy(m, stream, NULL));
    if (event)
        UNTIL_DONE(m->event_destroy(m, event, NULL));
    if (segment)
        UNTIL_DONE(m->segment_free(m, segment, NULL));
    if (mapped)
        UNTIL_DONE(m->unmap(m, range, 2 * g, NULL));
    if (handle)
        UNTIL_DONE(m->release(m, handle, NULL));
    if (range)
        UNTIL_DONE(m->unreserve(m, range, 2 * g, NULL));
    return status;
#undef TRY
#undef UNTIL_DONE
}

#endif
