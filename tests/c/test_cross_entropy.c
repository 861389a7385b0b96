/* Rows of logits by each instruction set, beside the oracle's; and what is refused. */
#include "each_isa.h"
#include "logits_rows.h"

#include "loss/cross_entropy_kernels.h"

TEST_EACH_ISA(rows_are_the_oracles)
{
    uint64_t random = test_seed();

    mo_cross_entropy_use(isa);
    for (int round = 0; round < test_rounds(20, 500); round++)
        for (mo_float kind = MO_F32; kind < MO_F64; kind++) {
            const size_t columns = 1 + test_random(&random) % (round % 4 ? 70 : COLUMNS_MAX);
            made *m = make(&random, kind, columns, test_random(&random) & 1 ? 0.1f : 0,
                           test_random(&random) & 1 ? 30 : 0);
            CHECK_EQ(mo_cross_entropy_cpu(&m->job, NULL), MO_OK);
            check_rows(m, 0);
            free(m);
        }
    mo_cross_entropy_use(MO_ISA_COUNT);
}

TEST_EACH_ISA(a_class_that_cannot_be_has_no_gradient_and_a_nan_spoils_its_row_alone)
{
    uint64_t random = test_seed();

    mo_cross_entropy_use(isa);
    for (mo_float kind = MO_F32; kind < MO_F64; kind++) {
        made *m = make(&random, kind, 37, 0, 0);

        for (size_t k = 0; k < 37; k++) {
            if (k != (size_t)m->target[0] && k % 3)
                set(m, k, -INFINITY);
            set(m, 3 * 37 + k, -INFINITY); /* no class can be */
        }
        set(m, 37 + 36, NAN);
        set(m, 2 * 37 + 5, INFINITY);
        CHECK_EQ(mo_cross_entropy_cpu(&m->job, NULL), MO_OK);
        for (size_t k = 0; k < 37; k++) {
            if (isinf(m->before[k]))
                CHECK(value(m, k) == 0);
            CHECK(isnan(value(m, 37 + k)) && isnan(value(m, 3 * 37 + k)) && isfinite(value(m, 4 * 37 + k)));
        }
        CHECK(isfinite(m->loss[0]) && isnan(m->loss[1]) && isnan(m->loss[3]) && isfinite(m->loss[4]));
        CHECK(!isfinite(m->loss[2])); /* inf, or NaN where it is the target */
        free(m);
    }
    mo_cross_entropy_use(MO_ISA_COUNT);
}

TEST_EACH_ISA(blocks_of_classes_give_the_gradient_of_the_whole)
{
    uint64_t random = test_seed();

    mo_cross_entropy_use(isa);
    for (mo_float kind = MO_F32; kind < MO_F64; kind++) {
        made *m = make(&random, kind, 50, 0.1f, 30);
        const size_t size = mo_float_size(kind);
        unsigned char block[ROWS * 50 * 4], *logits = (unsigned char *)m->job.logits;

        m->job.passes = MO_LOSS_FIND;
        CHECK_EQ(mo_cross_entropy_cpu(&m->job, NULL), MO_OK);
        for (size_t first = 0; first < 50; first += 20) {
            mo_cross_entropy_job part = m->job;
            part.passes = MO_LOSS_SUBTRACT;
            part.logits = (uintptr_t)block;
            part.first = first;
            part.columns = first == 40 ? 10 : 20;
            for (size_t row = 0; row < ROWS; row++)
                memcpy(block + row * part.columns * size, logits + (row * 50 + first) * size,
                       part.columns * size);
            CHECK_EQ(mo_cross_entropy_cpu(&part, NULL), MO_OK);
            for (size_t row = 0; row < ROWS; row++)
                memcpy(logits + (row * 50 + first) * size, block + row * part.columns * size,
                       part.columns * size);
        }
        check_rows(m, 0);
        free(m);
    }
    mo_cross_entropy_use(MO_ISA_COUNT);
}

TEST(what_cannot_be_is_refused_before_anything_is_written)
{
    uint64_t random = 1;
    made *m = make(&random, MO_F32, 10, 0, 0);
    mo_detail detail;

#define REFUSED(field_, value_)                                                                              \
    do {                                                                                                     \
        mo_cross_entropy_job bad = m->job;                                                                   \
        bad.field_ = value_;                                                                                 \
        CHECK_EQ(mo_cross_entropy_cpu(&bad, &detail), MO_INVALID);                                           \
    } while (0)
    REFUSED(kind, MO_F64);
    REFUSED(columns, 0);
    REFUSED(rows, SIZE_MAX);
    REFUSED(logits, m->job.logits + 1);
    REFUSED(classes, 11);
    REFUSED(first, 1);
    REFUSED(smoothing, 1.5f);
    REFUSED(smoothing, NAN);
    REFUSED(softcap, -1);
    REFUSED(softcap, INFINITY);
    REFUSED(target, NULL);
    REFUSED(lse, NULL);
    REFUSED(scale, NULL);
    CHECK(m->loss[0] == 0 && m->floats[0] == (float)m->before[0]);
    m->job.rows = 0;
    CHECK_EQ(mo_cross_entropy_cpu(&m->job, &detail), MO_OK);
    free(m);
}

TEST_MAIN
