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

/* A torch and a C++ runtime of ours: the constructor takes what it is given apart, and the throw lands in landing(). */
static const char runtime[] =
    "#include <stdlib.h>\n#include <string.h>\n"
    "typedef struct { const char *function, *file; unsigned line; } where;\n"
    "typedef struct { char *bytes; size_t length; union { char small[16]; size_t capacity; } u; } string;\n"
    "int _ZTIN3c105ErrorE, destroyed, errors, live;\n"
    "static void *take(void *block) { __sync_fetch_and_add(&live, 1); return block; }\n"
    "static void give(void *block) { __sync_fetch_and_sub(&live, 1); free(block); }\n"
    "void landing(void *type, char *text);\n"
    "void destroy(void *e) { __sync_fetch_and_add(&destroyed, 1); }\n"
    "void *table[5] = {0, 0, destroy};\n"
    "void *__cxa_allocate_exception(size_t n) { return take(malloc(n)); }\n"
    "void *_Znwm(size_t n) { return take(malloc(n)); }\n"
    "void _ZdlPv(void *block) { give(block); }\n"
    "void _ZN3c105ErrorC1ENS_14SourceLocationENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE\n"
    "    (void **self, where w, string *s) {\n"
    "    if (!w.function || !w.file || s->u.capacity != s->length || s->bytes[s->length]) abort();\n"
    "    __sync_fetch_and_add(&errors, 1);\n"
    "    self[0] = table + 2; self[1] = strdup(s->bytes); _ZdlPv(s->bytes); }\n"
    "void __cxa_throw(void *e, void *type, void (*end)(void *)) {\n"
    "    char *text = ((void **)e)[1]; end(e); give(e); landing(type, text); }\n";

/* Of the class itself, where torch has one: it makes an Error and goes on. */
static const char with_constructor[] =
    "int _ZTIN3c1016OutOfMemoryErrorE;\n"
    "void _ZN3c1016OutOfMemoryErrorC1"
    "ENS_14SourceLocationENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE\n"
    "    (void **self, where w, string *s) { _ZN3c105ErrorC1"
    "ENS_14SourceLocationENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE(self, w, s); }\n";

static const char with_table[] = "int _ZTIN3c1016OutOfMemoryErrorE, ended_as_out_of_memory;\n"
                                 "void end(void *e) { __sync_fetch_and_add(&ended_as_out_of_memory, 1); }\n"
                                 "void *_ZTVN3c1016OutOfMemoryErrorE[5] = {0, 0, end};\n";

static void *c10;

static void load_runtime(const char *out_of_memory)
{
    static char source[8192];
    snprintf(source, sizeof source, "%s%s", runtime, out_of_memory);
    c10 = load("libc10.so", source);
    load("libtorch_python.so", "int of_python;");
    CHECK(dlopen("libstdc++.so.6", RTLD_NOW));
}

typedef struct thrown {
    const char *text;
    bool out_of_memory;
    useconds_t late;
    int wrong;
    char said[1024];
    void *type;
    jmp_buf catch;
} thrown;

static __thread thrown *throwing;

void landing(void *type, char *text);
void landing(void *type, char *text)
{
    snprintf(throwing->said, sizeof throwing->said, "%s", text);
    free(text);
    throwing->type = type;
    longjmp(throwing->catch, 1);
}

static void *throw_it(void *slot)
{
    throwing = slot;
    while (mo_torch_throw_prepare(NULL) != MO_OK)
        continue;
    if (setjmp(throwing->catch) == 0) {
        if (throwing->out_of_memory)
            mo_torch_throw_out_of_memory(throwing->text);
        mo_torch_throw_error(throwing->text);
    }
    return slot;
}

static void check_thrown(thrown *t)
{
    const char *name = t->out_of_memory ? "_ZTIN3c1016OutOfMemoryErrorE" : "_ZTIN3c105ErrorE";
    CHECK_STR(t->said, t->text);
    CHECK(t->type && t->type == dlsym(c10, name));
}

