/* A piece of a test in a process of its own: what ends the process, forks, or changes what can't be changed
 * back.
 *
 *     static void takes_it_twice(void) { … CHECK(…); … }
 *     child_end end = in_child(takes_it_twice);
 *     CHECK(child_aborted(&end));  CHECK_SAID(&end, "broken invariant");
 *
 * A CHECK that fails in the child is told by in_child's status 1 and its text. A child that hangs is killed
 * after ten minutes (SIGALRM). */
#ifndef MEMOPT_CHILD_H
#define MEMOPT_CHILD_H

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "test.h"

typedef struct child_end {
    int status;      /* as waitpid gives it */
    char said[8192]; /* standard error, cut */
} child_end;

static void be_the_child(void (*body)(void)) __attribute__((noreturn));
static void be_the_child(void (*body)(void))
{
    alarm(600);
    if (setjmp(test_escape) == 0) {
        body();
        _exit(0);
    }
    fprintf(stderr, "%s\n", test_why);
    _exit(1);
}

static child_end in_child(void (*body)(void))
{
    child_end end = {0};
    size_t length = 0;
    ssize_t n;
    int ends[2];

    fflush(NULL);
    if (pipe(ends) != 0)
        TEST_FAIL("pipe() failed");
    pid_t child = fork();
    if (child < 0)
        TEST_FAIL("fork() failed");
    if (child == 0) {
        dup2(ends[1], STDERR_FILENO);
        close(ends[0]);
        close(ends[1]);
        be_the_child(body);
    }
    close(ends[1]);
    while ((n = read(ends[0], end.said + length, sizeof end.said - 1 - length)) > 0)
        length += (size_t)n;
    close(ends[0]);
    waitpid(child, &end.status, 0);
    return end;
}

__attribute__((unused)) static bool child_passed(const child_end *end)
{
    return WIFEXITED(end->status) && WEXITSTATUS(end->status) == 0;
}

__attribute__((unused)) static bool child_aborted(const child_end *end)
{
    return WIFSIGNALED(end->status) && WTERMSIG(end->status) == SIGABRT;
}

#define CHECK_CHILD(body)                                                                                    \
    do {                                                                                                     \
        child_end end_ = in_child(body);                                                                     \
        test_checks++;                                                                                       \
        if (!child_passed(&end_))                                                                            \
            TEST_FAIL("%s ended with %#x: %.300s", #body, end_.status, end_.said);                           \
    } while (0)

#define CHECK_SAID(end, words)                                                                               \
    do {                                                                                                     \
        test_checks++;                                                                                       \
        if (!strstr((end)->said, words))                                                                     \
            TEST_FAIL("the child said not \"%s\" but \"%.300s\"", words, (end)->said);                       \
    } while (0)

/* A std::runtime_error of those words leaves body, and nobody catches it. AddressSanitizer sets up its own __cxa_throw
 * at the program's start; where libstdc++ comes later, it ends the program at the throw, naming it and not the words. */
#ifdef __SANITIZE_ADDRESS__
#define CHECK_THROWS(body, words)                                                                            \
    do {                                                                                                     \
        child_end end_ = in_child(body);                                                                     \
        CHECK_SAID(&end_, "__cxa_throw");                                                                    \
        CHECK_SAID(&end_, "std::__throw_runtime_error(char const*)");                                        \
    } while (0)
#else
#define CHECK_THROWS(body, words)                                                                            \
    do {                                                                                                     \
        child_end end_ = in_child(body);                                                                     \
        CHECK(child_aborted(&end_));                                                                         \
        CHECK_SAID(&end_, "std::runtime_error");                                                             \
        CHECK_SAID(&end_, words);                                                                            \
    } while (0)
#endif

#endif
