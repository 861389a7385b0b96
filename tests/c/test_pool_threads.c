#include "pool_fixture.h"

#include <pthread.h>
#include <stdatomic.h>

/* Eight threads, one pool. What is live stands in a ledger outside the pool, from after its allocation to before its free:
 * two entries that overlap are two owners of one byte. */

enum { THREADS = 8, SLOTS = 24 };

typedef struct held_block {
    mo_address address;
    size_t size;
    mo_stream stream;
} held_block;

typedef struct worker {
    pthread_t thread;
    uint64_t random;
    int operations;
    const char *failed;
} worker;

static pthread_mutex_t ledger_lock = PTHREAD_MUTEX_INITIALIZER;
static held_block ledger[THREADS * SLOTS + SLOTS]; /* all that is live, address 0: free entry */
static atomic_bool stop;

#define LEDGER (sizeof ledger / sizeof *ledger)

static bool enter(held_block block)
{
    bool apart = true;
    held_block *place = NULL;
    pthread_mutex_lock(&ledger_lock);
    for (size_t i = 0; i < LEDGER; i++) {
        if (!ledger[i].address)
            place = place ? place : &ledger[i];
        else
            apart &= ledger[i].address + ledger[i].size <= block.address ||
                     block.address + block.size <= ledger[i].address;
    }
    if (place)
        *place = block;
    pthread_mutex_unlock(&ledger_lock);
    return apart && place;
}

/* Takes anyone's block out: whoever frees it need not be who allocated it. */
static held_block leave_any(uint64_t random)
{
    held_block block = {0};
    pthread_mutex_lock(&ledger_lock);
    for (size_t i = 0; i < LEDGER && !block.address; i++) {
        held_block *entry = &ledger[(random + i) % LEDGER];
        block = *entry;
        *entry = (held_block){0};
    }
    pthread_mutex_unlock(&ledger_lock);
    return block;
}

static size_t entries(void)
{
    size_t n = 0;
    pthread_mutex_lock(&ledger_lock);
    for (size_t i = 0; i < LEDGER; i++)
        n += ledger[i].address != 0;
    pthread_mutex_unlock(&ledger_lock);
    return n;
}

static void *work(void *argument)
{
    worker *w = argument;
    mo_detail detail;
    for (int i = 0; i < w->operations && !w->failed; i++) {
        const uint64_t r = test_random(&w->random), what = r % 100;
        const mo_stream stream = (mo_stream)((r >> 8) % 4 * 0x10);
        if (what < 48) {
            held_block block = {0, 1 + test_random(&w->random) % ((size_t)1 << (9 + (r >> 16) % 13)), stream};
            if (entries() >= THREADS * SLOTS)
                continue;
            const mo_status status = mo_pool_alloc(pool, block.size, stream, &detail, &block.address);
            if (status == MO_NO_DEVICE_MEMORY)
                continue;
            if (status)
                w->failed = "alloc";
            else if (!enter(block))
                w->failed = "two live blocks overlap";
        } else if (what < 90) {
            const held_block block = leave_any(r >> 8);
            if (!block.address)
                continue;
            if ((r >> 40) % 4 == 0 &&
                mo_pool_record_stream(pool, block.address + block.size / 2, stream, &detail))
                w->failed = "record_stream";
            if (mo_pool_free(pool, block.address, &detail))
                w->failed = "free";
        } else if (what < 94) {
            mo_model_device_complete(&device, stream, 5);
        } else if (what < 96) {
            mo_stats stats;
            mo_fragmentation f;
            mo_pool_read_stats(pool, &stats);
            mo_pool_fragmentation(pool, &f);
            if (f.held_bytes < f.live_bytes)
                w->failed = "fragmentation";
        } else if (what < 97) {
            size_t freed;
            if (mo_pool_trim(pool, (r >> 20) % (64 * MIB), &detail, &freed))
                w->failed = "trim";
        } else if (what < 98) {
            mo_block_view *blocks;
            size_t count;
            if (mo_pool_blocks(pool, &detail, &blocks, &count))
                w->failed = "blocks";
            else
                mo_host_free(blocks);
        } else if (what < 99) {
            if (mo_pool_check(pool, &detail))
                w->failed = "check";
        } else {
            const mo_arena_id id = {0, 1 + (r >> 20) % 3};
            mo_address address;
            if (mo_pool_arena_retain(pool, id, false, 0, &detail))
                w->failed = "retain";
            else if (mo_pool_alloc_in(pool, id, 3 * MIB, stream, &detail, &address) == MO_OK &&
                     mo_pool_free(pool, address, &detail))
                w->failed = "free in an arena";
            if (mo_pool_arena_release(pool, id, &detail))
                w->failed = "release";
        }
    }
    return NULL;
}

