"""CudaPool on host memory: what a machine without a GPU can try out."""

from __future__ import annotations

import gc
import mmap
import tempfile
import threading

import pytest
import torch

import memopt.cuda

MIB = 1 << 20
PAGE = mmap.PAGESIZE


def resident() -> int:
    """Bytes of this process that lie in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * PAGE


@pytest.fixture
def pool():
    made = memopt.cuda.CudaPool("64MiB", device="cpu")
    yield made
    if made.paused:
        made.resume()
    made.close()


def test_without_a_gpu_the_default_device_is_refused_naming_the_cpu():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(RuntimeError, match=r'CudaPool\(device="cpu"\)'):
        memopt.cuda.CudaPool("1GiB")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"size": 0}, "can hold nothing"),
        ({"size": -1}, "-1"),
        ({"size": "2 elephants"}, "elephants"),
        ({"device": "meta"}, "CUDA devices and on the CPU"),
    ],
)
def test_what_is_no_size_or_device_is_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        memopt.cuda.CudaPool(**({"device": "cpu"} | arguments))


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.complex64],
)
def test_a_shape_and_dtype_are_a_tensor_of_torch(pool, dtype):
    t = pool.allocate((3, 0, 5), dtype=dtype)
    assert (t.shape, t.dtype) == ((3, 0, 5), dtype)
    t = pool.allocate((3, 4, 5), dtype=dtype)
    assert (t.shape, t.dtype, t.is_contiguous(), t._is_view()) == ((3, 4, 5), dtype, True, False)
    assert t.data_ptr() % PAGE == 0
    t.fill_(1)
    assert torch.equal(t.clone(), torch.ones((3, 4, 5), dtype=dtype))


def test_bytes_and_elements_are_not_mixed_up(pool):
    assert pool.allocate(1000).shape == (1000,)
    assert pool.allocate("1KiB").shape == (1024,)
    with pytest.raises(ValueError, match=r"allocate\(\(1000,\), dtype=…\) gives so many elements"):
        pool.allocate(1000, dtype=torch.float32)
    with pytest.raises(ValueError, match="negative"):
        pool.allocate((2, -3))


def test_the_accounts_follow_the_memory_not_the_name(pool):
    t = pool.allocate(3 * PAGE - 1)
    assert pool.stats() == {
        "size": 64 * MIB,
        "reserved_bytes": 3 * PAGE,
        "allocated_bytes": 3 * PAGE,
        "requested_bytes": 3 * PAGE - 1,
        "max_allocated_bytes": 3 * PAGE,
        "free_bytes": 0,
        "allocations": 1,
        "paused": False,
        "route": "cpu",
    }
    view = t[5:].detach()
    del t
    assert pool.stats()["allocations"] == 1
    del view
    assert (pool.stats()["allocations"], pool.stats()["max_allocated_bytes"]) == (0, 3 * PAGE)


def test_beyond_its_size_is_torchs_out_of_memory_and_the_next_request_works(pool):
    t = pool.allocate("40MiB")
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 30.0 MiB.*at most 64.0 MiB"):
        pool.allocate("30MiB")
    u = pool.allocate("24MiB")
    del t, u
    assert pool.allocate("64MiB").numel() == 64 * MIB


def test_more_than_the_machine_has_is_torchs_out_of_memory():
    pool = memopt.cuda.CudaPool(device="cpu")
    for shape in ((1 << 62,), (1 << 40, 1 << 40)):
        with pytest.raises(torch.OutOfMemoryError, match="no limit"):
            pool.allocate(shape, dtype=torch.uint8)
    assert pool.stats()["allocations"] == 0


def test_the_context_says_why_it_is_not_there(pool):
    with pytest.raises(NotImplementedError, match=r"pool\.allocate\(\)"), pool:
        raise AssertionError("the block has run")
    pool.close()


def test_free_gives_the_memory_back_while_the_name_lives_on(pool):
    before = resident()
    t = pool.allocate("60MiB").fill_(1)
    assert resident() - before > 50 * MIB
    pool.free(t)
    assert resident() - before < 10 * MIB
    assert t.shape == (0,) and pool.stats()["allocated_bytes"] == 0
    with pytest.raises(ValueError, match="already freed"):
        pool.free(t)


def test_what_is_not_the_pools_is_refused(pool):
    other = memopt.cuda.CudaPool(device="cpu")
    t = pool.allocate((4, 5), dtype=torch.float32)
    for wrong in (torch.empty(4), other.allocate(4), torch.eye(3).to_sparse(), torch.empty(0)):
        with pytest.raises(ValueError, match="not from this pool|has no storage"):
            pool.free(wrong)
    with pytest.raises(ValueError, match=r"a view of one of shape \(4, 5\)"):
        pool.free(t[1])
    with pytest.raises(ValueError, match="is on meta"):
        pool.free(torch.empty(3, device="meta"))
    with pytest.raises(TypeError, match="takes a tensor, not list"):
        pool.free([t])
    assert pool.stats()["allocations"] == 1


def test_a_tensor_that_was_given_other_memory_is_no_longer_the_pools(pool):
    t = pool.allocate((4,), dtype=torch.float32)
    t.data = torch.ones(4)
    assert pool.stats()["allocations"] == 0
    with pytest.raises(ValueError, match="not from this pool"):
        pool.free(t)
    assert torch.equal(t, torch.ones(4))


# ---- who uses it ---------------------------------------------------------------------------------------------


def saved_input(t, w):
    return w * t


def saved_result(t, w):
    t.copy_(w)
    return t.exp_().sum()


def saved_by_a_function(t, w):
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, kept):
            ctx.save_for_backward(kept)
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2, None

    return Twice.apply(w, t)


def saved_for_recomputation(t, w):
    return torch.utils.checkpoint.checkpoint(torch.mul, w, t, use_reentrant=False)


def accumulated(t, w):
    t.requires_grad_()
    return t + 1


def viewed(t, w):
    return t[3:]


def detached(t, w):
    return t.detach()


def exported(t, w):
    return torch.utils.dlpack.to_dlpack(t)


def in_numpy(t, w):
    return t.numpy()


def as_a_parameter(t, w):
    return torch.nn.Parameter(t)


def its_storage(t, w):
    return t.untyped_storage()


def test_a_graph_whose_hooks_refuse_to_be_read_is_passed_over(pool):
    def refuse(_):
        raise ValueError("not to be read")

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, refuse):
        other = torch.ones(3, requires_grad=True).exp()
    t = pool.allocate((10,), dtype=torch.float32)
    kept = saved_input(t.zero_(), torch.ones(10, requires_grad=True))
    with pytest.raises(RuntimeError, match="MulBackward0"):
        pool.free(t)
    del kept
    pool.free(t)
    assert other.requires_grad


@pytest.mark.parametrize(
    ("use", "name"),
    [
        (
            saved_input,
            r"MulBackward0, which keeps it \(other\) for the backward of a tensor of shape \(10,\)",
        ),
        (saved_result, r"ExpBackward0, which keeps it \(result\)"),
        (saved_by_a_function, r"TwiceBackward, which keeps it \(saved_tensors\)"),
        (saved_for_recomputation, "still used by"),
        (accumulated, r"AccumulateGrad, which keeps it \(variable\)"),
        (viewed, r"a view of shape \(7,\) on the same memory"),
        (detached, r"another tensor of shape \(10,\) on the same memory"),
        (exported, "something outside Python"),
        (in_numpy, "still used by"),
        (as_a_parameter, r"another tensor of shape \(10,\)"),
        (its_storage, "a storage object"),
    ],
)
def test_free_is_refused_naming_who_uses_the_memory_and_works_when_that_is_gone(pool, use, name):
    t = pool.allocate((10,), dtype=torch.float32)
    t.zero_()
    w = torch.ones(10, requires_grad=True)
    user = use(t, w)
    with pytest.raises(RuntimeError, match=name):
        pool.free(t)
    assert t.shape == (10,) and pool.stats()["allocations"] == 1
    if use is saved_result:
        t.detach_()  # its own graph ends with it
    del user
    gc.collect()
    pool.free(t)
    assert pool.stats()["allocations"] == 0


def test_further_names_and_weak_references_are_no_users(pool):
    t = pool.allocate((10,), dtype=torch.float32)
    names = {"t": t, "list": [t]}
    with torch.no_grad():
        y = torch.ones(10, requires_grad=True) * t
    pool.free(t)
    assert names["t"].shape == (0,) and y.shape == (10,)


def test_asking_for_users_runs_no_saved_tensor_hook_when_there_is_none(pool):
    calls = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: calls.append(1) or x):
        t = pool.allocate((10,), dtype=torch.float32)
        y = torch.ones(10, requires_grad=True) * t  # what is kept is the hook's copy
    pool.free(t)
    assert calls == []
    y.sum().backward()
    assert calls


# ---- pause -----------------------------------------------------------------------------------------------------


def test_a_pause_gives_the_pages_back_and_resume_brings_the_contents_to_the_same_addresses(
    pool, tmp_path, monkeypatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    t, u = pool.allocate((7 * MIB,), dtype=torch.float32), pool.allocate((100,), dtype=torch.float64)
    t.copy_(torch.arange(7 * MIB)), u.copy_(torch.arange(100))
    addresses, before = (t.data_ptr(), u.data_ptr()), resident()
    pool.pause()
    assert before - resident() > 20 * MIB
    assert pool.paused and pool.stats()["reserved_bytes"] == 0 and pool.stats()["allocations"] == 2
    assert list(tmp_path.iterdir()) == []  # the file has no name
    pool.resume()
    assert (t.data_ptr(), u.data_ptr()) == addresses
    assert torch.equal(t, torch.arange(7 * MIB, dtype=torch.float32))
    assert torch.equal(u, torch.arange(100, dtype=torch.float64))


def test_contents_can_be_dropped_and_tensors_may_die_while_it_is_paused(pool):
    t, u = pool.allocate("1MiB").fill_(3), pool.allocate("1MiB").fill_(4)
    pool.pause()
    del t
    pool.resume()
    assert bool((u == 4).all())
    pool.pause(keep=False)
    pool.resume()
    assert bool((u == 0).all())
    pool.pause()
    pool.free(u)
    pool.resume()
    assert pool.stats()["allocations"] == 0


def test_a_disk_without_room_leaves_the_pool_as_it_was(pool, monkeypatch):
    class Full:
        def tell(self):
            return 0

        def write(self, data):
            raise OSError(28, "No space left on device")

        def close(self):
            pass

    t = pool.allocate("1MiB").fill_(5)
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: Full())
    with pytest.raises(OSError, match="No space left"):
        pool.pause()
    assert not pool.paused and bool((t == 5).all())


def test_what_is_not_possible_now_is_refused_with_the_mend(pool):
    with pytest.raises(RuntimeError, match="not paused"):
        pool.resume()
    t = pool.allocate(1)
    pool.pause()
    for call in (pool.pause, lambda: pool.allocate(1), pool.__enter__):
        with pytest.raises(RuntimeError, match=r"call resume\(\) first"):
            call()
    with pytest.raises(RuntimeError, match="1 live tensors would be left without memory"):
        pool.close()
    pool.resume()
    pool.close()
    pool.close()
    assert pool.closed and t.numel() == 1
    for call in (pool.pause, pool.resume, pool.stats, lambda: pool.allocate(1), lambda: pool.free(t)):
        with pytest.raises(RuntimeError, match="closed; make a new one"):
            call()
    with pytest.raises(RuntimeError, match="left before"):
        pool.__exit__(None, None, None)


def test_tensors_outlive_the_pool():
    pool = memopt.cuda.CudaPool("1MiB", device="cpu")
    t = pool.allocate((10,), dtype=torch.int32)
    t.fill_(8)
    del pool
    gc.collect()
    assert t.tolist() == [8] * 10


def test_threads_allocate_and_free_at_the_same_time(pool):
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for i in range(200):
                t = pool.allocate(1 + i * 37)
                if i % 2:
                    pool.free(t)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == [] and pool.stats()["allocations"] == 0


def test_it_says_what_it_is(pool):
    assert repr(pool) == '<CudaPool("64.0 MiB", device="cpu")>'
    assert (pool.size, pool.device) == (64 * MIB, torch.device("cpu"))
    pool.pause()
    assert repr(pool).endswith(", paused>")
