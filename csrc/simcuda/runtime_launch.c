/* Kernels by the runtime API: registered by the address of a host function, launched by it. */
#include "context.h"
#include "cudart_api.h"
#include "heap.h"
#include "images.h"
#include "kernels.h"
#include "memory.h"

#include <stdlib.h>
#include <string.h>

/* ---- registration, by code that nvcc puts into a library's constructors ------------------------------- */
typedef struct registered {
    const void *host;
    const char *name; /* the caller's, for as long as its library is loaded */
    uint64_t hash;    /* of the name; 0 until it is first needed */
    const void *image;
    int dynamic_shared;
} registered;

typedef struct variable {
    const void *host;
    size_t size;
    uintptr_t address[SIM_MAX_DEVICES];
    struct variable *next;
} variable;

/* Open addressing at most half full; torch registers tens of thousands. */
static registered *kernels;
static size_t kernel_count, kernel_capacity;
static variable *variables;

static registered *slot(registered *table, size_t capacity, const void *host)
{
    size_t at = (size_t)((uintptr_t)host >> 4) * 0x9E3779B97F4A7C15u & (capacity - 1);

    while (table[at].host && table[at].host != host)
        at = (at + 1) & (capacity - 1);
    return &table[at];
}

static registered *kernel_of(const void *host)
{
    registered *found = kernel_capacity && host ? slot(kernels, kernel_capacity, host) : NULL;

    return found && found->host ? found : NULL;
}

static void add_kernel(const void *host, const char *name, const void *image)
{
    if (2 * (kernel_count + 1) > kernel_capacity) {
        size_t capacity = kernel_capacity ? 2 * kernel_capacity : 1 << 12;
        registered *grown = calloc(capacity, sizeof *grown);
        if (!grown)
            return; /* launching it will be cudaErrorInvalidDeviceFunction */
        for (size_t i = 0; i < kernel_capacity; i++)
            if (kernels[i].host)
                *slot(grown, capacity, kernels[i].host) = kernels[i];
        free(kernels);
        kernels = grown;
        kernel_capacity = capacity;
    }
    registered *entry = slot(kernels, kernel_capacity, host);
    if (!entry->host)
        kernel_count++;
    *entry = (registered){.host = host, .name = name, .image = image};
}

const char *simcuda_kernel_name(const void *host_function)
{
    sim_lock();
    const registered *found = kernel_of(host_function);
    sim_unlock();
    return found ? found->name : NULL;
}

/* These run before main, and must do so with no device: they are not calls that can fail. */
void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int limit,
                            uint3 *thread, uint3 *block, dim3 *block_size, dim3 *grid_size, int *warp)
{
    (void)device, (void)limit, (void)thread, (void)block, (void)block_size, (void)grid_size, (void)warp;
    sim_lock();
    add_kernel(host, name, handle ? *handle : NULL);
    sim_unlock();
}

void __cudaRegisterVar(void **handle, char *host, char *device, const char *name, int external, size_t size,
                       int constant, int global)
{
    (void)handle, (void)device, (void)name, (void)external, (void)constant, (void)global;
    variable *entry = calloc(1, sizeof *entry);

    if (!entry)
        return; /* its symbol will be cudaErrorInvalidSymbol */
    entry->host = host;
    entry->size = size;
    sim_lock();
    entry->next = variables;
    variables = entry;
    sim_unlock();
}

void **__cudaRegisterFatBinary(void *image)
{
    void **handle = malloc(sizeof *handle);

    if (handle)
        *handle = image;
    return handle; /* NULL: its kernels are of an unknown architecture */
}

void __cudaRegisterFatBinaryEnd(void **handle)
{
    (void)handle;
}

void __cudaUnregisterFatBinary(void **handle)
{
    free(handle);
}

char __cudaInitModule(void **handle)
{
    (void)handle;
    return 1;
}

/* ---- symbols ------------------------------------------------------------------------------------------ */
static CUresult symbol_address(const void *symbol, uintptr_t *out, size_t *size)
{
    int device = sim_current_device();
    variable *entry = variables;

    while (entry && entry->host != symbol)
        entry = entry->next;
    if (!entry)
        return (CUresult)cudaErrorInvalidSymbol;
    if (!entry->address[device]) {
        CUresult result = sim_heap_alloc(device, entry->size, NULL, &entry->address[device]);
        if (result != CUDA_SUCCESS)
            return result;
        /* The image, not the program, owns it: it is no leak. */
        sim_devices[device].counts.live.allocations--;
    }
    *out = entry->address[device];
    *size = entry->size;
    return CUDA_SUCCESS;
}

SIM_RUNTIME(SIM_CONTEXT, cudaGetSymbolAddress, (void **out, const void *symbol), (out, symbol))
{
    uintptr_t address;
    size_t size;

    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = symbol_address(symbol, &address, &size);
    if (result == CUDA_SUCCESS)
        *out = (void *)address;
    return result;
}

