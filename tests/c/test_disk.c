#include "transfer/disk.h"

#include <unistd.h>

#include "base/hostmem.h"
#include "child.h"
#include "driver/model_device.h"
#include "failing_files.h"

enum { PLACES = 8, ROOM = 16 << 10 };

static mo_disk disk;
static char memory[PLACES][ROOM] __attribute__((aligned(MO_FILE_ALIGNMENT)));
static char back[PLACES][ROOM] __attribute__((aligned(MO_FILE_ALIGNMENT)));
static mo_disk_job jobs[PLACES];

static void fill(void)
{
    uint64_t state = test_seed();
    for (size_t i = 0; i < PLACES; i++)
        for (size_t b = 0; b < ROOM; b++)
            memory[i][b] = (char)test_random(&state);
    memset(back, 0, sizeof back);
}

static void start(void)
{
    mo_detail detail;
    fail_nothing();
    if (mo_disk_open("/tmp", &failing_files, &disk, &detail))
        TEST_FAIL("%s", detail.text);
    fill();
}

static void finish(void)
{
    mo_disk_close(&disk);
    CHECK_EQ(failing.open, 0);
    CHECK_EQ(mo_host_live(), 0);
}

static mo_status begin_write(size_t i, size_t size, mo_detail *detail)
{
    jobs[i] = (mo_disk_job){.writes = true, .memory = memory[i], .size = size, .at = i * ROOM};
    return mo_disk_begin(&disk, &jobs[i], detail);
}

static mo_status read_back(size_t i, mo_detail *detail)
{
    mo_disk_job job = {.memory = back[i], .size = jobs[i].size, .at = jobs[i].at, .sum = jobs[i].sum};
    mo_status status = mo_disk_begin(&disk, &job, detail);
    return status ? status : mo_disk_finish(&disk, &job, detail);
}

static mo_model_device device;
static mo_copies copies;
static mo_ticket ticket;
static char *pinned;

static void start_device(void)
{
    mo_address on_device;
    mo_model_device_close(&device);
    mo_model_device_open(&device, 1 << 20, 0);
    CHECK_EQ(device.table.segment_alloc(&device.table, ROOM, NULL, &on_device), MO_OK);
    CHECK_EQ(device.table.pinned_alloc(&device.table, ROOM, NULL, (void **)&pinned), MO_OK);
    CHECK_EQ(mo_copies_open(&device.table, &copies, NULL), MO_OK);
    CHECK_EQ(mo_copy(&copies, MO_OUT, NULL, on_device, pinned, ROOM, 0, NULL, &ticket), MO_OK);
    memset(pinned, 1, ROOM);
}

static mo_status begin_behind(void)
{
    jobs[0] =
        (mo_disk_job){.writes = true, .memory = pinned, .size = ROOM, .copies = &copies, .behind = ticket};
    return mo_disk_begin(&disk, &jobs[0], NULL);
}

/* ---- the end of a process: first, while this one has had no thread ------------------------------------------ */

static void ends_at_once(void)
{
    static char *large;
    const size_t size = 8 * MO_DISK_PIECE;
    start();
    large = calloc(1, size);
    CHECK(large);
    jobs[0] = (mo_disk_job){.writes = true, .memory = large, .size = size};
    CHECK_EQ(mo_disk_begin(&disk, &jobs[0], NULL), MO_OK);
    exit(0);
}

TEST(a_process_ends_while_it_writes)
{
    CHECK_CHILD(ends_at_once);
}

static void ends_while_it_waits_for_a_device(void)
{
    start_device();
    start();
    CHECK_EQ(begin_behind(), MO_OK);
    usleep(2000);
    exit(0);
}

TEST(a_process_ends_while_a_device_is_waited_for)
{
    CHECK_CHILD(ends_while_it_waits_for_a_device);
}

/* ---- bytes ---------------------------------------------------------------------------------------------- */

TEST(what_is_read_is_what_was_written_whatever_its_size_and_place)
{
    static const size_t sizes[PLACES] = {1, 63, 64, 65, 4095, 4096, 4097, ROOM};
    start();
    for (size_t i = 0; i < PLACES; i++)
        CHECK_EQ(begin_write(i, sizes[i], NULL), MO_OK);
    for (size_t i = 0; i < PLACES; i++) {
        mo_detail detail;
        if (mo_disk_finish(&disk, &jobs[i], &detail) || read_back(i, &detail))
            TEST_FAIL("%s", detail.text);
        CHECK(memcmp(memory[i], back[i], sizes[i]) == 0);
        CHECK(sizes[i] == ROOM || back[i][sizes[i]] == 0); /* and not a byte more */
    }
    CHECK_EQ(disk.counts.bytes_written, disk.counts.bytes_read);
    finish();
}

