/* Whole jobs: every kind beside every other, cut into units and tiles, on every instruction set and by any number of threads, are
 * what the oracle makes of them one element at a time. */
#include "update_jobs.h"

#include <pthread.h>

#include "base/hostmem.h"
#include "base/parallel.h"

/* ---- ways to deal out the work ----------------------------------------------------------------------------------------------- */

static size_t dealt; /* calls of a way */

static void one_by_one_from_the_end(size_t count, size_t grain, mo_parallel_body body, void *user)
{
    (void)grain;
    dealt++;
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
    dealt++;
    for (size_t k = 0; k < 3; k++) {
        shares[k] = (share){body, user, count * k / 3, count * (k + 1) / 3};
        if (pthread_create(&threads[k], NULL, work, &shares[k]) != 0)
            abort();
    }
    for (size_t k = 0; k < 3; k++)
        pthread_join(threads[k], NULL);
}

/* The tables that this processor can run. */
static size_t tables(const mo_update_kernels *out[MO_ISA_COUNT])
{
    size_t n = 0;
    out[n++] = &mo_update_generic;
#if defined(__x86_64__)
    if (mo_isa_best() >= MO_ISA_AVX2)
        out[n++] = &mo_update_avx2;
    if (mo_isa_best() >= MO_ISA_AVX512)
        out[n++] = &mo_update_avx512;
#endif
    return n;
}

/* ---- results --------------------------------------------------------------------------------------------------------------------- */

TEST(random_jobs_are_the_formulas_element_by_element)
{
    uint64_t random = test_seed();
    const mo_update_kernels *isas[MO_ISA_COUNT];
    const size_t n = tables(isas);
    static job given, expected, got;

    for (int round = 0; round < test_rounds(150, 20000); round++) {
        job_make(&given, &random, /* ordinary */ round % 3);
        job_copy(&expected, &given);
        job_oracle(&expected);
        for (size_t k = 0; k < n; k++) {
            mo_detail detail = {.text = ""};
            mo_update_kernels_use(isas[k]);
            job_copy(&got, &given);
            if (mo_update_cpu(&got.job, &detail) != MO_OK)
                TEST_FAIL("refused: %s", detail.text);
            job_same(&got, &expected);
            job_free(&got);
        }
        mo_update_kernels_use(NULL);
        job_free(&expected);
        job_free(&given);
    }
}

/* A job of n parameters of `count` elements each: with fp32 states, with states of 8 bits, of 4 bits, and again with factored second
 * moments. */
static void make_uniform(job *j, uint64_t *random, size_t n, size_t count)
{
    *j = (job){.factor = 0.5f};
    j->job.count = n;
    j->job.group_count = 1;
    j->job.factor = 1;
    j->groups[0] = (mo_hyper){
        .rule = MO_ADAMW, .lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.01};
    for (size_t i = 0; i < n; i++) {
        const unsigned code_bits = i % 3 == 0 ? 0 : i % 3 == 1 ? 8 : 4;
        const size_t blocks = code_bits ? (count + MO_CODE_BLOCK - 1) / MO_CODE_BLOCK : 0;
        const mo_float states = code_bits ? MO_FLOAT_COUNT : MO_F32;
        size_t columns = i < 3 ? 0 : 8;
        while (columns && count % columns)
            columns++;
        j->parameters[i] = (mo_parameter){.count = count, .code_bits = code_bits, .columns = columns};
        for (int k = 0; k < JOB_ARRAYS; k++)
            job_array_make(j, i, k, k == 3 || k == 4 ? states : MO_F32,
                           k == 2 || k == 5 || (columns && (k == 4 || k == 7)) ? 0
                           : k < 6                                             ? count
                           : k < 8                                             ? blocks
                           : k == 8                                            ? 1
                           : k == 9 ? (columns ? count / columns : 0)
                                    : columns,
                           0);
        for (size_t e = 0; e < count; e++) {
            job_write(&j->arrays[i][0], e, float_ordinary(random), NULL);
            job_write(&j->arrays[i][1], e, float_ordinary(random), NULL);
        }
    }
    job_connect(j);
}

TEST(it_makes_no_difference_how_many_threads_share_the_work)
{
    static const mo_parallel_way ways[] = {NULL, one_by_one_from_the_end, three_threads};
    uint64_t random = test_seed();
    static job given, expected, got;

    make_uniform(&given, &random, 6,
                 521 * 523); /* tiles in three rows and three columns, the last ones partial */
    job_copy(&expected, &given);
    job_oracle(&expected);
    for (size_t k = 0; k < sizeof ways / sizeof *ways; k++) {
        dealt = 0;
        mo_parallel_use(ways[k]);
        job_copy(&got, &given);
        CHECK_EQ(mo_update_cpu(&got.job, NULL), MO_OK);
        mo_parallel_use(NULL);
        CHECK_EQ(dealt, ways[k] ? 3 : 0); /* twice for the factored second moments */
        job_same(&got, &expected);
        job_free(&got);
    }
    job_free(&expected);
    job_free(&given);
}