SIM_RUNTIME(SIM_CONTEXT | SIM_UNSAFE, cudaMemcpyToSymbol,
            (const void *symbol, const void *from, size_t size, size_t offset, enum cudaMemcpyKind kind),
            (symbol, from, size, offset, kind))
{
    uintptr_t address;
    size_t room;

    if (kind != cudaMemcpyHostToDevice && kind != cudaMemcpyDeviceToDevice && kind != cudaMemcpyDefault)
        return (CUresult)cudaErrorInvalidMemcpyDirection;
    CUresult result = symbol_address(symbol, &address, &room);
    if (result != CUDA_SUCCESS)
        return result;
    if (offset > room || size > room - offset)
        return CUDA_ERROR_INVALID_VALUE;
    return sim_copy_plain((char *)address + offset, from, size, NULL, true);
}

/* ---- launches ----------------------------------------------------------------------------------------- */
enum { CONFIGURATIONS = 16 }; /* <<<>>> nests as deep as argument expressions that launch kernels */
static _Thread_local struct {
    dim3 grid, block;
    size_t shared;
    void *stream;
} configurations[CONFIGURATIONS];
static _Thread_local int configured;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st *stream)
{
    if (configured == CONFIGURATIONS)
        return 1;
    configurations[configured].grid = grid;
    configurations[configured].block = block;
    configurations[configured].shared = shared;
    configurations[configured].stream = stream;
    configured++;
    return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream)
{
    if (!configured)
        return cudaErrorMissingConfiguration;
    configured--;
    *grid = configurations[configured].grid;
    *block = configurations[configured].block;
    *shared = configurations[configured].shared;
    memcpy(stream, &configurations[configured].stream, sizeof(void *));
    return cudaSuccess;
}

/* A kernel's handle is what __cudaGetKernel gave, the host function, or cudaLibraryGetKernel's. */
static CUresult launch(const void *function, sim_launch *of, cudaStream_t handle)
{
    registered *kernel = kernel_of(function);
    const sim_function *loaded = kernel ? NULL : sim_function_of(function);
    sim_stream *stream = sim_stream_of(handle);

    if (!kernel && !loaded)
        return (CUresult)cudaErrorInvalidDeviceFunction;
    if (!stream || stream->device != sim_current_device())
        return CUDA_ERROR_INVALID_HANDLE;
    if (kernel && !kernel->hash)
        kernel->hash = sim_name_hash(kernel->name);
    of->name = kernel ? kernel->name : loaded->name;
    of->hash = kernel ? kernel->hash : loaded->hash;
    of->dynamic_shared = kernel ? kernel->dynamic_shared : loaded->dynamic_shared;
    CUresult result = sim_launch_check(of);
    if (result == CUDA_ERROR_INVALID_VALUE)
        return (CUresult)cudaErrorInvalidConfiguration; /* the runtime's name for it */
    return result != CUDA_SUCCESS ? result : sim_launch_submit(of, stream);
}

static CUresult launch_plain(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared,
                             cudaStream_t stream, bool cooperative)
{
    sim_launch of = {.grid = {grid.x, grid.y, grid.z},
                     .block = {block.x, block.y, block.z},
                     .shared = shared > UINT32_MAX ? UINT32_MAX : (unsigned)shared,
                     .arguments = arguments,
                     .cooperative = cooperative};
    return launch(function, &of, stream);
}

SIM_RUNTIME(SIM_CONTEXT, cudaLaunchKernel,
            (const void *function, dim3 grid, dim3 block, void **arguments, size_t shared,
             cudaStream_t stream),
            (function, grid, block, arguments, shared, stream))
{
    return launch_plain(function, grid, block, arguments, shared, stream, false);
}

SIM_RUNTIME(SIM_CONTEXT, cudaLaunchCooperativeKernel,
            (const void *function, dim3 grid, dim3 block, void **arguments, size_t shared,
             cudaStream_t stream),
            (function, grid, block, arguments, shared, stream))
{
    return launch_plain(function, grid, block, arguments, shared, stream, true);
}

SIM_RUNTIME(SIM_CONTEXT, cudaLaunchKernelExC,
            (const cudaLaunchConfig_t *config, const void *function, void **arguments),
            (config, function, arguments))
{
    bool cooperative = false;

    if (!config || (config->numAttrs && !config->attrs))
        return CUDA_ERROR_INVALID_VALUE;
    for (unsigned i = 0; i < config->numAttrs; i++)
        if (config->attrs[i].id == cudaLaunchAttributeCooperative)
            cooperative = config->attrs[i].val.cooperative != 0;
    return launch_plain(function, config->gridDim, config->blockDim, arguments, config->dynamicSmemBytes,
                        config->stream, cooperative);
}

cudaError_t __cudaGetKernel(cudaKernel_t *out, const void *function)
{
    *out = (cudaKernel_t)(uintptr_t)function;
    return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                               cudaStream_t stream)
{
    return cudaLaunchKernel((const void *)kernel, grid, block, arguments, shared, stream);
}