TEST(memory_that_is_not_aligned_goes_through_a_buffer)
{
    start();
    jobs[0] = (mo_disk_job){.writes = true, .memory = memory[0] + 3, .size = 9001};
    CHECK_EQ(mo_disk_begin(&disk, &jobs[0], NULL), MO_OK);
    CHECK_EQ(mo_disk_finish(&disk, &jobs[0], NULL), MO_OK);
    mo_disk_job job = {.memory = back[0] + 5, .size = 9001, .sum = jobs[0].sum};
    CHECK_EQ(mo_disk_begin(&disk, &job, NULL), MO_OK);
    CHECK_EQ(mo_disk_finish(&disk, &job, NULL), MO_OK);
    CHECK(memcmp(memory[0] + 3, back[0] + 5, 9001) == 0);
    finish();
}

TEST(more_than_one_piece_is_moved_piece_by_piece)
{
    const size_t size = 2 * MO_DISK_PIECE + 12345;
    char *large = malloc(size), *other = malloc(size);
    start();
    for (size_t i = 0; i < size; i++)
        large[i] = (char)(i ^ i >> 9);
    mo_disk_job write = {.writes = true, .memory = large, .size = size, .at = 8192};
    CHECK_EQ(mo_disk_begin(&disk, &write, NULL), MO_OK);
    CHECK_EQ(mo_disk_finish(&disk, &write, NULL), MO_OK);
    mo_disk_job read = {.memory = other, .size = size, .at = 8192, .sum = write.sum};
    CHECK_EQ(mo_disk_begin(&disk, &read, NULL), MO_OK);
    CHECK_EQ(mo_disk_finish(&disk, &read, NULL), MO_OK);
    CHECK(memcmp(large, other, size) == 0);
    finish();
    free(large);
    free(other);
}

TEST(damaged_bytes_are_not_given_back_for_good_ones)
{
    start();
    mo_detail detail;
    CHECK_EQ(begin_write(0, ROOM, NULL), MO_OK);
    CHECK_EQ(mo_disk_finish(&disk, &jobs[0], NULL), MO_OK);
    failing.damaged = 1;
    CHECK_EQ(read_back(0, &detail), MO_IO);
    CHECK(strstr(detail.text, "differ from the bytes that were written") && strstr(detail.text, "/tmp"));
    failing.damaged = 0;
    CHECK_EQ(read_back(0, &detail), MO_OK);
    finish();
}

TEST(a_sum_sees_each_byte_and_its_place)
{
    fill();
    const uint64_t sum = mo_sum(0, memory[0], 1000);
    for (size_t i = 0; i < 1000; i++) {
        memory[0][i] ^= 1;
        CHECK(mo_sum(0, memory[0], 1000) != sum);
        memory[0][i] ^= 1;
    }
    CHECK(mo_sum(0, memory[0], 1000) == sum);
    CHECK(mo_sum(0, memory[0], 999) != sum);
    memset(memory[1], 0, ROOM);
    CHECK(mo_sum(0, memory[1], 64) != mo_sum(0, memory[1], 128)); /* zeros count */
    memcpy(memory[2], memory[0] + 64, 64);
    memcpy(memory[2] + 64, memory[0], 64);
    CHECK(mo_sum(0, memory[2], 128) != mo_sum(0, memory[0], 128));
}

/* Writes fail from the N-th on; what was written before is good, and the failure is told at each next call. */
TEST(the_first_failed_write_is_told_by_all_later_ones)
{
    for (long after = 0; after < PLACES; after++) {
        start();
        mo_detail detail;
        size_t good = 0;
        fail_after(FAIL_WRITE, after, ENOSPC, false);
        for (size_t i = 0; i < PLACES; i++) {
            jobs[i].state = MO_JOB_IDLE;
            if (begin_write(i, ROOM, &detail)) {
                CHECK(detail.code == ENOSPC && strstr(detail.text, "more space"));
                break;
            }
            if (mo_disk_finish(&disk, &jobs[i], &detail)) {
                CHECK(detail.code == ENOSPC && strstr(detail.text, "more space"));
            } else {
                good++;
            }
        }
        CHECK_EQ(good, after);
        CHECK_EQ(begin_write(0, ROOM, &detail), MO_IO);
        for (size_t i = 1; i < good; i++) { /* the jobs but the first, which was just begun anew */
            CHECK_EQ(read_back(i, NULL), MO_OK);
            CHECK(memcmp(memory[i], back[i], ROOM) == 0);
        }
        finish();
    }
}

