/* Over the simulated device, which takes the place of libcuda.so.1 (simulated_device.h). */
#include "driver/driver_cuda.h"

#include <pthread.h>

#include "child.h"
#include "driver_contract_tests.h"
#include "simulated_contract.h"

/* ---- in processes of their own ------------------------------------------------------------------------- */

/* A device is activated, and a process's driver opened, once. These come first: the children are of a process
 * that has done neither yet. */

static void no_activation_in_child(void)
{
    const mo_cuda_api *api = NULL;
    mo_driver *m = NULL;
    mo_detail detail;
    simulated_library();
    CHECK_EQ(mo_cuda_api_get(&api, &detail), MO_NO_DEVICE);
    CHECK(strstr(detail.text, "cuInit(0): CUDA_ERROR_NO_DEVICE"));
    CHECK_EQ(mo_driver_cuda_get(0, &m, &detail), MO_NO_DEVICE);
    CHECK(!api && !m);
}

TEST(a_machine_without_a_gpu_says_so)
{
    CHECK_CHILD(no_activation_in_child);
}

static unsigned primary_is_active(int ordinal)
{
    unsigned flags;
    int active = -1;
    CHECK_EQ(simulated_devices()->primary_state(ordinal, &flags, &active), CUDA_SUCCESS);
    return (unsigned)active;
}

static void opening_may_fail_in_child(void)
{
    static const char *const steps[] = {"cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetAttribute",
                                        "cuMemGetAllocationGranularity", "cuDevicePrimaryCtxRetain"};
    simulated_device *sim = simulated_devices();
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
        const int codes[] = {CUDA_ERROR_UNKNOWN, CUDA_ERROR_OUT_OF_MEMORY};
        for (int c = 0; c < 2; c++) {
            mo_driver_cuda d = {.handle = 77};
            mo_detail detail;
            const uint64_t before = sim->calls(steps[i]);
            CHECK_EQ(sim->fail(steps[i], 0, 1, codes[c]), 0);
            CHECK_EQ(mo_driver_cuda_open(&sim->api, 1, &d, &detail), c ? MO_NO_DEVICE_MEMORY : MO_DRIVER);
            CHECK_EQ(detail.code, codes[c]);
            CHECK_EQ(sim->calls(steps[i]), before + 1);
            CHECK_EQ(d.handle, 77);
            CHECK_EQ(primary_is_active(1), 0);
        }
    }
    mo_driver_cuda d;
    CHECK_EQ(mo_driver_cuda_open(&sim->api, 1, &d, NULL), MO_OK);
    CHECK_EQ(primary_is_active(1), 1);
    CHECK_EQ(mo_driver_cuda_close(&d, NULL), MO_OK);
    CHECK_EQ(primary_is_active(1), 0);
}

TEST(opening_may_fail_at_any_step_and_holds_no_context_then)
{
    CHECK_CHILD(opening_may_fail_in_child);
}

enum { THREADS = 8 };
static pthread_barrier_t together;

static void *get(void *slot)
{
    mo_driver *m = NULL;
    pthread_barrier_wait(&together);
    if (mo_driver_cuda_get(1, &m, NULL) != MO_OK || m->device != 1 || !m->granularity)
        return NULL;
    *(mo_driver **)slot = m;
    return slot;
}

static CUresult slow_count(int *out)
{
    usleep(2000);
    return simulated_devices()->api.device_count(out);
}

