/* The CPU's loops over any part of a job, by the table of all results and without. */
#include "widen_jobs.h"

static void run(made_job *m, bool by_table, uint64_t *random)
{
    void *table = by_table ? malloc(256 * m->job.channels * mo_float_size(m->job.target_kind)) : NULL;

    if (table)
        mo_widen_fill_table(&m->job, table);
    for (size_t begin = 0, end; begin < m->job.count; begin = end) {
        end = begin + 1 + test_random(random) % 3000;
        if (end > m->job.count)
            end = m->job.count;
        mo_widen_range(&m->job, table, begin, end);
    }
    free(table);
    widen_check(m, by_table ? "by the table" : "one by one");
}

TEST(any_cut_of_any_job_is_what_the_oracle_makes_of_it)
{
    const unsigned long rounds = test_rounds(400, 20000);
    uint64_t random = test_seed();

    for (unsigned long round = 0; round < rounds; round++) {
        const mo_number kind = (mo_number)(test_random(&random) % MO_NUMBER_COUNT);
        const mo_float target = (mo_float)(test_random(&random) % MO_F64);
        const size_t channels = 1 + test_random(&random) % 8;
        const size_t inner = test_random(&random) % 3 ? 1 + test_random(&random) % 300 : 1;
        const size_t outer = 1 + test_random(&random) % (1 + 6000 / (inner * channels));
        made_job *m =
            widen_make(&random, kind, target, inner, channels, outer, (unsigned)(test_random(&random) % 4));
        if (test_random(&random) % 4 == 0)
            m->job.mean = NULL;
        if (test_random(&random) % 4 == 0)
            m->job.deviation = NULL;
        run(m, mo_number_size(kind) == 1 && test_random(&random) % 2, &random);
        widen_free(m);
    }
}

TEST_MAIN
