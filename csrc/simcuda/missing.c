#include "csrc/simcuda/missing.h"

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

/* Scripts touch a handful of unsimulated functions; past this many distinct ones only the last slot's count
 * grows. */
#define SIM_MISSING_MAX 512

struct missing {
    const char *name;
    uint64_t calls;
};

static pthread_mutex_t missing_lock = PTHREAD_MUTEX_INITIALIZER;
static struct missing missing_list[SIM_MISSING_MAX];
static size_t missing_count;

void simcuda_missing_add(const char *name)
{
    pthread_mutex_lock(&missing_lock);
    size_t at = 0;
    while (at < missing_count && strcmp(missing_list[at].name, name) != 0)
        at++;
    if (at == missing_count) {
        if (missing_count == SIM_MISSING_MAX)
            at = SIM_MISSING_MAX - 1;
        else
            missing_list[missing_count++].name = name;
    }
    missing_list[at].calls++;
    pthread_mutex_unlock(&missing_lock);
}

size_t simcuda_missing(char *out, size_t size)
{
    size_t needed = 1, used = 0;
    pthread_mutex_lock(&missing_lock);
    if (size > 0)
        out[0] = '\0';
    for (size_t at = 0; at < missing_count; at++) {
        char line[256];
        int length = snprintf(line, sizeof line, "%s %llu\n", missing_list[at].name,
                              (unsigned long long)missing_list[at].calls);
        if (length < 0 || (size_t)length >= sizeof line)
            continue; /* no function of NVIDIA's has a name of 200 characters */
        if (used + (size_t)length < size && used + 1 == needed) {
            memcpy(out + used, line, (size_t)length + 1);
            used += (size_t)length;
        }
        needed += (size_t)length;
    }
    pthread_mutex_unlock(&missing_lock);
    return needed;
}
