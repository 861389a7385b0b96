#include "driver/kernel_proof.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

#include "../kernels/cross_entropy.cuh"
#include "../kernels/gradients.cuh"
#include "../kernels/update_table.cuh"
#include "../kernels/widen.cuh"

#define COUNT   4  /* elements */
#define THREADS 32 /* a warp: the fewest that every kernel takes */

/* What the kernels read and write, as it lies on the device. The numbers are such that no operation rounds,
 * but for the logarithm of cross_entropy. */
typedef struct proof {
    struct { /* the table of each: its head first */
        mo_gradients_head head;
        mo_chunk chunk;
        double partial;
    } gradients;
    struct {
        mo_update_head head;
        mo_update_parameter parameter;
        mo_update_group group;
        mo_update_unit unit;
    } update, factored;
    struct {
        float mean, deviation;
    } widen;
    mo_cross_entropy_options options;
    long long target;
    float inv_scale, found_inf, norm;
    unsigned char bytes[COUNT];
    MO_ALIGNED(16) float scaled[COUNT], stepped[COUNT], gradient[COUNT], widened[COUNT], logits[COUNT];
    MO_ALIGNED(16) float averages[COUNT], sums[COUNT], inverse;
    float lse, loss, row_scale;
} proof;

static const float scaled[COUNT] = {0.5f, 1, 1, 2}; /* whose norm is 2.5 */
static const float log_4 = 1.38629436f;
static const float stepped[COUNT] = {0.5f, 1, 1.5f, 2};
static const float widened[COUNT] = {0, 0.5f, 1, 1.5f};
static const float averages[COUNT] = {1.25f, 6.25f, 2.5f,
                                      5};         /* of the squares of 1, 2; 3, 4: rows, columns */
static const float logits[COUNT] = {1, 1, -3, 1}; /* of four equal ones: 4 * (1/4 - 1 at the target) */

#define AT(member) (address + offsetof(proof, member))

static proof before(CUdeviceptr address)
{
    proof p = {
        .gradients.chunk = {.address = AT(scaled), .count = COUNT, .kind = MO_F32},
        .update.parameter = {.p = AT(stepped),
                             .g = AT(gradient),
                             .count = COUNT,
                             .flags = MO_UPDATE_SGD,
                             .kind = MO_F32,
                             .grad_kind = MO_F32,
                             .state_kind = MO_F32},
        .update.group.lr = 0.5,
        .factored.parameter = {.g = AT(gradient),
                               .row = AT(averages[0]),
                               .column = AT(averages[2]),
                               .sums = AT(sums),
                               .inverse = AT(inverse),
                               .count = COUNT,
                               .columns = 2,
                               .blocks = 1,
                               .grad_kind = MO_F32},
        .factored.group.beta2 = 0.5,
        .widen = {.mean = 1, .deviation = 2},
        .target = 2,
        .row_scale = COUNT,
        .inv_scale = 0.5f,
    };
    for (int i = 0; i < COUNT; i++) {
        p.scaled[i] = 2 * scaled[i];
        p.stepped[i] = p.gradient[i] = 2 * stepped[i];
        p.bytes[i] = (unsigned char)(2 * (i + 1));
        p.widened[i] = -1;
    }
    return p;
}

static bool same(const float a[COUNT], const float b[COUNT])
{
    for (int i = 0; i < COUNT; i++)
        if (a[i] != b[i])
            return false;
    return true;
}

static bool near(const float *a, const float *b, int count)
{
    for (int i = 0; i < count; i++)
        if (!(a[i] - b[i] < 1e-5f && b[i] - a[i] < 1e-5f))
            return false;
    return true;
}

/* The first kernel whose results are not those expected; MO_KERNEL_COUNT where all are. */
static mo_kernel wrong(const proof *p)
{
    if (p->norm != 2.5f || p->found_inf != 0 || !same(p->scaled, scaled))
        return MO_KERNEL_GRADIENTS;
    if (!same(p->stepped, stepped))
        return MO_KERNEL_UPDATE;
    if (!same(p->averages, averages))
        return MO_KERNEL_FACTORED;
    if (!same(p->widened, widened))
        return MO_KERNEL_WIDEN;
    /* The GPU's exponential and logarithm are near: log 4 is the lse and the loss. */
    if (!near(&p->lse, &log_4, 1) || !near(&p->loss, &log_4, 1) || !near(p->logits, logits, COUNT))
        return MO_KERNEL_CROSS_ENTROPY;
    return MO_KERNEL_COUNT;
}

