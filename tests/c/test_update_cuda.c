/* Over the simulated device, which runs the text of kernels/update.cuh when the test lets it, on any memory of this process:
 * random jobs are what the oracle of the CPU's tests makes of them, to the bit. */
#include "update_jobs.h"

#include "base/hostmem.h"
#include "child.h"
#include "driver/launch.h"
#include "simulated_kernels.h"

static mo_detail detail;

static mo_status step_of(const job *j)
{
    return mo_update_cuda(0, stream, &j->job, &detail);
}

static uint64_t launches_now(void)
{
    mo_launch_counts counts;
    mo_launch_read(0, &counts);
    return counts.launches;
}

/* What the oracle makes of `given`, and what the kernel does. */
static void check_job(const job *given)
{
    static job expected, got;

    job_copy(&expected, given);
    job_copy(&got, given);
    job_oracle(&expected);
    if (step_of(&got) != MO_OK)
        TEST_FAIL("refused: %.300s", detail.text);
    finish(stream);
    job_same(&got, &expected);
    job_free(&got);
    job_free(&expected);
}

/* One parameter of AdamW on fp32, or with states of so many bits, of which the second moment may be factored, and its job. */
static void make_matrix(job *j, uint64_t *random, size_t count, unsigned code_bits, size_t columns)
{
    const size_t blocks = code_bits ? (count + MO_CODE_BLOCK - 1) / MO_CODE_BLOCK : 0;

    *j = (job){.factor = 0.5f};
    j->job.count = j->job.group_count = 1;
    j->job.factor = j->job.found_inf = 1;
    j->groups[0] = (mo_hyper){
        .rule = MO_ADAMW, .lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.01};
    j->parameters[0] = (mo_parameter){.count = count, .code_bits = code_bits, .columns = columns};
    for (int k = 0; k < JOB_ARRAYS; k++)
        job_array_make(j, 0, k, code_bits && (k == 3 || k == 4) ? MO_FLOAT_COUNT : MO_F32,
                       k == 2 || k == 5 || (columns && (k == 4 || k == 7)) ? 0
                       : k < 6                                             ? count
                       : k < 8                                             ? blocks
                       : k == 8                                            ? 1
                       : k == 9                                            ? (columns ? count / columns : 0)
                                                                           : columns,
                       0);
    for (size_t e = 0; e < count; e++) {
        job_write(&j->arrays[0][0], e, float_ordinary(random), NULL);
        job_write(&j->arrays[0][1], e, float_ordinary(random), NULL);
    }
    job_connect(j);
}

static void make_one(job *j, uint64_t *random, size_t count, unsigned code_bits)
{
    make_matrix(j, random, count, code_bits, /* columns */ 0);
}

/* These come first: each child is of a process that has not used CUDA. */
static const char *failing;

static void failure_in_child(void)
{
    uint64_t random = test_seed();
    static job given, got;

    start_kernels();
    make_one(&given, &random, 500, /* code_bits */ 8);
    job_copy(&got, &given);
    CHECK_EQ(simulated_devices()->fail(failing, 0, 1, CUDA_ERROR_OUT_OF_MEMORY), 0);
    CHECK_EQ(step_of(&got), MO_NO_DEVICE_MEMORY);
    CHECK(strncmp(strstr(detail.text, "cu"), failing, 10) == 0);
    simulated_devices()->fail_clear();
    finish(stream);
    job_same(&got, &given);
    CHECK_OK(step_of(&got));
    finish(stream);
    job_oracle(&given);
    job_same(&got, &given);
}

TEST(a_driver_call_that_fails_leaves_the_parameters_and_the_next_step_works)
{
    static const char *const calls_made[] = {"cuMemHostAlloc", "cuMemAlloc", "cuEventCreate",
                                             "cuMemcpyHtoDAsync", "cuLaunchKernel"};

    for (size_t i = 0; i < sizeof calls_made / sizeof *calls_made; i++) {
        char symbol[64];
        snprintf(symbol, sizeof symbol, "%s%s", calls_made[i], i == 1 || i == 3 ? "_v2" : "");
        failing = symbol;
        CHECK_CHILD(failure_in_child);
    }
}

