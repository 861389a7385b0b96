/* Checked arithmetic on sizes. A size that came from outside (a tensor, a budget, a file) is only ever added,
 * multiplied or rounded through these: each says false where the true result does not fit, and then leaves
 * *out alone. */
#ifndef MO_SIZE_H
#define MO_SIZE_H

#include <stdbool.h>
#include <stddef.h>

static inline bool mo_add_ok(size_t a, size_t b, size_t *out)
{
    size_t sum;
    if (__builtin_add_overflow(a, b, &sum))
        return false;
    *out = sum;
    return true;
}

static inline bool mo_mul_ok(size_t a, size_t b, size_t *out)
{
    size_t product;
    if (__builtin_mul_overflow(a, b, &product))
        return false;
    *out = product;
    return true;
}

static inline bool mo_is_power_of_two(size_t n)
{
    return n && !(n & (n - 1));
}

/* The least multiple of alignment that is >= n. False, too, where alignment is no power of two. */
static inline bool mo_align_up_ok(size_t n, size_t alignment, size_t *out)
{
    size_t padded;
    if (!mo_is_power_of_two(alignment) || !mo_add_ok(n, alignment - 1, &padded))
        return false;
    *out = padded & ~(alignment - 1);
    return true;
}

static inline size_t mo_size_min(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* How many pieces of `size` bytes cover n. size > 0. */
static inline size_t mo_ceil_div(size_t n, size_t size)
{
    return n / size + (n % size != 0);
}

#endif
