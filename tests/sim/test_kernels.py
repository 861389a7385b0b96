"""memopt's kernels on the simulated device: the values (each kernel's own text, run thread by thread), and
the ways by which they are loaded, with NVIDIA's real run-time compiler where the driver refuses the embedded
image."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from nvrtc_wheel import nvrtc

from memopt import _C, amp, sim
from memopt._runtime import kernels
from memopt.amp import _scaling
from memopt.sim import _activation

SIM = {"memory": "1GiB"}
ROOT = Path(__file__).resolve().parents[2]
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
torch_op = torch._amp_foreach_non_finite_check_and_unscale_


def scalar(x: float) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.float32).cuda()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal to the sign of zero, where NaNs count as equal: their payload is the processor's business."""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    nan = a.isnan() & b.isnan()
    return bool(((a.view(integer) == b.view(integer)) | nan).all())


def hard_numbers(dtype: torch.dtype, count: int, seed: int) -> torch.Tensor:
    """Every kind of finite number: all exponents, subnormals, zeros of both signs."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    generator = torch.Generator().manual_seed(seed)
    info = torch.iinfo(bits)
    x = torch.randint(info.min, info.max, (count,), dtype=bits, generator=generator).view(dtype)
    x = torch.where(x.isfinite(), x, torch.zeros((), dtype=dtype))
    special = [
        0.0,
        -0.0,
        torch.finfo(dtype).max,
        torch.finfo(dtype).tiny,
        torch.finfo(dtype).smallest_normal / 4,
    ]
    for i, value in enumerate(special):
        x[i::37] = value
    return x


def placed(values: torch.Tensor, shift: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The values on the device, `shift` elements from a block's start, and the block, filled with -7 around
    them."""
    block = torch.full((values.numel() + shift + 9,), -7.0, dtype=values.dtype).cuda()
    view = block[shift : shift + values.numel()]
    view.copy_(values)
    return view, block


@pytest.mark.parametrize("inv_scale", [1.0, 0.5, 2.0**-16, 3.0, 0.3, 1 / 3e5, 0.0, math.inf, math.nan])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_are_torchs_bit_for_bit_at_odd_sizes_and_misaligned_starts(
    dtype: torch.dtype, inv_scale: float
) -> None:
    sizes = [0, 1, 2, 3, 7, 8, 9, 31, 33, 255, 1000, 4096, 16385, 70001]
    values = [hard_numbers(dtype, size, seed) for seed, size in enumerate(sizes)]
    for shift in (0, 1, 3, 7):
        views, blocks = zip(*(placed(v, shift) for v in values), strict=True)
        expected = [v.clone() for v in values]
        expected_found, found = torch.zeros(()), scalar(0)
        torch_op(expected, expected_found, torch.tensor(inv_scale))
        amp.foreach_unscale_(views, found, scalar(inv_scale))
        assert found.item() == expected_found.item() == 0
        for view, block, want in zip(views, blocks, expected, strict=True):
            assert same_bits(view.cpu(), want)
            whole = block.cpu()
            assert (whole[:shift] == -7).all() and (whole[shift + want.numel() :] == -7).all()


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_bad_element_is_found_in_every_place(dtype: torch.dtype, bad: float) -> None:
    size, shift = 45, 1  # head, vectors and tail
    clean, _ = placed(hard_numbers(dtype, size, 1), shift)
    inv_scale = scalar(0.5)
    for place in range(size):
        values = hard_numbers(dtype, size, place)
        values[place] = bad
        view, _ = placed(values, shift)
        found = scalar(0)
        amp.foreach_unscale_([clean, view], found, inv_scale)
        assert found.item() == 1.0, place
        torch_op([values], torch.zeros(()), torch.tensor(0.5))
        assert same_bits(view.cpu(), values)


def test_with_a_scale_of_one_nan_payloads_stay_and_are_found() -> None:
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        grad, found = bits.view(dtype).cuda(), scalar(0)
        amp.foreach_unscale_([grad], found, scalar(1.0))
        assert torch.equal(grad.cpu().view(torch.int16), bits) and found.item() == 1.0


