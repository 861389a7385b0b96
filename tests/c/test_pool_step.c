/* A step is an event of the trace, in its place among the others, and nothing where there is no trace. */
#include "alloc/pool.h"
#include "alloc/trace_ring.h"
#include "driver/model_device.h"
#include "test.h"

TEST(a_step_stands_between_the_requests_around_it)
{
    const mo_pool_settings settings = {.slack = 20};
    mo_trace_record got[16];
    uint16_t ops[16];
    mo_address a, b;
    mo_model_device device;
    mo_detail why;
    mo_pool *pool;
    mo_trace *ring;
    uint64_t first;
    int count = 0;

    mo_model_device_open(&device, 1u << 30, 2u << 20);
    CHECK_EQ(mo_pool_open(&device.table, &settings, &why, &pool), MO_OK);
    CHECK_EQ(mo_trace_open(16, &why, &ring), MO_OK);
    mo_pool_step(pool); /* nobody listens */
    mo_pool_trace(pool, ring);
    CHECK_EQ(mo_pool_alloc(pool, 100, NULL, &why, &a), MO_OK);
    mo_pool_step(pool);
    CHECK_EQ(mo_pool_alloc(pool, 100, NULL, &why, &b), MO_OK);
    const size_t kept = mo_trace_read(ring, 0, got, 16, &first);
    for (size_t i = 0; i < kept; i++)
        if (got[i].op != MO_TRACE_MAP)
            ops[count++] = got[i].op;
    CHECK_EQ(count, 3);
    CHECK(ops[0] == MO_TRACE_ALLOC && ops[1] == MO_TRACE_STEP && ops[2] == MO_TRACE_ALLOC);
    CHECK_EQ(mo_pool_close(pool, &why), MO_OK);
    mo_trace_close(ring);
    mo_model_device_close(&device);
}

TEST_MAIN