/* ---- questions ---------------------------------------------------------------------------------------- */
SIM_RUNTIME(SIM_CONTEXT, cudaFuncGetAttributes, (struct cudaFuncAttributes * out, const void *function),
            (out, function))
{
    const registered *kernel = kernel_of(function);
    /* CUB looks up by it for what it was compiled, and refuses any other. */
    int made_for = kernel && kernel->image ? sim_image_architecture(kernel->image, sim_cc) : -1;

    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    if (!kernel && !sim_function_of(function))
        return (CUresult)cudaErrorInvalidDeviceFunction;
    if (made_for == 0)
        return CUDA_ERROR_NO_BINARY_FOR_GPU;
    memset(out, 0, sizeof *out);
    out->maxThreadsPerBlock = 1024;
    out->numRegs = 32;
    out->binaryVersion = out->ptxVersion = made_for > 0 ? made_for : sim_cc;
    out->maxDynamicSharedSizeBytes = kernel && kernel->dynamic_shared ? kernel->dynamic_shared : 49152;
    out->preferredShmemCarveout = -1;
    return CUDA_SUCCESS;
}

static CUresult set_attribute(const void *function, enum cudaFuncAttribute attribute, int value)
{
    registered *kernel = kernel_of(function);
    sim_function probe = {.name = NULL}, *loaded = kernel ? &probe : sim_function_of(function);

    if (!loaded)
        return (CUresult)cudaErrorInvalidDeviceFunction;
    CUresult result = sim_function_set_attribute(loaded, (CUfunction_attribute)attribute, value);
    if (result == CUDA_SUCCESS && kernel && attribute == cudaFuncAttributeMaxDynamicSharedMemorySize)
        kernel->dynamic_shared = value;
    return result;
}

SIM_RUNTIME(SIM_CONTEXT, cudaFuncSetAttribute,
            (const void *function, enum cudaFuncAttribute attribute, int value), (function, attribute, value))
{
    return set_attribute(function, attribute, value);
}

SIM_RUNTIME(SIM_CONTEXT, cudaKernelSetAttributeForDevice,
            (cudaKernel_t kernel, enum cudaFuncAttribute attribute, int value, int device),
            (kernel, attribute, value, device))
{
    return sim_device_exists(device) ? set_attribute((const void *)kernel, attribute, value)
                                     : CUDA_ERROR_INVALID_DEVICE;
}

static CUresult occupancy(int *out, const void *function, int block_size, size_t shared)
{
    if (!out || block_size <= 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (!kernel_of(function) && !sim_function_of(function))
        return (CUresult)cudaErrorInvalidDeviceFunction;
    *out = sim_occupancy(block_size, shared);
    return CUDA_SUCCESS;
}

SIM_RUNTIME(SIM_CONTEXT, cudaOccupancyMaxActiveBlocksPerMultiprocessor,
            (int *out, const void *function, int block_size, size_t shared),
            (out, function, block_size, shared))
{
    return occupancy(out, function, block_size, shared);
}

SIM_RUNTIME(SIM_CONTEXT, cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags,
            (int *out, const void *function, int block_size, size_t shared, unsigned flags),
            (out, function, block_size, shared, flags))
{
    return flags > 1 ? CUDA_ERROR_INVALID_VALUE : occupancy(out, function, block_size, shared);
}

/* ---- libraries ---------------------------------------------------------------------------------------- */
SIM_RUNTIME(SIM_CONTEXT | SIM_UNSAFE, cudaLibraryLoadData,
            (cudaLibrary_t * out, const void *image, enum cudaJitOption *jit, void **jit_values,
             unsigned jit_count, enum cudaLibraryOption *options, void **values, unsigned count),
            (out, image, jit, jit_values, jit_count, options, values, count))
{
    sim_module *module = NULL;

    if (!out || !image || (jit_count && (!jit || !jit_values)) || (count && (!options || !values)))
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = sim_module_load(image, true, &module);
    if (result == CUDA_SUCCESS)
        *out = (cudaLibrary_t)(uintptr_t)module->handle;
    return result;
}

SIM_RUNTIME(SIM_CONTEXT, cudaLibraryGetKernel, (cudaKernel_t * out, cudaLibrary_t library, const char *name),
            (out, library, name))
{
    sim_module *module = sim_module_of(library, true);
    sim_function *function = NULL;

    if (!module)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!out || !name)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = sim_module_function(module, name, &function);
    if (result == CUDA_SUCCESS)
        *out = (cudaKernel_t)(uintptr_t)function->handle;
    return result;
}

SIM_RUNTIME(SIM_CONTEXT | SIM_UNSAFE, cudaLibraryUnload, (cudaLibrary_t library), (library))
{
    sim_module *module = sim_module_of(library, true);

    if (!module)
        return CUDA_ERROR_INVALID_HANDLE;
    sim_module_unload(module);
    return CUDA_SUCCESS;
}
