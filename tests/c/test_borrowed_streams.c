#include "pool_fixture.h"

/* Streams that the program may destroy at any time: the driver is given their handles only while they must be alive. Of the
 * streams here A alone lasts. */

static mo_stream named;           /* of the request or record_stream that is made now */
static const mo_stream *recorded; /* by the block that is freed now; ends with NULL */
static uint64_t touched;          /* handles that the driver was given and should not have been */
static mo_stream (*torch_says)(void);

static bool lasts(int number, mo_stream stream)
{
    (void)number;
    return stream == A || (torch_says && torch_says() == stream);
}

static void look(mo_stream stream)
{
    bool alive = !stream || stream == A || stream == named;

    for (const mo_stream *s = recorded; s && *s; s++)
        alive |= *s == stream;
    touched += !alive;
}

static mo_status (*record)(mo_driver *, mo_event *, mo_stream, mo_detail *);
static mo_status (*wait_behind)(mo_driver *, mo_stream, mo_event *, mo_detail *);
static mo_status (*capture)(mo_driver *, mo_stream, mo_detail *, uint64_t *);

static mo_status watched_record(mo_driver *driver, mo_event *event, mo_stream stream, mo_detail *detail)
{
    look(stream);
    return record(driver, event, stream, detail);
}

static mo_status watched_wait(mo_driver *driver, mo_stream stream, mo_event *event, mo_detail *detail)
{
    look(stream);
    return wait_behind(driver, stream, event, detail);
}

static mo_status watched_capture(mo_driver *driver, mo_stream stream, mo_detail *detail, uint64_t *out)
{
    look(stream);
    return capture(driver, stream, detail, out);
}

static void open_watched(size_t capacity, bool double_map, size_t budget)
{
    mo_pool_settings settings = plain_settings;

    settings.double_map = double_map;
    settings.budget = budget;
    settings.stream_lasts = lasts;
    named = NULL;
    recorded = NULL;
    torch_says = NULL;
    touched = 0;
    open_pool(capacity, GRANULE, settings);
    record = device.table.event_record;
    wait_behind = device.table.stream_wait;
    capture = device.table.capture_id;
    device.table.event_record = watched_record;
    device.table.stream_wait = watched_wait;
    device.table.capture_id = watched_capture;
}

static mo_address get_on(size_t size, mo_stream stream)
{
    named = stream;
    const mo_address a = get(size, stream);
    named = NULL;
    return a;
}

/* The program's own events need its streams alive, of course. */
static void use_and_record(mo_address address, mo_stream stream)
{
    const mo_stream both[] = {model_at(&model, address)->stream, stream, NULL};

    recorded = both;
    use_on(address, stream);
    recorded = NULL;
}

static void put_recorded(mo_address address, const mo_stream *streams)
{
    recorded = streams;
    put(address);
    recorded = NULL;
}

static void close_watched(void)
{
    CHECK_EQ(touched, 0);
    close_pool();
}

#define EACH_MODE for (int double_map = 0; double_map < 2; double_map++)

TEST(what_a_borrowed_stream_had_goes_to_another_when_the_whole_device_is_done)
{
    EACH_MODE
    {
        open_watched(64 * MIB, double_map, 24 * MIB);
        const mo_address b = get_on(20 * MIB, B);
        put(b);
        get_on(20 * MIB, A); /* the double's verdict on the order is in get() */
        CHECK_EQ(device.calls[MO_MODEL_DEVICE_synchronize], 1);
        CHECK_EQ(device.calls[MO_MODEL_DEVICE_event_record], 0);
        close_watched();
    }
}

TEST(while_there_is_other_memory_that_is_taken_and_nobody_waits)
{
    EACH_MODE
    {
        open_watched(64 * MIB, double_map, 0);
        put(get_on(20 * MIB, B));
        get_on(20 * MIB, A);
        CHECK_EQ(device.calls[MO_MODEL_DEVICE_synchronize], 0);
        close_watched();
    }
}

TEST(its_own_stream_gets_it_back_at_once)
{
    EACH_MODE
    {
        open_watched(64 * MIB, double_map, 24 * MIB);
        const mo_address b = get_on(20 * MIB, B);
        put(b);
        CHECK_EQ(get_on(20 * MIB, B), b);
        CHECK_EQ(device.calls[MO_MODEL_DEVICE_synchronize] + device.calls[MO_MODEL_DEVICE_event_record], 0);
        close_watched();
    }
}

