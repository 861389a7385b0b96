/* Granules that move, from inside the pool. */
#include "alloc/remap.h"

#include "alloc/supply.h"
#include "pool_fixture.h"

#define UNIT ((size_t)1 << 19) /* bytes of a granule here */

static mo_request request_of(mo_arena *arena, size_t size, mo_stream stream)
{
    mo_request request = {
        .arena = arena, .zone = &arena->zones[MO_ZONE_LARGE], .size = size, .requested = size};

    CHECK_OK(mo_stream_order_number(&pool->order, stream, &said, &request.stream));
    return request;
}

TEST(a_stale_slot_can_be_switched_to_where_its_granule_is_free_outside_the_site)
{
    mo_request request;
    mo_block *elsewhere;
    mo_address a, b;
    mo_span *span;
    mo_slot *slot;
    mo_site site;

    open_pool(1024 * MIB, UNIT, (mo_pool_settings){.double_map = true});
    a = get(4 * UNIT, A);
    get(3 * UNIT, A);
    put(a);
    request = request_of(&pool->general, 4 * UNIT, A);
    span = request.zone->spans;
    slot = &span->slots[mo_span_slot(span, a)];
    site = (mo_site){.span = span, .at = a};
    CHECK(!mo_remap_switchable(pool, &request, &site, slot, &elsewhere)); /* it is owned */
    CHECK_OK(mo_supply_collect(pool, &request, &(mo_site){.at = 512}, MO_EFFORT_MOVE, 0, 4, &said));
    CHECK(mo_remap_switchable(pool, &request, &site, slot, &elsewhere) && !elsewhere); /* spare */
    b = get(6 * UNIT, A); /* the four are there now */
    CHECK(b != a);
    for (int i = 0; i < 4; i++)
        CHECK(!mo_remap_switchable(pool, &request, &site, slot + i, &elsewhere)); /* live */
    put(b);
    for (int i = 0; i < 4; i++)
        CHECK_EQ(mo_remap_switchable(pool, &request, &site, slot + i, &elsewhere), slot[i].granule != NULL);
    CHECK(elsewhere == mo_span_block_at(span, b));
    site.at = b;
    request.size = 6 * UNIT;
    for (int i = 0; i < 4; i++)
        CHECK(!mo_remap_switchable(pool, &request, &site, slot + i, &elsewhere)); /* inside the site */
    site.at = a;
    request = request_of(&pool->general, 4 * UNIT, B);
    CHECK(!mo_remap_switchable(pool, &request, &site, slot, &elsewhere)); /* another stream's still */
    request = request_of(&pool->general, 4 * UNIT, A);
    request.captured = true;
    CHECK(!mo_remap_switchable(pool, &request, &site, slot, &elsewhere));
    request.captured = false;
    pool->general.pinned = true;
    CHECK(!mo_remap_switchable(pool, &request, &site, slot, &elsewhere));
    pool->general.pinned = false;
    slot->granted = false;
    CHECK(!mo_remap_switchable(pool, &request, &site, slot, &elsewhere));
    slot->granted = true;
    CHECK(mo_remap_switchable(pool, &request, &site, slot, &elsewhere));
    put(model.blocks[0].address);
    close_pool();
}

TEST(where_memory_went_is_told_by_the_address_it_had_last_and_in_the_order_that_it_had)
{
    mo_address from, at;
    mo_zone *zone;
    size_t freed;

    open_pool(12 * UNIT, UNIT, (mo_pool_settings){.budget = 12 * UNIT});
    zone = &pool->general.zones[MO_ZONE_LARGE];
    from = get(4 * UNIT, A);
    get(2 * UNIT, A);
    CHECK_EQ(mo_remap_follow(zone, from), 0);            /* it has not gone */
    CHECK_EQ(mo_remap_follow(zone, from + 8 * UNIT), 0); /* nothing was ever there */
    CHECK_EQ(mo_remap_follow(zone, zone->spans->base - 1), 0);
    put(from);
    finish(A);
    at = get(10 * UNIT, A); /* all that is left, and those four */
    CHECK(at > from);
    for (size_t i = 0; i < 4; i++) {
        CHECK(!zone->spans->slots[mo_span_slot(zone->spans, from) + i].granule);
        CHECK_EQ(mo_remap_follow(zone, from + i * UNIT + 512), mo_remap_follow(zone, from) + i * UNIT + 512);
    }
    CHECK(mo_remap_follow(zone, from) >= at && mo_remap_follow(zone, from) + 4 * UNIT <= at + 10 * UNIT);
    CHECK_EQ(mo_remap_follow(&pool->general.zones[MO_ZONE_SMALL], from), 0);
    put(at);
    finish(A);
    CHECK_OK(mo_pool_trim(pool, 0, &said, &freed));
    CHECK_EQ(mo_remap_follow(zone, from), 0); /* it is the device's again */
    close_pool();
}

/* What a device that comes later is granted by: every mapping once, in as few calls as there are rows of them. */
TEST(all_that_is_mapped_is_granted_again_and_a_call_that_fails_changes_nothing)
{
    mo_address block;

    open_pool(1024 * MIB, UNIT, (mo_pool_settings){.double_map = true});
    CHECK_OK(mo_pool_grant_again(pool, &said)); /* nothing is mapped */
    CHECK_EQ(device.calls[MO_MODEL_DEVICE_grant], 0);
    block = get(8 * UNIT, A);
    get(4 * KIB, A);
    for (uint64_t failing = 0;; failing++) {
        uint64_t before = device.calls[MO_MODEL_DEVICE_grant];
        mo_status status;

        mo_model_device_fail(&device, MO_MODEL_DEVICE_grant, failing, 1, MO_DRIVER);
        status = mo_pool_grant_again(pool, &said);
        mo_model_device_fail_never(&device);
        CHECK_POOL();
        if (!status) {
            CHECK_EQ(failing, 2); /* a row a zone */
            CHECK_EQ(device.calls[MO_MODEL_DEVICE_grant] - before, 2);
            break;
        }
        CHECK_EQ(status, MO_DRIVER);
    }
    CHECK(mo_model_device_usable(&device, block, 8 * UNIT));
    put(block);
    CHECK_OK(mo_pool_grant_again(pool, &said)); /* free memory too: it will be wanted */
    close_pool();
}

TEST_MAIN
