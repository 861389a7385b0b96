/* The list's elements, one after another, are cut into items of about 64 KiB: a large gradient is many, of many small ones go to
 * one. Where the cuts are depends on the list alone, each item has a result of its own, and those are added up in order; so
 * the threads that share the items have no say in the result. Nothing else is allocated, and nothing a gradient. */
#include "scaler/gradients.h"

#include <math.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "../kernels/float_bits.cuh"
#include "base/hostmem.h"
#include "base/parallel.h"
#include "base/size.h"
#include "scaler/gradients_kernels.h"

/* Small enough that a few megabytes are shared evenly, large enough that what an item costs beside its elements (about 0.1 us)
 * does not count. */
#define ITEM_BYTES ((size_t)64 << 10)

/* What a gradient costs beside its bytes, as bytes. */
#define GRADIENT_BYTES 64

/* A thread's least share, 1 MiB. A second thread would save some 3 us of it, but where no core is free the loop waits for a
 * whole time slice of the kernel's: 14 ms were measured. */
#define ITEMS_A_THREAD 16

enum { ITEMS_ON_STACK = 32 };

/* ---- the instruction set --------------------------------------------------------------------------------- */

static _Atomic(const mo_gradients_kernels *) chosen, forced;

const mo_gradients_kernels *mo_gradients_kernels_of(mo_isa isa)
{
#if defined(__x86_64__)
    if (isa == MO_ISA_AVX512)
        return &mo_gradients_avx512;
    if (isa == MO_ISA_AVX2)
        return &mo_gradients_avx2;
#endif
    (void)isa;
    return &mo_gradients_generic;
}

void mo_gradients_use(const mo_gradients_kernels *kernels)
{
    atomic_store(&chosen, NULL);
    atomic_store(&forced, kernels);
}

static mo_status choose(const mo_gradients_kernels **out, mo_detail *detail)
{
    const mo_gradients_kernels *kernels = atomic_load_explicit(&forced, memory_order_acquire);
    mo_status status = MO_OK;
    mo_isa isa;

    if (!kernels)
        kernels = atomic_load_explicit(&chosen, memory_order_acquire);
    if (!kernels) {
        status = mo_isa_choose(getenv("MEMOPT_ISA"), &isa, detail);
        if (status)
            return status;
        kernels = mo_gradients_kernels_of(isa);
        atomic_store_explicit(&chosen, kernels, memory_order_release);
    }
    *out = kernels;
    return MO_OK;
}

/* ---- items ----------------------------------------------------------------------------------------------- */

/* Where an item begins; it ends where the next begins. */
typedef struct place {
    size_t gradient, element;
} place;

typedef struct result {
    double sum;     /* of squares */
    double maximum; /* of |y| */
} result;

typedef struct work {
    const mo_gradients_kernels *kernels;
    const mo_gradient *gradients;
    const place *places; /* items + 1 */
    result *results;     /* items, or NULL */
    unsigned run;        /* MO_RUN_STORE, MO_RUN_NORM */
    float inv_scale;
    atomic_bool found;
} work;

static mo_status check_gradient(const mo_gradient *g, size_t i, mo_detail *detail)
{
    const unsigned size = (unsigned)g->kind < MO_FLOAT_COUNT ? mo_float_size(g->kind) : 0;

    if (!size)
        return mo_fail(detail, MO_INVALID, 0,
                       "gradient %zu: element type %d: expected 0 (fp32), 1 (fp16), 2 (bf16) or 3 (fp64)", i,
                       (int)g->kind);
    if (g->count > 0 && (!g->address || g->address % size))
        return mo_fail(detail, MO_INVALID, 0,
                       "gradient %zu: address %#zx: expected a multiple of its elements' %u bytes", i,
                       (size_t)g->address, size);
    if (g->count > (UINTPTR_MAX - g->address) / size)
        return mo_fail(detail, MO_INVALID, 0,
                       "gradient %zu: %zu elements of %u bytes at %#zx run past the end of the address space",
                       i, g->count, size, (size_t)g->address);
    return MO_OK;
}

/* Checks the list, and finds a number of items that it does not exceed. */
static mo_status check_gradients(const mo_gradient *gradients, size_t count, size_t *out_items,
                                 mo_detail *detail)
{
    size_t cost = 0;

    if (count > 0 && !gradients)
        return mo_fail(detail, MO_INVALID, 0, "a list of %zu gradients has no address", count);
    for (size_t i = 0; i < count; i++) {
        const mo_gradient *g = &gradients[i];
        /* Almost never true, and then told apart. */
        if ((unsigned)g->kind >= MO_FLOAT_COUNT || !g->address || g->address % mo_float_size(g->kind) ||
            g->count > (UINTPTR_MAX - g->address) / mo_float_size(g->kind)) {
            const mo_status status = check_gradient(g, i, detail);
            if (status)
                return status;
        }
        if (!mo_add_ok(cost, g->count * mo_float_size(g->kind) + GRADIENT_BYTES, &cost))
            return mo_fail(detail, MO_INVALID, 0, "the bytes of all %zu gradients do not fit", count);
    }
    /* Every item but the last lacks less than a block of fp64, or a gradient's cost, of being full. */
    *out_items = cost / (ITEM_BYTES - MO_GRADIENTS_BLOCK * sizeof(double) - GRADIENT_BYTES) + 1;
    return MO_OK;
}

