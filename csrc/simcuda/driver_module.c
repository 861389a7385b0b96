/* Modules, libraries and functions by the driver API. */
#include "context.h"
#include "driver_api.h"
#include "kernels.h"

static CUresult give(CUresult result, const sim_module *module, void **out)
{
    if (result == CUDA_SUCCESS)
        *out = (void *)(uintptr_t)module->handle;
    return result;
}

static CUresult load(CUmodule *out, const void *image)
{
    sim_module *module = NULL;

    if (!out || !image)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = sim_module_load(image, false, &module);
    return give(result, module, (void **)out);
}

SIM_DRIVER(SIM_CONTEXT | SIM_UNSAFE, cuModuleLoad, (CUmodule * out, const char *path), (out, path))
{
    sim_module *module = NULL;

    if (!out || !path)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = sim_module_load_file(path, false, &module);
    return give(result, module, (void **)out);
}

SIM_DRIVER(SIM_CONTEXT | SIM_UNSAFE, cuModuleLoadData, (CUmodule * out, const void *image), (out, image))
{
    return load(out, image);
}

SIM_DRIVER(SIM_CONTEXT | SIM_UNSAFE, cuModuleLoadDataEx,
           (CUmodule * out, const void *image, unsigned count, CUjit_option *options, void **values),
           (out, image, count, options, values))
{
    if (count && (!options || !values))
        return CUDA_ERROR_INVALID_VALUE;
    return load(out, image);
}

SIM_DRIVER(SIM_CONTEXT | SIM_UNSAFE, cuModuleLoadFatBinary, (CUmodule * out, const void *image), (out, image))
{
    return load(out, image);
}

SIM_DRIVER(SIM_CONTEXT | SIM_UNSAFE, cuModuleUnload, (CUmodule handle), (handle))
{
    sim_module *module = sim_module_of(handle, false);

    if (!module)
        return CUDA_ERROR_INVALID_HANDLE;
    sim_module_unload(module);
    return CUDA_SUCCESS;
}

static CUresult function(void **out, sim_module *module, const char *name)
{
    sim_function *found = NULL;

    if (!module)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!out || !name)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = sim_module_function(module, name, &found);
    if (result == CUDA_SUCCESS)
        *out = (void *)(uintptr_t)found->handle;
    return result;
}

static CUresult global(CUdeviceptr *address, size_t *size, sim_module *module, const char *name)
{
    uintptr_t at;
    size_t bytes;

    if (!module)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!name || (!address && !size))
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = sim_module_global(module, name, sim_current_device(), &at, &bytes);
    if (result == CUDA_SUCCESS && address)
        *address = at;
    if (result == CUDA_SUCCESS && size)
        *size = bytes;
    return result;
}

SIM_DRIVER(SIM_CONTEXT, cuModuleGetFunction, (CUfunction * out, CUmodule module, const char *name),
           (out, module, name))
{
    return function((void **)out, sim_module_of(module, false), name);
}

SIM_DRIVER(SIM_CONTEXT | SIM_UNSAFE, cuModuleGetGlobal_v2,
           (CUdeviceptr * address, size_t *size, CUmodule module, const char *name),
           (address, size, module, name))
{
    return global(address, size, sim_module_of(module, false), name);
}

/* ---- libraries: modules that belong to no context ----------------------------------------------------- */
SIM_DRIVER(SIM_INITIALISED | SIM_UNSAFE, cuLibraryLoadData,
           (CUlibrary * out, const void *image, CUjit_option *jit, void **jit_values, unsigned jit_count,
            CUlibraryOption *options, void **values, unsigned count),
           (out, image, jit, jit_values, jit_count, options, values, count))
{
    sim_module *module = NULL;

    if (!out || !image || (jit_count && (!jit || !jit_values)) || (count && (!options || !values)))
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = sim_module_load(image, true, &module);
    return give(result, module, (void **)out);
}

SIM_DRIVER(SIM_INITIALISED | SIM_UNSAFE, cuLibraryLoadFromFile,
           (CUlibrary * out, const char *path, CUjit_option *jit, void **jit_values, unsigned jit_count,
            CUlibraryOption *options, void **values, unsigned count),
           (out, path, jit, jit_values, jit_count, options, values, count))
{
    sim_module *module = NULL;

    if (!out || !path || (jit_count && (!jit || !jit_values)) || (count && (!options || !values)))
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = sim_module_load_file(path, true, &module);
    return give(result, module, (void **)out);
}