def test_random_lists_of_mixed_types_cost_one_launch_and_equal_torch() -> None:
    seed = int(os.environ.get("MEMOPT_SEED") or random.SystemRandom().getrandbits(31))
    print(f"MEMOPT_SEED={seed}")
    draw = random.Random(seed)
    for _ in range(200 if os.environ.get("MEMOPT_SOAK") == "1" else 8):
        values = [
            hard_numbers(
                draw.choice(DTYPES),
                draw.choice([0, 1, 5, 64, 999, draw.randrange(30000)]),
                draw.getrandbits(30),
            )
            for _ in range(draw.randrange(1, 60))
        ]
        for v in values:
            if v.numel() and draw.random() < 0.02:
                v[draw.randrange(v.numel())] = math.inf
        grads = [placed(v, draw.randrange(8))[0] for v in values]
        inv_scale = draw.choice([1.0, 2.0**-10, draw.random()])
        expected_found, found = torch.zeros(()), scalar(0)
        scale = scalar(inv_scale)
        launches, any_element = sim.calls("cuLaunchKernel"), any(v.numel() for v in values)
        amp.foreach_unscale_(grads, found, scale)
        assert sim.calls("cuLaunchKernel") - launches == any_element
        for v in values:
            torch_op([v], expected_found, torch.tensor(inv_scale))
        assert found.item() == expected_found.item()
        assert all(same_bits(g.cpu(), v) for g, v in zip(grads, values, strict=True))


def test_found_inf_is_never_cleared_and_no_elements_are_no_launch() -> None:
    launches = sim.calls("cuLaunchKernel")
    found = scalar(1.0)
    amp.foreach_unscale_([torch.empty(0).cuda(), torch.empty(3, 0).cuda()], found, scalar(0.5))
    amp.foreach_unscale_([], found, scalar(0.5))
    assert sim.calls("cuLaunchKernel") == launches
    amp.foreach_unscale_([torch.ones(3).cuda()], found, scalar(0.5))
    assert found.item() == 1.0


def test_dense_tensors_of_any_stride_order_are_ours_and_the_rest_is_torchs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passed: list[torch.Tensor] = []
    monkeypatch.setattr(_scaling, "torchs_unscale_", lambda grads, found, inv: passed.extend(grads))

    class Sub(torch.Tensor):
        pass

    ours = [
        torch.ones(4, 6).cuda().t(),
        torch.ones(2, 3, 4, 5).contiguous(memory_format=torch.channels_last).cuda(),
        torch.nn.Parameter(torch.ones(5).cuda()).detach().requires_grad_(),
        torch.nn.Parameter(torch.ones(5).cuda()),
    ]
    theirs = [
        torch.ones(4, 6).cuda()[:, :3],
        torch.ones(1).cuda().expand(5),
        torch.ones(3).cuda().as_subclass(Sub),
        torch.ones(3, dtype=torch.complex64).cuda(),
        torch.ones(3, dtype=torch.complex64).cuda().conj().imag,  # its values are negated lazily
        torch.ones(3),
    ]
    amp.foreach_unscale_([*ours, *theirs], scalar(0), scalar(0.25))
    assert [id(t) for t in passed] == [id(t) for t in theirs]
    assert all((t.detach().cpu() == 0.25).all() for t in ours)
    passed.clear()
    amp.foreach_unscale_(ours, torch.zeros(()), scalar(0.25))  # found_inf elsewhere: torch words the error
    assert len(passed) == len(ours)


def test_the_version_counter_stays_as_with_torchs_op() -> None:
    grad, cpu = torch.ones(3).cuda(), torch.ones(3)
    before = grad._version
    amp.foreach_unscale_([grad], scalar(0), scalar(0.5))
    torch_op([cpu], torch.zeros(()), torch.tensor(0.5))
    assert (grad._version - before, cpu._version) == (0, 0)


def test_gradients_that_keep_their_addresses_are_not_uploaded_again() -> None:
    grads, found, inv_scale = [torch.ones(10).cuda() for _ in range(50)], scalar(0), scalar(0.5)
    amp.foreach_unscale_(grads, found, inv_scale)
    before = kernels.status()
    for _ in range(5):
        amp.foreach_unscale_(grads, found, inv_scale)
    after = kernels.status()
    assert (after["uploads"], after["repeats"], after["launches"]) == (
        before["uploads"], before["repeats"] + 5, before["launches"] + 5,
    )  # fmt: skip
    assert all((g.cpu() == 0.5**6).all() for g in grads)