/* Cuts the list; returns how many items there are, and out[items] is the list's end. */
static size_t cut(const mo_gradient *gradients, size_t count, place *out)
{
    size_t items = 0, room = 0;

    for (size_t i = 0; i < count; i++) {
        const size_t size = mo_float_size(gradients[i].kind);
        size_t element = 0;
        while (element < gradients[i].count) {
            const size_t left = gradients[i].count - element;
            const size_t fit = room > GRADIENT_BYTES ? (room - GRADIENT_BYTES) / size : 0;
            size_t taken = left <= fit ? left : fit - fit % MO_GRADIENTS_BLOCK;
            if (taken == 0) {
                out[items++] = (place){i, element};
                room = ITEM_BYTES + GRADIENT_BYTES;
            } else {
                element += taken;
                room -= taken * size + GRADIENT_BYTES;
            }
        }
    }
    out[items] = (place){count, 0};
    return items;
}

/* ---- an item --------------------------------------------------------------------------------------------- */

static double larger(double a, double b)
{
    return a > b || isnan(a) ? a : b; /* NaN is larger than all */
}

static float rounded(mo_float kind, float x)
{
    return kind == MO_F16    ? mo_f16_to_float(mo_f16_from_float(x))
           : kind == MO_BF16 ? mo_bf16_to_float(mo_bf16_from_float(x))
                             : x;
}

/* The largest |y| of the pieces since the tops were zeros; but for fp64 ones they are all of `kind`. Rounding keeps the order,
 * so the largest x became the largest y. (What is not stored is x; the norm as a whole is multiplied.) */
static double take_tops(work *w, mo_float kind, mo_gradients_lanes *lanes)
{
    const bool stores = w->run & MO_RUN_STORE;
    uint64_t wide_top = 0;
    uint32_t top = 0;

    for (int i = 0; i < 16; i++)
        top = lanes->tops[i] > top ? lanes->tops[i] : top;
    for (int i = 0; i < 8; i++)
        wide_top = lanes->wide_tops[i] > wide_top ? lanes->wide_tops[i] : wide_top;
    memset(lanes->tops, 0, sizeof lanes->tops);
    memset(lanes->wide_tops, 0, sizeof lanes->wide_tops);

    const float x = mo_float_from_bits(top);
    const double wide_x = mo_double_from_bits(wide_top);
    if (!isfinite(x) || !isfinite(wide_x))
        atomic_store_explicit(&w->found, true, memory_order_relaxed);
    return stores
               ? larger((double)fabsf(rounded(kind, x * w->inv_scale)), fabs(wide_x * (double)w->inv_scale))
               : larger((double)x, wide_x);
}

static void run_item(work *w, size_t item)
{
    const place begin = w->places[item], end = w->places[item + 1];
    mo_float kind = w->gradients[begin.gradient].kind;
    mo_gradients_lanes lanes;
    double sum, maximum = 0;
    size_t i = begin.gradient, element = begin.element;

    memset(&lanes, 0, sizeof lanes);
    for (; i <= end.gradient; i++, element = 0) {
        if (i == end.gradient && element >= end.element) /* the list's end is a place, but no gradient */
            break;
        const mo_gradient *g = &w->gradients[i];
        const size_t stop = i == end.gradient ? end.element : g->count;
        if (stop == element)
            continue;
        if (g->kind != kind) {
            maximum = larger(maximum, take_tops(w, kind, &lanes));
            kind = g->kind;
        }
        w->kernels->run[kind][w->run](&lanes, (void *)(g->address + element * mo_float_size(kind)),
                                      stop - element, w->inv_scale);
    }
    maximum = larger(maximum, take_tops(w, kind, &lanes));
    if (w->results) {
        sum = lanes.careful;
        for (int k = 0; k < 16; k++)
            sum += lanes.sums[k];
        w->results[item] = (result){sum, maximum};
    }
}

static void run_items(void *user, size_t begin, size_t end)
{
    for (size_t item = begin; item < end; item++)
        run_item(user, item);
}

/* ---- a job ----------------------------------------------------------------------------------------------- */

static void write_float(uintptr_t address, double value)
{
    if (address)
        *(float *)address = isnan(value) ? NAN : (float)value; /* one NaN, whichever came first */
}

/* The norm of y, of a list that has been run over. */
static double norm_of(const work *w, size_t items, unsigned passes)
{
    double sum = 0, maximum = 0, norm;

    for (size_t i = 0; i < items; i++) {
        sum += w->results[i].sum;
        maximum = larger(maximum, w->results[i].maximum);
    }
    norm = passes & MO_GRADIENTS_MAXIMUM ? maximum : sqrt(sum);
    return w->run & MO_RUN_STORE ? norm : norm * fabs((double)w->inv_scale);
}