static CUresult launch_all(const mo_cuda_api *api, const CUfunction functions[MO_KERNEL_COUNT],
                           CUdeviceptr address, CUstream stream)
{
    mo_gradients_launch gradients = {
        .table = AT(gradients),
        .inv_scale = AT(inv_scale),
        .found_inf = AT(found_inf),
        .norm = AT(norm),
        .chunks = 1,
        .passes = MO_GRADIENTS_CHECK | MO_GRADIENTS_STORE | MO_GRADIENTS_NORM,
    };
    mo_update_launch update = {
        .table = AT(update), .parameters = 1, .groups = 1, .units = 1, .elements = 1024};
    mo_update_launch factored = {.table = AT(factored), .parameters = 1, .groups = 1};
    mo_widen_launch widen = {
        .table = AT(widen),
        .source = AT(bytes),
        .target = AT(widened),
        .count = COUNT,
        .inner = 1,
        .channels = 1,
        .scale = 0.5f,
        .aligned = 1,
        .source_kind = MO_NUMBER_U8,
        .target_kind = MO_F32,
    };
    mo_cross_entropy_launch cross_entropy = {
        .table = AT(options),
        .logits = AT(logits),
        .target = AT(target),
        .lse = AT(lse),
        .loss = AT(loss),
        .scale = AT(row_scale),
        .classes = COUNT,
        .columns = COUNT,
        .passes = MO_LOSS_FIND | MO_LOSS_SUBTRACT,
        .kind = MO_F32,
    };
    void *const arguments[MO_KERNEL_COUNT] = {[MO_KERNEL_GRADIENTS] = &gradients,
                                              [MO_KERNEL_UPDATE] = &update,
                                              [MO_KERNEL_FACTORED] = &factored,
                                              [MO_KERNEL_WIDEN] = &widen,
                                              [MO_KERNEL_CROSS_ENTROPY] = &cross_entropy};
    CUresult code = CUDA_SUCCESS;

    for (int i = 0; i < MO_KERNEL_COUNT && !code; i++) {
        void *argument[] = {arguments[i]};
        code =
            api->launch(functions[i], 1, 1, 1, THREADS, 1, 1, /* shared_bytes */ 0, stream, argument, NULL);
    }
    return code;
}

mo_status mo_kernels_prove(const mo_cuda_api *api, const CUfunction functions[MO_KERNEL_COUNT],
                           mo_detail *detail)
{
    const char *call = "cuMemAlloc";
    CUdeviceptr address = 0;
    CUstream stream = NULL;
    proof p;
    CUresult code = api->memory_alloc(&address, sizeof p);

    if (code)
        return mo_cuda_check(api, code, call, detail);
    p = before(address);
    call = "cuStreamCreate";
    code = api->stream_create(&stream, CU_STREAM_NON_BLOCKING);
    if (!code) {
        call = "cuMemcpyHtoDAsync";
        code = api->copy_to_device(address, &p, sizeof p, stream);
    }
    if (!code) {
        call = "cuLaunchKernel";
        code = launch_all(api, functions, address, stream);
    }
    if (!code) {
        call = "cuMemcpyDtoHAsync";
        code = api->copy_to_host(&p, address, sizeof p, stream);
    }
    if (stream) { /* in any case: what was queued uses the memory below */
        const CUresult waited = api->stream_synchronize(stream);
        if (!code) {
            call = "cuStreamSynchronize";
            code = waited;
        }
        api->stream_destroy(stream);
    }
    api->memory_free(address);
    if (code)
        return mo_cuda_check(api, code, call, detail);
    if (wrong(&p) != MO_KERNEL_COUNT)
        return mo_fail(detail, MO_CORRUPT, 0, "%s computes wrong results", mo_kernel_name(wrong(&p)));
    return MO_OK;
}
