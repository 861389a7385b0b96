/* Built with -fexceptions, like torch_hooks.c: an exception passes through these frames. */
#include "alloc/torch_throw.h"

#include <dlfcn.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/lock.h"

/* libstdc++'s std::string since 2015 (the __cxx11 ABI, in the mangled names below). */
typedef struct cxx_string {
    char *bytes;
    size_t length;
    union {
        char small[16];
        size_t capacity;
    } u;
} cxx_string;

/* c10::SourceLocation, passed in memory for its 24 bytes. */
typedef struct source_location {
    const char *function, *file;
    uint32_t line;
} source_location;

typedef void (*error_constructor)(void *self, source_location where, cxx_string *text);

#define NAMED_CONSTRUCTOR(class_)                                                                            \
    "_ZN3c10" class_ "C1ENS_14SourceLocationENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"

typedef struct pieces {
    void *(*allocate_exception)(size_t size);
    void (*throw_exception)(void *exception, void *type, void (*destroy)(void *));
    void *(*operator_new)(size_t size);
    error_constructor make_error, make_out_of_memory;
    void *error_type, *out_of_memory_type;
    void *out_of_memory_table; /* its vtable, where the class has no constructor of its own (torch <= 2.11) */
} pieces;

static pieces found;
static atomic_bool prepared;

/* First of the libraries that has the symbol. dlsym gives an object pointer; POSIX lets it be a function's. */
static bool look_up(void *slot, const char *symbol, void *const *libraries, int count)
{
    for (int i = 0; i < count; i++) {
        void *address = dlsym(libraries[i], symbol);
        if (address) {
            memcpy(slot, &address, sizeof address);
            return true;
        }
    }
    return false;
}

enum { LIBRARIES = 3 };

/* Fills *p; the symbol that is missing, or NULL. */
static const char *look_up_pieces(pieces *p, void *const *libraries)
{
#define NEED(slot, symbol)                                                                                   \
    if (!look_up(&p->slot, symbol, libraries, LIBRARIES))                                                    \
        return symbol;
    NEED(allocate_exception, "__cxa_allocate_exception")
    NEED(throw_exception, "__cxa_throw")
    NEED(operator_new, "_Znwm")
    NEED(error_type, "_ZTIN3c105ErrorE")
    NEED(make_error, NAMED_CONSTRUCTOR("5Error"))
    NEED(out_of_memory_type, "_ZTIN3c1016OutOfMemoryErrorE")
    if (!look_up(&p->make_out_of_memory, NAMED_CONSTRUCTOR("16OutOfMemoryError"), libraries, LIBRARIES))
        NEED(out_of_memory_table, "_ZTVN3c1016OutOfMemoryErrorE")
#undef NEED
    return NULL;
}

static mo_status look_up_all(pieces *p, mo_detail *detail)
{
    static const char *const names[LIBRARIES] = {"libc10.so", "libtorch_python.so", "libstdc++.so.6"};
    void *libraries[LIBRARIES];
    const char *missing = NULL;
    int opened = 0;

    /* Only what torch itself has loaded: another copy would have types of its own. */
    while (opened < LIBRARIES && (libraries[opened] = dlopen(names[opened], RTLD_NOW | RTLD_NOLOAD)))
        opened++;
    if (opened == LIBRARIES)
        missing = look_up_pieces(p, libraries);
    for (int i = 0; i < opened; i++)
        dlclose(libraries[i]); /* torch keeps them loaded; ours was one more count */
    if (opened < LIBRARIES)
        return mo_fail(detail, MO_NO_LIBRARY, 0, "%s is not loaded: import torch first", names[opened]);
    if (missing)
        return mo_fail(detail, MO_NO_SYMBOL, 0,
                       "this torch has no symbol %s, which memopt needs to raise torch.OutOfMemoryError: "
                       "memopt supports torch 2.10 and later",
                       missing);
    return MO_OK;
}

mo_status mo_torch_throw_prepare(mo_detail *detail)
{
    static mo_lock lock = MO_LOCK_INIT;
    mo_status status = MO_OK;

    if (atomic_load_explicit(&prepared, memory_order_acquire))
        return MO_OK;
    mo_lock_take(&lock);
    if (!atomic_load(&prepared)) {
        pieces p = {0};
        status = look_up_all(&p, detail);
        if (!status) {
            found = p;
            atomic_store_explicit(&prepared, true, memory_order_release);
        }
    }
    mo_lock_give(&lock);
    return status;
}

/* The first entry of a c10::Error's table is its complete destructor (the class derives from std::exception). */
static void destroy(void *exception)
{
    void (***table)(void *) = exception;
    (*table)[0](exception);
}

/* Where torch has not what is needed: what every C++ program knows, with the same text. */
static void throw_runtime_error(const char *text) __attribute__((noreturn));
static void throw_runtime_error(const char *text)
{
    void (*thrower)(const char *) = NULL;
    void *library = dlopen("libstdc++.so.6", RTLD_NOW);
    if (library)
        look_up(&thrower, "_ZSt21__throw_runtime_errorPKc", &library, 1);
    if (thrower)
        thrower(text);
    abort(); /* no C++ at all: nobody who calls us can be without it */
}

/* An exception object of 512 bytes is more than any c10::Error (104 in 2.13). */
enum { EXCEPTION_BYTES = 512 };

static void throw_error(const char *text, error_constructor make, void *table, void *type)
    __attribute__((noreturn));
static void throw_error(const char *text, error_constructor make, void *table, void *type)
{
    const source_location where = {"memopt_malloc", "memopt", 0};
    cxx_string string = {.length = strlen(text)};
    void *exception = found.allocate_exception(EXCEPTION_BYTES);

    memset(exception, 0, EXCEPTION_BYTES);
    string.u.capacity = string.length;
    string.bytes = found.operator_new(string.length + 1); /* what the string's destructor deletes */
    memcpy(string.bytes, text, string.length + 1);
    make(exception, where, &string); /* moves the string out */
    if (table) {
        void *entries = (char *)table + 2 * sizeof(void *); /* past offset-to-top and type information */
        memcpy(exception, &entries, sizeof entries);
    }
    found.throw_exception(exception, type, destroy);
    abort(); /* __cxa_throw does not return */
}

void mo_torch_throw_out_of_memory(const char *text)
{
    if (!atomic_load_explicit(&prepared, memory_order_acquire))
        throw_runtime_error(text);
    if (found.make_out_of_memory)
        throw_error(text, found.make_out_of_memory, NULL, found.out_of_memory_type);
    throw_error(text, found.make_error, found.out_of_memory_table, found.out_of_memory_type);
}

void mo_torch_throw_error(const char *text)
{
    if (!atomic_load_explicit(&prepared, memory_order_acquire))
        throw_runtime_error(text);
    throw_error(text, found.make_error, NULL, found.error_type);
}