static void many_threads_in_child(void)
{
    mo_driver *drivers[THREADS], *again = NULL, *other = NULL;
    pthread_t threads[THREADS];
    void *done;
    const mo_cuda_api *api;
    simulated_device *sim = simulated_devices();
    CHECK_EQ(mo_cuda_api_get(&api, NULL), MO_OK);    /* its lock would let them in one by one */
    ((mo_cuda_api *)api)->device_count = slow_count; /* nor shall the first be done before the second comes */
    pthread_barrier_init(&together, NULL, THREADS);
    for (int i = 0; i < THREADS; i++)
        CHECK_EQ(pthread_create(&threads[i], NULL, get, &drivers[i]), 0);
    for (int i = 0; i < THREADS; i++) {
        pthread_join(threads[i], &done);
        CHECK(done == &drivers[i]);
        CHECK(drivers[i] == drivers[0]);
    }
    CHECK_EQ(sim->calls("cuDevicePrimaryCtxRetain"), 1);
    CHECK_EQ(mo_driver_cuda_get(1, &again, NULL), MO_OK);
    CHECK(again == drivers[0]);
    CHECK_EQ(mo_driver_cuda_get(0, &other, NULL), MO_OK);
    CHECK(other != again && other->device == 0);
}

static void failures_in_child(void)
{
    mo_driver *m = NULL;
    mo_detail detail;
    simulated_device *sim = simulated_devices();
    CHECK_EQ(sim->fail("cuDevicePrimaryCtxRetain", 0, 1, CUDA_ERROR_OUT_OF_MEMORY), 0);
    CHECK_EQ(mo_driver_cuda_get(0, &m, &detail), MO_NO_DEVICE_MEMORY);
    CHECK(strstr(detail.text, "cuDevicePrimaryCtxRetain(0)"));
    CHECK_EQ(mo_driver_cuda_get(2, &m, &detail), MO_NO_DEVICE);
    CHECK(strstr(detail.text, "no CUDA device 2: this process sees 2"));
    CHECK_EQ(mo_driver_cuda_get(-1, &m, &detail), MO_NO_DEVICE);
    CHECK(strstr(detail.text, "-1"));
    CHECK_EQ(mo_driver_cuda_get(MO_MAX_DEVICES, &m, &detail), MO_NO_DEVICE);
    CHECK(strstr(detail.text, "64"));
    CHECK(!m);
    CHECK_EQ(mo_driver_cuda_get(0, &m, &detail), MO_OK);
    CHECK(m && m->device == 0);
}

TEST(the_processs_driver_is_opened_once_however_many_threads_ask)
{
    for (int i = 0, n = test_rounds(3, 100); i < n; i++)
        CHECK_CHILD(many_threads_in_child);
}

TEST(a_processs_driver_that_could_not_be_opened_can_be_later)
{
    CHECK_CHILD(failures_in_child);
}

/* ---- the contract -------------------------------------------------------------------------------------- */

