/* Built with -fexceptions: torch's allocator may leave ours by one. */
#include "alloc/torch_cpu.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>

#include "base/lock.h"

enum { CPU = 0 }; /* c10::DeviceType */

typedef void (*deleter)(void *context);

/* c10::DataPtr: a pointer, a std::unique_ptr with its deleter in front, and a device. */
typedef struct data_ptr {
    void *data;
    deleter free;
    void *context;
    int8_t device_type, device_index;
} data_ptr;

/* c10::Allocator's table; a DataPtr is returned through a pointer that comes before `this`. */
typedef struct functions {
    void (*destroy)(void *self);
    void (*destroy_and_free)(void *self);
    data_ptr *(*allocate)(data_ptr *out, void *self, size_t size);
    bool (*is_simple_data_ptr)(const void *self, const data_ptr *pointer);
    deleter (*raw_deleter)(const void *self);
    void (*copy_data)(const void *self, void *to, const void *from, size_t count);
} functions;

typedef struct table {
    ptrdiff_t offset_to_top;
    const void *type_info;
    functions functions;
} table;

typedef struct allocator {
    const functions *functions;
} allocator;

static mo_lock lock = MO_LOCK_INIT;
static _Atomic(mo_life_log *) watched; /* changes under the lock */
static _Atomic(mo_torch_cpu_where) where_is;
static _Thread_local unsigned pauses;

/* torch's, from the first watch on. */
static const allocator *torchs;
static deleter torchs_deleter;

/* ---- our allocator -------------------------------------------------------------------------------------------- */

mo_life_log *mo_torch_cpu_lock_log(void)
{
    mo_life_log *log;

    if (!atomic_load_explicit(&watched, memory_order_relaxed))
        return NULL; /* without the lock, which in a forked child may be one that nobody gives back */
    mo_lock_take(&lock);
    log = atomic_load_explicit(&watched, memory_order_relaxed);
    if (!log)
        mo_lock_give(&lock);
    return log;
}

void mo_torch_cpu_unlock_log(void)
{
    mo_lock_give(&lock);
}

/* Before the memory goes back: then whoever gets it next is born after this. */
static void free_noted(void *context)
{
    mo_life_log *log = mo_torch_cpu_lock_log();

    if (log) {
        mo_life_died(log, (int64_t)(intptr_t)context, 0);
        mo_torch_cpu_unlock_log();
    }
    torchs_deleter(context);
}

static data_ptr *allocate(data_ptr *out, void *self, size_t size)
{
    const mo_torch_cpu_where where = atomic_load(&where_is);
    int64_t stack = 0, module = 0;
    mo_life_log *log;

    (void)self;
    torchs->functions->allocate(out, (void *)(uintptr_t)torchs, size);
    if (!size || !out->data || pauses || out->context != out->data || out->free != torchs_deleter ||
        !atomic_load_explicit(&watched, memory_order_relaxed))
        return out;
    if (where)
        where(&stack, &module);
    log = mo_torch_cpu_lock_log();
    if (log) {
        if (mo_life_born(log, (int64_t)(intptr_t)out->data, (int64_t)size, stack, module))
            out->free = free_noted;
        mo_torch_cpu_unlock_log();
    }
    return out;
}

static bool is_simple_data_ptr(const void *self, const data_ptr *pointer)
{
    (void)self;
    return torchs->functions->is_simple_data_ptr(torchs, pointer);
}

static deleter raw_deleter(const void *self)
{
    (void)self;
    return free_noted;
}

static void copy_data(const void *self, void *to, const void *from, size_t count)
{
    (void)self;
    torchs->functions->copy_data(torchs, to, from, count);
}

static void stay(void *self)
{
    (void)self;
}

static table our_table = {.functions = {stay, stay, allocate, is_simple_data_ptr, raw_deleter, copy_data}};
static allocator ours = {&our_table.functions};

/* ---- watching ------------------------------------------------------------------------------------------------- */

