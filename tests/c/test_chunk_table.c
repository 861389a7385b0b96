#include "scaler/chunk_table.h"

#include "test.h"

enum { MANY = 20 };

static mo_chunk *cut(const mo_tensor *list, size_t count, size_t chunk_bytes, size_t *chunks)
{
    mo_detail detail;
    mo_chunk *table;
    mo_status status = mo_chunks_count(list, count, chunk_bytes, chunks, &detail);

    if (status)
        TEST_FAIL("%s: %.300s", mo_status_name(status), detail.text);
    /* One entry more than asked for, marked, to see that exactly so many are written. */
    table = malloc((*chunks + 1) * sizeof *table);
    memset(table, 0xA5, (*chunks + 1) * sizeof *table);
    mo_chunks_fill(list, count, chunk_bytes, table);
    CHECK_EQ(table[*chunks].count, 0xA5A5A5A5u);
    return table;
}

/* The oracle is the header's list of invariants, walked tensor by tensor. */
static void check_cover(const mo_tensor *list, size_t count, size_t chunk_bytes)
{
    size_t chunks, at = 0;
    mo_chunk *table = cut(list, count, chunk_bytes, &chunks);

    for (size_t t = 0; t < count; t++) {
        const size_t size = mo_float_size(list[t].kind);
        size_t seen = 0;
        while (seen < list[t].count) {
            CHECK(at < chunks);
            CHECK_EQ(table[at].kind, list[t].kind);
            CHECK_EQ(table[at].address, list[t].address + seen * size);
            CHECK(table[at].count >= 1 && table[at].count * size <= chunk_bytes);
            CHECK(seen == 0 || table[at].address % MO_CHUNK_ALIGNMENT == 0);
            seen += table[at++].count;
        }
        CHECK_EQ(seen, list[t].count);
    }
    CHECK_EQ(at, chunks);
    free(table);
}

TEST(every_element_of_random_tensors_is_in_exactly_one_chunk)
{
    uint64_t state = test_seed();
    mo_tensor list[MANY];

    for (int round = 0; round < test_rounds(3000, 300000); round++) {
        const size_t count = test_random(&state) % (MANY + 1);
        for (size_t t = 0; t < count; t++) {
            list[t].kind = (mo_float)(test_random(&state) % MO_FLOAT_COUNT);
            list[t].count = test_random(&state) % (test_random(&state) % 2 ? 5 : 3000);
            list[t].address = ((uintptr_t)1 << 40) + test_random(&state) % 512 * mo_float_size(list[t].kind);
        }
        check_cover(list, count, (size_t)128 << test_random(&state) % 4);
    }
}

TEST(sizes_next_to_a_chunk_boundary_are_covered_at_every_misalignment)
{
    for (mo_float kind = MO_F32; kind < MO_FLOAT_COUNT; kind++)
        for (size_t shift = 0, size = mo_float_size(kind); shift < 256; shift += size)
            for (int around = -2; around <= 2; around++) {
                const mo_tensor list = {4096 + shift, (size_t)((long)(512 / size) * 3 + around), kind};
                check_cover(&list, 1, 512);
            }
}

TEST(no_tensors_and_empty_tensors_make_no_chunks)
{
    const mo_tensor list[] = {{0, 0, MO_F32}, {0, 0, MO_F16}, {3, 0, MO_F64}};
    size_t chunks = 7;

    CHECK_EQ(mo_chunks_count(list, 3, 4096, &chunks, NULL), MO_OK);
    CHECK_EQ(chunks, 0);
    chunks = 7;
    CHECK_EQ(mo_chunks_count(NULL, 0, 4096, &chunks, NULL), MO_OK);
    CHECK_EQ(chunks, 0);
}

static void refuses(mo_tensor tensor, size_t chunk_bytes, mo_status expected, const char *word)
{
    const mo_tensor list[] = {{4096, 1, MO_F16}, tensor};
    size_t chunks = 99;
    mo_detail detail = {0};

    CHECK_EQ(mo_chunks_count(list, 2, chunk_bytes, &chunks, &detail), expected);
    CHECK_EQ(detail.status, expected);
    if (!strstr(detail.text, word))
        TEST_FAIL("\"%.300s\" does not say \"%s\"", detail.text, word);
    CHECK_EQ(chunks, 99); /* an output is only written on success */
}

TEST(a_wrong_list_is_refused_and_the_tensor_named)
{
    refuses((mo_tensor){0, 1, MO_F32}, 4096, MO_INVALID, "tensor 1");
    refuses((mo_tensor){4098, 1, MO_F32}, 4096, MO_INVALID, "tensor 1");
    refuses((mo_tensor){UINTPTR_MAX - 3, 2, MO_F32}, 4096, MO_INVALID, "tensor 1");
    refuses((mo_tensor){4096, SIZE_MAX / 2, MO_F32}, 4096, MO_OVERFLOW, "tensor 1");
    refuses((mo_tensor){4096, (size_t)1 << 60, MO_BF16}, 128, MO_OVERFLOW, "chunks");
    refuses((mo_tensor){4096, 1, MO_FLOAT_COUNT}, 4096, MO_INVALID, "tensor 1: element type 4");
    refuses((mo_tensor){4096, 0, (mo_float)-1}, 4096, MO_INVALID, "tensor 1: element type -1");
    refuses((mo_tensor){4096, 1, MO_F32}, 64, MO_INVALID, "64 bytes");
    refuses((mo_tensor){4096, 1, MO_F32}, 384, MO_INVALID, "384 bytes");
}

TEST(the_bytes_of_a_list_are_summed_or_said_not_to_fit)
{
    mo_tensor list[] = {{4096, 10, MO_F64}, {8192, 20, MO_BF16}};
    size_t bytes = 0;

    CHECK(mo_tensors_bytes(list, 2, &bytes));
    CHECK_EQ(bytes, 120);
    list[0].count = SIZE_MAX / 8;
    CHECK(!mo_tensors_bytes(list, 2, &bytes));
    CHECK_EQ(bytes, 120);
}

TEST(a_chunk_splits_into_head_vectors_and_tail_on_the_16_byte_grid)
{
    for (unsigned size = 2; size <= 8; size *= 2)
        for (unsigned shift = 0; shift < 16; shift += size)
            for (unsigned count = 1; count < 40; count++) {
                const mo_chunk chunk = {.address = 4096 + shift, .count = count};
                const mo_split s = mo_chunk_split(chunk, size);
                CHECK_EQ(s.head + s.vectors * (16 / size) + s.tail, count);
                CHECK(s.head < 16 / size && s.tail < 16 / size);
                CHECK(s.vectors == 0 || (chunk.address + s.head * size) % 16 == 0);
                /* Single elements only where they must be: a vector that would have fitted is not taken
                 * apart. */
                CHECK(s.vectors > 0 || count < (shift ? (16 - shift) / size : 0) + 16 / size);
            }
}

TEST_MAIN
