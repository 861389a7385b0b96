/* The oracle is the same arithmetic in 128 bits. */
#include "base/size.h"

#include "test.h"

typedef unsigned __int128 wide;

static const size_t edges[] = {0,
                               1,
                               2,
                               3,
                               511,
                               512,
                               513,
                               (size_t)1 << 31,
                               (size_t)1 << 32,
                               ((size_t)1 << 32) + 1,
                               SIZE_MAX / 2,
                               SIZE_MAX / 2 + 1,
                               SIZE_MAX - 511,
                               SIZE_MAX - 1,
                               SIZE_MAX};
enum { EDGES = sizeof edges / sizeof *edges };

/* Right: what fits is given, what does not leaves out alone. */
static void check(bool said, size_t got, bool fits, wide truth)
{
    CHECK_EQ(said, fits);
    CHECK(got == (fits ? (size_t)truth : 77));
}

static void check_sum_and_product(size_t a, size_t b)
{
    size_t sum = 77, product = 77;
    bool sum_said = mo_add_ok(a, b, &sum), product_said = mo_mul_ok(a, b, &product);
    check(sum_said, sum, (wide)a + b <= SIZE_MAX, (wide)a + b);
    check(product_said, product, (wide)a * b <= SIZE_MAX, (wide)a * b);
}

static void check_align(size_t n, size_t alignment)
{
    size_t got = 77;
    bool said = mo_align_up_ok(n, alignment, &got), power = false;
    for (int bit = 0; bit < 64; bit++)
        power |= alignment == (size_t)1 << bit;
    CHECK_EQ(mo_is_power_of_two(alignment), power);
    const wide up = power ? ((wide)n + alignment - 1) / alignment * alignment : 0;
    check(said, got, power && up <= SIZE_MAX, up);
}

TEST(sums_and_products_at_the_edges_are_right_or_refused)
{
    for (int i = 0; i < EDGES; i++)
        for (int j = 0; j < EDGES; j++)
            check_sum_and_product(edges[i], edges[j]);
}

TEST(rounding_at_the_edges_is_right_or_refused)
{
    for (int i = 0; i < EDGES; i++) {
        for (int bit = 0; bit < 64; bit++)
            check_align(edges[i], (size_t)1 << bit);
        for (int j = 0; j < EDGES; j++)
            check_align(edges[i], edges[j]);
    }
}

static size_t any_magnitude(uint64_t *state)
{
    const int shift = (int)(test_random(state) % 64);
    return test_random(state) >> shift;
}

TEST(random_sizes_of_every_magnitude_agree_with_128_bits)
{
    uint64_t state = test_seed();
    for (int i = 0, n = test_rounds(20000, 2000000); i < n; i++) {
        const size_t a = any_magnitude(&state), b = any_magnitude(&state);
        check_sum_and_product(a, b);
        check_align(a, (size_t)1 << test_random(&state) % 64);
        check_align(a, b);
    }
}

TEST(the_result_may_be_one_of_the_operands)
{
    size_t n = 5;
    CHECK(mo_add_ok(n, 6, &n) && n == 11);
    CHECK(mo_mul_ok(n, n, &n) && n == 121);
    CHECK(mo_align_up_ok(n, 64, &n) && n == 128);
    CHECK(!mo_mul_ok(n, SIZE_MAX, &n) && n == 128);
}

TEST_MAIN
