#include "alloc/step_predictor.h"

#include "base/hostmem.h"
#include "test.h"

static mo_step_predictor predictor;

/* Each request of a step has an address of its own, the same in each step: so a prediction says what it was made from. */
static mo_address address_of(size_t i)
{
    return (i + 1) * 512;
}

typedef struct tally {
    size_t right, wrong; /* predictions */
} tally;

static void request(uint32_t signature, size_t i, tally *t)
{
    const mo_address predicted = mo_step_predictor_predict(&predictor, signature);

    t->right += predicted == address_of(i);
    t->wrong += predicted && predicted != address_of(i);
    mo_step_predictor_learn(&predictor, signature, address_of(i));
}

static tally step(const uint32_t *signatures, size_t count)
{
    tally t = {0};

    for (size_t i = 0; i < count; i++)
        request(signatures[i], i, &t);
    return t;
}

/* Signatures of `count` requests that differ. */
static uint32_t *different(size_t count)
{
    uint32_t *signatures = calloc(count, sizeof *signatures);

    CHECK(signatures);
    for (size_t i = 0; i < count; i++)
        signatures[i] = mo_step_predictor_signature((i + 1) * 512, 0, 1);
    return signatures;
}

static void open_predictor(void)
{
    mo_step_predictor_close(&predictor);
    CHECK_EQ(mo_step_predictor_open(&predictor, NULL), MO_OK);
}

TEST(a_step_is_predicted_as_soon_as_its_second_repetition_is_recognised_and_whole_from_the_third)
{
    for (size_t count = MO_STEP_PREDICTOR_CONTEXT; count < 3000; count = count * 3 / 2 + 1) {
        uint32_t *signatures = different(count);

        open_predictor();
        CHECK_EQ(step(signatures, count).right, 0);
        CHECK_EQ(step(signatures, count).right, count - MO_STEP_PREDICTOR_CONTEXT);
        for (uint32_t n = 0; n < 4; n++) {
            const tally t = step(signatures, count);

            CHECK_EQ(t.right, count);
            CHECK_EQ(t.wrong, 0);
            CHECK_EQ(predictor.run, (n + 2) * count - MO_STEP_PREDICTOR_CONTEXT);
        }
        free(signatures);
    }
    mo_step_predictor_close(&predictor);
}

TEST(a_request_of_another_size_is_not_predicted)
{
    uint32_t *signatures = different(100);

    open_predictor();
    for (int n = 0; n < 3; n++)
        step(signatures, 100);
    for (size_t i = 0; i < 100; i++) {
        tally t = {0};

        CHECK_EQ(mo_step_predictor_predict(&predictor, signatures[i] ^ 1), 0);
        CHECK_EQ(mo_step_predictor_predict(&predictor, signatures[i]), address_of(i));
        request(signatures[i], i, &t);
    }
    free(signatures);
    mo_step_predictor_close(&predictor);
}

/* One layer after another asks for the same, so what a layer did is found in the wrong one at first. */
TEST(a_wrong_place_in_equal_layers_is_left_at_the_first_request_that_tells_them_apart)
{
    for (size_t layers = 4; layers <= 96; layers *= 2)
        for (size_t length = 1; length <= 32; length *= 2) {
            const size_t count = layers * length + 3;
            uint32_t *signatures = calloc(count, sizeof *signatures);

            CHECK(signatures);
            for (size_t i = 0; i < count; i++)
                signatures[i] = i < layers * length
                                    ? mo_step_predictor_signature((i % length + 1) * 512, 1, 1)
                                    : (uint32_t)(i - layers * length);
            open_predictor();
            step(signatures, count);
            step(signatures, count);
            for (int n = 0; n < 3; n++) {
                const tally t = step(signatures, count);

                CHECK_EQ(t.right, count);
                CHECK_EQ(t.wrong, 0);
            }
            free(signatures);
        }
    mo_step_predictor_close(&predictor);
}

TEST(after_one_other_request_it_is_lost_for_one_context_and_no_longer)
{
    uint32_t *signatures = different(200);
    tally t;

    open_predictor();
    for (int n = 0; n < 3; n++)
        step(signatures, 200);
    signatures[50] ^= 0x40000000;
    t = step(signatures, 200);
    CHECK_EQ(t.right, 200 - 1 - MO_STEP_PREDICTOR_CONTEXT);
    signatures[50] ^= 0x40000000;
    for (int n = 0; n < 2; n++) { /* the odd step is met once more, on the way from the step before it */
        t = step(signatures, 200);
        CHECK(t.right >= 199);
        CHECK_EQ(t.wrong, 0);
    }
    CHECK_EQ(step(signatures, 200).right, 200);
    free(signatures);
    mo_step_predictor_close(&predictor);
}

TEST(two_kinds_of_steps_in_turn_are_both_predicted)
{
    uint32_t *train = different(300), *evaluate = different(80);

    for (size_t i = 0; i < 80; i++)
        evaluate[i] ^= 0x55;
    open_predictor();
    for (int n = 0; n < 3; n++) {
        step(train, 300);
        step(evaluate, 80);
    }
    CHECK_EQ(step(train, 300).right, 300);
    CHECK_EQ(step(evaluate, 80).right, 80);
    CHECK(step(evaluate, 80).right >= 80 - MO_STEP_PREDICTOR_CONTEXT);
    CHECK(step(train, 300).right >= 300 - MO_STEP_PREDICTOR_CONTEXT);
    free(train);
    free(evaluate);
    mo_step_predictor_close(&predictor);
}