TEST(little_work_stays_on_the_calling_thread)
{
    uint64_t random = test_seed();
    static job small;

    make_uniform(&small, &random, 6, 1000);
    dealt = 0;
    mo_parallel_use(three_threads);
    CHECK_EQ(mo_update_cpu(&small.job, NULL), MO_OK);
    mo_parallel_use(NULL);
    CHECK_EQ(dealt, 0);
    job_free(&small);
}

TEST(nothing_changes_where_found_inf_is_not_0)
{
    static const float found[] = {1, -1, 2, NAN, INFINITY, 0x1p-149f};
    uint64_t random = test_seed();
    static job given, got;

    for (size_t k = 0; k < 60; k++) {
        job_make(&given, &random, /* ordinary */ true);
        given.job.found_inf = (uintptr_t)&given.found_inf;
        given.found_inf = found[k % (sizeof found / sizeof *found)];
        job_copy(&got, &given);
        CHECK_EQ(mo_update_cpu(&got.job, NULL), MO_OK);
        job_same(&got, &given);
        job_free(&got);
        job_free(&given);
    }
}

TEST(each_host_allocation_that_fails_changes_nothing)
{
    uint64_t random = test_seed();
    static job given, got;
    uint64_t after;

    job_make(&given, &random, /* ordinary */ true);
    while (given.job.count < 2) { /* an empty job needs no memory */
        job_free(&given);
        job_make(&given, &random, true);
    }
    for (after = 0; after < 10; after++) {
        const size_t live = mo_host_live();
        mo_detail detail = {.text = ""};
        mo_status status;
        job_copy(&got, &given);
        mo_host_fail_after(after);
        status = mo_update_cpu(&got.job, &detail);
        mo_host_fail_never();
        CHECK_EQ(mo_host_live(), live);
        if (status == MO_OK)
            break;
        CHECK_EQ(status, MO_NO_HOST_MEMORY);
        CHECK(strstr(detail.text, "parameters"));
        job_same(&got, &given);
        job_free(&got);
    }
    bool factored = false;
    for (size_t i = 0; i < given.job.count; i++)
        factored |= given.parameters[i].columns != 0;
    CHECK_EQ(after, 2 + factored);
    job_free(&got);
    job_free(&given);
}

TEST(a_job_that_is_refused_changes_nothing)
{
    uint64_t random = test_seed();
    static job given, got;

    make_uniform(&given, &random, 3, 300);
    job_copy(&got, &given);
    got.parameters[2].step = 0; /* the last: by then the first could have been done */
    CHECK_EQ(mo_update_cpu(&got.job, NULL), MO_INVALID);
    job_same(&got, &given);
    job_free(&got);
    job_free(&given);
}

/* ---- over many steps -------------------------------------------------------------------------------------------------------------- */

TEST(a_hundred_steps_are_within_1e_5_of_the_formula_in_double)
{
    enum { COUNT = 3000 };
    uint64_t random = test_seed();
    static double p[COUNT], m[COUNT], v[COUNT];
    double off = 0, moved = 0;
    static job j;

    make_uniform(&j, &random, 1, COUNT);
    for (size_t e = 0; e < COUNT; e++) {
        p[e] = (double)job_read(&j.arrays[0][0], e);
        m[e] = v[e] = 0;
    }
    for (int t = 1; t <= 100; t++) {
        for (size_t e = 0; e < COUNT; e++) {
            const float g = float_ordinary(&random);
            const double x = (double)g * 0.5;
            job_write(&j.arrays[0][1], e, g, NULL);
            m[e] = 0.9 * m[e] + 0.1 * x;
            v[e] = 0.999 * v[e] + 0.001 * x * x;
            p[e] = p[e] * (1 - 1e-3 * 0.01) -
                   1e-3 / (1 - pow(0.9, t)) * m[e] / (sqrt(v[e]) / sqrt(1 - pow(0.999, t)) + 1e-8);
        }
        CHECK_EQ(mo_update_cpu(&j.job, NULL), MO_OK);
    }
    CHECK_EQ(job_read(&j.arrays[0][8], 0), 100);
    for (size_t e = 0; e < COUNT; e++) {
        off += pow((double)job_read(&j.arrays[0][0], e) - p[e], 2);
        moved += p[e] * p[e];
    }
    CHECK(sqrt(off / moved) < 1e-5);
    job_free(&j);
}

/* bf16 alone, with steps of a hundredth of its own: rounded to nearest p would never move. */
TEST(without_a_master_dithered_parameters_move_as_far_as_they_should)
{
    uint64_t random = test_seed();
    double sum = 0;
    static job j;

    for (mo_float kind = MO_F16; kind <= MO_BF16; kind++) {
        make_uniform(&j, &random, 1, 2000);
        free(j.arrays[0][0].block);
        job_array_make(&j, 0, 0, kind, 2000, 0);
        j.parameters[0].kind = kind;
        j.groups[0] = (mo_hyper){.rule = MO_SGD, .lr = kind == MO_F16 ? 1e-5 : 8e-5, .stochastic = true};
        for (size_t e = 0; e < 2000; e++) {
            job_write(&j.arrays[0][0], e, 1.5f, NULL);
            job_write(&j.arrays[0][1], e, 2, NULL);
        }
        for (int t = 0; t < 1000; t++)
            CHECK_EQ(mo_update_cpu(&j.job, NULL), MO_OK);
        sum = 0;
        for (size_t e = 0; e < 2000; e++)
            sum += (double)job_read(&j.arrays[0][0], e);
        CHECK(fabs(sum / 2000 - (1.5 - 1000 * j.groups[0].lr)) < 0.01 * 1000 * j.groups[0].lr);
        job_free(&j);
    }
}

