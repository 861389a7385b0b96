#include "driver/capture.h"

CUresult mo_capture_id(const mo_cuda_api *api, CUstream stream, uint64_t *out)
{
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    cuuint64_t id = 0;
    CUresult code = CUDA_SUCCESS;

    if (stream && stream != CU_STREAM_LEGACY) {
        if (api->capture_info_v3)
            code = api->capture_info_v3(stream, &status, &id, NULL, NULL, NULL, NULL);
        else if (api->capture_info_v2)
            code = api->capture_info_v2(stream, &status, &id, NULL, NULL, NULL);
        else
            code = api->stream_capturing(stream, &status);
    }
    if (!code)
        *out = status == CU_STREAM_CAPTURE_STATUS_NONE ? 0 : id ? id : 1;
    return code;
}