SIM_DRIVER(SIM_INITIALISED | SIM_UNSAFE, cuLibraryUnload, (CUlibrary handle), (handle))
{
    sim_module *module = sim_module_of(handle, true);

    if (!module)
        return CUDA_ERROR_INVALID_HANDLE;
    sim_module_unload(module);
    return CUDA_SUCCESS;
}

SIM_DRIVER(SIM_INITIALISED, cuLibraryGetKernel, (CUkernel * out, CUlibrary library, const char *name),
           (out, library, name))
{
    return function((void **)out, sim_module_of(library, true), name);
}

SIM_DRIVER(SIM_CONTEXT | SIM_UNSAFE, cuLibraryGetGlobal,
           (CUdeviceptr * address, size_t *size, CUlibrary library, const char *name),
           (address, size, library, name))
{
    return global(address, size, sim_module_of(library, true), name);
}

/* A kernel and its function are one object here, so that cuLaunchKernel takes either, as documented. */
SIM_DRIVER(SIM_CONTEXT, cuKernelGetFunction, (CUfunction * out, CUkernel kernel), (out, kernel))
{
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    if (!sim_function_of(kernel))
        return CUDA_ERROR_INVALID_HANDLE;
    *out = (CUfunction)kernel;
    return CUDA_SUCCESS;
}

/* ---- functions ---------------------------------------------------------------------------------------- */
SIM_DRIVER(SIM_CONTEXT, cuFuncGetAttribute, (int *out, CUfunction_attribute attribute, CUfunction handle),
           (out, attribute, handle))
{
    const sim_function *found = sim_function_of(handle);

    if (!found)
        return CUDA_ERROR_INVALID_HANDLE;
    return out ? sim_function_attribute(found, attribute, out) : CUDA_ERROR_INVALID_VALUE;
}

SIM_DRIVER(SIM_CONTEXT, cuFuncSetAttribute, (CUfunction handle, CUfunction_attribute attribute, int value),
           (handle, attribute, value))
{
    sim_function *found = sim_function_of(handle);

    return found ? sim_function_set_attribute(found, attribute, value) : CUDA_ERROR_INVALID_HANDLE;
}

SIM_DRIVER(SIM_INITIALISED, cuKernelGetAttribute,
           (int *out, CUfunction_attribute attribute, CUkernel kernel, CUdevice device),
           (out, attribute, kernel, device))
{
    const sim_function *found = sim_function_of(kernel);

    if (!found)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!sim_device_exists(device))
        return CUDA_ERROR_INVALID_DEVICE;
    return out ? sim_function_attribute(found, attribute, out) : CUDA_ERROR_INVALID_VALUE;
}

SIM_DRIVER(SIM_INITIALISED, cuKernelSetAttribute,
           (CUfunction_attribute attribute, int value, CUkernel kernel, CUdevice device),
           (attribute, value, kernel, device))
{
    sim_function *found = sim_function_of(kernel);

    if (!found)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!sim_device_exists(device))
        return CUDA_ERROR_INVALID_DEVICE;
    return sim_function_set_attribute(found, attribute, value);
}

SIM_DRIVER(SIM_CONTEXT, cuFuncSetCacheConfig, (CUfunction handle, CUfunc_cache config), (handle, config))
{
    if (!sim_function_of(handle))
        return CUDA_ERROR_INVALID_HANDLE;
    return (unsigned)config <= CU_FUNC_CACHE_PREFER_EQUAL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

SIM_DRIVER(SIM_INITIALISED, cuFuncGetModule, (CUmodule * out, CUfunction handle), (out, handle))
{
    const sim_function *found = sim_function_of(handle);

    if (!found || !out)
        return found ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_HANDLE;
    *out = (CUmodule)(uintptr_t)found->module->handle;
    return CUDA_SUCCESS;
}

SIM_DRIVER(SIM_INITIALISED, cuFuncGetName, (const char **out, CUfunction handle), (out, handle))
{
    const sim_function *found = sim_function_of(handle);

    if (!found || !out)
        return found ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_HANDLE;
    *out = found->name;
    return CUDA_SUCCESS;
}
