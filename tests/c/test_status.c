#include "base/status.h"

#include "test.h"

TEST(every_status_has_its_name_and_a_text_of_its_own)
{
    CHECK_STR(mo_status_name(MO_OK), "MO_OK");
    CHECK_STR(mo_status_name(MO_CORRUPT), "MO_CORRUPT");
    CHECK_STR(mo_status_text(MO_NO_DEVICE_MEMORY), "out of device memory");
    for (int a = 0; a < MO_STATUS_COUNT; a++) {
        CHECK(strncmp(mo_status_name((mo_status)a), "MO_", 3) == 0);
        CHECK(strlen(mo_status_text((mo_status)a)) > 0);
        for (int b = 0; b < a; b++) {
            CHECK(strcmp(mo_status_name((mo_status)a), mo_status_name((mo_status)b)) != 0);
            CHECK(strcmp(mo_status_text((mo_status)a), mo_status_text((mo_status)b)) != 0);
        }
    }
}

TEST(a_number_that_is_no_status_is_named_as_such)
{
    const int strangers[] = {MO_STATUS_COUNT, MO_STATUS_COUNT + 1, -1, INT32_MAX, INT32_MIN};
    for (size_t i = 0; i < sizeof strangers / sizeof *strangers; i++) {
        CHECK_STR(mo_status_name((mo_status)strangers[i]), "MO_?");
        CHECK_STR(mo_status_text((mo_status)strangers[i]), "an unknown status");
    }
}

TEST(success_is_zero_so_that_a_status_is_a_condition)
{
    CHECK_EQ(MO_OK, 0);
}

TEST(a_failure_carries_its_status_its_code_and_its_text)
{
    mo_detail detail;
    CHECK_EQ(mo_fail(&detail, MO_DRIVER, 700, "cuMemMap(%d): %s", 42, "no"), MO_DRIVER);
    CHECK_EQ(detail.status, MO_DRIVER);
    CHECK_EQ(detail.code, 700);
    CHECK_STR(detail.text, "cuMemMap(42): no");
}

TEST(a_failure_that_nobody_reads_is_its_status)
{
    CHECK_EQ(mo_fail(NULL, MO_IO, 5, "%s", "unread"), MO_IO);
}

TEST(a_long_text_is_cut_and_terminated)
{
    mo_detail detail;
    char words[4000];
    memset(words, 'x', sizeof words - 1);
    words[sizeof words - 1] = 0;
    memset(&detail, 'y', sizeof detail);
    mo_fail(&detail, MO_INVALID, 0, "%s", words);
    CHECK_EQ(strlen(detail.text), sizeof detail.text - 1);
}

TEST(a_text_that_just_fits_is_whole)
{
    mo_detail detail;
    char words[sizeof detail.text];
    memset(words, 'x', sizeof words - 3);
    strcpy(words + sizeof words - 3, "\xC3\xA9"); /* é at the very end */
    mo_fail(&detail, MO_INVALID, 0, "%s", words);
    CHECK_STR(detail.text, words);
}

/* Of characters of 1 to 4 bytes; the cut may fall anywhere in one. */
TEST(a_text_is_cut_between_characters)
{
    static const char *const letters[] = {"a", "\xC3\xA9", "\xE2\x82\xAC", "\xF0\x9F\x98\x80"};
    mo_detail detail;
    char words[3000];
    for (int shift = 0; shift < 4; shift++)
        for (int kind = 0; kind < 4; kind++) {
            const size_t bytes = strlen(letters[kind]);
            size_t length = 0;
            while (length < (size_t)shift)
                words[length++] = 'a';
            for (int i = 0; i < 600; i++, length += bytes)
                memcpy(words + length, letters[kind], bytes);
            words[length] = 0;
            mo_fail(&detail, MO_INVALID, 0, "%s", words);
            const size_t kept = strlen(detail.text), most = sizeof detail.text - 1;
            CHECK_EQ(kept, length < most ? length : most - (most - (size_t)shift) % bytes);
            CHECK(memcmp(detail.text, words, kept) == 0);
        }
}

TEST_MAIN
