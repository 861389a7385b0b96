#include "scaler/chunk_table.h"

#include "base/assert.h"
#include "base/size.h"

/* Elements of a tensor's first chunk: up to the last boundary at or before the end of a full chunk. */
static size_t first_elements(uintptr_t address, size_t size, size_t chunk_bytes)
{
    return (chunk_bytes - address % MO_CHUNK_ALIGNMENT) / size;
}

/* For a tensor of at least one element. */
static size_t tensor_chunks(uintptr_t address, size_t count, size_t size, size_t chunk_bytes)
{
    const size_t first = first_elements(address, size, chunk_bytes), each = chunk_bytes / size;
    return count <= first ? 1 : 1 + (count - first - 1) / each + 1;
}

bool mo_tensors_bytes(const mo_tensor_list *list, size_t *out)
{
    size_t total = 0;
    for (size_t i = 0; i < list->tensors; i++) {
        size_t bytes;
        if (!mo_mul_ok(list->counts[i], list->size, &bytes) || !mo_add_ok(total, bytes, &total))
            return false;
    }
    *out = total;
    return true;
}

mo_status mo_chunks_count(const mo_tensor_list *list, size_t chunk_bytes, size_t *out_chunks,
                          mo_detail *detail)
{
    size_t chunks = 0;

    if (!mo_is_power_of_two(list->size) || list->size > 16)
        return mo_fail(detail, MO_INVALID, 0, "an element of %zu bytes: expected 1, 2, 4, 8 or 16",
                       list->size);
    if (!mo_is_power_of_two(chunk_bytes) || chunk_bytes < MO_CHUNK_ALIGNMENT || chunk_bytes > (size_t)1 << 31)
        return mo_fail(detail, MO_INVALID, 0, "chunks of %zu bytes: expected a power of two from %d to 2^31",
                       chunk_bytes, MO_CHUNK_ALIGNMENT);
    if (list->tensors > UINT32_MAX)
        return mo_fail(detail, MO_OVERFLOW, 0, "%zu tensors are more than a chunk can number", list->tensors);
    for (size_t i = 0; i < list->tensors; i++) {
        const uintptr_t address = list->addresses[i];
        const size_t count = list->counts[i];
        size_t bytes, end;

        if (count == 0)
            continue;
        if (!mo_mul_ok(count, list->size, &bytes))
            return mo_fail(detail, MO_OVERFLOW, 0, "tensor %zu: %zu elements of %zu bytes do not fit", i,
                           count, list->size);
        if (!address || address % list->size)
            return mo_fail(detail, MO_INVALID, 0,
                           "tensor %zu: %#zx is not the address of an element of %zu bytes", i,
                           (size_t)address, list->size);
        if (!mo_add_ok(address, bytes, &end))
            return mo_fail(detail, MO_INVALID, 0, "tensor %zu: %zu bytes at %#zx run past the end of memory",
                           i, bytes, (size_t)address);
        chunks +=
            tensor_chunks(address, count, list->size, chunk_bytes); /* each is at most 2^57: no overflow */
        if (chunks > MO_CHUNKS_MAX)
            return mo_fail(detail, MO_OVERFLOW, 0, "more than %d chunks of %zu bytes: use larger chunks",
                           MO_CHUNKS_MAX, chunk_bytes);
    }
    *out_chunks = chunks;
    return MO_OK;
}

void mo_chunks_fill(const mo_tensor_list *list, size_t chunk_bytes, mo_chunk *out)
{
    const size_t each = chunk_bytes / list->size;

    for (size_t i = 0; i < list->tensors; i++) {
        uintptr_t address = list->addresses[i];
        size_t left = list->counts[i], now;

        if (left == 0)
            continue;
        now = first_elements(address, list->size, chunk_bytes);
        while (left > 0) {
            if (now > left)
                now = left;
            *out++ = (mo_chunk){.address = address, .count = (unsigned)now, .tensor = (unsigned)i};
            address += now * list->size;
            left -= now;
            MO_ASSERT(left == 0 || address % MO_CHUNK_ALIGNMENT == 0);
            now = each;
        }
    }
}
