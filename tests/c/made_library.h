/* Shared libraries made by a test out of C text, with gcc, under build/: a driver that lacks a function, a
 * libc10.so that is not torch's. Its own functions come before those of the same name in the test. Tests
 * start in the repository's root, as pytest and make have them. */
#ifndef MEMOPT_MADE_LIBRARY_H
#define MEMOPT_MADE_LIBRARY_H

#include <dlfcn.h>
#include <sys/stat.h>
#include <unistd.h>

#include "test.h"

/* The path of build/c/made/<name>-<process>.so, with a slash in it, so that dlopen takes it as a path. */
static const char *make_library(const char *name, const char *soname, const char *source)
{
    static char path[256];
    char text_path[300], command[1024];
    FILE *text;

    mkdir("build", 0777);
    mkdir("build/c", 0777);
    mkdir("build/c/made", 0777);
    snprintf(path, sizeof path, "build/c/made/%s-%d.so", name, (int)getpid());
    snprintf(text_path, sizeof text_path, "%s.c", path);
    text = fopen(text_path, "w");
    if (!text || fputs(source, text) < 0 || fclose(text) != 0)
        TEST_FAIL("%s cannot be written: start the test in the repository's root", text_path);
    const char *cc = getenv("CC");
    snprintf(command, sizeof command,
             "%s -std=c11 -D_GNU_SOURCE -Icsrc -shared -fPIC -Wl,-Bsymbolic%s%s -o %s %s",
             cc && *cc ? cc : "gcc", soname ? " -Wl,-soname," : "", soname ? soname : "", path, text_path);
    if (system(command) != 0)
        TEST_FAIL("failed: %s", command);
    unlink(text_path);
    return path;
}

static bool is_loaded(const char *name)
{
    void *library = dlopen(name, RTLD_NOW | RTLD_NOLOAD);
    if (library)
        dlclose(library);
    return library != NULL;
}

#endif
