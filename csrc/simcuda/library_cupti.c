/* CUPTI: only its status texts. Every tracing function is a stub that answers "not supported", so a profiler
 * falls back to the host side, as it does where the user may not read a GPU's counters. */
#include "csrc/simcuda/library.h"

/* CUptiResult, as NVIDIA documents it. */
enum { CUPTI_SUCCESS = 0, CUPTI_INVALID_PARAMETER = 1 };

int cuptiGetResultString(int result, const char **text)
{
    if (text == NULL)
        return CUPTI_INVALID_PARAMETER;
    *text = result == CUPTI_SUCCESS ? "CUPTI_SUCCESS" : "simulated CUPTI: not supported";
    return CUPTI_SUCCESS;
}

int cuptiGetVersion(uint32_t *version)
{
    if (version == NULL)
        return CUPTI_INVALID_PARAMETER;
    *version = SIM_CUDA_MAJOR == 12 ? 26 : 130000;
    return CUPTI_SUCCESS;
}