#define RUN(name) contract_##name(contract())
TEST(reservations_do_not_overlap_and_cost_no_memory)
{
    RUN(reservations_do_not_overlap_and_cost_no_memory);
}
TEST(a_reservation_is_given_back_whole_and_once)
{
    RUN(a_reservation_is_given_back_whole_and_once);
}
TEST(a_reservation_with_something_mapped_stays)
{
    RUN(a_reservation_with_something_mapped_stays);
}
TEST(a_reservation_beyond_all_addresses_is_refused)
{
    RUN(a_reservation_beyond_all_addresses_is_refused);
}
TEST(memory_is_what_is_created_and_the_rest_is_free)
{
    RUN(memory_is_what_is_created_and_the_rest_is_free);
}
TEST(a_full_device_says_out_of_memory_and_recovers)
{
    RUN(a_full_device_says_out_of_memory_and_recovers);
}
TEST(a_handle_is_released_once)
{
    RUN(a_handle_is_released_once);
}
TEST(sizes_that_are_no_granules_are_refused)
{
    RUN(sizes_that_are_no_granules_are_refused);
}
TEST(memory_returns_after_release_and_unmap_in_either_order)
{
    RUN(memory_returns_after_release_and_unmap_in_either_order);
}
TEST(a_handle_may_be_mapped_twice_and_returns_after_the_last)
{
    RUN(a_handle_may_be_mapped_twice_and_returns_after_the_last);
}
TEST(mappings_do_not_overlap_and_lie_in_a_reservation)
{
    RUN(mappings_do_not_overlap_and_lie_in_a_reservation);
}
TEST(mappings_are_undone_whole_one_or_several)
{
    RUN(mappings_are_undone_whole_one_or_several);
}
TEST(access_is_granted_over_mappings_in_a_row_only)
{
    RUN(access_is_granted_over_mappings_in_a_row_only);
}
TEST(segments_are_apart_aligned_and_freed_once)
{
    RUN(segments_are_apart_aligned_and_freed_once);
}
TEST(a_segment_that_does_not_fit_is_out_of_memory)
{
    RUN(a_segment_that_does_not_fit_is_out_of_memory);
}
TEST(freeing_a_segment_waits_for_the_device)
{
    RUN(freeing_a_segment_waits_for_the_device);
}
TEST(an_event_is_over_when_what_was_queued_before_it_is)
{
    RUN(an_event_is_over_when_what_was_queued_before_it_is);
}
TEST(recording_again_moves_the_mark)
{
    RUN(recording_again_moves_the_mark);
}
TEST(a_pending_event_can_be_destroyed)
{
    RUN(a_pending_event_can_be_destroyed);
}
TEST(a_stream_that_waits_goes_on_after_the_mark)
{
    RUN(a_stream_that_waits_goes_on_after_the_mark);
}
TEST(waiting_for_what_was_never_recorded_is_no_wait)
{
    RUN(waiting_for_what_was_never_recorded_is_no_wait);
}
TEST(a_wait_keeps_its_mark_when_the_event_moves_on)
{
    RUN(a_wait_keeps_its_mark_when_the_event_moves_on);
}
TEST(synchronize_ends_all_work)
{
    RUN(synchronize_ends_all_work);
}
TEST(pinned_memory_is_whole_aligned_and_freed_once)
{
    RUN(pinned_memory_is_whole_aligned_and_freed_once);
}
TEST(a_copy_is_queued_on_its_stream_and_on_no_other)
{
    RUN(a_copy_is_queued_on_its_stream_and_on_no_other);
}
TEST(a_capture_has_a_number_while_it_lasts)
{
    RUN(a_capture_has_a_number_while_it_lasts);
}
TEST(time_goes_on_and_a_pause_takes_about_as_long_as_asked)
{
    RUN(time_goes_on_and_a_pause_takes_about_as_long_as_asked);
}
TEST(any_call_may_fail_and_nothing_is_left_behind)
{
    RUN(any_call_may_fail_and_nothing_is_left_behind);
}

/* ---- opening ------------------------------------------------------------------------------------------- */

TEST(opening_tells_the_ordinal_and_the_granularity)
{
    mo_driver *m = device();
    CHECK_EQ(m->device, 0);
    CHECK_EQ(second.table.device, 1);
    CHECK_EQ(m->granularity, 2u << 20);
    CHECK(first.context && second.context && first.context != second.context);
}

TEST(an_ordinal_that_is_not_there_is_named_with_how_many_there_are)
{
    const int strangers[] = {-1, 2, 63, 64, INT32_MAX, INT32_MIN};
    device();
    for (size_t i = 0; i < sizeof strangers / sizeof *strangers; i++) {
        mo_driver_cuda d = {.handle = 77};
        mo_detail detail;
        char words[100];
        CHECK_EQ(mo_driver_cuda_open(first.api, strangers[i], &d, &detail), MO_NO_DEVICE);
        snprintf(words, sizeof words, "no CUDA device %d: this process sees 2 of them", strangers[i]);
        CHECK(strstr(detail.text, words));
        CHECK_EQ(d.handle, 77);
        CHECK_EQ(mo_driver_cuda_open(first.api, strangers[i], &d, NULL), MO_NO_DEVICE);
    }
}

/* ---- drivers of other ages ----------------------------------------------------------------------------- */