def test_the_host_never_waits_for_the_device() -> None:
    found, inv_scale = scalar(0), scalar(0.5)
    lists = [[torch.ones(n + 1).cuda() for n in range(3 + k)] for k in range(8)]
    torch.cuda.synchronize()
    sim.lazy(True)
    try:
        syncs, waits = sim.stats()["syncs"], kernels.status()["waits"]
        for grads in lists:
            amp.foreach_unscale_(grads, found, inv_scale)
        assert sim.stats()["syncs"] == syncs and kernels.status()["waits"] == waits
        torch.cuda.synchronize()
    finally:
        sim.lazy(False)
    assert all((g.cpu() == 0.5).all() for grads in lists for g in grads)


def test_tables_in_flight_are_not_overwritten_however_far_the_host_is_ahead() -> None:
    found, inv_scale = scalar(0), scalar(0.5)
    lists = [[torch.ones(n + 1).cuda() for n in range(3 + k)] for k in range(40)]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(3)]
    sim.lazy(True)
    try:
        for k, grads in enumerate(lists):
            with torch.cuda.stream(streams[k % 3]):
                amp.foreach_unscale_(grads, found, inv_scale)
        torch.cuda.synchronize()
    finally:
        sim.lazy(False)
    assert all((g.cpu() == 0.5).all() for grads in lists for g in grads)


def test_a_captured_call_works_at_every_replay() -> None:
    grads, found, inv_scale = [torch.ones(100).cuda(), torch.ones(7).cuda()], scalar(0), scalar(0.5)
    amp.foreach_unscale_(grads, found, inv_scale)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    before = kernels.status()["captured"]
    with torch.cuda.graph(graph):
        amp.foreach_unscale_(grads, found, inv_scale)
    assert kernels.status()["captured"] == before + 1
    assert all((g.cpu() == 0.5).all() for g in grads)  # only recorded
    other = [torch.ones(9).cuda() for _ in range(20)]
    for replay in range(1, 4):
        for g in other:  # calls in between must not take the graph's table away
            amp.foreach_unscale_([g], found, inv_scale)
        graph.replay()
        assert all((g.cpu() == 0.5 ** (1 + replay)).all() for g in grads)


@pytest.mark.parametrize(
    "function", ["cuMemHostAlloc", "cuMemAlloc_v2", "cuMemcpyHtoDAsync_v2", "cuLaunchKernel"]
)
def test_a_refused_driver_call_is_an_error_that_names_it_and_the_next_call_works(function: str) -> None:
    # Larger than any table so far, so that buffers are made anew.
    size = (
        getattr(test_a_refused_driver_call_is_an_error_that_names_it_and_the_next_call_works, "size", 1500)
        * 2
    )
    test_a_refused_driver_call_is_an_error_that_names_it_and_the_next_call_works.size = size
    base = torch.ones(size).cuda()
    grads, found, inv_scale = list(base), scalar(0), scalar(0.5)
    sim.fail(function)
    try:
        with pytest.raises(_C.Error, match=function.removesuffix("_v2")):
            amp.foreach_unscale_(grads, found, inv_scale)
    finally:
        sim.fail_clear()
    assert (base.cpu() == 1).all()
    amp.foreach_unscale_(grads, found, inv_scale)
    assert (base.cpu() == 0.5).all()


def test_the_embedded_image_is_what_serves_here_if_there_is_one() -> None:
    state = kernels.status()
    assert state["origin"] == ("embedded" if state["embedded_bytes"] else "compiled")


# ---- loading, each in a process of its own -----------------------------------------------------------------
# What a cache does is the same for any compiler: NVIDIA's takes 11 s where the simulated one takes none.
SIMULATED_NVRTC = _activation.libraries() / "sim_nvrtc.so"
CHILD = """
import json, sys
from memopt import _C, sim
from memopt._runtime import kernels
refusals, capability, directory = json.loads(sys.argv[1]), sys.argv[2], kernels.cache_directory()
sim.activate(memory="64MiB", compute_capability=capability)
for code in refusals:
    sim.fail("cuModuleLoadDataEx", code=code)
if "cached" in sys.argv:  # as on a GPU: what it finds there is of NVIDIA's compiler
    _C.kernels_configure(kernels.nvrtc_candidates(), directory)
else:
    kernels.prepare()
try:
    state = dict(_C.kernel_status(0, True))
except _C.Error as error:
    state = {"error": str(error), "status": error.status}
state["loads"] = sim.calls("cuModuleLoadDataEx")
print(json.dumps(state))
"""


