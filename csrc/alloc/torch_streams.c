#include "alloc/torch_streams.h"

#include <dlfcn.h>
#include <stdatomic.h>
#include <string.h>

#define LEGACY_STREAM ((mo_stream)1) /* CU_STREAM_LEGACY */

/* c10::cuda::CUDAStream: a c10::Stream, which is a c10::Device and an id; returned in two registers. */
typedef struct torch_stream {
    int8_t device_type, device;
    int64_t id;
} torch_stream;

static _Atomic(void *) current, handle; /* getCurrentCUDAStream, CUDAStream::stream */

static bool look_up(void)
{
    void *library;

    if (atomic_load_explicit(&handle, memory_order_acquire))
        return true;
    library = dlopen("libc10_cuda.so", RTLD_NOW | RTLD_NOLOAD);
    if (!library)
        return false;
    atomic_store(&current, dlsym(library, "_ZN3c104cuda20getCurrentCUDAStreamEa"));
    if (atomic_load(&current))
        atomic_store_explicit(&handle, dlsym(library, "_ZNK3c104cuda10CUDAStream6streamEv"),
                              memory_order_release);
    dlclose(library); /* torch keeps it loaded */
    return atomic_load(&handle) != NULL;
}

bool mo_torch_stream_lasts(int device, mo_stream stream)
{
    torch_stream (*current_of)(int8_t);
    mo_stream (*handle_of)(const torch_stream *);
    torch_stream now;
    void *address;

    if (!stream || stream == LEGACY_STREAM)
        return true;
    if (!look_up())
        return false;
    /* dlsym gives an object pointer; POSIX lets it be a function's. */
    address = atomic_load(&current);
    memcpy(&current_of, &address, sizeof address);
    address = atomic_load(&handle);
    memcpy(&handle_of, &address, sizeof address);
    now = current_of((int8_t)device);
    return (now.id & 1) && handle_of(&now) == stream;
}
