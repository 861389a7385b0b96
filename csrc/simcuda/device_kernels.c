#include "kernels.h"

#include "context.h"
#include "handles.h"
#include "heap.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- host bodies -------------------------------------------------------------------------------------- */
typedef struct emulated {
    char *name;
    uint64_t hash;
    sim_body body;
    int count;
    size_t *sizes;
    struct emulated *next;
} emulated;

static emulated *bodies; /* a handful: a list, compared by hash first */

uint64_t sim_name_hash(const char *name) /* FNV-1a */
{
    uint64_t hash = 0xCBF29CE484222325u;

    for (; *name; name++)
        hash = (hash ^ (unsigned char)*name) * 0x100000001B3u;
    return hash;
}

static emulated *body_of(const char *name, uint64_t hash)
{
    for (emulated *at = bodies; at; at = at->next)
        if (at->hash == hash && strcmp(at->name, name) == 0)
            return at;
    return NULL;
}

bool sim_kernel_emulate(const char *name, sim_body body, int count, const size_t *sizes)
{
    uint64_t hash = sim_name_hash(name);
    emulated *entry = body_of(name, hash);
    size_t *copy = malloc(((size_t)count + 1) * sizeof *copy);

    if (!copy)
        return false;
    if (count)
        memcpy(copy, sizes, (size_t)count * sizeof *copy);
    if (!entry) {
        entry = calloc(1, sizeof *entry);
        if (entry)
            entry->name = strdup(name);
        if (!entry || !entry->name) {
            free(entry);
            free(copy);
            return false;
        }
        entry->hash = hash;
        entry->next = bodies;
        bodies = entry;
    }
    free(entry->sizes);
    entry->sizes = copy;
    entry->body = body;
    entry->count = count;
    return true;
}

int simcuda_emulate(const char *name,
                    void (*body)(void **args, const unsigned grid[3], const unsigned block[3]), int nargs,
                    const size_t *arg_sizes)
{
    if (!name || nargs < 0 || (nargs && !arg_sizes))
        return -1;
    sim_lock();
    bool kept = sim_kernel_emulate(name, body, nargs, arg_sizes);
    sim_unlock();
    return kept ? 0 : -1;
}

