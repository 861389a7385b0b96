/* cuFFT: plans are numbers, need no work area and transform nothing. */
#include "csrc/simcuda/library.h"

#include <stdatomic.h>

/* cufftResult, as NVIDIA documents it. */
enum { CUFFT_SUCCESS = 0, CUFFT_INVALID_VALUE = 4, CUFFT_SETUP_FAILED = 7 };

#define CUFFT_VERSION (SIM_CUDA_MAJOR == 12 ? 11400 : 12000)

static atomic_int plans;

static int make_plan(int *plan, size_t *work_bytes)
{
    if (!sim_library_device_present())
        return CUFFT_SETUP_FAILED;
    if (plan != NULL)
        *plan = ++plans;
    if (work_bytes != NULL)
        *work_bytes = 0;
    return CUFFT_SUCCESS;
}

int cufftCreate(int *plan)
{
    return plan == NULL ? CUFFT_INVALID_VALUE : make_plan(plan, NULL);
}

int cufftPlan1d(int *plan, int n, int type, int batch)
{
    return cufftCreate(plan);
}

int cufftPlan2d(int *plan, int n0, int n1, int type)
{
    return cufftCreate(plan);
}

int cufftPlan3d(int *plan, int n0, int n1, int n2, int type)
{
    return cufftCreate(plan);
}

int cufftPlanMany(int *plan, int rank, int *n, int *in_embed, int in_stride, int in_distance, int *out_embed,
                  int out_stride, int out_distance, int type, int batch)
{
    return cufftCreate(plan);
}

int cufftMakePlanMany64(int plan, int rank, long long *n, long long *in_embed, long long in_stride,
                        long long in_distance, long long *out_embed, long long out_stride,
                        long long out_distance, int type, long long batch, size_t *work_bytes)
{
    return make_plan(NULL, work_bytes);
}

int cufftXtMakePlanMany(int plan, int rank, long long *n, long long *in_embed, long long in_stride,
                        long long in_distance, int in_type, long long *out_embed, long long out_stride,
                        long long out_distance, int out_type, long long batch, size_t *work_bytes,
                        int compute_type)
{
    return make_plan(NULL, work_bytes);
}

int cufftGetSize(int plan, size_t *work_bytes)
{
    return make_plan(NULL, work_bytes);
}

int cufftGetVersion(int *version)
{
    if (version == NULL)
        return CUFFT_INVALID_VALUE;
    *version = CUFFT_VERSION;
    return CUFFT_SUCCESS;
}

int cufftGetProperty(int which, int *value)
{
    int done = sim_library_property(which, CUFFT_VERSION / 1000, CUFFT_VERSION / 100 % 10, 0, value);
    return done == 0 ? CUFFT_SUCCESS : CUFFT_INVALID_VALUE;
}