TEST(random_jobs_of_all_rules_and_types_are_the_formulas_to_the_bit)
{
    uint64_t random = test_seed();
    static job given;

    start_kernels();
    for (int round = 0; round < test_rounds(150, 20000); round++) {
        const uint64_t before = launches_now();
        job_make(&given, &random, /* ordinary */ round % 3);
        check_job(&given);
        bool averages = false;
        for (size_t i = 0; i < given.job.count; i++)
            averages |= given.parameters[i].columns != 0;
        CHECK_EQ(launches_now() - before, given.job.count ? 1 + averages : 0);
        job_free(&given);
    }
}

TEST(a_parameter_that_many_blocks_share_is_updated_once_and_its_step_counted_once)
{
    uint64_t random = test_seed();
    static job given;

    start_kernels();
    for (unsigned code_bits = 0; code_bits <= 8; code_bits += 4) {
        make_one(&given, &random, 100003, code_bits);
        check_job(&given);
        job_free(&given);
        make_matrix(&given, &random, 521 * 523, code_bits, /* columns */ 523);
        check_job(&given);
        job_free(&given);
    }
}

TEST(steps_that_follow_each_other_upload_one_table_and_read_their_scalars_when_they_run)
{
    uint64_t random = test_seed();
    mo_launch_counts before, after;
    static job expected, got;

    start_kernels();
    make_one(&got, &random, 3000, /* code_bits */ 4);
    job_copy(&expected, &got);
    mo_launch_read(0, &before);
    for (int i = 0; i < 4; i++) {
        CHECK_OK(step_of(&got)); /* queued: what follows comes in time */
        got.factor = expected.factor = 0.25f * (float)i;
        got.found_inf = expected.found_inf = i == 2;
        finish(stream);
        job_oracle(&expected);
        job_same(&got, &expected);
    }
    mo_launch_read(0, &after);
    CHECK_EQ(after.uploads, before.uploads + 1);
    CHECK_EQ(after.repeats, before.repeats + 3);
    CHECK(*(float *)got.arrays[0][8].x == 3.0f);
    job_free(&got);
    job_free(&expected);
}

TEST(a_captured_step_is_counted_and_does_not_run_or_break_the_capture)
{
    uint64_t random = test_seed();
    mo_launch_counts before, after;
    static job given, got;

    start_kernels();
    make_one(&given, &random, 500, /* code_bits */ 0);
    job_copy(&got, &given);
    mo_launch_read(0, &before);
    begin_capture(stream);
    const mo_status status = step_of(&got);
    end_capture(stream);
    CHECK_OK(status);
    mo_launch_read(0, &after);
    CHECK_EQ(after.captured, before.captured + 1);
    finish(stream);
    job_same(&got, &given);
    job_free(&got);
    job_free(&given);
}

TEST(a_wrong_job_is_refused_before_anything_is_queued_or_loaded)
{
    uint64_t random = test_seed();
    static job given;

    start_kernels();
    const uint64_t before = launches_now();
    make_one(&given, &random, 500, /* code_bits */ 0);
    given.parameters[0].g += 1;
    CHECK_EQ(step_of(&given), MO_INVALID);
    CHECK(strstr(detail.text, "parameter 0: its gradient"));
    given.parameters[0].g -= 1;
    CHECK_EQ(mo_update_cuda(2, stream, &given.job, &detail), MO_NO_DEVICE);
    mo_host_fail_after(0);
    given.job.count = 1;
    mo_parameter many[JOB_MOST * 100];
    for (size_t i = 0; i < sizeof many / sizeof *many; i++)
        many[i] = given.parameters[0];
    given.job.parameters = many;
    given.job.count = sizeof many / sizeof *many;
    const mo_status status = step_of(&given);
    mo_host_fail_never();
    given.job.count = 1;
    CHECK_EQ(status, MO_NO_HOST_MEMORY);
    CHECK_EQ(launches_now(), before);
    job_free(&given);
}

TEST_MAIN
