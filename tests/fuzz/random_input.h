/* A fuzzer without libFuzzer: with MEMOPT_RANDOM_INPUT defined, a main() that feeds LLVMFuzzerTestOneInput
 * random bytes, the fuzzer's FUZZ_SEEDS, and mutations of what it fed before, from a printed seed
 * (MEMOPT_SEED). It knows nothing of coverage, so the seeds should reach every branch. MEMOPT_SOAK=1 takes
 * the long form; a number as argument is a count of inputs, a file's name is one input, as with libFuzzer.
 *
 * What ends the program prints the input that did. */
#ifndef MEMOPT_RANDOM_INPUT_H
#define MEMOPT_RANDOM_INPUT_H

#include <stddef.h>
#include <stdint.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* The fuzzer's own: texts or bytes that are worth changing. */
typedef struct fuzz_seed {
    const char *data;
    size_t size;
} fuzz_seed;
#define FUZZ_SEED(text)                                                                                      \
    {                                                                                                        \
        text, sizeof text - 1                                                                                \
    }

/* A claim about the input. In a fuzzer there is nobody to go on for: it ends here. */
#define FUZZ_CHECK(condition)                                                                                \
    do {                                                                                                     \
        if (!(condition)) {                                                                                  \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                                  \
            abort();                                                                                         \
        }                                                                                                    \
    } while (0)

#ifdef MEMOPT_RANDOM_INPUT
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { FUZZ_MOST = 512, FUZZ_KEPT = 64 };

typedef struct fuzz_input {
    uint8_t data[FUZZ_MOST];
    size_t size;
} fuzz_input;

static fuzz_input fuzz_now, fuzz_kept[FUZZ_KEPT];
static uint64_t fuzz_state, fuzz_index;

static const fuzz_seed *fuzz_given;
static size_t fuzz_given_count;