TEST(a_failed_read_is_its_own_affair)
{
    start();
    mo_detail detail;
    CHECK_EQ(begin_write(0, ROOM, NULL), MO_OK);
    CHECK_EQ(mo_disk_finish(&disk, &jobs[0], NULL), MO_OK);
    fail_after(FAIL_READ, 0, EIO, true);
    CHECK_EQ(read_back(0, &detail), MO_IO);
    CHECK_EQ(detail.code, EIO);
    CHECK_EQ(read_back(0, &detail), MO_OK);
    finish();
}

TEST(opening_may_fail_and_holds_nothing_then)
{
    mo_detail detail;
    fail_nothing();
    fail_after(FAIL_OPEN, 0, EACCES, true);
    CHECK_EQ(mo_disk_open("/tmp", &failing_files, &disk, &detail), MO_IO);
    CHECK(strstr(detail.text, "a writable directory"));
    mo_host_fail_after(0);
    CHECK_EQ(mo_disk_open("/tmp", &failing_files, &disk, &detail), MO_NO_HOST_MEMORY);
    mo_host_fail_never();
    CHECK_EQ(failing.open, 0);
    CHECK_EQ(mo_host_live(), 0);
}

/* ---- behind a device's copy ---------------------------------------------------------------------------- */

TEST(a_write_waits_for_the_copy_that_fills_its_memory)
{
    start_device();
    start();
    CHECK_EQ(begin_behind(), MO_OK);
    usleep(5000);
    CHECK(!mo_disk_over(&disk, &jobs[0]));
    CHECK_EQ(failing.calls[FAIL_WRITE], 0);
    memset(pinned, 2, ROOM);
    mo_model_device_complete(&device, NULL, SIZE_MAX);
    mo_model_device_complete(&device, copies.lines[MO_OUT].stream, SIZE_MAX);
    CHECK_EQ(mo_disk_finish(&disk, &jobs[0], NULL), MO_OK);
    CHECK_EQ(read_back(0, NULL), MO_OK);
    CHECK(back[0][0] == 2 && back[0][ROOM - 1] == 2);
    finish();
}

TEST(a_copy_that_fails_fails_the_write_behind_it)
{
    start_device();
    start();
    mo_detail detail;
    mo_model_device_fail(&device, MO_MODEL_DEVICE_event_query, 0, 1, MO_DRIVER);
    CHECK_EQ(begin_behind(), MO_OK);
    CHECK_EQ(mo_disk_finish(&disk, &jobs[0], &detail), MO_DRIVER);
    CHECK(strstr(detail.text, "event_query"));
    finish();
}

/* ---- the queue ------------------------------------------------------------------------------------------ */

TEST(what_has_not_begun_is_taken_back)
{
    start_device();
    start();
    CHECK_EQ(begin_behind(), MO_OK); /* the thread waits for it */
    for (size_t i = 1; i < 5; i++)
        CHECK_EQ(begin_write(i, ROOM, NULL), MO_OK);
    mo_disk_cancel(&disk, &jobs[4]);
    mo_disk_cancel(&disk, &jobs[2]);
    mo_model_device_complete(&device, NULL, SIZE_MAX);
    mo_model_device_complete(&device, copies.lines[MO_OUT].stream, SIZE_MAX);
    for (size_t i = 0; i < 4; i++)
        if (i != 2)
            CHECK_EQ(mo_disk_finish(&disk, &jobs[i], NULL), MO_OK);
    CHECK_EQ(disk.counts.bytes_written, 3 * ROOM);
    CHECK_EQ(begin_write(5, ROOM, NULL), MO_OK); /* the queue's end is where it was */
    mo_disk_cancel(&disk, &jobs[5]);
    mo_disk_cancel(&disk, &jobs[3]); /* over: nothing to take back */
    finish();
}

static void *complete_later(void *unused)
{
    for (bool full = false; !full; usleep(100)) {
        mo_lock_take(&disk.lock);
        full = disk.counts.waits == 1;
        mo_lock_give(&disk.lock);
    }
    mo_model_device_complete(&device, NULL, SIZE_MAX);
    mo_model_device_complete(&device, copies.lines[MO_OUT].stream, SIZE_MAX);
    return unused;
}

