/* Without torch: what prepare() says is missing, and what is thrown when it was never prepared. The
 * exceptions of torch themselves are tests/sim/test_torch_hooks.py's. Each test is a process of its own,
 * since what is loaded stays loaded. */
#include "alloc/torch_throw.h"

#include <pthread.h>

#include "child.h"
#include "made_library.h"

static void *load(const char *soname, const char *source)
{
    const char *path = make_library(soname, soname, source);
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    unlink(path);
    CHECK(library);
    return library;
}

static void no_torch(void)
{
    mo_detail detail;
    for (int i = 0; i < 3; i++) {
        CHECK_EQ(mo_torch_throw_prepare(&detail), MO_NO_LIBRARY);
        CHECK_STR(detail.text, "libc10.so is not loaded: import torch first");
        CHECK_EQ(mo_torch_throw_prepare(NULL), MO_NO_LIBRARY);
    }
}

TEST(without_torch_the_first_library_that_is_missing_is_named)
{
    CHECK_CHILD(no_torch);
}

static void half_a_torch(void)
{
    mo_detail detail;
    void *c10 = load("libc10.so", "int of_c10;");
    for (int i = 0; i < 10; i++) {
        CHECK_EQ(mo_torch_throw_prepare(&detail), MO_NO_LIBRARY);
        CHECK_STR(detail.text, "libtorch_python.so is not loaded: import torch first");
    }
    dlclose(c10);
    CHECK(!is_loaded("libc10.so")); /* a failed attempt holds no library */
}

TEST(half_a_torch_is_not_enough_and_is_not_held)
{
    CHECK_CHILD(half_a_torch);
}

/* Whatever libstdc++ has is found there, so the first of torch's own symbols is the one that is named. */
static void another_torch(void)
{
    mo_detail detail;
    void *c10 = load("libc10.so", "int of_c10;"), *python = load("libtorch_python.so", "int of_python;");
    CHECK(dlopen("libstdc++.so.6", RTLD_NOW));
    for (int i = 0; i < 10; i++) {
        CHECK_EQ(mo_torch_throw_prepare(&detail), MO_NO_SYMBOL);
        CHECK(strstr(detail.text, "no symbol _ZTIN3c105ErrorE"));
        CHECK(strstr(detail.text, "torch 2.10 and later"));
    }
    dlclose(c10);
    dlclose(python);
    CHECK(!is_loaded("libc10.so") && !is_loaded("libtorch_python.so"));
}

TEST(a_torch_without_the_symbols_is_told_which_one)
{
    CHECK_CHILD(another_torch);
}

#define CONSTRUCTOR(name)                                                                                    \
    "void _ZN3c10" name                                                                                      \
    "C1ENS_14SourceLocationENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE(void) {}\n"

static void only_the_last_is_missing(void)
{
    mo_detail detail;
    load("libc10.so", "int _ZTIN3c105ErrorE;\n" CONSTRUCTOR("5Error"));
    load("libtorch_python.so", "int _ZTIN3c1016OutOfMemoryErrorE;\n");
    CHECK(dlopen("libstdc++.so.6", RTLD_NOW));
    CHECK_EQ(mo_torch_throw_prepare(&detail), MO_NO_SYMBOL);
    CHECK(strstr(detail.text, "no symbol _ZTVN3c1016OutOfMemoryErrorE"));
}

TEST(a_torch_with_neither_constructor_nor_table_of_out_of_memory_is_refused)
{
    CHECK_CHILD(only_the_last_is_missing);
}

static void all_there(const char *out_of_memory)
{
    load("libc10.so", "int _ZTIN3c105ErrorE;\n" CONSTRUCTOR("5Error"));
    load("libtorch_python.so", out_of_memory);
    CHECK(dlopen("libstdc++.so.6", RTLD_NOW));
    CHECK_EQ(mo_torch_throw_prepare(NULL), MO_OK);
    CHECK_EQ(mo_torch_throw_prepare(NULL), MO_OK);
}

static void with_a_table(void)
{
    all_there("int _ZTIN3c1016OutOfMemoryErrorE, _ZTVN3c1016OutOfMemoryErrorE;\n");
}

static void with_a_constructor(void)
{
    all_there("int _ZTIN3c1016OutOfMemoryErrorE;\n" CONSTRUCTOR("16OutOfMemoryError"));
}

TEST(either_form_of_the_exception_will_do)
{
    CHECK_CHILD(with_a_table);
    CHECK_CHILD(with_a_constructor);
}

static void *prepare(void *unused)
{
    return mo_torch_throw_prepare(NULL) == MO_OK ? (void *)1 : unused;
}

static void many_threads(void)
{
    pthread_t threads[8];
    load("libc10.so", "int _ZTIN3c105ErrorE;\n" CONSTRUCTOR("5Error"));
    load("libtorch_python.so", "int _ZTIN3c1016OutOfMemoryErrorE;\n" CONSTRUCTOR("16OutOfMemoryError"));
    CHECK(dlopen("libstdc++.so.6", RTLD_NOW));
    for (int i = 0; i < 8; i++)
        CHECK_EQ(pthread_create(&threads[i], NULL, prepare, NULL), 0);
    for (int i = 0; i < 8; i++) {
        void *done = NULL;
        pthread_join(threads[i], &done);
        CHECK(done);
    }
}

TEST(many_threads_prepare_at_once)
{
    for (int i = 0, n = test_rounds(2, 50); i < n; i++)
        CHECK_CHILD(many_threads);
}

static void throw_out_of_memory(void)
{
    mo_torch_throw_out_of_memory("CUDA out of memory");
}

static void throw_error(void)
{
    mo_torch_throw_error("the driver");
}

TEST(unprepared_it_throws_what_every_program_in_cpp_knows)
{
    CHECK_THROWS_BAD_ALLOC(throw_out_of_memory);
    CHECK_THROWS_BAD_ALLOC(throw_error);
}

TEST_MAIN