static void check_throws(const char *out_of_memory)
{
    static const char *const texts[] = {
        "", "short", "fifteen letters", "sixteen letters.",
        "CUDA out of memory. Tried to allocate 1.00 GiB on GPU 0. It has 80.0 GiB in all."};
    enum { TEXTS = sizeof texts / sizeof *texts };
    load_runtime(out_of_memory);
    for (int i = 0; i < 2 * TEXTS; i++) {
        thrown t = {.text = texts[i / 2], .out_of_memory = i % 2};
        throw_it(&t);
        check_thrown(&t);
    }
    CHECK_EQ(*(int *)dlsym(c10, "errors"), 2 * TEXTS);
    const int *as_out_of_memory = dlsym(c10, "ended_as_out_of_memory");
    CHECK_EQ(*(int *)dlsym(c10, "destroyed") + (as_out_of_memory ? *as_out_of_memory : 0), 2 * TEXTS);
    CHECK(!as_out_of_memory || *as_out_of_memory == TEXTS);
}

static void throws_by_constructor(void)
{
    check_throws(with_constructor);
}

static void throws_by_table(void)
{
    check_throws(with_table);
}

TEST(an_exception_has_its_text_its_type_and_its_destructor)
{
    CHECK_CHILD(throws_by_constructor);
    CHECK_CHILD(throws_by_table);
}

static pthread_barrier_t together;

static void *throw_at_once(void *slot)
{
    pthread_barrier_wait(&together);
    usleep(((thrown *)slot)->late); /* some find it prepared, by no lock of theirs */
    return throw_it(slot);
}

static void many_threads(void)
{
    enum { THREADS = 8 };
    pthread_t threads[THREADS];
    thrown each[THREADS];
    load_runtime(with_constructor);
    pthread_barrier_init(&together, NULL, THREADS);
    for (int i = 0; i < THREADS; i++) {
        each[i] = (thrown){.text = i % 2 ? "odd" : "CUDA out of memory",
                           .out_of_memory = i % 2 == 0,
                           .late = i < 4 ? 0 : 5000};
        CHECK_EQ(pthread_create(&threads[i], NULL, throw_at_once, &each[i]), 0);
    }
    for (int i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
        check_thrown(&each[i]);
    }
}

TEST(many_threads_prepare_and_throw_at_once)
{
    for (int i = 0, n = test_rounds(5, 100); i < n; i++)
        CHECK_CHILD(many_threads);
}

/* The string and the exception are torch's to free, once it has them: both are counted by the runtime. */
static void *throw_often(void *slot)
{
    thrown *t = slot;
    for (int i = 0; i < 100000 / 8; i++) {
        t->said[0] = '\0';
        throw_it(t);
        t->wrong += strcmp(t->said, t->text) != 0;
    }
    return slot;
}

static void a_hundred_thousand_throws(void)
{
    enum { THREADS = 8 };
    pthread_t threads[THREADS];
    static thrown each[THREADS];
    load_runtime(with_constructor);
    for (int i = 0; i < THREADS; i++) {
        each[i] = (thrown){.text = i % 2 ? "the driver" : "CUDA out of memory", .out_of_memory = i % 2 == 0};
        CHECK_EQ(pthread_create(&threads[i], NULL, throw_often, &each[i]), 0);
    }
    for (int i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
        CHECK_EQ(each[i].wrong, 0);
        check_thrown(&each[i]);
    }
    CHECK_EQ(*(int *)dlsym(c10, "errors"), 100000);
    CHECK_EQ(*(int *)dlsym(c10, "destroyed"), 100000);
    CHECK_EQ(*(int *)dlsym(c10, "live"), 0);
}

TEST(a_hundred_thousand_throws_of_eight_threads_leave_nothing_behind)
{
    CHECK_CHILD(a_hundred_thousand_throws);
}

static void throw_out_of_memory(void)
{
    mo_torch_throw_out_of_memory("CUDA out of memory");
}

static void throw_error(void)
{
    mo_torch_throw_error("the driver");
}

TEST(unprepared_it_throws_what_every_program_in_cpp_knows_with_the_same_text)
{
    CHECK_THROWS(throw_out_of_memory, "CUDA out of memory");
    CHECK_THROWS(throw_error, "the driver");
}

TEST_MAIN