TEST(a_full_queue_is_waited_for)
{
    static mo_disk_job many[MO_DISK_JOBS + 1];
    pthread_t thread;
    start_device();
    start();
    CHECK_EQ(begin_behind(), MO_OK);
    while (!mo_disk_over(&disk, &jobs[0])) {
        mo_lock_take(&disk.lock);
        const bool running = jobs[0].state == MO_JOB_RUNNING;
        mo_lock_give(&disk.lock);
        if (running)
            break;
        usleep(100);
    }
    CHECK_EQ(pthread_create(&thread, NULL, complete_later, NULL), 0);
    for (size_t i = 0; i < MO_DISK_JOBS + 1; i++) {
        many[i] = (mo_disk_job){.writes = true, .memory = memory[0], .size = 64, .at = i * 4096};
        CHECK_EQ(mo_disk_begin(&disk, &many[i], NULL), MO_OK);
    }
    CHECK_EQ(disk.counts.waits, 1);
    for (size_t i = 0; i < MO_DISK_JOBS + 1; i++)
        CHECK_EQ(mo_disk_finish(&disk, &many[i], NULL), MO_OK);
    pthread_join(thread, NULL);
    finish();
}

TEST(closing_takes_back_what_is_queued)
{
    start();
    mo_detail detail;
    for (size_t i = 0; i < PLACES; i++)
        CHECK_EQ(begin_write(i, ROOM, NULL), MO_OK);
    finish();
    for (size_t i = 0; i < PLACES; i++) {
        CHECK_EQ(jobs[i].state, MO_JOB_OVER);
        CHECK(jobs[i].status == MO_OK || jobs[i].status == MO_UNSUPPORTED);
    }
    (void)detail;
}

static void *count_on(void *stop)
{
    uint64_t counted = 0;
    while (!atomic_load((atomic_bool *)stop)) {
        const mo_disk_counts counts = mo_disk_counted(&disk);
        if (counts.bytes_written < counted)
            return stop;
        counted = counts.bytes_written;
    }
    return NULL;
}

TEST(counts_may_be_read_while_the_thread_works) /* that it races with nothing, TSan says */
{
    pthread_t thread;
    atomic_bool stop = false;
    void *failed = &thread;
    start();
    CHECK_EQ(pthread_create(&thread, NULL, count_on, &stop), 0);
    fail_after(FAIL_WRITE, 1, EINVAL, true); /* from here on through the page cache */
    for (size_t i = 0; i < PLACES; i++)
        CHECK_EQ(begin_write(i, ROOM, NULL), MO_OK);
    for (size_t i = 0; i < PLACES; i++)
        CHECK_EQ(mo_disk_finish(&disk, &jobs[i], NULL), MO_OK);
    atomic_store(&stop, true);
    pthread_join(thread, &failed);
    const mo_disk_counts counts = mo_disk_counted(&disk);
    CHECK(!failed && counts.bytes_written == PLACES * ROOM && !counts.direct);
    finish();
}

static void *use_it(void *number)
{
    const size_t i = (size_t)(uintptr_t)number;
    for (int round = 0; round < 50; round++) {
        if (begin_write(i, ROOM - i, NULL) || mo_disk_finish(&disk, &jobs[i], NULL) || read_back(i, NULL) ||
            memcmp(memory[i], back[i], ROOM - i) != 0)
            return number;
    }
    return NULL;
}

TEST(threads_may_use_one_disk)
{
    pthread_t threads[3];
    start();
    for (size_t i = 0; i < 3; i++)
        CHECK_EQ(pthread_create(&threads[i], NULL, use_it, (void *)(i + 1)), 0);
    for (size_t i = 0; i < 3; i++) {
        void *failed = threads;
        pthread_join(threads[i], &failed);
        CHECK(!failed);
    }
    finish();
}

/* ---- fork ------------------------------------------------------------------------------------------------ */

static void in_a_child(void)
{
    mo_detail detail;
    CHECK_EQ(begin_write(1, ROOM, &detail), MO_UNSUPPORTED);
    CHECK(strstr(detail.text, "belongs to the parent"));
    CHECK_EQ(mo_disk_finish(&disk, &jobs[0], &detail), MO_UNSUPPORTED);
    CHECK(!mo_disk_over(&disk, &jobs[0]));
    mo_disk_cancel(&disk, &jobs[0]);
    mo_disk_close(&disk);
#ifndef __SANITIZE_THREAD__ /* which knows of no threads in a child */
    start();                /* its own works */
    CHECK_EQ(begin_write(0, ROOM, NULL), MO_OK);
    CHECK_EQ(mo_disk_finish(&disk, &jobs[0], NULL), MO_OK);
    CHECK_EQ(read_back(0, NULL), MO_OK);
    mo_disk_close(&disk);
#endif
}

TEST(a_child_is_refused_and_may_begin_anew)
{
    start();
    CHECK_EQ(begin_write(0, ROOM, NULL), MO_OK);
    CHECK_EQ(mo_disk_finish(&disk, &jobs[0], NULL), MO_OK);
    CHECK_CHILD(in_a_child);
    CHECK_EQ(read_back(0, NULL), MO_OK);
    finish();
}

TEST_MAIN