/* ---- modules ------------------------------------------------------------------------------------------ */
CUresult sim_module_load(const void *image, bool library, sim_module **out)
{
    sim_module *module = calloc(1, sizeof *module);

    if (!module)
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = sim_image_open(image, sim_cc, &module->image);
    if (result == CUDA_SUCCESS && !(module->handle = sim_handle_new(SIM_KIND_MODULE, module))) {
        sim_image_close(&module->image);
        result = CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (result != CUDA_SUCCESS) {
        free(module);
        return result;
    }
    module->library = library;
    sim_modules++;
    *out = module;
    return CUDA_SUCCESS;
}

CUresult sim_module_load_file(const char *path, bool library, sim_module **out)
{
    FILE *file = fopen(path, "rb");
    char *image = NULL;
    CUresult result = CUDA_ERROR_INVALID_IMAGE;
    long size;

    if (!file)
        return CUDA_ERROR_FILE_NOT_FOUND;
    if (fseek(file, 0, SEEK_END) != 0 || (size = ftell(file)) < 0 || fseek(file, 0, SEEK_SET) != 0)
        goto done;
    /* Padded with zeros, so that a short file is no header of anything. */
    image = calloc(1, (size_t)size + 64);
    if (!image)
        result = CUDA_ERROR_OUT_OF_MEMORY;
    else if (fread(image, 1, (size_t)size, file) == (size_t)size)
        result = sim_module_load(image, library, out);
done:
    free(image);
    fclose(file);
    return result;
}

sim_module *sim_module_of(const void *handle, bool library)
{
    sim_module *module = sim_handle_get(SIM_HANDLE(handle), SIM_KIND_MODULE);

    return module && module->library == library ? module : NULL;
}

void sim_module_unload(sim_module *module)
{
    for (sim_function *at = module->functions, *next; at; at = next) {
        next = at->next;
        sim_handle_drop(at->handle);
        free(at->name);
        free(at);
    }
    for (sim_global *at = module->globals, *next; at; at = next) {
        next = at->next;
        for (int device = 0; device < sim_device_count; device++)
            if (at->address[device])
                sim_heap_free_now(at->address[device]);
        free(at->name);
        free(at);
    }
    sim_image_close(&module->image);
    sim_handle_drop(module->handle);
    sim_modules--;
    free(module);
}

CUresult sim_module_function(sim_module *module, const char *name, sim_function **out)
{
    uint64_t hash = sim_name_hash(name);

    for (sim_function *at = module->functions; at; at = at->next)
        if (at->hash == hash && strcmp(at->name, name) == 0) {
            *out = at;
            return CUDA_SUCCESS;
        }
    if (!sim_image_has_kernel(&module->image, name))
        return CUDA_ERROR_NOT_FOUND;
    sim_function *function = calloc(1, sizeof *function);
    if (!function || !(function->name = strdup(name)) ||
        !(function->handle = sim_handle_new(SIM_KIND_FUNCTION, function))) {
        if (function)
            free(function->name);
        free(function);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    function->hash = hash;
    function->module = module;
    function->carveout = -1;
    function->next = module->functions;
    module->functions = function;
    *out = function;
    return CUDA_SUCCESS;
}

CUresult sim_module_global(sim_module *module, const char *name, int device, uintptr_t *address, size_t *size)
{
    sim_global *global = module->globals;

    while (global && strcmp(global->name, name) != 0)
        global = global->next;
    if (!global) {
        size_t bytes = sim_image_global(&module->image, name);
        if (!bytes)
            return module->image.format == SIM_IMAGE_ELF ? CUDA_ERROR_NOT_FOUND : CUDA_ERROR_NOT_SUPPORTED;
        global = calloc(1, sizeof *global);
        if (!global || !(global->name = strdup(name))) {
            free(global);
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
        global->size = bytes;
        global->next = module->globals;
        module->globals = global;
    }
    if (!global->address[device]) {
        CUresult result = sim_heap_alloc(device, global->size, NULL, &global->address[device]);
        if (result != CUDA_SUCCESS)
            return result;
        memset((void *)global->address[device], 0, global->size);
    }
    *address = global->address[device];
    *size = global->size;
    return CUDA_SUCCESS;
}

sim_function *sim_function_of(const void *handle)
{
    return sim_handle_get(SIM_HANDLE(handle), SIM_KIND_FUNCTION);
}

CUresult sim_function_attribute(const sim_function *function, CUfunction_attribute attribute, int *out)
{
    switch (attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
        *out = 1024;
        break;
    case CU_FUNC_ATTRIBUTE_NUM_REGS:
        *out = 32;
        break;
    case CU_FUNC_ATTRIBUTE_PTX_VERSION:
    case CU_FUNC_ATTRIBUTE_BINARY_VERSION:
        *out = sim_cc;
        break;
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
        *out = function->dynamic_shared ? function->dynamic_shared : 49152;
        break;
    case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
        *out = function->carveout;
        break;
    default:
        if ((unsigned)attribute > CU_FUNC_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE)
            return CUDA_ERROR_INVALID_VALUE;
        *out = 0;
    }
    return CUDA_SUCCESS;
}

static int most_shared(void)
{
    int bytes = 0;

    sim_device_attribute(&bytes, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, 0);
    return bytes;
}

CUresult sim_function_set_attribute(sim_function *function, CUfunction_attribute attribute, int value)
{
    switch (attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
        if (value < 0 || value > most_shared())
            return CUDA_ERROR_INVALID_VALUE;
        function->dynamic_shared = value;
        return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
        if (value < -1 || value > 100)
            return CUDA_ERROR_INVALID_VALUE;
        function->carveout = value;
        return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED:
    case CU_FUNC_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE:
    case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH:
    case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_HEIGHT:
    case CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_DEPTH:
        return CUDA_SUCCESS;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

/* ---- launches ----------------------------------------------------------------------------------------- */
/* Blocks of so many threads that an SM holds at once, by threads, blocks and shared memory. Registers are not
 * known. */
int sim_occupancy(int block_size, size_t shared)
{
    int threads = 2048, blocks = 32, bytes = 0;

    sim_device_attribute(&threads, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, 0);
    sim_device_attribute(&blocks, CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR, 0);
    sim_device_attribute(&bytes, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, 0);
    if (block_size <= 0 || block_size > 1024)
        return 0;
    if (threads / block_size < blocks)
        blocks = threads / block_size;
    if (shared && (size_t)bytes / shared < (size_t)blocks)
        blocks = (int)((size_t)bytes / shared);
    return blocks;
}

CUresult sim_launch_check(const sim_launch *launch)
{
    const unsigned *grid = launch->grid, *block = launch->block;
    uint64_t threads = (uint64_t)block[0] * block[1] * block[2];

    if (!grid[0] || !grid[1] || !grid[2] || grid[0] > 0x7FFFFFFF || grid[1] > 65535 || grid[2] > 65535)
        return CUDA_ERROR_INVALID_VALUE;
    if (!threads || threads > 1024 || block[0] > 1024 || block[1] > 1024 || block[2] > 64)
        return CUDA_ERROR_INVALID_VALUE;
    if (launch->shared > (unsigned)(launch->dynamic_shared ? launch->dynamic_shared : 49152))
        return CUDA_ERROR_INVALID_VALUE;
    if (launch->arguments && launch->extra)
        return CUDA_ERROR_INVALID_VALUE;
    uint64_t blocks = (uint64_t)grid[0] * grid[1] * grid[2];
    if (launch->cooperative &&
        blocks > (uint64_t)sim_occupancy((int)threads, launch->shared) * (uint64_t)sim_sms)
        return CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE;
    return CUDA_SUCCESS;
}

/* The other way to pass arguments: one buffer, each argument at its natural alignment. Only sizes are known
 * here: alignment is taken as the greatest power of two that divides the size, at most 8. */
static bool from_buffer(void **extra, const emulated *body, void **out)
{
    char *buffer = NULL;
    const size_t *size = NULL;
    size_t offset = 0;

    for (; extra && extra[0] != CU_LAUNCH_PARAM_END; extra += 2) {
        if (extra[0] == CU_LAUNCH_PARAM_BUFFER_POINTER)
            buffer = extra[1];
        else if (extra[0] == CU_LAUNCH_PARAM_BUFFER_SIZE)
            size = extra[1];
        else
            return false;
    }
    for (int i = 0; i < body->count; i++) {
        size_t alignment = body->sizes[i] & -body->sizes[i];
        if (alignment > 8)
            alignment = 8;
        if (alignment)
            offset = (offset + alignment - 1) & ~(alignment - 1);
        if (!buffer || !size || offset + body->sizes[i] > *size)
            return false;
        out[i] = buffer + offset;
        offset += body->sizes[i];
    }
    return true;
}

/* Gives the work its body and a copy of the arguments, 16 bytes apart at least. */
static CUresult attach(sim_work *work, const emulated *body, const sim_launch *launch)
{
    size_t count = (size_t)body->count, bytes = 0;
    void **from = launch->arguments;
    CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
    void **gathered = NULL;

    if (launch->extra && count) {
        gathered = malloc(count * sizeof *gathered);
        if (!gathered)
            return CUDA_ERROR_OUT_OF_MEMORY;
        result = CUDA_ERROR_INVALID_VALUE;
        if (!from_buffer(launch->extra, body, gathered))
            goto done;
        from = gathered;
    }
    result = CUDA_ERROR_INVALID_VALUE;
    if (count && !from)
        goto done;
    for (size_t i = 0; i < count; i++)
        bytes += (body->sizes[i] + 15) & ~(size_t)15;
    /* One block: sizes, pointers, then the bytes at a multiple of 16. */
    size_t heads = (count * (sizeof(size_t) + sizeof(void *)) + 15) & ~(size_t)15;
    result = CUDA_ERROR_OUT_OF_MEMORY;
    work->kernel.sizes = malloc(heads + bytes + 1);
    if (!work->kernel.sizes)
        goto done;
    work->kernel.arguments = (void **)(work->kernel.sizes + count);
    char *at = (char *)work->kernel.sizes + heads;
    for (size_t i = 0; i < count; i++) {
        work->kernel.sizes[i] = body->sizes[i];
        work->kernel.arguments[i] = memcpy(at, from[i], body->sizes[i]);
        at += (body->sizes[i] + 15) & ~(size_t)15;
    }
    work->kernel.body = body->body;
    work->kernel.count = body->count;
    result = CUDA_SUCCESS;
done:
    free(gathered);
    return result;
}

CUresult sim_launch_submit(const sim_launch *launch, sim_stream *stream)
{
    const emulated *body = body_of(launch->name, launch->hash);
    sim_work *work = sim_work_new(SIM_WORK_KERNEL, stream->device);

    if (!work)
        return CUDA_ERROR_OUT_OF_MEMORY;
    memcpy(work->kernel.grid, launch->grid, sizeof launch->grid);
    memcpy(work->kernel.block, launch->block, sizeof launch->block);
    CUresult result = body && body->body ? attach(work, body, launch) : CUDA_SUCCESS;
    if (result != CUDA_SUCCESS) {
        sim_work_release(work);
        return result;
    }
    return sim_stream_submit(stream, work, NULL);
}
