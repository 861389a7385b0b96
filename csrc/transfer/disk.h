/* A disk as a place for bytes: jobs that write them and read them back, done one after the other, in the order in which
 * they were begun, by a thread of the disk's own.
 *
 *     job: idle ─► queued ─► running ─► over (status, detail)      queued: cancel takes it back
 *
 * What a job moves is left as it is until the job is over; the job is the caller's, and is not moved meanwhile. A write
 * notes the sum of what it wrote in the job (mo_sum); a read of the same range is told it, and is MO_IO if it comes to
 * another: what is given back is what was given, or an error. A job may come behind a device's copy with its memory.
 *
 *     queued jobs <= MO_DISK_JOBS: beginning one more waits for the oldest
 *
 * Direct transfers need aligned memory: what is not goes through a buffer of the thread's, and so does the last part of a
 * page; ranges of the file begin at multiples of MO_FILE_ALIGNMENT, and up to the next one is theirs.
 *
 * The first failure of a write is the disk's: every later write fails at once with the same words. A child of a fork has
 * no such thread: there everything answers MO_UNSUPPORTED, and closing is quiet. When the process ends, the thread
 * stops between two pieces of MO_DISK_PIECE before anything is taken down. */
#ifndef MO_DISK_H
#define MO_DISK_H

#include <pthread.h>

#include "transfer/copies.h"
#include "transfer/nameless_file.h"

#define MO_DISK_JOBS  64
#define MO_DISK_PIECE ((size_t)4 << 20)

typedef enum mo_job_state { MO_JOB_IDLE, MO_JOB_QUEUED, MO_JOB_RUNNING, MO_JOB_OVER } mo_job_state;

typedef struct mo_disk_job {
    bool writes;
    char *memory;
    size_t size; /* > 0 */
    uint64_t at; /* a multiple of MO_FILE_ALIGNMENT */
    uint64_t sum;
    mo_copies *copies; /* NULL, or the job comes behind their copy `behind` */
    mo_ticket behind;
    /* the disk's */
    mo_job_state state;
    mo_status status;
    mo_detail detail;
    struct mo_disk_job *next;
} mo_disk_job;

/* Of jobs that are over well. waits: of callers that found the queue full; direct: past the page cache, with the last
 * job at least. */
typedef struct mo_disk_counts {
    uint64_t bytes_written, bytes_read, waits;
    bool direct;
} mo_disk_counts;

typedef struct mo_disk {
    mo_file file;
    mo_lock lock;
    pthread_cond_t changed;
    pthread_t thread;
    bool started, closing;
    pid_t process; /* whose thread it is */
    mo_disk_job *first, **last;
    size_t queued;
    mo_status failed;
    mo_detail failure;
    void *buffer_block;
    char *buffer; /* the thread's: MO_DISK_PIECE bytes, aligned */
    mo_disk_counts counts;
} mo_disk;

/* Not to be moved afterwards. The thread starts with the first job. */
mo_status mo_disk_open(const char *directory, const mo_file_calls *calls, mo_disk *out, mo_detail *detail);

/* Jobs that are queued are taken back (their status is MO_UNSUPPORTED); WAITS for the one that runs. */
void mo_disk_close(mo_disk *disk);

/* As mo_file_reserve; beside the jobs. */
mo_status mo_disk_reserve(mo_disk *disk, uint64_t at, size_t size, mo_detail *detail);

/* Queues it. WAITS where the queue is full. */
mo_status mo_disk_begin(mo_disk *disk, mo_disk_job *job, mo_detail *detail);

/* Whether the job is over. */
bool mo_disk_over(mo_disk *disk, const mo_disk_job *job);

/* WAITS until it is, and tells what came of it. */
mo_status mo_disk_finish(mo_disk *disk, mo_disk_job *job, mo_detail *detail);

/* The job is no longer wanted: taken back if it has not begun, else WAITS for it. Quiet. */
void mo_disk_cancel(mo_disk *disk, mo_disk_job *job);

/* In a child of a fork, what they were then. */
mo_disk_counts mo_disk_counted(mo_disk *disk);

/* A number that other bytes, or bytes in other places, hardly ever have too; of a range, piece after piece: begin with
 * 0. All pieces but the last are multiples of 64 bytes. */
uint64_t mo_sum(uint64_t before, const void *bytes, size_t size);

#endif
