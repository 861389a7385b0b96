#include "driver/cuda_api.h"

#include <pthread.h>

#include "child.h"
#include "made_library.h"

/* A driver of functions that do nothing, all but `without` of them. */
static const char *make_driver(const char *name, const char *soname, const char *without)
{
    static char source[16384];
    const char *symbol;
    int required, n = snprintf(source, sizeof source,
                               "#include <unistd.h>\n"
                               "int init_code, init_calls, init_held;\n");
    for (int i = 0; (symbol = mo_cuda_api_symbol(i, &required)); i++)
        if (!without || strcmp(symbol, without) != 0)
            n += snprintf(source + n, sizeof source - (size_t)n, "int %s(void) { %s }\n", symbol,
                          strcmp(symbol, "cuInit") == 0
                              ? "__sync_fetch_and_add(&init_calls, 1);"
                                "while (__sync_fetch_and_add(&init_held, 0)) usleep(1000); return init_code;"
                              : "return 0;");
    return make_library(name, soname, source);
}

TEST(the_list_of_symbols_is_required_ones_then_optional_ones_then_the_end)
{
    int required, previous = 1, count = 0, demanded = 0;
    for (const char *symbol; (symbol = mo_cuda_api_symbol(count, &required)); count++) {
        CHECK(strncmp(symbol, "cu", 2) == 0);
        CHECK(required <= previous);
        previous = required;
        demanded += required;
        for (int i = 0, unused; i < count; i++)
            CHECK(strcmp(symbol, mo_cuda_api_symbol(i, &unused)) != 0);
    }
    CHECK(demanded > 30 && count > demanded);
    CHECK(!mo_cuda_api_symbol(-1, &required));
    CHECK(!mo_cuda_api_symbol(count + 1, &required));
}

TEST(a_library_that_cannot_be_opened_is_named_with_what_works_without_it)
{
    mo_cuda_api api = {.library = &api};
    mo_detail detail;
    CHECK_EQ(mo_cuda_api_open("build/c/made/there-is-none.so", &api, &detail), MO_NO_LIBRARY);
    CHECK(strstr(detail.text, "there-is-none.so"));
    CHECK(strstr(detail.text, "CPU features work without it"));
    CHECK(api.library == &api); /* out is written on MO_OK only */
    CHECK_EQ(mo_cuda_api_open("build/c/made/there-is-none.so", &api, NULL), MO_NO_LIBRARY);
}

TEST(a_file_that_is_no_library_is_named)
{
    mo_cuda_api api;
    mo_detail detail;
    CHECK_EQ(mo_cuda_api_open("./README.md", &api, &detail), MO_NO_LIBRARY);
    CHECK(strstr(detail.text, "README.md"));
}

TEST(a_whole_driver_fills_the_table)
{
    const char *path = make_driver("whole", NULL, NULL);
    mo_cuda_api api;
    mo_detail detail = {.text = ""};
    const mo_status status = mo_cuda_api_open(path, &api, &detail);
    unlink(path);
    if (status)
        TEST_FAIL("%s", detail.text);
#define IS_FOUND(field, symbol, parameters) CHECK(*(void **)&api.field == dlsym(api.library, #symbol));
    MO_CUDA_REQUIRED(IS_FOUND)
    MO_CUDA_OPTIONAL(IS_FOUND)
#undef IS_FOUND
    CHECK(api.init != NULL);
    CHECK_EQ(*(int *)dlsym(api.library, "init_calls"), 0); /* nothing was called */
    dlclose(api.library);
}

TEST(a_driver_without_a_required_function_is_refused_naming_it_and_closed)
{
    int required;
    for (int i = 0; mo_cuda_api_symbol(i, &required) && required; i++) {
        const char *symbol = mo_cuda_api_symbol(i, &required);
        const char *path = make_driver("lacking", NULL, symbol);
        mo_cuda_api api = {.library = &api};
        mo_detail detail;
        char words[100];
        const mo_status status = mo_cuda_api_open(path, &api, &detail);
        const bool open = is_loaded(path);
        unlink(path);
        CHECK_EQ(status, MO_NO_SYMBOL);
        snprintf(words, sizeof words, "no function %s: ", symbol);
        CHECK(strstr(detail.text, words) && strstr(detail.text, path) && strstr(detail.text, "driver 460"));
        CHECK(api.library == &api);
        CHECK(!open);
    }
}

TEST(a_driver_without_an_optional_function_is_taken_and_its_field_is_null)
{
    int required;
    mo_cuda_api api;
    for (int i = 0; mo_cuda_api_symbol(i, &required); i++) {
        const char *symbol = mo_cuda_api_symbol(i, &required);
        if (required)
            continue;
        const char *path = make_driver("older", NULL, symbol);
        CHECK_EQ(mo_cuda_api_open(path, &api, NULL), MO_OK);
        unlink(path);
#define IS_AS_GIVEN(field, name, parameters) CHECK((api.field == NULL) == (strcmp(#name, symbol) == 0));
        MO_CUDA_REQUIRED(IS_AS_GIVEN)
        MO_CUDA_OPTIONAL(IS_AS_GIVEN)
#undef IS_AS_GIVEN
        dlclose(api.library);
    }
}

