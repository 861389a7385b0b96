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

bool mo_tensors_bytes(const mo_tensor *tensors, size_t count, size_t *out)
{
    size_t total = 0;
    for (size_t i = 0; i < count; i++) {
        size_t bytes;
        if (!mo_mul_ok(tensors[i].count, mo_float_size(tensors[i].kind), &bytes) ||
            !mo_add_ok(total, bytes, &total))
            return false;
    }
    *out = total;
    return true;
}

mo_status mo_chunks_count(const mo_tensor *tensors, size_t count, size_t chunk_bytes, size_t *out_chunks,
                          mo_detail *detail)
{
    size_t chunks = 0;

    if (!mo_is_power_of_two(chunk_bytes) || chunk_bytes < MO_CHUNK_ALIGNMENT || chunk_bytes > (size_t)1 << 31)
        return mo_fail(detail, MO_INVALID, 0, "chunks of %zu bytes: expected a power of two from %d to 2^31",
                       chunk_bytes, MO_CHUNK_ALIGNMENT);
    for (size_t i = 0; i < count; i++) {
        const mo_tensor *t = &tensors[i];
        size_t size, bytes, end;

        if ((unsigned)t->kind >= MO_FLOAT_COUNT)
            return mo_fail(detail, MO_INVALID, 0,
                           "tensor %zu: element type %d: expected 0 (fp32), 1 (fp16), 2 (bf16) or 3 (fp64)",
                           i, (int)t->kind);
        if (t->count == 0)
            continue;
        size = mo_float_size(t->kind);
        if (!mo_mul_ok(t->count, size, &bytes))
            return mo_fail(detail, MO_OVERFLOW, 0, "tensor %zu: %zu elements of %zu bytes do not fit", i,
                           t->count, size);
        if (!t->address || t->address % size)
            return mo_fail(detail, MO_INVALID, 0,
                           "tensor %zu: %#zx is not the address of an element of %zu bytes", i,
                           (size_t)t->address, size);
        if (!mo_add_ok(t->address, bytes, &end))
            return mo_fail(detail, MO_INVALID, 0, "tensor %zu: %zu bytes at %#zx run past the end of memory",
                           i, bytes, (size_t)t->address);
        /* Each is at most 2^57: no overflow. */
        chunks += tensor_chunks(t->address, t->count, size, chunk_bytes);
        if (chunks > MO_CHUNKS_MAX)
            return mo_fail(detail, MO_OVERFLOW, 0, "more than %d chunks of %zu bytes: use larger chunks",
                           MO_CHUNKS_MAX, chunk_bytes);
    }
    *out_chunks = chunks;
    return MO_OK;
}

void mo_chunks_fill(const mo_tensor *tensors, size_t count, size_t chunk_bytes, mo_chunk *out)
{
    for (size_t i = 0; i < count; i++) {
        const size_t size = mo_float_size(tensors[i].kind);
        uintptr_t address = tensors[i].address;
        size_t left = tensors[i].count, now;

        if (left == 0)
            continue;
        now = first_elements(address, size, chunk_bytes);
        while (left > 0) {
            if (now > left)
                now = left;
            *out++ = (mo_chunk){.address = address, .count = (unsigned)now, .kind = tensors[i].kind};
            address += now * size;
            left -= now;
            MO_ASSERT(left == 0 || address % MO_CHUNK_ALIGNMENT == 0);
            now = chunk_bytes / size;
        }
    }
}