static CUresult no_virtual_memory(int *out, CUdevice_attribute which, CUdevice handle)
{
    if (which == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) {
        *out = 0;
        return CUDA_SUCCESS;
    }
    return simulated_devices()->api.device_attribute(out, which, handle);
}

static void check_segments_only(const mo_cuda_api *api)
{
    mo_driver_cuda d;
    mo_address a;
    CHECK_EQ(mo_driver_cuda_open(api, 0, &d, NULL), MO_OK);
    CHECK_EQ(d.table.granularity, 0);
    CHECK_EQ(d.table.segment_alloc(&d.table, 1 << 20, NULL, &a), MO_OK);
    CHECK_EQ(d.table.segment_free(&d.table, a, NULL), MO_OK);
    CHECK_EQ(mo_driver_cuda_close(&d, NULL), MO_OK);
}

TEST(without_any_one_function_of_virtual_memory_there_are_segments)
{
    device();
#define WITHOUT(field)                                                                                       \
    do {                                                                                                     \
        mo_cuda_api api = simulated_devices()->api;                                                          \
        api.field = NULL;                                                                                    \
        check_segments_only(&api);                                                                           \
    } while (0)
    WITHOUT(reserve);
    WITHOUT(unreserve);
    WITHOUT(create);
    WITHOUT(release);
    WITHOUT(map);
    WITHOUT(unmap);
    WITHOUT(grant);
    WITHOUT(granularity);
#undef WITHOUT
}

TEST(a_device_without_virtual_memory_has_segments)
{
    device();
    mo_cuda_api api = simulated_devices()->api;
    api.device_attribute = no_virtual_memory;
    check_segments_only(&api);
}

/* ---- what memory is asked for beside bytes ------------------------------------------------------------- */

static struct {
    int rdma, exportable; /* what the device says of itself */
    CUresult unknown;     /* what it says instead, where it does not know the question */
    CUresult refusal;     /* of a cuMemCreate that asks for one of them; CUDA_SUCCESS: taken */
    CUresult question;    /* the same of cuMemGetAllocationGranularity */
    int asked, creates;   /* cuMemCreate calls with and in all */
} more;

static bool asks(const CUmemAllocationProp *properties)
{
    return properties->requestedHandleTypes || properties->allocFlags.gpuDirectRDMACapable;
}

static CUresult offering(int *out, CUdevice_attribute which, CUdevice handle)
{
    const bool rdma = which == CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED;
    if (!rdma && which != CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)
        return simulated_devices()->api.device_attribute(out, which, handle);
    *out = rdma ? more.rdma : more.exportable;
    return more.unknown;
}

static CUresult taking(CUmemGenericAllocationHandle *out, size_t size, const CUmemAllocationProp *properties,
                       unsigned long long flags)
{
    more.creates++;
    more.asked += asks(properties);
    if (asks(properties) && more.refusal)
        return more.refusal;
    return simulated_devices()->api.create(out, size, properties, flags);
}

static CUresult answering(size_t *out, const CUmemAllocationProp *properties,
                          CUmemAllocationGranularity_flags option)
{
    return asks(properties) && more.question ? more.question
                                             : simulated_devices()->api.granularity(out, properties, option);
}

static mo_cuda_api more_api;
static mo_driver_cuda more_driver;

static mo_driver *open_more(void)
{
    device();
    more.asked = more.creates = 0;
    more_api = simulated_devices()->api;
    more_api.device_attribute = offering;
    more_api.create = taking;
    more_api.granularity = answering;
    CHECK_EQ(mo_driver_cuda_open(&more_api, 0, &more_driver, NULL), MO_OK);
    CHECK_EQ(more_driver.table.granularity, 2u << 20);
    return &more_driver.table;
}