/* splitmix64 */
static uint64_t fuzz_random(void)
{
    uint64_t z = fuzz_state += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

static size_t fuzz_below(size_t n)
{
    return n ? (size_t)(fuzz_random() % n) : 0;
}

static void fuzz_describe(void)
{
    fprintf(stderr, "input %" PRIu64 " of this seed, %zu bytes:", fuzz_index, fuzz_now.size);
    for (size_t i = 0; i < fuzz_now.size; i++)
        fprintf(stderr, " %02x", fuzz_now.data[i]);
    fputc('\n', stderr);
}

static void fuzz_on_signal(int number)
{
    fuzz_describe();
    signal(number, SIG_DFL);
    raise(number);
}

/* Both sanitizers end the program without a signal; present only where one is linked. */
void __sanitizer_set_death_callback(void (*callback)(void)) __attribute__((weak));

static void fuzz_insert(fuzz_input *in, size_t at, const uint8_t *bytes, size_t n)
{
    if (n > FUZZ_MOST - in->size)
        n = FUZZ_MOST - in->size;
    memmove(in->data + at + n, in->data + at, in->size - at);
    memcpy(in->data + at, bytes, n);
    in->size += n;
}

static void fuzz_mutate(fuzz_input *in)
{
    const size_t at = fuzz_below(in->size + 1), left = in->size - at, n = fuzz_below(left < 9 ? left + 1 : 9);
    const fuzz_input *other = &fuzz_kept[fuzz_below(FUZZ_KEPT)];
    uint8_t bytes[16];

    switch (fuzz_below(7)) {
    case 0: /* a bit */
        if (left)
            in->data[at] ^= (uint8_t)(1u << fuzz_below(8));
        break;
    case 1: /* a byte */
        if (left)
            in->data[at] = (uint8_t)fuzz_random();
        break;
    case 2: /* some bytes out */
        memmove(in->data + at, in->data + at + n, left - n);
        in->size -= n;
        break;
    case 3: /* some bytes twice */
        memcpy(bytes, in->data + at, n);
        fuzz_insert(in, at, bytes, n);
        break;
    case 4: /* random bytes in */
        for (size_t i = 0; i < n; i++)
            bytes[i] = (uint8_t)fuzz_random();
        fuzz_insert(in, at, bytes, n);
        break;
    case 5: { /* a piece of another */
        const size_t from = fuzz_below(other->size), most = other->size - from;
        const fuzz_input copy = *other;
        fuzz_insert(in, at, copy.data + from, fuzz_below(most + 1));
        break;
    }
    default: /* cut */
        in->size = at;
    }
}

static void fuzz_choose(fuzz_input *in)
{
    const size_t which = fuzz_below(16);
    if (which == 0) {
        in->size = fuzz_below(40);
        for (size_t i = 0; i < in->size; i++)
            in->data[i] = (uint8_t)fuzz_random();
    } else if (which < 8) {
        const fuzz_seed *seed = &fuzz_given[fuzz_below(fuzz_given_count)];
        in->size = seed->size < FUZZ_MOST ? seed->size : FUZZ_MOST;
        memcpy(in->data, seed->data, in->size);
    } else {
        *in = fuzz_kept[fuzz_below(FUZZ_KEPT)];
    }
    for (size_t i = fuzz_below(6); i > 0; i--)
        fuzz_mutate(in);
}

/* The input lies in memory of exactly its size, so that a sanitizer sees the first byte past it. */
static void fuzz_feed(const fuzz_input *in)
{
    uint8_t *exact = malloc(in->size ? in->size : 1);
    if (!exact)
        abort();
    memcpy(exact, in->data, in->size);
    LLVMFuzzerTestOneInput(exact, in->size);
    free(exact);
}

static int fuzz_main(int argc, char **argv)
{
    const char *given = getenv("MEMOPT_SEED"), *soak = getenv("MEMOPT_SOAK");
    const uint64_t seed =
        given ? strtoull(given, NULL, 0) : (uint64_t)time(NULL) * 2654435761u + (uint64_t)clock();
    uint64_t count = soak && strcmp(soak, "1") == 0 ? 20000000 : 50000;
    char *end = NULL;

    signal(SIGABRT, fuzz_on_signal);
    if (__sanitizer_set_death_callback)
        __sanitizer_set_death_callback(fuzz_describe);
    if (argc > 1) {
        count = strtoull(argv[1], &end, 10);
        if (*end) {
            FILE *file = fopen(argv[1], "rb");
            if (!file) {
                perror(argv[1]);
                return 2;
            }
            fuzz_now.size = fread(fuzz_now.data, 1, FUZZ_MOST, file);
            fclose(file);
            fuzz_feed(&fuzz_now);
            return 0;
        }
    }
    printf("# MEMOPT_SEED=%" PRIu64 "\n", seed);
    fflush(stdout);
    fuzz_state = seed;
    for (fuzz_index = 0; fuzz_index < count; fuzz_index++) {
        if (fuzz_index < fuzz_given_count) { /* first the seeds as they are */
            fuzz_now.size = fuzz_given[fuzz_index].size;
            memcpy(fuzz_now.data, fuzz_given[fuzz_index].data, fuzz_now.size);
        } else {
            fuzz_choose(&fuzz_now);
        }
        fuzz_feed(&fuzz_now);
        fuzz_kept[fuzz_below(FUZZ_KEPT)] = fuzz_now;
    }
    printf("# %" PRIu64 " inputs\n", count);
    return 0;
}

#define FUZZ_SEEDS(...)                                                                                      \
    static const fuzz_seed fuzz_seeds[] = {__VA_ARGS__};                                                     \
    int main(int argc, char **argv)                                                                          \
    {                                                                                                        \
        fuzz_given = fuzz_seeds;                                                                             \
        fuzz_given_count = sizeof fuzz_seeds / sizeof *fuzz_seeds;                                           \
        return fuzz_main(argc, argv);                                                                        \
    }
#else
#define FUZZ_SEEDS(...)
#endif
#endif