TEST(the_longest_step_that_is_seen_is_one_less_than_the_log)
{
    uint32_t *signatures = different(MO_STEP_PREDICTOR_LOG);

    open_predictor();
    for (int n = 0; n < 2; n++)
        step(signatures, MO_STEP_PREDICTOR_LOG - 1);
    CHECK_EQ(step(signatures, MO_STEP_PREDICTOR_LOG - 1).right, MO_STEP_PREDICTOR_LOG - 1);
    open_predictor();
    for (int n = 0; n < 4; n++) {
        const tally t = step(signatures, MO_STEP_PREDICTOR_LOG);

        CHECK_EQ(t.right, 0);
        CHECK_EQ(t.wrong, 0);
    }
    free(signatures);
    mo_step_predictor_close(&predictor);
}

TEST(the_count_of_requests_may_wrap)
{
    uint32_t *signatures = different(100);

    open_predictor();
    predictor.written = UINT32_MAX - 450;
    step(signatures, 100);
    step(signatures, 100);
    for (int n = 0; n < 10; n++)
        CHECK_EQ(step(signatures, 100).right, 100);
    CHECK(predictor.written < 1000);
    free(signatures);
    mo_step_predictor_close(&predictor);
}

/* ---- against the definition: all that was ever asked for, searched backwards -------------------------------------- */

#define HISTORY 300000

static uint32_t asked[HISTORY];

/* The place after the last occurrence, before `here`, of the context that ends with it; 0: there is none. */
static size_t earlier_place(size_t here)
{
    for (size_t end = here; end-- >= MO_STEP_PREDICTOR_CONTEXT;)
        if (!memcmp(&asked[end + 1 - MO_STEP_PREDICTOR_CONTEXT], &asked[here + 1 - MO_STEP_PREDICTOR_CONTEXT],
                    MO_STEP_PREDICTOR_CONTEXT * sizeof *asked))
            return here + 1 - (end + 1) < MO_STEP_PREDICTOR_LOG ? end + 1 : 0;
    return 0;
}

/* Two signatures, so that the 64 contexts have 64 hashes. */
TEST(what_is_predicted_is_what_followed_the_last_time)
{
    static const uint32_t signatures[] = {0x1234567, 0x89ABCDE};
    uint64_t random = test_seed();
    size_t place = 0, run = 0, copied = 0, from = 0, predictions = 0;

    open_predictor();
    for (size_t here = 0; here < (size_t)test_rounds(30000, HISTORY); here++) {
        mo_address expected = 0;

        if (!copied && here > 100) { /* a stretch of the past, or a new one */
            copied = 1 + test_random(&random) % (test_random(&random) % 4 ? 200 : 10);
            from = test_random(&random) % here;
        }
        if (copied)
            copied--;
        asked[here] = copied && here % 3000 ? asked[from++] : signatures[test_random(&random) & 1];
        if (place && asked[place] == asked[here])
            expected = address_of(place);
        CHECK_EQ(mo_step_predictor_predict(&predictor, asked[here]), expected);
        mo_step_predictor_learn(&predictor, asked[here], address_of(here));
        predictions += expected != 0;
        run = expected ? run + 1 : 0;
        if (expected)
            place++;
        else
            place = here >= MO_STEP_PREDICTOR_CONTEXT ? earlier_place(here) : 0;
        CHECK_EQ(predictor.run, run);
    }
    CHECK(predictions > 10000);
    mo_step_predictor_close(&predictor);
}

TEST(signatures_tell_sizes_streams_and_arenas_apart)
{
    static unsigned char seen[1 << 20];
    size_t equal = 0, total = 0;

    for (size_t size = 1; size <= 5000; size++)
        for (unsigned stream = 0; stream < 3; stream++)
            for (uint64_t arena = 1; arena < 3; arena++, total++) {
                const uint32_t signature = mo_step_predictor_signature(size * 512, stream, arena);

                equal += seen[signature >> 12] == (unsigned char)(signature >> 4 | 1);
                seen[signature >> 12] = (unsigned char)(signature >> 4 | 1);
            }
    CHECK(equal < total / 500); /* 30000 in 2^27 places */
    CHECK(mo_step_predictor_signature(512, 0, 1) != mo_step_predictor_signature(512, 1, 1));
    CHECK(mo_step_predictor_signature(512, 0, 1) != mo_step_predictor_signature(512, 0, 2));
}

TEST(without_host_memory_it_says_so_and_leaves_nothing)
{
    size_t live;

    mo_step_predictor_close(&predictor);
    live = mo_host_live();
    for (uint64_t after = 0; after < 2; after++) {
        mo_detail detail = {0};

        mo_host_fail_after(after);
        CHECK_EQ(mo_step_predictor_open(&predictor, &detail), MO_NO_HOST_MEMORY);
        mo_host_fail_never();
        CHECK(strstr(detail.text, "no host memory"));
        CHECK(mo_host_live() == live);
    }
}

TEST_MAIN
