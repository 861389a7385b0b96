/* base/pin.c is compiled into a library of its own here: what stays loaded is the library that has the code.
 */
#include "made_library.h"

static const char source[] =
    "#include \"base/pin.c\"\n"
    "#include \"base/status.c\"\n"
    "int pin(void); int pin(void) { mo_detail detail; return mo_pin_library(&detail); }\n"
    "int answer(void); int answer(void) { return 42; }\n";

/* A library after `pins` calls of pin() and one dlclose; its answer() into *answer. */
static bool stays_loaded(const char *name, int pins, int (**answer)(void))
{
    const char *path = make_library(name, NULL, source);
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    int (*pin)(void);

    CHECK(library);
    *(void **)&pin = dlsym(library, "pin");
    *(void **)answer = dlsym(library, "answer");
    CHECK(pin && *answer);
    for (int i = 0; i < pins; i++)
        CHECK_EQ(pin(), 0);
    dlclose(library);
    const bool loaded = is_loaded(path);
    unlink(path);
    return loaded;
}

TEST(a_library_that_was_not_pinned_is_unloaded)
{
    int (*answer)(void);
    CHECK(!stays_loaded("not_pinned", 0, &answer));
}

TEST(a_pinned_library_outlives_its_dlclose)
{
    int (*answer)(void);
    CHECK(stays_loaded("pinned", 1, &answer));
    CHECK_EQ(answer(), 42);
}

TEST(pinning_often_is_pinning_once)
{
    int (*answer)(void);
    CHECK(stays_loaded("pinned_often", 100, &answer));
    CHECK_EQ(answer(), 42);
}

TEST_MAIN
