/* kernels/cross_entropy.cuh, the text that a thread of the kernel runs, on the host: threads one after another. The kernel whole is
 * the business of tests/unit/kernels. */
#include "logits_rows.h"

static void run_row(const mo_cross_entropy_launch *launch, unsigned number, unsigned threads)
{
    mo_logits_row row = mo_logits_row_of(launch, number);
    const unsigned size = mo_float_size((mo_float)launch->kind);
    const float target = mo_logit_load(launch->kind, row.address + row.column * (uint64_t)size);
    mo_logits_seen seen = mo_logits_none();

    for (unsigned thread = 0; thread < threads; thread++)
        seen = mo_logits_joined(seen, mo_cross_entropy_find(launch, &row, thread, threads));
    row.lse = mo_cross_entropy_finish(launch, number, &row, seen, target);
    for (unsigned thread = 0; thread < threads; thread++)
        mo_cross_entropy_subtract(launch, &row, thread, threads);
}

TEST(rows_of_every_length_and_alignment_are_the_oracles)
{
    uint64_t random = test_seed();

    for (mo_float kind = MO_F32; kind < MO_F64; kind++)
        for (size_t columns = 1; columns < 300; columns += columns < 40 ? 1 : 37) {
            const float smoothing = columns % 2 ? 0.1f : 0, softcap = columns % 3 ? 0 : 30;
            made *m = make(&random, kind, columns, smoothing, softcap);
            const mo_cross_entropy_options options = {smoothing, smoothing / (float)columns, softcap,
                                                      softcap > 0 ? 1 / softcap : 0};
            const mo_cross_entropy_launch launch = {
                .table = (uintptr_t)&options,
                .logits = m->job.logits,
                .target = (uintptr_t)m->target,
                .lse = (uintptr_t)m->lse,
                .loss = (uintptr_t)m->loss,
                .scale = (uintptr_t)m->scale,
                .classes = columns,
                .columns = (unsigned)columns,
                .passes = MO_LOSS_FIND | MO_LOSS_SUBTRACT,
                .kind = (unsigned char)kind,
            };
            for (unsigned row = 0; row < ROWS; row++)
                run_row(&launch, row, columns % 5 ? 32 : 96);
            check_rows(m, KERNEL_TANGENT);
            free(m);
        }
}

TEST_MAIN