/* As in torch's own allocator, which marks them then. */
TEST(recorded_streams_are_marked_at_the_free_and_waited_for_on_the_device)
{
    static const mo_stream both[] = {B, C, NULL};

    EACH_MODE
    {
        open_watched(64 * MIB, double_map, 8 * MIB);
        const mo_address a = get_on(8 * MIB, A);
        use_and_record(a, B);
        use_and_record(a, C);
        put_recorded(a, both);
        get_on(8 * MIB, A);
        CHECK(mo_model_device_ordered(&device, B, A) && mo_model_device_ordered(&device, C, A));
        CHECK_EQ(device.calls[MO_MODEL_DEVICE_synchronize], 0);
        close_watched();
    }
}

/* A later mark is not to come, so the newest one moves on. */
TEST(each_free_of_what_recorded_it_is_marked_however_many_there_were)
{
    static const mo_stream one[] = {B, NULL};
    mo_address a[3 * MO_MARKS];

    EACH_MODE
    {
        open_watched(64 * MIB, double_map, 48 * MIB);
        for (size_t i = 0; i < 3 * MO_MARKS; i++) {
            a[i] = get_on(2 * MIB, A);
            use_and_record(a[i], B);
        }
        for (size_t i = 0; i < 3 * MO_MARKS; i++)
            put_recorded(a[i], one);
        get_on(48 * MIB, A);
        CHECK(mo_model_device_ordered(&device, B, A));
        CHECK_EQ(device.calls[MO_MODEL_DEVICE_synchronize], 0);
        close_watched();
    }
}

static mo_stream says_b(void)
{
    return B;
}

/* It was recorded first, when its own thread was not the one that asked. */
TEST(a_stream_that_is_found_to_last_is_marked_late_like_any)
{
    EACH_MODE
    {
        open_watched(64 * MIB, double_map, 24 * MIB);
        const mo_address a = get_on(MIB, A);
        use_and_record(a, B);
        torch_says = says_b;
        const mo_address b = get_on(20 * MIB, B);
        put(b);
        CHECK_EQ(touched, 0);
        named = B; /* from here on it may be */
        get(20 * MIB, A);
        CHECK(mo_model_device_ordered(&device, B, A));
        CHECK_EQ(device.calls[MO_MODEL_DEVICE_synchronize], 0);
        close_watched();
    }
}

/* It may be the borrowed stream that is captured. */
TEST(while_there_is_a_route_the_device_is_not_waited_for)
{
    const mo_arena_id graph = {7, 0};
    mo_address a = 0;

    EACH_MODE
    {
        open_watched(64 * MIB, double_map, 24 * MIB);
        put(get_on(20 * MIB, B));
        CHECK_OK(mo_pool_arena_retain(pool, graph, true, 0, &said));
        CHECK_OK(mo_pool_route(pool, graph, (mo_route){0}, &said));
        CHECK_OUT_OF_MEMORY(mo_pool_alloc_in(pool, GENERAL, 20 * MIB, A, &said, &a));
        CHECK_EQ(device.calls[MO_MODEL_DEVICE_synchronize], 0);
        CHECK_OK(mo_pool_unroute(pool, graph, &said));
        get_on(20 * MIB, A);
        CHECK_OK(mo_pool_arena_release(pool, graph, &said));
        close_watched();
    }
}

static void random_program(bool double_map, size_t budget)
{
    static const mo_stream streams[] = {A, B, C, (mo_stream)0x40, (mo_stream)0x50};
    uint64_t random = test_seed() + double_map;
    struct {
        mo_address address;
        mo_stream recorded[3];
    } live[40] = {0};

    open_watched(256 * MIB, double_map, budget);
    for (int n = 0; n < 4000; n++) {
        const size_t i = test_random(&random) % 40;
        const mo_stream stream = streams[test_random(&random) % 5];
        const uint64_t what = test_random(&random) % 8;

        if (!live[i].address) {
            live[i].address = get_on(1 + test_random(&random) % (3 * MIB), stream);
            memset(live[i].recorded, 0, sizeof live[i].recorded);
        } else if (what < 2 && !live[i].recorded[what]) {
            if (model_at(&model, live[i].address)->stream != stream) {
                use_and_record(live[i].address, stream);
                live[i].recorded[live[i].recorded[0] != NULL] = stream;
            }
        } else if (what < 6) {
            put_recorded(live[i].address, live[i].recorded);
            live[i].address = 0;
        } else {
            mo_model_device_complete(&device, stream, test_random(&random) % 20);
        }
        if (n % 64 == 0)
            CHECK_POOL();
        CHECK_EQ(touched, 0);
    }
    close_watched();
}

TEST(no_program_has_a_borrowed_streams_handle_used_or_memory_out_of_order)
{
    EACH_MODE
    {
        random_program(double_map, 0);
        random_program(double_map, 128 * MIB);
    }
}

TEST_MAIN