def child(
    cache: Path,
    *,
    refusals: tuple[int, ...] = (209,),
    capability: str = "8.0",
    library: Path | None = None,
    cached: bool = True,
) -> subprocess.Popen[str]:
    environment = os.environ | {
        "XDG_CACHE_HOME": str(cache),
        "MEMOPT_NVRTC": str(library or SIMULATED_NVRTC),
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-c", CHILD, json.dumps(refusals), capability, *(["cached"] if cached else [])]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def outcome(process: subprocess.Popen[str]) -> dict:
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    return json.loads(out)


needs_image = pytest.mark.skipif(
    not _C.kernel_status()["embedded_bytes"], reason="built without nvcc: nothing to refuse"
)


@pytest.fixture(scope="module")
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that a child has filled."""
    folder = tmp_path_factory.mktemp("cache")
    outcome(child(folder))
    return folder


@pytest.fixture
def filled(compiled_once: Path, tmp_path: Path) -> Path:
    """A copy of it, with its file's mode."""
    return shutil.copytree(compiled_once, tmp_path / "filled")


@needs_image
@pytest.mark.sampled("kernels by NVIDIA's compilers")
@pytest.mark.parametrize(
    ("code", "capability"), [(209, "8.0"), (222, "7.5"), (209, "10.3"), (222, "12.1")], ids=str
)
def test_a_refused_image_is_compiled_by_nvrtc_once_and_then_comes_from_the_cache(
    code: int, capability: str, tmp_path: Path
) -> None:
    def run() -> dict:
        return outcome(child(tmp_path, refusals=(code,), capability=capability, library=nvrtc()))

    first = run()
    assert (first["origin"], first["cache"], first["stored"], first["compilations"]) == (
        "compiled",
        "missing",
        True,
        1,
    )
    assert first["options"].startswith(f"--gpu-architecture=sm_{capability.replace('.', '')} ")
    assert first["nvrtc"].startswith("13.")
    assert "rejected" in first["note"] and first["loads"] == 2
    second = run()
    assert (second["origin"], second["cache"], second["compilations"]) == ("cached", "hit", 0)
    files = list((tmp_path / "memopt" / "kernels").iterdir())
    assert len(files) == 1 and files[0].stat().st_mode & 0o777 == 0o600


# The image may be there or not: what is left is what the simulated device's own compiler makes.
WITHOUT_IMAGE = """
import json, os, sys
from memopt import _C, sim
from memopt._runtime import kernels
sim.activate(memory="64MiB")
import torch
if _C.kernel_status()["embedded_bytes"]:
    sim.fail("cuModuleLoadDataEx", count=1, code=209)
from memopt import amp
gradient, found_inf, inv_scale = torch.full((1000,), 3.0).cuda(), torch.zeros(()).cuda(), torch.tensor(0.5).cuda()
amp.foreach_unscale_([gradient], found_inf, inv_scale)
value = gradient.cpu().unique().tolist()
print(json.dumps(kernels.status() | {"directory": kernels.cache_directory(), "value": value}))
"""


def test_without_the_image_kernels_compute_and_no_cache_is_written_or_read(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "MEMOPT_NVRTC"}
    environment |= {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", WITHOUT_IMAGE]
    for _ in range(2):
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        state = json.loads(done.stdout)
        assert (state["origin"], state["cache"], state["compilations"]) == ("compiled", "off", 1)
        assert state["value"] == [1.5] and state["directory"] is None
        assert list(tmp_path.iterdir()) == []


@needs_image
def test_what_lies_in_the_cache_is_left_alone_by_the_simulated_device(filled: Path) -> None:
    (file,) = (filled / "memopt" / "kernels").iterdir()
    file.write_bytes(b"cut")
    state = outcome(child(filled, cached=False))
    assert (state["origin"], state["cache"], state["note"].count("cache")) == ("compiled", "off", 0)
    assert file.read_bytes() == b"cut"


@needs_image
def test_two_processes_at_once_both_load_and_leave_one_file(tmp_path: Path) -> None:
    both = [child(tmp_path), child(tmp_path)]
    states = [outcome(process) for process in both]
    assert all(state["origin"] in ("compiled", "cached") for state in states), states
    assert 1 <= sum(state["compilations"] for state in states) <= 2
    assert len(list((tmp_path / "memopt" / "kernels").iterdir())) == 1
    third = outcome(child(tmp_path))
    assert (third["origin"], third["compilations"]) == ("cached", 0)
    together = [outcome(process) for process in [child(tmp_path), child(tmp_path)]]
    assert [(state["origin"], state["compilations"]) for state in together] == [("cached", 0)] * 2


@needs_image
@pytest.mark.parametrize("damage", ["header only", "one bit", "foreign"])
def test_a_damaged_cache_file_is_rebuilt(damage: str, filled: Path) -> None:
    (file,) = (filled / "memopt" / "kernels").iterdir()
    good = file.read_bytes()
    middle = len(good) // 2
    damaged = {
        "header only": good[:40],
        "one bit": good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :],
        "foreign": b"#!/bin/sh\n" * 100,
    }
    file.write_bytes(damaged[damage])
    state = outcome(child(filled))
    assert (state["origin"], state["cache"], state["stored"], state["compilations"]) == (
        "compiled",
        "damaged",
        True,
        1,
    )
    assert "rebuilt" in state["note"] and str(file) in state["note"]
    assert file.read_bytes() == good
    assert outcome(child(filled))["origin"] == "cached"


@needs_image
def test_a_cache_that_cannot_be_written_is_said_and_the_kernels_still_load(tmp_path: Path) -> None:
    (tmp_path / "memopt").write_text("a file where the folder should be")
    state = outcome(child(tmp_path))
    assert (state["origin"], state["stored"]) == ("compiled", False)
    assert "cannot be cached" in state["note"] and str(tmp_path) in state["note"]


@needs_image
def test_without_nvrtc_the_error_says_what_was_tried_and_the_mend(tmp_path: Path) -> None:
    state = outcome(child(tmp_path, library=tmp_path / "libnvrtc.so.13"))
    assert state["status"] == "MO_NO_LIBRARY"
    for part in (
        "compute capability 8.0",
        "rejected the embedded image",
        "NO_BINARY_FOR_GPU",
        str(tmp_path),
        "pip install",
    ):
        assert part in state["error"]


@needs_image
@pytest.mark.parametrize("capability", ["7.5", "10.3", "12.1"])
def test_a_device_of_any_generation_takes_the_embedded_image(capability: str, tmp_path: Path) -> None:
    assert outcome(child(tmp_path, refusals=(), capability=capability))["origin"] == "embedded"


@pytest.mark.sampled("kernels by NVIDIA's compilers")
@needs_image
def test_a_device_newer_than_the_compiler_gets_ptx(tmp_path: Path) -> None:
    state = outcome(child(tmp_path, capability="19.0", library=nvrtc()))
    assert state["origin"] == "compiled" and "compute_" in state["options"]
    assert outcome(child(tmp_path, capability="19.0", refusals=()))["origin"] == "embedded"  # its PTX


def test_a_forked_child_is_told_so_and_does_not_hang(tmp_path: Path) -> None:
    script = """
import os
from memopt import _C, sim
from memopt._runtime import kernels
sim.activate(memory="64MiB")
import torch
kernels.prepare()
_C.kernel_status(0, True)
found_inf = torch.zeros((), device="cuda")
gradients = _C.Gradients([torch.ones(4, device="cuda")])
gradients.run(0, found_inf=found_inf)
child = os.fork()
if child == 0:
    try:
        gradients.run(0, found_inf=found_inf)
    except _C.Error as error:
        os._exit(0 if "spawn" in str(error) else 1)
    os._exit(2)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "MEMOPT_NVRTC": str(nvrtc()),
        "XDG_CACHE_HOME": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
