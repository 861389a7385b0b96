#include "transfer/disk.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/hostmem.h"
#include "base/size.h"

/* ---- sums ----------------------------------------------------------------------------------------------------------- */

/* Eight lanes, each its own multiply-and-add over 64-bit words, so that the compiler may do them at once. */
uint64_t mo_sum(uint64_t before, const void *bytes, size_t size)
{
    enum { LANES = 8 };
    const uint64_t odd = UINT64_C(0x9E3779B97F4A7C15);
    const unsigned char *p = bytes;
    uint64_t lanes[LANES], sum = before;

    for (int i = 0; i < LANES; i++)
        lanes[i] = before + (uint64_t)i * odd;
    for (; size >= sizeof lanes; p += sizeof lanes, size -= sizeof lanes) {
        uint64_t words[LANES];
        memcpy(words, p, sizeof words);
        for (int i = 0; i < LANES; i++)
            lanes[i] = (lanes[i] ^ words[i]) * odd + (lanes[i] >> 32);
    }
    for (int i = 0; i < LANES; i++)
        sum = (sum ^ lanes[i]) * odd + (sum >> 29);
    for (; size; p++, size--)
        sum = (sum ^ *p) * odd + (sum >> 29);
    return sum;
}

/* ---- the end of the process -------------------------------------------------------------------------------------------- */

/* Threads that are between two pieces go no further once the process ends: after this nothing of theirs runs that
 * touches memory. */
typedef struct ending {
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    bool ending;
    unsigned busy;
} ending;

static ending the_end = {.mutex = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};

static void end(void)
{
    pthread_mutex_lock(&the_end.mutex);
    the_end.ending = true;
    while (the_end.busy)
        pthread_cond_wait(&the_end.changed, &the_end.mutex);
    pthread_mutex_unlock(&the_end.mutex);
}

/* A child has no threads yet, and its copy of the mutex may be one that a thread of the parent held. */
static void begin_child(void)
{
    the_end = (ending){.mutex = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};
}

static void watch_the_end(void)
{
    pthread_atfork(NULL, NULL, begin_child);
    atexit(end);
}

static bool enter_piece(void)
{
    bool goes_on;
    pthread_mutex_lock(&the_end.mutex);
    goes_on = !the_end.ending;
    the_end.busy += goes_on;
    pthread_mutex_unlock(&the_end.mutex);
    return goes_on;
}

static void leave_piece(void)
{
    pthread_mutex_lock(&the_end.mutex);
    if (!--the_end.busy)
        pthread_cond_broadcast(&the_end.changed);
    pthread_mutex_unlock(&the_end.mutex);
}

/* ---- a job ------------------------------------------------------------------------------------------------------------- */

/* As it lies, without the buffer. */
static bool goes_straight(const mo_disk *disk, const char *memory, size_t size)
{
    return !disk->file.direct ||
           ((uintptr_t)memory % MO_FILE_ALIGNMENT == 0 && size % MO_FILE_ALIGNMENT == 0);
}

static mo_status write_piece(mo_disk *disk, mo_disk_job *job, size_t from, size_t size)
{
    const char *memory = job->memory + from;
    size_t whole = size;

    if (!goes_straight(disk, memory, size)) {
        whole = mo_ceil_div(size, MO_FILE_ALIGNMENT) * MO_FILE_ALIGNMENT;
        memcpy(disk->buffer, memory, size);
        memset(disk->buffer + size, 0, whole - size);
        memory = disk->buffer;
    }
    job->sum = mo_sum(job->sum, memory, size);
    return mo_file_write(&disk->file, memory, whole, job->at + from, &job->detail);
}

static mo_status read_piece(mo_disk *disk, mo_disk_job *job, size_t from, size_t size, uint64_t *sum)
{
    char *memory = job->memory + from;
    mo_status status;

    if (goes_straight(disk, memory, size)) {
        status = mo_file_read(&disk->file, memory, size, job->at + from, &job->detail);
    } else {
        const size_t whole = mo_ceil_div(size, MO_FILE_ALIGNMENT) * MO_FILE_ALIGNMENT;
        status = mo_file_read(&disk->file, disk->buffer, whole, job->at + from, &job->detail);
        if (!status)
            memcpy(memory, disk->buffer, size);
    }
    if (!status)
        *sum = mo_sum(*sum, memory, size);
    return status;
}

/* The copy that the job comes behind; a piece at a time, which is how long the end of the process may wait for it. */
static mo_status wait_for_copy(const mo_disk_job *job, mo_detail *detail, bool *goes_on)
{
    const uint64_t piece = 10000000; /* nanoseconds */
    bool over = !job->copies;
    mo_status status = MO_OK;

    while (!over && !status && (*goes_on = enter_piece())) {
        status = mo_copies_wait(job->copies, job->behind, piece, detail, &over);
        leave_piece();
    }
    return status;
}

