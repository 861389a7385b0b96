/* A CUDA driver for tests of what sits on mo_cuda_api: it keeps count of what is live, runs nothing, and
 * fails the call it is told to. What an image is to it: text that begins with "image:" is taken, and holds
 * the kernels; all else is refused with fake.refusal. */
#ifndef MEMOPT_FAKE_CUDA_H
#define MEMOPT_FAKE_CUDA_H

#include "driver/context.h"
#include "test.h"

static struct fake {
    int modules, blocks, pinned, events; /* live */
    int depth;                           /* contexts pushed and not popped */
    CUstreamCaptureMode mode;
    CUcontext current;
    bool capturing, pending; /* pending: no event is complete until it is waited for */
    int loads, copies, waits, syncs, stream_waits, capture_questions;
    CUstream waiting; /* the last stream that was made to wait */
    CUresult refusal, event_code;
    int architecture;
    long countdown;   /* fail the call after so many more; negative: never */
    CUresult code;    /* with this */
    char missing[64]; /* a kernel that no image has */
} fake;

#define FAKE_PINNED_MAX 64
static void *fake_pinned[FAKE_PINNED_MAX]; /* so that what a test leaves on purpose goes with the driver */

#define FAKE_CONTEXT ((CUcontext)(uintptr_t)0xC0)

static bool fake_fails(void)
{
    return fake.countdown >= 0 && fake.countdown-- == 0;
}

#define FAKE(result, name, ...)                                                                              \
    static CUresult fake_##name(__VA_ARGS__)                                                                 \
    {                                                                                                        \
        if (fake_fails())                                                                                    \
            return fake.code;                                                                                \
        result return CUDA_SUCCESS;                                                                          \
    }

static CUresult fake_error_name(CUresult code, const char **out)
{
    (void)code;
    *out = "CUDA_ERROR_FAKED";
    return CUDA_SUCCESS;
}

FAKE(*out = fake.current;, context_current, CUcontext *out)
FAKE(fake.current = context; fake.depth++;, context_push, CUcontext context)

static CUresult fake_context_pop(CUcontext *out)
{
    *out = fake.current;
    fake.current = NULL;
    fake.depth--;
    return CUDA_SUCCESS;
}

/* Putting back what was there does not fail, so a countdown is not spent on it. */
static CUresult fake_capture_mode(CUstreamCaptureMode *mode)
{
    CUstreamCaptureMode former = fake.mode;
    if (*mode == CU_STREAM_CAPTURE_MODE_RELAXED && fake_fails())
        return fake.code;
    fake.mode = *mode;
    *mode = former;
    return CUDA_SUCCESS;
}

FAKE(*out = which == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR   ? fake.architecture / 10
            : which == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR ? fake.architecture % 10
                                                                    : 4;
     (void)device;, device_attribute, int *out, CUdevice_attribute which, CUdevice device)

static CUresult fake_module_load(CUmodule *out, const void *image, unsigned count, CUjit_option *names,
                                 void **values)
{
    (void)count, (void)names, (void)values;
    CHECK(fake.current == FAKE_CONTEXT && fake.mode == CU_STREAM_CAPTURE_MODE_RELAXED);
    if (fake_fails())
        return fake.code;
    fake.loads++;
    if (strncmp(image, "image:", 6) != 0)
        return fake.refusal;
    fake.modules++;
    *out = (CUmodule)(uintptr_t)0xB0;
    return CUDA_SUCCESS;
}

static CUresult fake_module_function(CUfunction *out, CUmodule module, const char *name)
{
    (void)module;
    if (fake_fails())
        return fake.code;
    *out = (CUfunction)(uintptr_t)(0xF000 + strlen(name));
    return strcmp(name, fake.missing) == 0 ? CUDA_ERROR_NOT_FOUND : CUDA_SUCCESS;
}

static CUresult fake_module_unload(CUmodule module)
{
    (void)module;
    fake.modules--;
    return CUDA_SUCCESS;
}

