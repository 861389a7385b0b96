/* Kernel launches and occupancy by the driver API. */
#include "context.h"
#include "driver_api.h"
#include "kernels.h"

static CUresult launch(CUfunction handle, sim_launch *launch, CUstream stream_handle)
{
    const sim_function *function = sim_function_of(handle);
    sim_stream *stream = sim_stream_of(stream_handle);

    /* Unlike a copy, a launch must go to a stream of the current device. */
    if (!function || !stream || stream->device != sim_current_device())
        return CUDA_ERROR_INVALID_HANDLE;
    launch->name = function->name;
    launch->hash = function->hash;
    launch->dynamic_shared = function->dynamic_shared;
    CUresult result = sim_launch_check(launch);
    return result != CUDA_SUCCESS ? result : sim_launch_submit(launch, stream);
}

SIM_DRIVER(SIM_CONTEXT, cuLaunchKernel,
           (CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
            unsigned shared, CUstream stream, void **arguments, void **extra),
           (function, gx, gy, gz, bx, by, bz, shared, stream, arguments, extra))
{
    sim_launch of = {.grid = {gx, gy, gz},
                     .block = {bx, by, bz},
                     .shared = shared,
                     .arguments = arguments,
                     .extra = extra};
    return launch(function, &of, stream);
}

SIM_DRIVER(SIM_CONTEXT, cuLaunchCooperativeKernel,
           (CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
            unsigned shared, CUstream stream, void **arguments),
           (function, gx, gy, gz, bx, by, bz, shared, stream, arguments))
{
    sim_launch of = {.grid = {gx, gy, gz},
                     .block = {bx, by, bz},
                     .shared = shared,
                     .arguments = arguments,
                     .cooperative = true};
    return launch(function, &of, stream);
}

SIM_DRIVER(SIM_CONTEXT, cuLaunchKernelEx,
           (const CUlaunchConfig *config, CUfunction function, void **arguments, void **extra),
           (config, function, arguments, extra))
{
    if (!config || (config->numAttrs && !config->attrs))
        return CUDA_ERROR_INVALID_VALUE;
    sim_launch of = {.grid = {config->gridDimX, config->gridDimY, config->gridDimZ},
                     .block = {config->blockDimX, config->blockDimY, config->blockDimZ},
                     .shared = config->sharedMemBytes,
                     .arguments = arguments,
                     .extra = extra};
    for (unsigned i = 0; i < config->numAttrs; i++)
        if (config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_COOPERATIVE)
            of.cooperative = config->attrs[i].value.cooperative != 0;
    return launch(function, &of, config->hStream);
}

static CUresult occupancy(int *out, CUfunction function, int block_size, size_t shared)
{
    if (!out || block_size <= 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (!sim_function_of(function))
        return CUDA_ERROR_INVALID_HANDLE;
    *out = sim_occupancy(block_size, shared);
    return CUDA_SUCCESS;
}

SIM_DRIVER(SIM_CONTEXT, cuOccupancyMaxActiveBlocksPerMultiprocessor,
           (int *out, CUfunction function, int block_size, size_t shared),
           (out, function, block_size, shared))
{
    return occupancy(out, function, block_size, shared);
}

SIM_DRIVER(SIM_CONTEXT, cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags,
           (int *out, CUfunction function, int block_size, size_t shared, unsigned flags),
           (out, function, block_size, shared, flags))
{
    return flags > 1 ? CUDA_ERROR_INVALID_VALUE : occupancy(out, function, block_size, shared);
}

/* Clusters exist from compute capability 9.0 on; 16 blocks is the largest that is not portable. */
SIM_DRIVER(SIM_CONTEXT, cuOccupancyMaxActiveClusters,
           (int *out, CUfunction function, const CUlaunchConfig *config), (out, function, config))
{
    if (!out || !config)
        return CUDA_ERROR_INVALID_VALUE;
    if (!sim_function_of(function))
        return CUDA_ERROR_INVALID_HANDLE;
    if (sim_cc < 90)
        return CUDA_ERROR_NOT_SUPPORTED;
    *out = sim_sms / 16;
    return CUDA_SUCCESS;
}