/* False: the process ends. */
static bool run(mo_disk *disk, mo_disk_job *job)
{
    bool goes_on = true;
    uint64_t sum = 0;
    mo_status status = wait_for_copy(job, &job->detail, &goes_on);

    if (job->writes)
        job->sum = 0;
    for (size_t from = 0; goes_on && !status && from < job->size; from += MO_DISK_PIECE) {
        const size_t size = mo_size_min(MO_DISK_PIECE, job->size - from);
        if (!(goes_on = enter_piece()))
            break;
        status = job->writes ? write_piece(disk, job, from, size) : read_piece(disk, job, from, size, &sum);
        leave_piece();
    }
    if (goes_on && !status && !job->writes && sum != job->sum)
        status = mo_fail(&job->detail, MO_IO, EIO,
                         "reading %zu bytes at %llu of a file in %s: they differ from the bytes that were "
                         "written; the disk or its file system is faulty: give a directory on another disk",
                         job->size, (unsigned long long)job->at, disk->file.directory);
    job->status = status;
    return goes_on;
}

/* ---- the thread -------------------------------------------------------------------------------------------------------- */

static void over_locked(mo_disk *disk, mo_disk_job *job)
{
    MO_ASSERT(mo_lock_held(&disk->lock));
    job->state = MO_JOB_OVER;
    disk->counts.direct = disk->file.direct;
    if (job->status) {
        if (job->writes && !disk->failed) {
            disk->failed = job->status;
            disk->failure = job->detail;
        }
    } else if (job->writes) {
        disk->counts.bytes_written += job->size;
    } else {
        disk->counts.bytes_read += job->size;
    }
    pthread_cond_broadcast(&disk->changed);
}

static void take_first_locked(mo_disk *disk, mo_disk_job *job)
{
    disk->first = job->next;
    if (!disk->first)
        disk->last = &disk->first;
    disk->queued--;
}

static void *serve(void *argument)
{
    mo_disk *disk = argument;

    mo_lock_take(&disk->lock);
    for (;;) {
        mo_disk_job *job = disk->first;
        bool goes_on = true;
        if (disk->closing)
            break;
        if (!job) {
            mo_lock_wait(&disk->lock, &disk->changed);
            continue;
        }
        take_first_locked(disk, job);
        job->state = MO_JOB_RUNNING;
        if (job->writes && disk->failed) {
            job->status = disk->failed;
            job->detail = disk->failure;
        } else {
            mo_lock_give(&disk->lock);
            goes_on = run(disk, job);
            mo_lock_take(&disk->lock);
        }
        if (!goes_on) { /* whoever still waits for the job does so in a process that ends */
            job->status = mo_fail(&job->detail, MO_UNSUPPORTED, 0, "the process ends");
            disk->closing = true;
        }
        over_locked(disk, job);
    }
    mo_lock_give(&disk->lock);
    return NULL;
}

static mo_status start_locked(mo_disk *disk, mo_detail *detail)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    sigset_t all, former;
    int failed;

    pthread_once(&once, watch_the_end);
    sigfillset(&all); /* signals are the program's threads' */
    pthread_sigmask(SIG_SETMASK, &all, &former);
    failed = pthread_create(&disk->thread, NULL, serve, disk);
    pthread_sigmask(SIG_SETMASK, &former, NULL);
    if (failed)
        return mo_fail(detail, MO_NO_HOST_MEMORY, failed, "no thread for a disk: %s", strerror(failed));
    disk->started = true;
    return MO_OK;
}

/* ---- the disk ------------------------------------------------------------------------------------------------------------ */

mo_status mo_disk_open(const char *directory, const mo_file_calls *calls, mo_disk *out, mo_detail *detail)
{
    mo_file file;
    void *block;
    mo_status status = mo_file_open(directory, calls, &file, detail);

    if (status)
        return status;
    block = mo_host_alloc(MO_DISK_PIECE + MO_FILE_ALIGNMENT);
    if (!block) {
        mo_file_close(&file);
        return mo_fail(detail, MO_NO_HOST_MEMORY, 0, "no memory for a disk buffer");
    }
    *out = (mo_disk){
        .file = file,
        .lock = MO_LOCK_INIT,
        .changed = PTHREAD_COND_INITIALIZER,
        .process = getpid(),
        .last = &out->first,
        .counts.direct = file.direct,
        .buffer_block = block,
        .buffer = (char *)(((uintptr_t)block + MO_FILE_ALIGNMENT) & ~(uintptr_t)(MO_FILE_ALIGNMENT - 1)),
    };
    return MO_OK;
}