/* ---- what codes mean ----------------------------------------------------------------------------------- */

static CUresult name_of(CUresult code, const char **out)
{
    *out = code == CUDA_ERROR_UNKNOWN ? NULL : "CUDA_ERROR_NAMED";
    return code == CUDA_ERROR_UNKNOWN ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

static CUresult text_of(CUresult code, const char **out)
{
    *out = code == CUDA_ERROR_UNKNOWN ? NULL : "what it means";
    return code == CUDA_ERROR_UNKNOWN ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

static const mo_cuda_api speaking = {.error_name = name_of, .error_string = text_of};

TEST(a_code_becomes_a_status)
{
    static const struct {
        CUresult code;
        mo_status status;
    } cases[] = {
        {CUDA_SUCCESS, MO_OK},
        {CUDA_ERROR_OUT_OF_MEMORY, MO_NO_DEVICE_MEMORY},
        {CUDA_ERROR_NOT_READY, MO_NOT_READY},
        {CUDA_ERROR_NOT_SUPPORTED, MO_UNSUPPORTED},
        {CUDA_ERROR_NO_DEVICE, MO_NO_DEVICE},
        {CUDA_ERROR_INVALID_DEVICE, MO_NO_DEVICE},
        {CUDA_ERROR_INVALID_VALUE, MO_DRIVER},
        {CUDA_ERROR_ILLEGAL_ADDRESS, MO_DRIVER},
        {CUDA_ERROR_DEINITIALIZED, MO_DRIVER},
        {CUDA_ERROR_UNKNOWN, MO_DRIVER},
        {(CUresult)123456, MO_DRIVER},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        mo_detail detail = {.status = MO_OK};
        CHECK_EQ(mo_cuda_check(&speaking, cases[i].code, "cuX(1)", &detail), cases[i].status);
        CHECK_EQ(mo_cuda_check(&speaking, cases[i].code, "cuX(1)", NULL), cases[i].status);
        CHECK_EQ(detail.status, cases[i].status);
        CHECK_EQ(detail.code, cases[i].status ? (int)cases[i].code : 0);
    }
}

TEST(a_failed_call_is_told_with_its_name_its_number_and_its_meaning)
{
    mo_detail detail;
    mo_cuda_check(&speaking, CUDA_ERROR_ILLEGAL_ADDRESS, "cuMemMap(0x7, 42)", &detail);
    CHECK_STR(detail.text, "cuMemMap(0x7, 42): CUDA_ERROR_NAMED (700): what it means");
}

TEST(a_code_that_the_driver_does_not_know_is_told_by_its_number)
{
    mo_detail detail;
    mo_cuda_check(&speaking, CUDA_ERROR_UNKNOWN, "cuX()", &detail);
    CHECK_STR(detail.text, "cuX(): an unknown error (999)");
}

/* ---- the process's table: each in a child, since it is opened once a process --------------------------- */

/* A driver under the very name that the linker would look for; now loaded, so it is the one that is found. */
static void *load_driver(const char *without)
{
    const char *path = make_driver("installed", "libcuda.so.1", without);
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    unlink(path);
    CHECK(library);
    return library;
}

static void a_failure_is_not_remembered_in_child(void)
{
    const mo_cuda_api *api = NULL, *again = NULL;
    mo_detail detail;
    void *library = load_driver(NULL);
    int *code = dlsym(library, "init_code"), *calls = dlsym(library, "init_calls");
    *code = CUDA_ERROR_NO_DEVICE;
    for (int i = 1; i < 4; i++) {
        CHECK_EQ(mo_cuda_api_get(&api, &detail), MO_NO_DEVICE);
        CHECK_EQ(detail.code, CUDA_ERROR_NO_DEVICE);
        CHECK(strstr(detail.text, "cuInit(0)"));
        CHECK(!api);
        CHECK_EQ(*calls, i);
    }
    *code = CUDA_ERROR_SYSTEM_DRIVER_MISMATCH;
    CHECK_EQ(mo_cuda_api_get(&api, NULL), MO_DRIVER);
    *code = CUDA_SUCCESS;
    CHECK_EQ(mo_cuda_api_get(&api, NULL), MO_OK);
    CHECK(api && api->library == library);
    *code = CUDA_ERROR_NO_DEVICE; /* success is: it is not asked again */
    CHECK_EQ(mo_cuda_api_get(&again, NULL), MO_OK);
    CHECK(again == api);
    CHECK_EQ(*calls, 5);
}

TEST(a_cuInit_that_fails_is_tried_again_and_one_that_worked_is_not)
{
    CHECK_CHILD(a_failure_is_not_remembered_in_child);
}

static void too_old_in_child(void)
{
    const mo_cuda_api *api = NULL;
    mo_detail detail;
    load_driver("cuThreadExchangeStreamCaptureMode");
    CHECK_EQ(mo_cuda_api_get(&api, &detail), MO_NO_SYMBOL);
    CHECK(strstr(detail.text, "libcuda.so.1 has no function cuThreadExchangeStreamCaptureMode"));
    CHECK(!api);
}

TEST(a_process_with_a_driver_too_old_hears_which_function_it_lacks)
{
    CHECK_CHILD(too_old_in_child);
}

enum { THREADS = 8 };
static pthread_barrier_t together;

static void *get(void *slot)
{
    pthread_barrier_wait(&together);
    for (int i = 0; i < 100; i++) {
        const mo_cuda_api *api = NULL;
        if (mo_cuda_api_get(&api, NULL) != MO_OK ||
            (*(const mo_cuda_api **)slot && *(const mo_cuda_api **)slot != api))
            return NULL;
        *(const mo_cuda_api **)slot = api;
        if (api->driver_version(NULL) !=
            CUDA_SUCCESS) /* through the table: what another thread wrote is whole */
            return NULL;
    }
    return slot;
}

static void many_threads_in_child(void)
{
    const mo_cuda_api *apis[THREADS] = {NULL};
    pthread_t threads[THREADS];
    void *library = load_driver(NULL), *done;
    pthread_barrier_init(&together, NULL, THREADS);
    for (int i = 0; i < THREADS; i++)
        CHECK_EQ(pthread_create(&threads[i], NULL, get, &apis[i]), 0);
    for (int i = 0; i < THREADS; i++) {
        pthread_join(threads[i], &done);
        CHECK(done == &apis[i]);
        CHECK(apis[i] == apis[0]);
    }
    CHECK_EQ(*(int *)dlsym(library, "init_calls"), 1);
}

TEST(many_threads_at_once_open_it_once_and_share_it)
{
    for (int i = 0, n = test_rounds(5, 200); i < n; i++)
        CHECK_CHILD(many_threads_in_child);
}

/* ---- forks --------------------------------------------------------------------------------------------- */

static void refused_in_child(void)
{
    const mo_cuda_api *api = NULL;
    mo_detail detail;
    for (int i = 0; i < 2; i++) {
        CHECK_EQ(mo_cuda_api_get(&api, &detail), MO_DRIVER);
        CHECK(strstr(detail.text, "cuInit(0)") && strstr(detail.text, "'spawn'"));
        CHECK_EQ(mo_cuda_api_get(&api, NULL), MO_DRIVER);
    }
    CHECK(!api);
}

static void *get_once(void *slot)
{
    return mo_cuda_api_get(slot, NULL) == MO_OK ? slot : NULL;
}

static void forked_during_init_in_child(void)
{
    const mo_cuda_api *api = NULL;
    pthread_t thread;
    void *done;
    void *library = load_driver(NULL);
    int *held = dlsym(library, "init_held"), *calls = dlsym(library, "init_calls");
    __sync_fetch_and_add(held, 1);
    CHECK_EQ(pthread_create(&thread, NULL, get_once, &api), 0);
    while (!__sync_fetch_and_add(calls, 0))
        usleep(1000);
    child_end end = in_child(refused_in_child); /* the other thread holds the lock */
    __sync_fetch_and_sub(held, 1);
    pthread_join(thread, &done);
    if (!child_passed(&end))
        TEST_FAIL("the child ended with %#x: %.300s", end.status, end.said);
    CHECK(done == &api && api);
    CHECK_EQ(mo_cuda_api_get(&api, NULL), MO_OK); /* the parent goes on */
    CHECK_CHILD(refused_in_child);                /* and so do its later children */
}

TEST(a_child_forked_while_another_thread_is_in_the_first_cuInit_is_told_so_and_does_not_hang)
{
    CHECK_CHILD(forked_during_init_in_child);
}

static void *found_library;

static void looks_for_itself_in_child(void)
{
    const mo_cuda_api *api = NULL;
    *(int *)dlsym(found_library, "init_code") = CUDA_SUCCESS;
    CHECK_EQ(mo_cuda_api_get(&api, NULL), MO_OK);
    CHECK(api);
}

static void forked_after_a_failure_in_child(void)
{
    const mo_cuda_api *api = NULL;
    found_library = load_driver(NULL);
    *(int *)dlsym(found_library, "init_code") = CUDA_ERROR_NO_DEVICE;
    CHECK_EQ(mo_cuda_api_get(&api, NULL), MO_NO_DEVICE);
    CHECK_CHILD(looks_for_itself_in_child);
}

TEST(a_child_of_a_process_that_found_no_device_may_look_for_itself)
{
    CHECK_CHILD(forked_after_a_failure_in_child);
}

TEST_MAIN
