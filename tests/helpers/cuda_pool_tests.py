"""Tests of a CudaPool on a CUDA device, whichever backend it has: tests/sim/test_cuda_pool_memopt.py and
tests/sim/test_cuda_pool_native.py run these, each under the allocator of its name."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

import memopt
import memopt.cuda
import memopt.sim

MIB = 1 << 20


def device_bytes() -> int:
    return memopt.sim.stats()["bytes"]


def empty(mib: int) -> torch.Tensor:
    return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")


def live(pool: memopt.cuda.CudaPool) -> int:
    return pool.stats()["allocations"]


def inside(pool: memopt.cuda.CudaPool, tensor: torch.Tensor) -> bool:
    return pool._memory.holds(tensor.data_ptr())


@pytest.fixture
def pool():
    torch.cuda.empty_cache()
    made = memopt.cuda.CudaPool("128MiB")
    yield made
    if made.paused:
        made.resume()
    made.close()


# ---- tensors -----------------------------------------------------------------------------------------------


def test_a_size_is_held_from_the_start_and_given_back_by_close():
    torch.cuda.empty_cache()
    before = device_bytes()
    pool = memopt.cuda.CudaPool("100MiB")
    assert device_bytes() - before == pool.stats()["reserved_bytes"] == 100 * MIB
    pool.close()
    torch.cuda.empty_cache()
    assert device_bytes() == before


def test_without_a_size_memory_is_taken_as_it_is_needed():
    pool = memopt.cuda.CudaPool()
    assert pool.size is None and pool.stats()["reserved_bytes"] == 0
    t = pool.allocate("30MiB")
    assert 30 * MIB <= pool.stats()["reserved_bytes"] <= 34 * MIB
    del t
    pool.close()


def test_allocate_takes_bytes_a_size_in_words_or_a_shape(pool):
    by_bytes, in_words = pool.allocate(1000), pool.allocate("2MiB")
    by_shape = pool.allocate((3, 5), dtype=torch.float16)
    assert (by_bytes.dtype, by_bytes.shape) == (torch.uint8, (1000,))
    assert in_words.numel() == 2 * MIB
    assert (by_shape.dtype, by_shape.shape, by_shape.is_contiguous()) == (torch.float16, (3, 5), True)
    assert pool.allocate((2, 3)).dtype == torch.get_default_dtype()
    assert live(pool) == 3
    for t in (by_bytes, in_words, by_shape):
        assert t.device == pool.device and not t._is_view()


def test_tensors_are_counted_while_they_live(pool):
    t = pool.allocate("10MiB")
    u = pool.allocate("20MiB")
    found = pool.stats()
    assert found["allocations"] == 2
    assert found["requested_bytes"] == 30 * MIB == found["allocated_bytes"]
    assert found["free_bytes"] == found["reserved_bytes"] - found["allocated_bytes"]
    del t, u
    assert (live(pool), pool.stats()["allocated_bytes"]) == (0, 0)
    assert pool.stats()["max_allocated_bytes"] >= 30 * MIB


def test_a_tensor_of_no_elements_is_fine(pool):
    t = pool.allocate((0, 4), dtype=torch.float32)
    assert t.shape == (0, 4) and live(pool) == 0
    pool.free(t)
    with pytest.raises(ValueError, match="already freed"):
        pool.free(t)


def test_threads_allocate_and_free_at_the_same_time(pool):
    def work() -> None:
        try:
            for _ in range(50):
                t = pool.allocate(MIB)
                found.append(inside(pool, t))
                pool.free(t)
        except BaseException as error:
            errors.append(error)

    found: list[bool] = []
    errors: list[BaseException] = []
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == [] and len(found) == 200 and all(found)
    assert live(pool) == 0


# ---- free --------------------------------------------------------------------------------------------------


def test_free_gives_the_memory_back_while_the_name_lives_on(pool):
    t = pool.allocate("100MiB")
    with pytest.raises(torch.OutOfMemoryError):
        pool.allocate("100MiB")
    pool.free(t)
    assert live(pool) == 0 and t.numel() == 0 and t.untyped_storage().nbytes() == 0
    assert pool.allocate("100MiB").numel() == 100 * MIB


def test_free_takes_what_the_context_made(pool):
    with pool:
        t = empty(3)
    pool.free(t)
    assert live(pool) == 0


def test_a_second_free_is_refused(pool):
    t = pool.allocate(MIB)
    pool.free(t)
    with pytest.raises(ValueError, match="already freed"):
        pool.free(t)


def test_what_is_not_the_pools_is_refused_before_anything_changes(pool):
    outside, other = empty(1), memopt.cuda.CudaPool()
    foreign = other.allocate(MIB)
    for wrong, words in (
        (outside, "not from this pool"),
        (foreign, "not from this pool"),
        (torch.empty(4), "is on cpu"),
        (torch.eye(3, device="cuda").to_sparse(), "no storage|not from"),
    ):
        before = wrong.shape
        with pytest.raises(ValueError, match=words):
            pool.free(wrong)
        assert wrong.shape == before
    with pytest.raises(TypeError, match="takes a tensor, not int"):
        pool.free(17)
    other.free(foreign)
    other.close()


def test_a_view_is_refused_and_so_is_a_tensor_that_has_one(pool):
    t = pool.allocate((4, MIB), dtype=torch.uint8)
    view = t[1:]
    with pytest.raises(ValueError, match=r"a view of one of shape \(4, 1048576\)"):
        pool.free(view)
    with pytest.raises(RuntimeError, match=r"a view of shape \(3, 1048576\) on the same memory"):
        pool.free(t)
    assert t.shape == (4, MIB) and live(pool) == 1
    del view
    pool.free(t)


def test_what_autograd_needs_is_refused_naming_the_node_until_backward_has_run(pool):
    t = pool.allocate((1000,), dtype=torch.float32)
    w = torch.ones(1000, device="cuda", requires_grad=True)
    y = (w * t).sum()
    with pytest.raises(RuntimeError, match=r"MulBackward0, which keeps it \(other\)"):
        pool.free(t)
    y.backward()
    del y
    pool.free(t)


def test_a_saved_result_and_a_leaf_are_refused_too(pool):
    w = torch.ones(1000, device="cuda", requires_grad=True)
    t = pool.allocate((1000,), dtype=torch.float32)
    t.copy_(w)
    t.exp_()
    with pytest.raises(RuntimeError, match=r"ExpBackward0, which keeps it \(result\)"):
        pool.free(t)
    leaf = pool.allocate((1000,), dtype=torch.float32).requires_grad_()
    y = leaf + 1
    with pytest.raises(RuntimeError, match="AccumulateGrad"):
        pool.free(leaf)
    del y
    pool.free(leaf)


def test_the_saved_tensor_of_a_function_and_a_capsule_are_refused(pool):
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, kept):
            ctx.save_for_backward(kept)
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2, None

    t = pool.allocate((1000,), dtype=torch.float32)
    y = Double.apply(torch.ones(3, device="cuda", requires_grad=True), t)
    with pytest.raises(RuntimeError, match=r"DoubleBackward, which keeps it \(saved_tensors\)"):
        pool.free(t)
    del y
    capsule = torch.utils.dlpack.to_dlpack(t)
    with pytest.raises(RuntimeError, match="something outside Python"):
        pool.free(t)
    del capsule
    pool.free(t)


# ---- with pool: --------------------------------------------------------------------------------------------


def test_every_threads_allocations_come_from_the_pool_backward_included(pool):
    with pool:
        x = torch.ones(4 * MIB, device="cuda", requires_grad=True)
        y = (x * 2).exp()
        before = live(pool)
        y.sum().backward()
        made: list[torch.Tensor] = []
        thread = threading.Thread(target=lambda: made.append(empty(1)))
        thread.start()
        thread.join()
    outside = empty(1)
    assert inside(pool, x.grad)
    assert live(pool) > before
    assert inside(pool, made[0])
    assert not inside(pool, outside)


def test_of_pools_in_one_another_the_last_entered_counts(pool):
    other = memopt.cuda.CudaPool()
    with pool:
        first = empty(1)
        with other:
            second = empty(1)
            by_hand = pool.allocate(MIB)
            with pool:
                third = empty(1)
            fourth = empty(1)
        fifth = empty(1)
    found = [inside(pool, t) for t in (first, second, by_hand, third, fourth, fifth)]
    assert found == [True, False, True, True, False, True]
    assert inside(other, second) and inside(other, fourth)
    assert not inside(pool, empty(1))
    del second, fourth
    other.close()


def test_an_exception_leaves_the_context(pool):
    with pytest.raises(KeyError), pool:
        raise KeyError
    assert not inside(pool, empty(1))
    pool.close()


def test_beyond_its_size_is_torchs_out_of_memory_and_the_next_request_works(pool):
    blocks = []
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory") as caught, pool:
        while True:
            blocks.append(empty(30))
    assert len(blocks) == 4
    assert "a limit of 128 MiB" in caught.value.__notes__[0]
    blocks.clear()
    with pool:
        assert inside(pool, empty(30))
    with pytest.raises(torch.OutOfMemoryError) as caught:
        pool.allocate("200MiB")
    assert "CudaPool" in caught.value.__notes__[0]
    t = pool.allocate("100MiB")  # of memory that was free in pieces of 30
    assert t.numel() == 100 * MIB
    assert empty(300).numel() == 300 * MIB  # outside there is more


def test_a_size_that_the_device_does_not_have_is_out_of_memory_and_leaves_nothing():
    torch.cuda.empty_cache()
    before = device_bytes()
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        memopt.cuda.CudaPool("64GiB")
    torch.cuda.empty_cache()
    assert device_bytes() == before


# ---- pause -------------------------------------------------------------------------------------------------


def test_a_pause_gives_the_memory_back_and_resume_brings_the_contents_to_the_same_addresses(pool):
    torch.cuda.empty_cache()
    t = pool.allocate((5, MIB), dtype=torch.float32)
    with pool:
        small = torch.empty(100, device="cuda")
    t.copy_(torch.arange(5 * MIB, dtype=torch.float32).view(5, MIB))
    small.copy_(torch.arange(100.0))
    addresses, contents = (t.data_ptr(), small.data_ptr()), (t.cpu(), small.cpu())
    held = device_bytes()
    pool.pause()
    assert held - device_bytes() == 128 * MIB
    assert pool.paused and pool.stats()["reserved_bytes"] == 0 and live(pool) == 2
    pool.resume()
    assert device_bytes() == held
    assert (t.data_ptr(), small.data_ptr()) == addresses
    assert torch.equal(t.cpu(), contents[0]) and torch.equal(small.cpu(), contents[1])


def test_contents_can_be_dropped(pool):
    t = pool.allocate("50MiB")
    copies = memopt.sim.stats()["copied_bytes"]
    pool.pause(keep=False)
    pool.resume()
    assert memopt.sim.stats()["copied_bytes"] == copies
    t.fill_(3)


def test_tensors_may_die_and_be_freed_while_the_pool_is_paused(pool):
    t, u, v = (pool.allocate("20MiB") for _ in range(3))
    v.copy_(torch.ones(20 * MIB, dtype=torch.uint8))
    pool.pause()
    del t
    gc.collect()
    pool.free(u)
    assert live(pool) == 1
    pool.resume()
    assert bool((v.cpu() == 1).all())
    assert pool.allocate("90MiB").numel() == 90 * MIB


def test_a_resume_without_room_leaves_it_paused_and_keeps_the_contents(pool):
    t = pool.allocate("20MiB")
    t.copy_(torch.full((20 * MIB,), 7, dtype=torch.uint8))
    pool.pause()
    memopt.sim.fail("cuMemCreate", count=10**6)
    with pytest.raises(torch.OutOfMemoryError):
        pool.resume()
    memopt.sim.fail_clear()
    assert pool.paused
    pool.resume()
    assert bool((t.cpu() == 7).all())


def test_a_failed_pause_changes_nothing(pool):
    t = pool.allocate("20MiB")
    t.copy_(torch.full((20 * MIB,), 7, dtype=torch.uint8))
    memopt.sim.fail("cuMemUnmap", after=3)
    with pytest.raises(memopt.Error):
        pool.pause()
    memopt.sim.fail_clear()
    assert not pool.paused and bool((t.cpu() == 7).all())


def test_what_is_not_possible_now_is_refused_with_the_mend(pool):
    with pool, pytest.raises(RuntimeError, match="leave it first"):
        pool.pause()
    with pool, pytest.raises(RuntimeError, match="leave it first"):
        pool.close()
    with pytest.raises(RuntimeError, match="not paused"):
        pool.resume()
    t = pool.allocate(MIB)
    pool.pause()
    for call in (pool.pause, pool.__enter__, lambda: pool.allocate(1)):
        with pytest.raises(RuntimeError, match=r"call resume\(\) first"):
            call()
    with pytest.raises(RuntimeError, match="resume"):
        pool.close()
    del t
    pool.close()
    for call in (pool.pause, pool.resume, pool.__enter__, pool.stats, lambda: pool.allocate(1)):
        with pytest.raises(RuntimeError, match="closed"):
            call()


def test_during_a_capture_allocation_is_refused(pool):
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    x = empty(1)
    with torch.cuda.graph(graph, stream=stream):
        x.zero_()
        with pytest.raises(RuntimeError, match="being captured"):
            pool.allocate(MIB)
        with pytest.raises(RuntimeError, match="being captured"):
            pool.__enter__()


# ---- the end -----------------------------------------------------------------------------------------------


def test_tensors_outlive_the_pool_and_their_memory_goes_back_with_them():
    torch.cuda.empty_cache()
    before = device_bytes()
    pool = memopt.cuda.CudaPool("64MiB")
    t = pool.allocate("10MiB")
    t.copy_(torch.full((10 * MIB,), 9, dtype=torch.uint8))
    pool.close()
    pool.close()
    other = empty(100)
    other.fill_(0)
    assert bool((t.cpu() == 9).all())
    del t, other
    torch.cuda.empty_cache()
    assert device_bytes() == before


def test_a_pool_that_nobody_refers_to_gives_its_memory_back():
    torch.cuda.empty_cache()
    before = device_bytes()
    memopt.cuda.CudaPool("64MiB").allocate("10MiB")
    gc.collect()
    torch.cuda.empty_cache()
    assert device_bytes() == before


def test_many_pools_one_after_another_leave_nothing_behind():
    torch.cuda.empty_cache()
    before = device_bytes()
    for _ in range(100):
        pool = memopt.cuda.CudaPool()
        pool.allocate(5 * MIB)
        pool.close()
    torch.cuda.empty_cache()
    assert device_bytes() == before


def test_a_pool_closed_or_dropped_inside_another_ones_context_does_no_harm(pool):
    with pool:
        other = memopt.cuda.CudaPool()
        other.allocate(MIB)
        other.close()
        memopt.cuda.CudaPool("10MiB").allocate(MIB)
        gc.collect()
        assert inside(pool, empty(1))
