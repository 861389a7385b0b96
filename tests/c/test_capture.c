#include "driver/capture.h"

#include "test.h"

static struct {
    int asked;
    CUstreamCaptureStatus status;
    cuuint64_t id;
    CUresult code;
} driver;

static CUresult answer(CUstreamCaptureStatus *status)
{
    driver.asked++;
    *status = driver.status;
    return driver.code;
}

static CUresult capturing(CUstream stream, CUstreamCaptureStatus *status)
{
    (void)stream;
    return answer(status);
}

static CUresult info_v2(CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph,
                        const CUgraphNode **dependencies, size_t *count)
{
    (void)stream, (void)graph, (void)dependencies, (void)count;
    *id = driver.id;
    return answer(status);
}

static CUresult info_v3(CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph,
                        const CUgraphNode **dependencies, const CUgraphEdgeData **edges, size_t *count)
{
    (void)edges;
    return info_v2(stream, status, id, graph, dependencies, count);
}

static const mo_cuda_api ages[] = {
    {.stream_capturing = capturing},
    {.stream_capturing = capturing, .capture_info_v2 = info_v2},
    {.stream_capturing = capturing, .capture_info_v2 = info_v2, .capture_info_v3 = info_v3},
};
#define AGES   ((int)(sizeof ages / sizeof *ages))
#define STREAM ((CUstream)(uintptr_t)0x5000)

TEST(a_capture_has_its_number_or_one_where_the_driver_cannot_tell)
{
    for (int age = 0; age < AGES; age++) {
        uint64_t id = 77;
        driver.code = CUDA_SUCCESS;
        driver.id = 42;
        driver.status = CU_STREAM_CAPTURE_STATUS_ACTIVE;
        CHECK_EQ(mo_capture_id(&ages[age], STREAM, &id), CUDA_SUCCESS);
        CHECK_EQ(id, age ? 42 : 1);
        driver.status = CU_STREAM_CAPTURE_STATUS_INVALIDATED; /* broken, and not ended: still captured */
        CHECK_EQ(mo_capture_id(&ages[age], STREAM, &id), CUDA_SUCCESS);
        CHECK_EQ(id, age ? 42 : 1);
        driver.status = CU_STREAM_CAPTURE_STATUS_NONE;
        CHECK_EQ(mo_capture_id(&ages[age], STREAM, &id), CUDA_SUCCESS);
        CHECK_EQ(id, 0);
    }
}

TEST(the_legacy_stream_is_not_asked_under_either_name_and_the_threads_own_is)
{
    for (int age = 0; age < AGES; age++) {
        uint64_t id = 77;
        driver.code = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
        driver.asked = 0;
        CHECK_EQ(mo_capture_id(&ages[age], NULL, &id), CUDA_SUCCESS);
        CHECK_EQ(id, 0);
        id = 77;
        CHECK_EQ(mo_capture_id(&ages[age], CU_STREAM_LEGACY, &id), CUDA_SUCCESS);
        CHECK_EQ(id, 0);
        CHECK_EQ(driver.asked, 0);
        CHECK_EQ(mo_capture_id(&ages[age], CU_STREAM_PER_THREAD, &id), CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
        CHECK_EQ(driver.asked, 1);
    }
}

TEST(a_failure_leaves_the_output_as_it_was)
{
    for (int age = 0; age < AGES; age++) {
        uint64_t id = 77;
        driver.code = CUDA_ERROR_INVALID_HANDLE;
        CHECK_EQ(mo_capture_id(&ages[age], STREAM, &id), CUDA_ERROR_INVALID_HANDLE);
        CHECK_EQ(id, 77);
    }
}

TEST_MAIN