/* States of 8 and of 4 bits beside fp32 ones, the same gradients: the updates' difference is a few percent of their size, with 4 bits
 * about as large as they are but across them; and it does not grow. */
TEST(states_of_8_and_4_bits_follow_those_of_fp32)
{
    uint64_t random = test_seed();
    static job j;
    double worst[3] = {0}, worst_along[3] = {0};

    make_uniform(&j, &random, 3, 5000);
    for (size_t e = 0; e < 5000; e++)
        for (size_t i = 1; i < 3; i++)
            job_write(&j.arrays[i][0], e, job_read(&j.arrays[0][0], e), NULL);
    for (int t = 1; t <= test_rounds(200, 3000); t++) {
        double off[3] = {0}, along[3] = {0}, moved = 0;
        static float before[3][5000];
        for (size_t e = 0; e < 5000; e++) {
            const float g = float_ordinary(&random);
            for (size_t i = 0; i < 3; i++) {
                job_write(&j.arrays[i][1], e, g, NULL);
                before[i][e] = job_read(&j.arrays[i][0], e);
            }
        }
        CHECK_EQ(mo_update_cpu(&j.job, NULL), MO_OK);
        for (size_t e = 0; e < 5000; e++) {
            const double full = (double)job_read(&j.arrays[0][0], e) - (double)before[0][e];
            moved += full * full;
            for (size_t i = 1; i < 3; i++) {
                const double coded = (double)job_read(&j.arrays[i][0], e) - (double)before[i][e];
                off[i] += (coded - full) * (coded - full);
                along[i] += (coded - full) * full;
            }
        }
        for (size_t i = 1; i < 3; i++) {
            worst[i] = fmax(worst[i], sqrt(off[i] / moved));
            worst_along[i] = fmax(worst_along[i], fabs(along[i] / moved));
        }
    }
    printf("# largest difference of an update: %.3f of it with 8 bits, %.3f with 4; along it %.3f, %.3f\n",
           worst[1], worst[2], worst_along[1], worst_along[2]);
    CHECK(worst[1] < 0.1 && worst_along[1] < 0.03);
    CHECK(worst[2] < 1.2 && worst_along[2] < 0.4);
    job_free(&j);
}

/* A gradient that never changes: nearest codes of 8 bits would leave a momentum of 0.99 at a third of it. */
TEST(a_coded_momentum_buffer_is_right_in_the_mean)
{
    enum { COUNT = 512, STEPS = 4000 };
    uint64_t random = test_seed();
    static double sum[COUNT];
    static job j;

    j = (job){.factor = 1};
    j.job.count = j.job.group_count = 1;
    j.groups[0] = (mo_hyper){.rule = MO_SGD, .momentum = 0.99, .dampening = 0.99};
    j.parameters[0] = (mo_parameter){.count = COUNT, .code_bits = 8};
    for (int k = 0; k < JOB_ARRAYS; k++)
        job_array_make(&j, 0, k, k == 3 ? MO_FLOAT_COUNT : MO_F32,
                       k < 2 || k == 3 ? COUNT
                       : k == 6        ? COUNT / MO_CODE_BLOCK
                       : k == 8        ? 1
                                       : 0,
                       0);
    job_connect(&j);
    for (size_t e = 0; e < COUNT; e++) {
        const float g = e % MO_CODE_BLOCK ? exp2f(-(float)(test_random(&random) % 600) / 100) : 1;
        job_write(&j.arrays[0][1], e, test_random(&random) & 1 ? g : -g, NULL);
    }
    memset(sum, 0, sizeof sum);
    for (int t = 0; t < STEPS; t++) {
        CHECK_EQ(mo_update_cpu(&j.job, NULL), MO_OK);
        for (size_t e = 0; e < COUNT && t >= STEPS / 2; e++)
            sum[e] += (double)mo_code_decode_m(
                8, j.arrays[0][3].x[e], mo_code_unit_m(8, job_read(&j.arrays[0][6], e / MO_CODE_BLOCK)));
    }
    for (size_t e = 0; e < COUNT; e++) {
        const double g = (double)job_read(&j.arrays[0][1], e);
        CHECK(fabs(sum[e] / (STEPS / 2) - g) <= 0.05 * fabs(g));
    }
    CHECK_EQ(job_read(&j.arrays[0][8], 0), STEPS);
    job_free(&j);
}

TEST_MAIN