static void run_job(work *w, size_t items, const mo_gradients_job *job)
{
    mo_parallel_for(items, ITEMS_A_THREAD, run_items, w);
    if (job->passes & MO_GRADIENTS_CHECK && atomic_load(&w->found))
        *(float *)job->found_inf = 1;
    if (!(job->passes & MO_GRADIENTS_NORM))
        return;
    if (job->passes & MO_GRADIENTS_MAXIMUM && w->run & MO_RUN_STORE && !isfinite(w->inv_scale)) {
        /* 0 becomes NaN, 1 infinite: the order was not kept. What was stored is read once more. */
        w->run = 0;
        w->inv_scale = 1;
        mo_parallel_for(items, ITEMS_A_THREAD, run_items, w);
    }
    const float inv_scale = job->inv_scale ? *(const float *)job->inv_scale : 1;
    const double norm64 = norm_of(w, items, job->passes), norm = (double)(float)norm64;
    const double ratio = job->max_norm / (norm + 1e-6);
    const float clip = ratio > 1 ? 1 : (float)ratio;
    if (job->norm64)
        *(double *)job->norm64 = norm64;
    write_float(job->norm, norm);
    write_float(job->clip, (double)clip);
    write_float(job->factor, (double)(inv_scale * clip));
}

/* Cuts the list and runs over it. With a job of NULL the elements are multiplied, and that is all. */
static mo_status run_list(work *w, size_t count, const mo_gradients_job *job, mo_detail *detail)
{
    place places_on_stack[ITEMS_ON_STACK + 1], *places = places_on_stack;
    result results_on_stack[ITEMS_ON_STACK], *results = results_on_stack;
    size_t items = 0, bytes;
    char *table = NULL;

    mo_status status = check_gradients(w->gradients, count, &items, detail);
    if (!status)
        status = choose(&w->kernels, detail);
    if (status)
        return status;
    if (items > ITEMS_ON_STACK) {
        if (!mo_mul_ok(items + 1, sizeof *places + sizeof *results, &bytes) ||
            !(table = mo_host_alloc(bytes)))
            return mo_fail(detail, MO_NO_HOST_MEMORY, 0, "out of host memory for a table of %zu items",
                           items);
        places = (place *)table;
        results = (result *)(table + (items + 1) * sizeof *places);
    }
    items = cut(w->gradients, count, places);
    w->places = places;
    w->results = job && job->passes & MO_GRADIENTS_NORM ? results : NULL;
    if (job)
        run_job(w, items, job);
    else
        mo_parallel_for(items, ITEMS_A_THREAD, run_items, w);
    mo_host_free(table);
    return MO_OK;
}

static mo_status check_floats(const mo_gradients_job *job, mo_detail *detail)
{
    const uintptr_t all[] = {job->inv_scale, job->found_inf, job->norm, job->clip, job->factor};
    static const char *const names[] = {"inv_scale", "found_inf", "norm", "clip", "factor"};
    const unsigned known = MO_GRADIENTS_CHECK | MO_GRADIENTS_STORE | MO_GRADIENTS_NORM | MO_GRADIENTS_MAXIMUM;

    if (job->passes & ~known)
        return mo_fail(detail, MO_INVALID, 0, "passes %#x: expected only the bits of %#x", job->passes,
                       known);
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (all[i] % sizeof(float))
            return mo_fail(detail, MO_INVALID, 0, "%s at %#zx: expected a multiple of 4 bytes", names[i],
                           (size_t)all[i]);
    if (job->norm64 % sizeof(double))
        return mo_fail(detail, MO_INVALID, 0, "norm64 at %#zx: expected a multiple of 8 bytes",
                       (size_t)job->norm64);
    if (job->passes & MO_GRADIENTS_CHECK && !job->found_inf)
        return mo_fail(detail, MO_INVALID, 0, "a check needs found_inf");
    return MO_OK;
}

mo_status mo_gradients_cpu(const mo_gradients_job *job, mo_detail *detail)
{
    const mo_status status = check_floats(job, detail);
    if (status)
        return status;
    work w = {
        .gradients = job->gradients,
        .inv_scale = job->inv_scale ? *(const float *)job->inv_scale : 1,
    };
    if (job->passes & MO_GRADIENTS_STORE && w.inv_scale != 1)
        w.run |= MO_RUN_STORE;
    if (job->passes & MO_GRADIENTS_NORM && !(job->passes & MO_GRADIENTS_MAXIMUM))
        w.run |= MO_RUN_NORM;
    return run_list(&w, job->count, job, detail);
}

mo_status mo_gradients_clip_cpu(const mo_gradient *gradients, size_t count, uintptr_t clip, mo_detail *detail)
{
    if (!clip || clip % sizeof(float))
        return mo_fail(detail, MO_INVALID, 0, "clip at %#zx: expected the address of an fp32", (size_t)clip);
    work w = {.gradients = gradients, .run = MO_RUN_STORE, .inv_scale = *(const float *)clip};
    return w.inv_scale == 1 ? MO_OK : run_list(&w, count, NULL, detail);
}