static CUresult fake_memory_alloc(CUdeviceptr *out, size_t size)
{
    static CUdeviceptr next = 0x10000;
    if (fake_fails())
        return fake.code;
    *out = next += size;
    fake.blocks++;
    return CUDA_SUCCESS;
}

static CUresult fake_memory_free(CUdeviceptr address)
{
    (void)address;
    fake.blocks--;
    return CUDA_SUCCESS;
}

static CUresult fake_host_alloc(void **out, size_t size, unsigned flags)
{
    (void)flags;
    if (fake_fails())
        return fake.code;
    *out = malloc(size);
    for (int i = 0; i < FAKE_PINNED_MAX; i++)
        if (!fake_pinned[i]) {
            fake_pinned[i] = *out;
            break;
        }
    fake.pinned++;
    return CUDA_SUCCESS;
}

static CUresult fake_host_free(void *block)
{
    for (int i = 0; i < FAKE_PINNED_MAX; i++)
        if (fake_pinned[i] == block)
            fake_pinned[i] = NULL;
    free(block);
    fake.pinned--;
    return CUDA_SUCCESS;
}

FAKE((void)to; (void)from; (void)size; (void)stream; fake.copies++;
     , copy_to_device, CUdeviceptr to, const void *from, size_t size, CUstream stream)
FAKE(*out = (CUevent)(uintptr_t)0xE0; (void)flags; fake.events++;, event_create, CUevent *out, unsigned flags)
FAKE((void)event; (void)stream;, event_record, CUevent event, CUstream stream)
FAKE((void)event; fake.waits++; fake.pending = false;, event_synchronize, CUevent event)
FAKE((void)stream; fake.syncs++;, stream_synchronize, CUstream stream)
FAKE((void)event; (void)flags; fake.stream_waits++; fake.waiting = stream;
     , stream_wait, CUstream stream, CUevent event, unsigned flags)
FAKE((void)stream; fake.capture_questions++;
     *out = fake.capturing ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
     , stream_capturing, CUstream stream, CUstreamCaptureStatus *out)

static CUresult fake_event_destroy(CUevent event)
{
    (void)event;
    fake.events--;
    return CUDA_SUCCESS;
}

static CUresult fake_event_query(CUevent event)
{
    (void)event;
    if (fake_fails())
        return fake.code;
    return fake.pending ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
}

static const mo_cuda_api fake_api = {
    .error_name = fake_error_name,
    .error_string = fake_error_name,
    .context_current = fake_context_current,
    .context_push = fake_context_push,
    .context_pop = fake_context_pop,
    .capture_mode = fake_capture_mode,
    .device_attribute = fake_device_attribute,
    .module_load = fake_module_load,
    .module_function = fake_module_function,
    .module_unload = fake_module_unload,
    .memory_alloc = fake_memory_alloc,
    .memory_free = fake_memory_free,
    .host_alloc = fake_host_alloc,
    .host_free = fake_host_free,
    .copy_to_device = fake_copy_to_device,
    .event_create = fake_event_create,
    .event_destroy = fake_event_destroy,
    .event_record = fake_event_record,
    .event_query = fake_event_query,
    .event_synchronize = fake_event_synchronize,
    .stream_synchronize = fake_stream_synchronize,
    .stream_wait = fake_stream_wait,
    .stream_capturing = fake_stream_capturing,
};

__attribute__((unused)) static const mo_driver_cuda fake_device = {.api = &fake_api, .context = FAKE_CONTEXT};

/* A new driver, of a device of compute capability 8.0; nothing may be live in the old one. */
static void fake_reset(void)
{
    CHECK_EQ(fake.modules, 0);
    CHECK_EQ(fake.depth, 0);
    for (int i = 0; i < FAKE_PINNED_MAX; i++) {
        free(fake_pinned[i]);
        fake_pinned[i] = NULL;
    }
    fake = (struct fake){.refusal = CUDA_ERROR_NO_BINARY_FOR_GPU, .architecture = 80, .countdown = -1};
}

#endif
