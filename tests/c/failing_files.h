/* mo_file_calls that go to the system, until the test says otherwise: any call fails, is interrupted, or transfers less
 * than it was asked for. */
#ifndef MEMOPT_FAILING_FILES_H
#define MEMOPT_FAILING_FILES_H

#include <errno.h>
#include <stdatomic.h>

#include "transfer/nameless_file.h"

typedef enum failing_call {
    FAIL_OPEN,
    FAIL_DIRECT,
    FAIL_RESERVE,
    FAIL_WRITE,
    FAIL_READ,
    FAIL_CALLS
} failing_call;

static struct failing {
    atomic_long after[FAIL_CALLS]; /* so many pass; -1: all */
    atomic_int code[FAIL_CALLS];   /* errno of all that follow; 0: it transfers nothing */
    atomic_long once;              /* 1: of one only */
    atomic_size_t at_most;         /* bytes of a transfer */
    atomic_size_t room;            /* bytes from the front that the disk has */
    atomic_int damaged;            /* a bit of each read is another */
    atomic_int open, calls[FAIL_CALLS];
} failing;

static void fail_nothing(void)
{
    for (int call = 0; call < FAIL_CALLS; call++) {
        failing.after[call] = -1;
        failing.calls[call] = 0;
    }
    failing.once = 0;
    failing.damaged = 0;
    failing.at_most = SIZE_MAX;
    failing.room = SIZE_MAX;
}

static void fail_after(failing_call call, long after, int code, bool once)
{
    failing.code[call] = code;
    failing.once = once;
    failing.after[call] = after;
}

static bool file_call_fails(failing_call call)
{
    failing.calls[call]++;
    if (failing.after[call] < 0 || failing.after[call]-- > 0)
        return false;
    failing.after[call] = failing.once ? -1 : 0;
    errno = failing.code[call];
    return true;
}

static int failing_open(const char *directory)
{
    int file = file_call_fails(FAIL_OPEN) ? -1 : mo_system_files.open(directory);
    failing.open += file >= 0;
    return file;
}

static int failing_set_direct(int file, bool on)
{
    return file_call_fails(FAIL_DIRECT) ? -1 : mo_system_files.set_direct(file, on);
}

static int failing_reserve(int file, off_t at, off_t size)
{
    return file_call_fails(FAIL_RESERVE) ? -1 : mo_system_files.reserve(file, at, size);
}

static ssize_t failing_write(int file, const void *from, size_t size, off_t at)
{
    if (file_call_fails(FAIL_WRITE))
        return failing.code[FAIL_WRITE] ? -1 : 0;
    if ((size_t)at >= failing.room) {
        errno = ENOSPC;
        return -1;
    }
    if (size > failing.room - (size_t)at)
        size = failing.room - (size_t)at;
    return mo_system_files.write(file, from, size < failing.at_most ? size : failing.at_most, at);
}

static ssize_t failing_read(int file, void *to, size_t size, off_t at)
{
    if (file_call_fails(FAIL_READ))
        return failing.code[FAIL_READ] ? -1 : 0;
    const ssize_t done = mo_system_files.read(file, to, size < failing.at_most ? size : failing.at_most, at);
    if (failing.damaged && done > 0)
        ((char *)to)[done / 2] ^= 4;
    return done;
}

static int failing_close(int file)
{
    failing.open--;
    return mo_system_files.close(file);
}

__attribute__((unused)) static const mo_file_calls failing_files = {
    failing_open, failing_set_direct, failing_reserve, failing_write, failing_read, failing_close};

#endif
