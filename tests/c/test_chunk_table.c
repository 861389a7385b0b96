#include "scaler/chunk_table.h"

#include "test.h"

#define LIST(addresses_, counts_, size_)                                                                     \
    {                                                                                                        \
        .addresses = addresses_, .counts = counts_, .tensors = sizeof(counts_) / sizeof *(counts_),          \
        .size = size_                                                                                        \
    }

static mo_chunk *cut(const mo_tensor_list *list, size_t chunk_bytes, size_t *chunks)
{
    mo_detail detail;
    mo_chunk *table;
    mo_status status = mo_chunks_count(list, chunk_bytes, chunks, &detail);

    if (status)
        TEST_FAIL("%s: %.300s", mo_status_name(status), detail.text);
    /* One entry more than asked for, marked, to see that exactly so many are written. */
    table = malloc((*chunks + 1) * sizeof *table);
    memset(table, 0xA5, (*chunks + 1) * sizeof *table);
    mo_chunks_fill(list, chunk_bytes, table);
    CHECK_EQ(table[*chunks].count, 0xA5A5A5A5u);
    return table;
}

/* The oracle is the header's list of invariants, walked tensor by tensor. */
static void check_cover(const mo_tensor_list *list, size_t chunk_bytes)
{
    size_t chunks, at = 0;
    mo_chunk *table = cut(list, chunk_bytes, &chunks);

    for (size_t t = 0; t < list->tensors; t++) {
        size_t seen = 0;
        while (seen < list->counts[t]) {
            CHECK(at < chunks);
            CHECK_EQ(table[at].tensor, t);
            CHECK_EQ(table[at].address, list->addresses[t] + seen * list->size);
            CHECK(table[at].count >= 1 && table[at].count * list->size <= chunk_bytes);
            CHECK(seen == 0 || table[at].address % MO_CHUNK_ALIGNMENT == 0);
            seen += table[at++].count;
        }
        CHECK_EQ(seen, list->counts[t]);
    }
    CHECK_EQ(at, chunks);
    free(table);
}

TEST(every_element_of_random_tensors_is_in_exactly_one_chunk)
{
    uint64_t state = test_seed();
    uintptr_t addresses[20];
    size_t counts[20];

    for (int round = 0; round < test_rounds(3000, 300000); round++) {
        mo_tensor_list list = {
            .addresses = addresses, .counts = counts, .size = (size_t)1 << test_random(&state) % 5};
        list.tensors = test_random(&state) % 21;
        for (size_t t = 0; t < list.tensors; t++) {
            counts[t] = test_random(&state) % (test_random(&state) % 2 ? 5 : 3000);
            addresses[t] = ((uintptr_t)1 << 40) + test_random(&state) % 4096 / list.size * list.size;
        }
        check_cover(&list, (size_t)128 << test_random(&state) % 4);
    }
}

TEST(sizes_next_to_a_chunk_boundary_are_covered_at_every_misalignment)
{
    for (size_t size = 1; size <= 16; size *= 2)
        for (size_t shift = 0; shift < 256; shift += size)
            for (int around = -2; around <= 2; around++) {
                uintptr_t address[] = {4096 + shift};
                size_t count[] = {(size_t)((long)(512 / size) * 3 + around)};
                mo_tensor_list list = LIST(address, count, size);
                check_cover(&list, 512);
            }
}

TEST(no_tensors_and_empty_tensors_make_no_chunks)
{
    uintptr_t addresses[] = {0, 0, 3};
    size_t counts[] = {0, 0, 0}, chunks = 7;
    mo_tensor_list list = LIST(addresses, counts, 4), none = {.size = 4};

    CHECK_EQ(mo_chunks_count(&list, 4096, &chunks, NULL), MO_OK);
    CHECK_EQ(chunks, 0);
    chunks = 7;
    CHECK_EQ(mo_chunks_count(&none, 4096, &chunks, NULL), MO_OK);
    CHECK_EQ(chunks, 0);
}

static void refuses(uintptr_t address, size_t count, size_t size, size_t chunk_bytes, mo_status expected,
                    const char *word)
{
    uintptr_t addresses[] = {4096, address};
    size_t counts[] = {1, count}, chunks = 99;
    mo_tensor_list list = LIST(addresses, counts, size);
    mo_detail detail = {0};

    CHECK_EQ(mo_chunks_count(&list, chunk_bytes, &chunks, &detail), expected);
    CHECK_EQ(detail.status, expected);
    if (!strstr(detail.text, word))
        TEST_FAIL("\"%.300s\" does not say \"%s\"", detail.text, word);
    CHECK_EQ(chunks, 99); /* an output is only written on success */
}

TEST(a_wrong_list_is_refused_and_the_tensor_named)
{
    refuses(0, 1, 4, 4096, MO_INVALID, "tensor 1");
    refuses(4098, 1, 4, 4096, MO_INVALID, "tensor 1");
    refuses(UINTPTR_MAX - 3, 2, 4, 4096, MO_INVALID, "tensor 1");
    refuses(4096, SIZE_MAX / 2, 4, 4096, MO_OVERFLOW, "tensor 1");
    refuses(4096, (size_t)1 << 60, 1, 128, MO_OVERFLOW, "chunks");
    refuses(4096, 1, 3, 4096, MO_INVALID, "3 bytes");
    refuses(4096, 1, 32, 4096, MO_INVALID, "32 bytes");
    refuses(4096, 1, 4, 64, MO_INVALID, "64 bytes");
    refuses(4096, 1, 4, 384, MO_INVALID, "384 bytes");
}

TEST(the_bytes_of_a_list_are_summed_or_said_not_to_fit)
{
    uintptr_t addresses[] = {4096, 8192};
    size_t counts[] = {10, 20}, bytes = 0;
    mo_tensor_list list = LIST(addresses, counts, 8);

    CHECK(mo_tensors_bytes(&list, &bytes));
    CHECK_EQ(bytes, 240);
    counts[1] = SIZE_MAX / 8;
    CHECK(!mo_tensors_bytes(&list, &bytes));
    CHECK_EQ(bytes, 240);
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