static void threads_share(mo_pool_settings settings, size_t granularity)
{
    worker workers[THREADS];
    uint64_t seed = test_seed();
    memset(ledger, 0, sizeof ledger);
    open_pool(1024 * MIB, granularity, settings);
    for (int i = 0; i < THREADS; i++) {
        workers[i] = (worker){.random = seed + (uint64_t)i * 7919, .operations = test_rounds(400, 20000)};
        CHECK_EQ(pthread_create(&workers[i].thread, NULL, work, &workers[i]), 0);
    }
    for (int i = 0; i < THREADS; i++)
        pthread_join(workers[i].thread, NULL);
    for (int i = 0; i < THREADS; i++)
        if (workers[i].failed)
            TEST_FAIL("thread %d: %s", i, workers[i].failed);
    CHECK_POOL();
    CHECK_EQ(stats_now().of[MO_ALLOCATION][MO_STAT_ALL].current, entries());
    for (held_block block; (block = leave_any(0)).address;)
        CHECK_OK(mo_pool_free(pool, block.address, &said));
    close_pool();
}

TEST(threads_share_a_pool)
{
    threads_share(plain_settings, GRANULE);
}

TEST(threads_share_a_pool_at_its_budget)
{
    threads_share((mo_pool_settings){.budget = 40 * MIB, .slack = 20, .double_map = false, .recall = true},
                  GRANULE);
}

TEST(threads_share_segments)
{
    threads_share((mo_pool_settings){.budget = 80 * MIB, .slack = 20}, 0);
}

/* ---- statistics are read while others work ------------------------------------------------------------------ */

static void *churn(void *argument)
{
    uint64_t random = (uintptr_t)argument;
    while (!atomic_load(&stop)) {
        mo_address address;
        if (mo_pool_alloc(pool, 1 + test_random(&random) % (3 * MIB), A, NULL, &address) == MO_OK)
            mo_pool_free(pool, address, NULL);
    }
    return NULL;
}

TEST(statistics_are_whole_whenever_they_are_read)
{
    pthread_t threads[4];
    open_pool(256 * MIB, GRANULE, plain_settings);
    atomic_store(&stop, false);
    for (uintptr_t i = 0; i < 4; i++)
        CHECK_EQ(pthread_create(&threads[i], NULL, churn, (void *)(i + 1)), 0);
    bool whole = true;
    for (int i = 0, n = test_rounds(200, 10000); i < n; i++) {
        const mo_stats s = stats_now();
        whole &=
            s.of[MO_REQUESTED_BYTES][MO_STAT_ALL].current <= s.of[MO_ALLOCATED_BYTES][MO_STAT_ALL].current &&
            s.of[MO_ALLOCATED_BYTES][MO_STAT_ALL].current <= s.of[MO_RESERVED_BYTES][MO_STAT_ALL].current &&
            s.of[MO_ALLOCATION][MO_STAT_ALL].current <= 4;
        if (i % 50 == 0)
            mo_pool_reset_peaks(pool);
    }
    atomic_store(&stop, true);
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    CHECK(whole);
    CHECK_EQ(stats_now().of[MO_ALLOCATION][MO_STAT_ALL].current, 0);
    close_pool();
}

TEST_MAIN
