/* Kernels: modules, functions, their host bodies, and launches.
 *
 * A kernel is known by name. A host body is looked up by name at launch, so that it may be registered before
 * or after the module is loaded; without one a launch is counted and does nothing. */
#ifndef SIM_KERNELS_H
#define SIM_KERNELS_H

#include "images.h"
#include "streams.h"

typedef struct sim_function {
    uint64_t handle;
    char *name;
    uint64_t hash;
    struct sim_module *module;
    int dynamic_shared, carveout; /* cuFuncSetAttribute */
    struct sim_function *next;
} sim_function;

typedef struct sim_global {
    char *name;
    size_t size;
    uintptr_t address[SIM_MAX_DEVICES];
    struct sim_global *next;
} sim_global;

typedef struct sim_module {
    uint64_t handle;
    bool library;
    sim_image image;
    sim_function *functions;
    sim_global *globals;
} sim_module;

CUresult sim_module_load(const void *image, bool library, sim_module **out);
CUresult sim_module_load_file(const char *path, bool library, sim_module **out);
sim_module *sim_module_of(const void *handle, bool library);
void sim_module_unload(sim_module *module);
CUresult sim_module_function(sim_module *module, const char *name, sim_function **out);
CUresult sim_module_global(sim_module *module, const char *name, int device, uintptr_t *address,
                           size_t *size);
sim_function *sim_function_of(const void *handle);
CUresult sim_function_attribute(const sim_function *function, CUfunction_attribute attribute, int *out);
CUresult sim_function_set_attribute(sim_function *function, CUfunction_attribute attribute, int value);

uint64_t sim_name_hash(const char *name);

typedef struct sim_launch {
    const char *name;
    uint64_t hash;
    unsigned grid[3], block[3];
    unsigned shared;
    int dynamic_shared; /* the most the function allows */
    bool cooperative;
    void **arguments;
    void **extra;
} sim_launch;

/* The driver's errors; INVALID_VALUE for a configuration no device takes. */
CUresult sim_launch_check(const sim_launch *launch);
CUresult sim_launch_submit(const sim_launch *launch, sim_stream *stream);
int sim_occupancy(int block_size, size_t shared);

/* Registers a host body; the lock is held. false when out of memory. */
bool sim_kernel_emulate(const char *name, sim_body body, int count, const size_t *sizes);

/* The project's own bodies (kernel_bodies.c), where they are linked in: called once, at activation. */
void sim_kernel_bodies_register(void) __attribute__((weak));

#endif