mo_status mo_torch_cpu_find(mo_torch_cpu *out, mo_detail *detail)
{
    static const char get[] = "_ZN3c1012GetAllocatorERKNS_10DeviceTypeE",
                      set[] = "_ZN3c1012SetAllocatorENS_10DeviceTypeEPNS_9AllocatorEh";
    void *library = dlopen("libc10.so", RTLD_NOW | RTLD_NOLOAD), *found[2];

    if (!library)
        return mo_fail(detail, MO_NO_LIBRARY, 0, "libc10.so is not loaded: import torch first");
    found[0] = dlsym(library, get);
    found[1] = dlsym(library, set);
    dlclose(library); /* torch keeps it loaded; ours was one more count */
    if (!found[0] || !found[1])
        return mo_fail(detail, MO_NO_SYMBOL, 0, "this torch has no symbol %s", found[0] ? set : get);
    memcpy(&out->get_allocator, &found[0], sizeof found[0]);
    memcpy(&out->set_allocator, &found[1], sizeof found[1]);
    return MO_OK;
}

static void *current_allocator(const mo_torch_cpu *torch)
{
    const int8_t type = CPU;

    return torch->get_allocator(&type);
}

/* Whether it gives blocks as torch's own allocator does: asked for one. */
static bool is_as_known(const allocator *it, deleter *its_deleter)
{
    data_ptr block = {0};
    bool known;

    if (!it || !it->functions || !it->functions->raw_deleter)
        return false;
    *its_deleter = it->functions->raw_deleter(it);
    if (!*its_deleter)
        return false;
    it->functions->allocate(&block, (void *)(uintptr_t)it, 64);
    known = block.data && block.context == block.data && block.free == *its_deleter &&
            block.device_type == CPU && it->functions->is_simple_data_ptr(it, &block);
    if (known)
        (*its_deleter)(block.context);
    return known;
}

/* The lowest priority at which torch takes it is the one that the allocator there has. */
static bool replace(const mo_torch_cpu *torch, void *by)
{
    for (int priority = 0; priority < 256 && current_allocator(torch) != by; priority++)
        torch->set_allocator(CPU, by, (uint8_t)priority);
    return current_allocator(torch) == by;
}

static mo_torch_cpu used;

/* The lock may be one that a thread of the parent holds. */
static void forget_in_child(void)
{
    static const mo_lock fresh = MO_LOCK_INIT;

    memcpy(&lock, &fresh, sizeof lock);
    atomic_store(&watched, NULL);
}

static void prepare_for_forks(void)
{
    pthread_atfork(NULL, NULL, forget_in_child);
}

mo_status mo_torch_cpu_watch(const mo_torch_cpu *torch, mo_life_log *log, mo_torch_cpu_where where,
                             mo_detail *detail)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    const allocator *there = current_allocator(torch);
    deleter its_deleter = NULL;

    if (atomic_load(&watched))
        return mo_fail(detail, MO_INVALID, 0, "torch's CPU allocator is already being watched");
    pthread_once(&once, prepare_for_forks);
    if (there != &ours) {
        if (!is_as_known(there, &its_deleter))
            return mo_fail(detail, MO_UNSUPPORTED, 0, "this torch's CPU allocator has an unknown layout");
        if (torchs && (torchs != there || torchs_deleter != its_deleter))
            return mo_fail(detail, MO_UNSUPPORTED, 0, "torch's CPU allocator was replaced");
        if (!torchs) {
            torchs = there;
            torchs_deleter = its_deleter;
            /* What the compiler knows of its class holds of ours. */
            memcpy(&our_table.type_info, (const char *)there->functions - sizeof our_table.type_info,
                   sizeof our_table.type_info);
        }
        if (!replace(torch, &ours))
            return mo_fail(detail, MO_UNSUPPORTED, 0, "torch did not accept the CPU allocator");
    }
    used = *torch;
    atomic_store(&where_is, where);
    mo_lock_take(&lock);
    atomic_store(&watched, log);
    mo_lock_give(&lock);
    return MO_OK;
}

void mo_torch_cpu_stop(void)
{
    if (!atomic_load(&watched))
        return;
    mo_lock_take(&lock);
    atomic_store(&watched, NULL);
    mo_lock_give(&lock);
    atomic_store(&where_is, NULL);
    if (current_allocator(&used) == &ours)
        replace(&used, (void *)(uintptr_t)torchs);
}

int mo_torch_cpu_watched(void)
{
    return atomic_load(&watched) != NULL;
}

void mo_torch_cpu_pause(void)
{
    pauses++;
}

void mo_torch_cpu_resume(void)
{
    pauses--;
}
