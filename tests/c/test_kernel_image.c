#include "driver/kernel_image.h"

#include <pthread.h>

#include "test.h"

TEST(the_source_ends_with_a_nul_that_its_size_does_not_count)
{
    const mo_kernel_image image = mo_kernel_image_get();
    CHECK(image.source_size > 1000);
    CHECK_EQ(strlen(image.source), image.source_size);
    CHECK(strstr(image.source, "__global__"));
}

TEST(the_fatbin_is_aligned_and_begins_as_fatbins_do_where_there_is_one)
{
    const mo_kernel_image image = mo_kernel_image_get();
    CHECK(image.fatbin);
    CHECK_EQ((uintptr_t)image.fatbin % 16, 0);
    if (image.fatbin_size) {
        static const unsigned char magic[] = {0x50, 0xED, 0x55, 0xBA};
        CHECK(image.fatbin_size > 1000);
        CHECK(memcmp(image.fatbin, magic, sizeof magic) == 0);
    }
}

static void *get_often(void *slot)
{
    for (int i = 0; i < 1000; i++)
        *(mo_kernel_image *)slot = mo_kernel_image_get();
    return NULL;
}

/* ThreadSanitizer's to judge; the values are everyone's. */
TEST(threads_that_ask_at_once_get_the_same)
{
    const mo_kernel_image image = mo_kernel_image_get();
    mo_kernel_image images[4];
    pthread_t threads[4];
    for (int i = 0; i < 4; i++)
        CHECK_EQ(pthread_create(&threads[i], NULL, get_often, &images[i]), 0);
    for (int i = 0; i < 4; i++) {
        pthread_join(threads[i], NULL);
        CHECK(images[i].fatbin == image.fatbin && images[i].fatbin_size == image.fatbin_size);
        CHECK(images[i].source == image.source && images[i].source_size == image.source_size);
    }
}

TEST_MAIN