/* Of memory that is made now: (RDMA, exportable). */
static void makes(mo_driver *m, int rdma, int exportable)
{
    CUresult (*properties_of)(CUmemAllocationProp *, CUmemGenericAllocationHandle);
    CUmemAllocationProp got;
    mo_physical h;
    *(void **)&properties_of =
        simulated_symbol(simulated_devices()->library, "cuMemGetAllocationPropertiesFromHandle");
    CHECK_OK(m->create(m, m->granularity, NULL, &h));
    IN_CONTEXT(properties_of(&got, h));
    CHECK_EQ(got.allocFlags.gpuDirectRDMACapable, rdma);
    CHECK_EQ(got.requestedHandleTypes, exportable ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR : 0);
    CHECK(got.type == CU_MEM_ALLOCATION_TYPE_PINNED && got.location.id == more_driver.handle);
    CHECK_OK(m->release(m, h, NULL));
}

TEST(memory_can_be_reached_by_network_cards_and_exported_where_the_device_offers_it)
{
    for (int offer = 0; offer < 4; offer++) {
        memset(&more, 0, sizeof more);
        more.rdma = offer & 1;
        more.exportable = offer >> 1;
        mo_driver *m = open_more();
        makes(m, more.rdma, more.exportable);
        makes(m, more.rdma, more.exportable);
        CHECK_EQ(more.creates, 2);
        CHECK_EQ(mo_driver_cuda_close(&more_driver, NULL), MO_OK);
    }
}

TEST(a_driver_that_does_not_know_the_attributes_offers_neither)
{
    memset(&more, 0, sizeof more);
    more.rdma = more.exportable = 1;
    more.unknown = CUDA_ERROR_INVALID_VALUE;
    mo_driver *m = open_more();
    makes(m, 0, 0);
    CHECK_EQ(mo_driver_cuda_close(&more_driver, NULL), MO_OK);
}

TEST(what_is_offered_and_refused_is_asked_for_once)
{
    static const CUresult refusals[] = {CUDA_ERROR_NOT_SUPPORTED, CUDA_ERROR_INVALID_VALUE,
                                        CUDA_ERROR_NOT_PERMITTED};
    for (int i = 0; i < 3; i++) {
        memset(&more, 0, sizeof more);
        more.rdma = more.exportable = 1;
        more.refusal = refusals[i];
        mo_driver *m = open_more();
        const contract_state before = contract_look(contract());
        for (int round = 0; round < 3; round++)
            makes(m, 0, 0);
        CHECK_EQ(more.asked, 1);
        CHECK_EQ(more.creates, 4);
        CHECK_SAME(contract(), before);
        CHECK_EQ(mo_driver_cuda_close(&more_driver, NULL), MO_OK);
    }
    memset(&more, 0, sizeof more);
    more.rdma = more.exportable = 1;
    more.question = CUDA_ERROR_NOT_SUPPORTED; /* refused when the device is opened */
    makes(open_more(), 0, 0);
    CHECK_EQ(more.asked, 0);
    CHECK_EQ(mo_driver_cuda_close(&more_driver, NULL), MO_OK);
}

TEST(an_error_of_another_kind_is_no_refusal)
{
    mo_physical h;
    mo_detail detail;
    memset(&more, 0, sizeof more);
    more.rdma = more.exportable = 1;
    mo_driver *m = open_more();
    CHECK_EQ(m->create(m, (size_t)1 << 40, NULL, &h), MO_NO_DEVICE_MEMORY);
    CHECK_EQ(more.creates, 1); /* what has no room has none without them */
    CHECK_EQ(simulated_devices()->fail("cuMemCreate", 0, 2, CUDA_ERROR_UNKNOWN), 0);
    CHECK_EQ(m->create(m, m->granularity, &detail, &h), MO_DRIVER); /* nor does it work without them */
    CHECK_EQ(detail.code, CUDA_ERROR_UNKNOWN);
    makes(m, 1, 1);
    CHECK_EQ(mo_driver_cuda_close(&more_driver, NULL), MO_OK);
}

