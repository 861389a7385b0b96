/* kernels/widen.cuh, the text that a thread of the kernel runs, on the host: every element once, nothing beside. */
#include "widen_jobs.h"

static void run(const mo_widen_job *job, unsigned threads, bool aligned)
{
    float table[16];
    mo_widen_launch launch = {
        .table = (uintptr_t)table,
        .source = job->source,
        .target = job->target,
        .count = job->count,
        .inner = (unsigned)job->inner,
        .channels = (unsigned)job->channels,
        .scale = job->scale,
        .divide = job->divide,
        .aligned = aligned,
        .source_kind = (unsigned char)job->source_kind,
        .target_kind = (unsigned char)job->target_kind,
    };

    memcpy(table, job->mean, job->channels * sizeof *table);
    memcpy(table + job->channels, job->deviation, job->channels * sizeof *table);
    for (unsigned block = 0; block * (size_t)MO_WIDEN_UNIT < job->count; block++)
        for (unsigned thread = 0; thread < threads; thread++)
            mo_widen_thread(&launch, block, thread, threads);
}

TEST(every_kind_becomes_every_other_at_every_size_and_misalignment)
{
    static const size_t shapes[][3] = {{1, 1, 1},    {1, 1, 2},    {1, 1, 5},   {1, 3, 1},   {1, 3, 7},
                                       {1, 4, 33},   {2, 3, 4},    {5, 3, 2},   {16, 2, 3},  {49, 8, 2},
                                       {1, 1, 8191}, {1, 3, 2731}, {7, 3, 400}, {997, 3, 3}, {8192, 1, 1},
                                       {8193, 2, 1}, {1, 1, 16385}};
    uint64_t random = 1;

    for (mo_number kind = MO_NUMBER_U8; kind < MO_NUMBER_COUNT; kind++)
        for (mo_float target = MO_F32; target < MO_F64; target++)
            for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
                for (unsigned shift = 0; shift < 4; shift++) {
                    made_job *m =
                        widen_make(&random, kind, target, shapes[i][0], shapes[i][1], shapes[i][2], shift);
                    run(&m->job, shift & 1 ? 32 : 256, /* aligned */ shift == 0);
                    widen_check(m, "the kernel");
                    widen_free(m);
                }
}

TEST(all_65536_numbers_of_two_bytes_and_all_256_of_one_are_what_the_oracle_makes_of_them)
{
    static uint16_t all[65536];
    static float out[65536];
    const float zero = 0, one = 1;

    for (mo_number kind = MO_NUMBER_U8; kind < MO_NUMBER_F32; kind++) {
        const size_t count = mo_number_size(kind) == 1 ? 256 : 65536;
        const mo_widen_job job = {(uintptr_t)all, (uintptr_t)out, count, kind, MO_F32, 1, 1,
                                  &zero,          &one,           1,     false};
        for (size_t i = 0; i < count; i++)
            if (count == 256)
                ((uint8_t *)all)[i] = (uint8_t)i;
            else
                all[i] = (uint16_t)i;
        run(&job, 256, true);
        for (size_t i = 0; i < count; i++) {
            const float x = oracle_value(kind, (uintptr_t)all, i);
            CHECK(isnan(x) ? isnan(out[i]) : mo_float_bits(out[i]) == mo_float_bits(x)); /* -0 too */
        }
    }
}

TEST_MAIN