static bool is_a_childs(const mo_disk *disk)
{
    return disk->process != getpid();
}

static mo_status refuse_child(const mo_disk *disk, mo_detail *detail)
{
    return mo_fail(
        detail, MO_UNSUPPORTED, 0,
        "the content of a file in %s, written before this process was forked, belongs to the parent: the "
        "child must start again",
        disk->file.directory);
}

void mo_disk_close(mo_disk *disk)
{
    if (!is_a_childs(disk)) {
        mo_lock_take(&disk->lock);
        disk->closing = true;
        while (disk->first) {
            mo_disk_job *job = disk->first;
            take_first_locked(disk, job);
            job->status =
                mo_fail(&job->detail, MO_UNSUPPORTED, 0, "the file in %s was closed", disk->file.directory);
            job->state = MO_JOB_OVER;
        }
        pthread_cond_broadcast(&disk->changed);
        mo_lock_give(&disk->lock);
        if (disk->started)
            pthread_join(disk->thread, NULL);
        pthread_cond_destroy(&disk->changed);
    }
    mo_file_close(&disk->file);
    mo_host_free(disk->buffer_block);
}

mo_status mo_disk_reserve(mo_disk *disk, uint64_t at, size_t size, mo_detail *detail)
{
    return is_a_childs(disk) ? refuse_child(disk, detail) : mo_file_reserve(&disk->file, at, size, detail);
}

mo_status mo_disk_begin(mo_disk *disk, mo_disk_job *job, mo_detail *detail)
{
    mo_status status;

    MO_ASSERT(job->size && job->at % MO_FILE_ALIGNMENT == 0);
    if (is_a_childs(disk))
        return refuse_child(disk, detail);
    mo_lock_take(&disk->lock);
    status = disk->started ? MO_OK : start_locked(disk, detail);
    disk->counts.waits += !status && disk->queued == MO_DISK_JOBS;
    while (!status && disk->queued == MO_DISK_JOBS && !disk->closing)
        mo_lock_wait(&disk->lock, &disk->changed);
    if (!status && disk->closing)
        status = mo_fail(detail, MO_UNSUPPORTED, 0, "the file in %s was closed", disk->file.directory);
    if (!status && job->writes && disk->failed) {
        status = disk->failed;
        if (detail)
            *detail = disk->failure;
    }
    if (!status) {
        job->next = NULL;
        job->state = MO_JOB_QUEUED;
        *disk->last = job;
        disk->last = &job->next;
        disk->queued++;
        pthread_cond_broadcast(&disk->changed);
    }
    mo_lock_give(&disk->lock);
    return status;
}

bool mo_disk_over(mo_disk *disk, const mo_disk_job *job)
{
    bool over;

    if (is_a_childs(disk))
        return false;
    mo_lock_take(&disk->lock);
    over = job->state == MO_JOB_OVER;
    mo_lock_give(&disk->lock);
    return over;
}

mo_status mo_disk_finish(mo_disk *disk, mo_disk_job *job, mo_detail *detail)
{
    mo_status status;

    if (is_a_childs(disk))
        return refuse_child(disk, detail);
    mo_lock_take(&disk->lock);
    MO_ASSERT(job->state != MO_JOB_IDLE);
    while (job->state != MO_JOB_OVER)
        mo_lock_wait(&disk->lock, &disk->changed);
    status = job->status;
    if (status && detail)
        *detail = job->detail;
    mo_lock_give(&disk->lock);
    return status;
}

void mo_disk_cancel(mo_disk *disk, mo_disk_job *job)
{
    if (is_a_childs(disk))
        return;
    mo_lock_take(&disk->lock);
    if (job->state == MO_JOB_QUEUED) {
        mo_disk_job **link = &disk->first;
        while (*link != job)
            link = &(*link)->next;
        *link = job->next;
        if (!job->next)
            disk->last = link;
        disk->queued--;
        job->state = MO_JOB_IDLE;
        pthread_cond_broadcast(&disk->changed);
    }
    while (job->state == MO_JOB_RUNNING)
        mo_lock_wait(&disk->lock, &disk->changed);
    mo_lock_give(&disk->lock);
}

mo_disk_counts mo_disk_counted(mo_disk *disk)
{
    mo_disk_counts counts;

    if (is_a_childs(disk)) /* the lock may be one that a thread of the parent held */
        return disk->counts;
    mo_lock_take(&disk->lock);
    counts = disk->counts;
    mo_lock_give(&disk->lock);
    return counts;
}