TEST(captures_are_told_apart_by_whichever_function_the_driver_has)
{
    const contract_device *c = contract();
    for (int age = 0; age < 3; age++) {
        mo_cuda_api api = simulated_devices()->api;
        mo_driver_cuda d;
        uint64_t id = 0;
        if (age >= 1)
            api.capture_info_v3 = NULL;
        if (age >= 2)
            api.capture_info_v2 = NULL;
        CHECK_EQ(mo_driver_cuda_open(&api, 0, &d, NULL), MO_OK);
        begin_capture(c->stream);
        const mo_status status = d.table.capture_id(&d.table, c->stream, NULL, &id);
        end_capture(c->stream);
        CHECK_EQ(status, MO_OK);
        CHECK(id != 0);
        CHECK_EQ(d.table.capture_id(&d.table, c->stream, NULL, &id), MO_OK);
        CHECK_EQ(id, 0);
        CHECK_EQ(mo_driver_cuda_close(&d, NULL), MO_OK);
    }
}

TEST(the_legacy_stream_is_not_captured_under_either_name_whatever_else_is)
{
    const contract_device *c = contract();
    begin_capture(c->stream);
    uint64_t ids[] = {77, 77};
    const mo_status null = c->driver->capture_id(c->driver, NULL, NULL, &ids[0]);
    const mo_status named = c->driver->capture_id(c->driver, CU_STREAM_LEGACY, NULL, &ids[1]);
    end_capture(c->stream); /* it is whole */
    CHECK_OK(null);
    CHECK_OK(named);
    CHECK(ids[0] == 0 && ids[1] == 0);
}

/* ---- errors, and a driver that is gone ----------------------------------------------------------------- */

TEST(a_failed_call_names_itself_its_arguments_and_the_drivers_words)
{
    mo_driver *m = device();
    mo_physical h;
    mo_detail detail;
    CHECK_EQ(m->create(m, (size_t)1 << 40, &detail, &h), MO_NO_DEVICE_MEMORY);
    CHECK_EQ(detail.code, CUDA_ERROR_OUT_OF_MEMORY);
    CHECK(strstr(detail.text, "cuMemCreate(1099511627776): CUDA_ERROR_OUT_OF_MEMORY (2): "));
    CHECK_EQ(m->segment_free(m, 0x1234500, &detail), MO_DRIVER);
    CHECK(strstr(detail.text, "cuMemFree(0x1234500): CUDA_ERROR_"));
}

TEST(after_the_driver_is_gone_releasing_is_success_and_acquiring_is_not)
{
    const contract_device *c = contract();
    const int codes[] = {CUDA_ERROR_DEINITIALIZED, CUDA_ERROR_NOT_INITIALIZED,
                         CUDA_ERROR_CONTEXT_IS_DESTROYED};
    for (int i = 0; i < 3; i++) {
        const char *const doors[] = {"cuCtxGetCurrent", "cuCtxPushCurrent_v2",
                                     "cuThreadExchangeStreamCaptureMode"};
        for (int j = 0; j < 3; j++) {
            CHECK_EQ(simulated_devices()->fail(doors[j], 0, UINT64_MAX, codes[i]), 0);
            check_gone(c);
            CHECK(j == 2 ||
                  mo_driver_cuda_close(&first, NULL) == MO_OK); /* and does not count as a release */
            fail_never();
        }
    }
    CHECK_OK(contract_session(c));
}

TEST(a_release_that_fails_otherwise_is_told)
{
    const contract_device *c = contract();
    mo_driver *m = c->driver;
    mo_address a;
    CHECK_OK(m->segment_alloc(m, 4096, NULL, &a));
    CHECK_EQ(simulated_devices()->fail("cuMemFree_v2", 0, 1, CUDA_ERROR_ILLEGAL_ADDRESS), 0);
    CHECK_EQ(m->segment_free(m, a, NULL), MO_DRIVER);
    CHECK_OK(m->segment_free(m, a, NULL));
}

TEST_MAIN
