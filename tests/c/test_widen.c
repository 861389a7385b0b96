/* Whole jobs on the CPU: however they are dealt out, and what is refused. */
#include "widen_jobs.h"

#include <pthread.h>

#include "base/hostmem.h"
#include "base/parallel.h"

static void one_by_one_from_the_end(size_t count, size_t grain, mo_parallel_body body, void *user)
{
    (void)grain;
    while (count-- > 0)
        body(user, count, count + 1);
}

typedef struct share {
    mo_parallel_body body;
    void *user;
    size_t begin, end;
} share;

static void *work(void *argument)
{
    const share *s = argument;
    s->body(s->user, s->begin, s->end);
    return NULL;
}

static void three_threads(size_t count, size_t grain, mo_parallel_body body, void *user)
{
    pthread_t threads[3];
    share shares[3];

    (void)grain;
    for (size_t k = 0; k < 3; k++) {
        shares[k] = (share){body, user, count * k / 3, count * (k + 1) / 3};
        if (pthread_create(&threads[k], NULL, work, &shares[k]) != 0)
            abort();
    }
    for (size_t k = 0; k < 3; k++)
        pthread_join(threads[k], NULL);
}

TEST(a_job_is_the_same_on_any_threads_by_the_table_and_without)
{
    const mo_parallel_way ways[] = {NULL, one_by_one_from_the_end, three_threads};
    uint64_t random = 3;

    for (size_t way = 0; way < sizeof ways / sizeof *ways; way++)
        for (mo_number kind = MO_NUMBER_U8; kind < MO_NUMBER_COUNT; kind++)
            for (mo_float target = MO_F32; target < MO_F64; target++)
                for (size_t outer = 2; outer <= 80;
                     outer *= 40) { /* 80: 5333 elements a channel, more than 16 * 256 */
                    made_job *m = widen_make(&random, kind, target, outer % 3 == 2 ? 67 : 1, 3, outer, 1);
                    mo_parallel_use(ways[way]);
                    CHECK_EQ(mo_widen_cpu(&m->job, NULL), MO_OK);
                    mo_parallel_use(NULL);
                    widen_check(m, "a job");
                    widen_free(m);
                }
}

TEST(pixels_of_bytes_go_by_the_table_wherever_a_thread_begins)
{
    uint64_t random = 4;

    for (size_t channels = 1; channels <= 8; channels++) {
        made_job *m = widen_make(&random, MO_NUMBER_U8, MO_F32, 1, channels, 5000, 0);
        mo_parallel_use(three_threads);
        CHECK_EQ(mo_widen_cpu(&m->job, NULL), MO_OK);
        mo_parallel_use(NULL);
        widen_check(m, "pixels");
        widen_free(m);
    }
}

TEST(nothing_is_written_where_there_is_no_memory_for_the_table)
{
    uint64_t random = 5;
    made_job *m = widen_make(&random, MO_NUMBER_U8, MO_F32, 1, 3, 5000, 0);
    const size_t live = mo_host_live();
    mo_detail detail;

    mo_host_fail_after(0);
    CHECK_EQ(mo_widen_cpu(&m->job, &detail), MO_NO_HOST_MEMORY);
    mo_host_fail_never();
    CHECK(strstr(detail.text, "3 channels"));
    for (size_t i = 0; i < m->job.count * 4; i++)
        CHECK_EQ(m->target[i], 0x5A);
    CHECK_EQ(mo_widen_cpu(&m->job, &detail), MO_OK);
    CHECK_EQ(mo_host_live(), live);
    widen_check(m, "again");
    widen_free(m);
}

TEST(jobs_that_cannot_be_are_refused_with_their_numbers)
{
    static float out[64];
    static uint16_t in[64];
    const mo_widen_job good = {.source = (uintptr_t)in,
                               .target = (uintptr_t)out,
                               .count = 60,
                               .source_kind = MO_NUMBER_U16,
                               .target_kind = MO_F32,
                               .inner = 4,
                               .channels = 3,
                               .scale = 1};
    const struct {
        mo_status status;
        const char *says;
        mo_widen_job job;
    } wrong[] = {
#define WITH(status, says, ...) {status, says, __VA_ARGS__}
        WITH(MO_INVALID, "kinds 7", good),        WITH(MO_INVALID, "kinds", good),
        WITH(MO_INVALID, "multiples", good),      WITH(MO_INVALID, "multiples", good),
        WITH(MO_INVALID, "0 channels", good),     WITH(MO_INVALID, "expected at least 1", good),
        WITH(MO_INVALID, "not a multiple", good), WITH(MO_OVERFLOW, "2^31", good),
        WITH(MO_OVERFLOW, "2^31", good),
    };
    mo_detail detail;

    CHECK_EQ(mo_widen_check(&good, &detail), MO_OK);
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        mo_widen_job job = wrong[i].job;
        switch (i) {
        case 0:
            job.source_kind = MO_NUMBER_COUNT;
            break;
        case 1:
            job.target_kind = MO_F64;
            break;
        case 2:
            job.source++;
            break;
        case 3:
            job.target += 2;
            break;
        case 4:
            job.channels = 0;
            break;
        case 5:
            job.inner = 0;
            break;
        case 6:
            job.count = 61;
            break;
        case 7:
            job.inner = (size_t)1 << 31;
            break;
        default:
            job.inner = SIZE_MAX / 2;
            break;
        }
        CHECK_EQ(mo_widen_cpu(&job, &detail), wrong[i].status);
        if (!strstr(detail.text, wrong[i].says))
            TEST_FAIL("%zu: %s", i, detail.text);
        for (size_t k = 0; k < 64; k++)
            CHECK(out[k] == 0);
    }
    mo_widen_job empty = good;
    empty.count = 0;
    CHECK_EQ(mo_widen_cpu(&empty, &detail), MO_OK);
}

TEST_MAIN
