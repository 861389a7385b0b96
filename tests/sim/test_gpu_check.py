"""`memopt gpu-check` on the simulated device: every part runs, and reports the fault that is planted for it."""

from __future__ import annotations

import itertools
import math
import os
import platform
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import memopt
from memopt import _C, sim
from memopt._gpu_check import (
    allocator_part,
    check_report,
    driver_calls,
    environment_part,
    feature_part,
    kernel_part,
    parts,
    processes,
)
from memopt._gpu_check.check_report import CheckReport, PartResult
from memopt._gpu_check.part_outcome import PartRequest, ask_child, run_checks
from memopt._gpu_check.processes import PARTS, check

SIM = {"memory": "1GiB"}
ROOT = Path(__file__).resolve().parents[2]


def request(part: str, contender: str = "", quick: bool = True, folder: str = "") -> PartRequest:
    return PartRequest(part, quick, simulated=True, contender=contender, folder=folder)


@pytest.fixture
def computing():
    with sim.Compute():
        yield


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "memopt", "gpu-check", *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=900, cwd=ROOT)


# ---- the command -----------------------------------------------------------------------------------------------------


def test_every_part_is_right_on_the_simulated_device(tmp_path):
    """In the short form four that are drawn."""
    file, parts, options = tmp_path / "report.json", list(PARTS), ["--full"]
    if os.environ.get("MEMOPT_SOAK") != "1":
        drawn = random.Random(os.environ.get("MEMOPT_SEED")).sample(parts[1:], 3)
        parts = [name for name in parts if name in {parts[0], *drawn}]
        options = ["--quick", "--parts", *parts]
    done = command("--simulated", "-o", str(file), *options)
    assert done.returncode == 0, done.stdout + done.stderr
    found = check_report.read(str(file))
    assert [(part.part, part.status) for part in found.parts] == [(name, "ok") for name in parts]
    assert found.simulated and found.passed
    assert str(found) in done.stdout and "simulated" in done.stdout
    for part in found.parts:
        assert part.figures and part.seconds > 0
    again = command("-o", str(file))
    assert again.returncode == 2 and "exists" in again.stderr
    shown = command("--compare", str(file), str(file))
    assert shown.returncode == 0 and f"| {parts[-1]} | ok | ok |" in shown.stdout


def test_a_machine_without_a_gpu_is_no_success():
    done = command("--parts", "kernels")
    assert done.returncode == 1 and "| environment | not here |" in done.stdout
    assert "kernels" not in done.stdout


def test_a_part_that_there_is_not_is_refused():
    done = command("--parts", "anything")
    assert done.returncode == 2 and "anything" in done.stderr


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"version": 99, "parts": []}', '{"version": 1, "parts": [{}]}', "\xff"]
)
def test_what_is_no_report_is_refused(tmp_path, text):
    file = tmp_path / "report.json"
    file.write_bytes(text.encode("latin-1"))
    done = command("--compare", str(file), str(file))
    assert done.returncode == 2 and "report" in done.stderr and "Traceback" not in done.stderr


def test_a_comparison_has_what_differs():
    one = CheckReport([PartResult("driver", "ok", figures={"map": 2.0, "same": 1.0})], False)
    two = CheckReport([PartResult("driver", "slow", figures={"map": 3.0, "same": 1.0})], False)
    assert check_report.compared(one, two).splitlines()[2:] == [
        "| driver | ok | slow |",
        "| map | 2 | 3 (1.50×) |",
    ]


def test_a_part_whose_process_ends_is_wrong(monkeypatch):
    monkeypatch.setattr(processes, "MODULE", "memopt._gpu_check.check_report")
    (found,) = check(["environment"], quick=True, simulated=True).parts
    assert found.status == "wrong" and "without an answer" in found.text


def test_a_report_names_neither_folders_nor_the_machine(monkeypatch):
    monkeypatch.setattr(platform, "node", lambda: "atlas7")
    told = processes._impersonal(
        "atlas7: '/home/someone/lib/libnvrtc.so.13' lacks it, at 3 GB/s and 1/2 of atlas77"
    )
    assert told == "this machine: '…/libnvrtc.so.13' lacks it, at 3 GB/s and 1/2 of atlas77"


# ---- planted faults: environment -------------------------------------------------------------------------------------


def test_memory_that_is_mapped_by_odd_sizes_is_wrong(monkeypatch):
    assert parts.environment(request("environment")).status == "ok"
    monkeypatch.setattr(driver_calls.Driver, "granularity", lambda *_: 3 << 20)
    found = parts.environment(request("environment"))
    assert found.status == "wrong" and "no multiple" in found.text


def test_a_slice_a_shared_device_and_an_old_driver_are_named(monkeypatch):
    known = _C.cuda_driver()
    known["devices"][0]["name"] = "NVIDIA A100 MIG 1g.5gb"
    monkeypatch.setattr(_C, "cuda_driver", lambda: {**known, "version": "12.4"})
    monkeypatch.setattr(driver_calls.Driver, "attribute", lambda _, number, device: int(number == 133))
    monkeypatch.setattr(platform, "release", lambda: "6.6-microsoft-standard-WSL2")
    found = environment_part.environment(request("environment")).figures
    for name in ("device 0, MIG slice", "device 0, MPS", "driver older than torch's CUDA", "WSL"):
        assert found[name] == "yes", name
    assert found["device 0, GPUDirect RDMA"] == "no"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused = environment_part.environment(request("environment"))
    assert refused.status == "wrong" and "12.4 is older than torch's" in refused.text


def test_without_virtual_memory_management_parts_are_not_here(monkeypatch):
    known = _C.cuda_driver()
    known["devices"][0]["virtual_memory"] = False
    monkeypatch.setattr(_C, "cuda_driver", lambda: known)
    monkeypatch.setattr(torch.cuda.memory, "change_current_allocator", lambda _: None)
    monkeypatch.setattr(memopt.cuda, "allocator", lambda **_: None)
    monkeypatch.setattr(_C, "allocator_double_map", lambda _: (False, False, ""))
    assert parts.environment(request("environment")).status == "ok"
    for part in (parts.driver, parts.aliasing):
        found = part(request(part.__name__))
        assert found.status == "not here" and "no virtual memory management" in found.text
    figures: dict = {}
    assert feature_part.pool(request("features"), figures) == "" and "not here" in str(figures)


# ---- kernels ---------------------------------------------------------------------------------------------------------


@pytest.mark.sampled("faults that gpu-check finds")
def test_a_kernel_that_is_off_by_one_bit_is_wrong(monkeypatch, computing):
    trained = kernel_part._trained

    def off(make, values, dtype, device):
        found = trained(make, values, dtype, device)
        if device == "cuda":
            found[0].view(torch.uint8)[0] ^= 1
        return found

    assert kernel_part.values(request("kernels"), {}) == ""
    monkeypatch.setattr(kernel_part, "_trained", off)
    found = run_checks({"values": kernel_part.values}, request("kernels"), {})
    assert found.status == "wrong" and "other bits" in found.text


def test_a_norm_that_is_off_or_changes_is_wrong(monkeypatch, computing):
    clip, ulps = memopt.amp.clip_grad_norm_, itertools.count()
    assert kernel_part.repeated_norm(request("kernels"), {}) == ""
    monkeypatch.setattr(
        memopt.amp,
        "clip_grad_norm_",
        lambda *given: torch.nextafter(clip(*given), torch.tensor(math.inf * (next(ulps) == 70)).cuda()),
    )
    assert "different norms" in kernel_part.repeated_norm(request("kernels"), {})
    monkeypatch.setattr(memopt.amp, "clip_grad_norm_", lambda *given: clip(*given) * (1 + 1e-5))
    assert "norm" in kernel_part.values(request("kernels"), {})


@pytest.mark.parametrize(
    ("module", "name", "fault", "reported"),
    [
        (memopt.amp, "clip_grad_norm_", lambda real: lambda params, most: real(params, most) * 2, "norm"),
        (
            memopt.amp,
            "foreach_unscale_",
            lambda real: lambda grads, *given: real([grad[: len(grad) // 2] for grad in grads], *given),
            "unscaling, search for inf",
        ),
        (
            memopt.optim.SGD,
            "step",
            lambda real: lambda self: self.param_groups[0]["params"][0].data[:9].sub_(1),
            "update",
        ),
    ],
)
def test_the_end_of_a_large_tensor_that_is_left_out_is_wrong(
    monkeypatch, computing, module, name, fault, reported
):
    assert kernel_part.large_tensor(request("kernels"), {}) == ""
    monkeypatch.setattr(module, name, fault(getattr(module, name)))
    assert reported in kernel_part.large_tensor(request("kernels"), {})


@pytest.mark.sampled("faults that gpu-check finds")
def test_a_launch_that_a_capture_records_twice_is_wrong(run_script):
    done = run_script(
        """
import memopt.sim
memopt.sim.activate(memory="1GiB")
import torch
from memopt import amp
from memopt._gpu_check import kernel_part
from memopt._gpu_check.part_outcome import PartRequest
launch = amp.foreach_unscale_
amp.foreach_unscale_ = lambda *given: (launch(*given), launch(*given))
found = kernel_part.load(PartRequest("load", True, False, kernel_part.JIT))
assert "other values" in found["answer"], found
"""
    )
    assert done.returncode == 0, done.stderr


def test_a_way_to_load_that_another_way_serves_is_wrong(monkeypatch, computing, tmp_path):
    """The cache is empty: the kernels come from the compiler."""
    found, said = ask_child(request("load", kernel_part.CACHED, folder=str(tmp_path)))
    assert said == "" and "compiled, not cached" in found["answer"]
    monkeypatch.setattr(kernel_part, "ask_child", lambda *_: (found, said))
    assert "compiled, not cached" in kernel_part.ways_to_load(request("kernels"), {})
    figures: dict = {}
    monkeypatch.setattr(
        kernel_part, "ask_child", lambda *_: ({"answer": "not here: no NVRTC is installed"}, "")
    )
    assert kernel_part.ways_to_load(request("kernels"), figures) == ""
    assert figures[kernel_part.CACHED] == "not here: no NVRTC is installed"


@pytest.mark.parametrize("status", [0, 9])
def test_what_a_sanitizer_finds_is_wrong(monkeypatch, tmp_path, status):
    tool = tmp_path / kernel_part.SANITIZER
    tool.write_text(f"#!/bin/sh\necho '========= ERROR SUMMARY: 1 error'\nexit {status}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    figures: dict = {}
    assert (
        kernel_part.sanitizer(request("kernels"), figures) == ""
        and "--full" in figures[kernel_part.SANITIZER]
    )
    found = kernel_part.sanitizer(request("kernels", quick=False), figures)
    assert ("racecheck: ========= ERROR SUMMARY" in found) == bool(status)
    assert figures["compute-sanitizer, memcheck"] == ("errors" if status else "clean")


# ---- streams, driver -------------------------------------------------------------------------------------------------


@pytest.mark.sampled("faults that gpu-check finds")
def test_a_block_that_is_written_while_another_stream_reads_it_is_wrong(run_script):
    """The lost wait: the allocator is not told that the other stream uses the block."""
    done = run_script(
        """
import memopt.sim
memopt.sim.activate(memory="1GiB")
import torch
from memopt._gpu_check import parts
request = parts.PartRequest("streams", True, True)
with memopt.sim.Compute():
    right = parts.streams(request)
    torch.Tensor.record_stream = lambda *_: None
    wrong = parts.streams(request)
assert right.status == "ok", right
assert wrong.status == "wrong" and "while another stream still read them" in wrong.text, wrong
"""
    )
    assert done.returncode == 0, done.stderr


def test_a_call_of_the_driver_that_fails_is_wrong():
    sim.fail("cuMemMap", after=3, count=1)
    found = parts.driver(request("driver"))
    sim.fail_clear()
    assert found.status == "wrong" and "cuMemMap" in found.text
    assert sim.stats()["handles"] == 0


def test_a_call_of_the_driver_that_waits_for_a_kernel_is_slow(monkeypatch):
    call = driver_calls.Driver.__call__

    def waiting(self, name, *given):
        if name == "cuMemSetAccess":
            torch.cuda.synchronize()
        call(self, name, *given)

    assert parts.driver(request("driver")).status == "ok"
    monkeypatch.setattr(driver_calls.Driver, "__call__", waiting)
    found = parts.driver(request("driver"))
    assert found.status == "slow" and found.text.endswith(": cuMemSetAccess")


def leak() -> None:
    import ctypes

    driver = driver_calls.Driver()
    handle, properties = ctypes.c_uint64(), driver.properties()
    size, none = ctypes.c_size_t(driver_calls.HANDLE), ctypes.c_uint64(0)
    driver("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(properties), none)
    leaked.append((driver, handle))


leaked: list = []


def test_a_handle_that_the_driver_keeps_is_wrong(monkeypatch):
    use = driver_calls.use_events
    monkeypatch.setattr(driver_calls, "use_events", lambda *given, **named: (leak(), use(*given, **named)))
    found = parts.driver(request("driver"))
    for driver, handle in leaked:
        driver("cuMemRelease", handle)
        driver.close()
    assert found.status == "wrong" and "not free again" in found.text


# ---- allocator -------------------------------------------------------------------------------------------------------


def test_losses_that_differ_memory_that_stays_and_a_high_frontier_are_reported():
    losses = {"unet": {name: [1.0, 2.0] for name in allocator_part.CONTENDERS}}
    figures = {
        f"unet, {name}: {figure}": value
        for name in allocator_part.CONTENDERS
        for figure, value in (
            (allocator_part.HELD, 0),
            (allocator_part.STEP, 9.0),
            (allocator_part.FRONTIER, 1.1),
            (allocator_part.LIVE, 1 << 30),
        )
    }

    def judged(losses, simulated=False, **changed):
        return allocator_part.judged(losses, {**figures, **changed}, simulated)

    assert judged(losses).status == "ok"
    assert "unet, memopt" in judged({"unet": {**losses["unet"], "memopt": [1.0, 2.5]}}).text
    assert "unet, memopt" in judged(losses, **{f"unet, memopt: {allocator_part.HELD}": 1 << 21}).text
    late = {f"unet, memopt: {allocator_part.STEP}": 12.0}
    assert judged(losses, **late).status == "slow" and judged(losses, simulated=True, **late).status == "ok"
    high = judged(losses, simulated=True, **{f"unet, memopt, one address: {allocator_part.FRONTIER}": 1.2})
    assert high.status == "slow" and "unet, memopt, one address, smallest budget" in high.text
    few = {f"unet, memopt, one address: {allocator_part.FRONTIER}": 1.2}
    assert judged(losses, **few, **{f"unet, native: {allocator_part.LIVE}": 64 << 20}).status == "ok"


def test_a_block_that_is_left_is_held_at_the_end_and_a_frontier_is_found(computing):
    left = torch.ones(1 << 20, device="cuda")
    asked = request("loop", "native")._replace(loops=("gnn",))
    found = allocator_part.loop(asked)["gnn"]
    assert found[allocator_part.HELD] > 0 and allocator_part.FRONTIER not in found
    assert len(found["losses"]) == 4 and all(found["losses"])
    allocator_part._until_the_end.clear()
    del left
    found = allocator_part.loop(asked._replace(quick=False))["gnn"]
    allocator_part._until_the_end.clear()
    assert found[allocator_part.HELD] == 0  # also after trainings that ran out of memory
    assert 1 <= found[allocator_part.FRONTIER] <= found["held over the live peak"]


def test_a_loop_whose_memory_is_overwritten_has_other_losses(monkeypatch, computing):
    """A parameter that somebody else writes to in the middle of the loop."""
    asked = request("loop", "native")._replace(loops=("gnn",))
    right = allocator_part.loop(asked)["gnn"]["losses"]
    assert allocator_part.loop(asked)["gnn"]["losses"] == right
    step, steps = torch.optim.AdamW.step, itertools.count()

    def overwritten(self, *given):
        step(self, *given)
        if next(steps) == 1:
            self.param_groups[0]["params"][0].data.view(-1)[0] = 3.0

    monkeypatch.setattr(torch.optim.AdamW, "step", overwritten)
    wrong = allocator_part.loop(asked)["gnn"]["losses"]
    allocator_part._until_the_end.clear()
    assert wrong[:2] == right[:2] and wrong[2] != right[2]


def test_a_process_that_ends_badly_after_its_answer_is_wrong(monkeypatch, tmp_path):
    (tmp_path / "ends_badly.py").write_text(
        "import os\nfrom memopt._runtime import process\nnext(process.requests())\n"
        "process.tell('finding', figures={'losses': [1.0]})\nos.abort()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(processes, "MODULE", "ends_badly")
    found = allocator_part.allocator(request("allocator"))
    assert found.status == "wrong" and found.text.startswith("native: the process was ended by SIGABRT after")


EDGES = """
import os
import memopt.sim
memopt.sim.activate(memory="1GiB")
import torch
from memopt import cuda
from memopt._gpu_check import allocator_part as part, driver_calls
from memopt._gpu_check.part_outcome import PartRequest, late_work, run_checks, use_memopts_allocator
from unittest import mock

use_memopts_allocator()
asked, parent = PartRequest("allocator", True, True), os.getpid()
block, limit, stats, churn, leaked = part._block, part._limit, cuda.memory_stats, part.churn, []

def unrecorded(nbytes):
    "What another stream writes to is the default stream's: the allocator knows nothing of it."
    with torch.cuda.stream(torch.cuda.default_stream()):
        return block(nbytes)

def refused_in_a_child():
    return stats() if os.getpid() == parent else os._exit(7)

def leaking(*given):
    import ctypes
    churn(*given)
    calls, handle = driver_calls.Driver(), ctypes.c_uint64()
    calls("cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(2 << 20), ctypes.byref(calls.properties()),
          ctypes.c_uint64(0))
    leaked.append(calls)

faults = {
    "out of memory": [(torch, "OutOfMemoryError", KeyError, "not torch.OutOfMemoryError"),
                      (part, "_limit", lambda nbytes: limit(2 * nbytes), "served beyond a limit")],
    "queued work": [(part, "_block", unrecorded, "queued work still wrote"),
                    (part, "_limit", lambda nbytes: limit(3 * nbytes // 4), "OutOfMemoryError: CUDA out of memory")],
    "captured graph": [(torch.cuda.CUDAGraph, "replay", lambda self: None, "wrong values")],
    "foreign stream": [(torch.Tensor, "record_stream", lambda *_: None, "before its last use")],
    "fork": [(cuda, "memory_stats", refused_in_a_child, "ends with 7")],
    "handles": [(part, "churn", leaking, "not free again")],
}
with late_work(True):
    right = run_checks(part.EDGES, asked, {})
    assert right.status == "ok", right
    for name, plants in faults.items():
        for where, what, fault, reported in plants:
            with mock.patch.object(where, what, fault):
                found = run_checks({name: part.EDGES[name]}, asked, {})
            assert found.status == "wrong" and reported in found.text, (name, what, found)
"""


@pytest.mark.sampled("faults that gpu-check finds")
def test_each_fault_at_the_allocators_edges_is_wrong(run_script):
    done = run_script(EDGES)
    assert done.returncode == 0, done.stderr


@pytest.mark.sampled("faults that gpu-check finds")
def test_values_that_another_device_changes_are_wrong(run_script):
    done = run_script(
        """
import memopt.sim
memopt.sim.activate(memory="1GiB", devices=2)
import torch
from memopt._gpu_check import allocator_part as part
figures, move = {}, torch.Tensor.to
assert part.second_device(None, figures) == "" and figures["second device"] == "yes"
torch.Tensor.to = lambda self, device: move(self.cpu() + 1, device)
assert "others" in part.second_device(None, figures)
"""
    )
    assert done.returncode == 0, done.stderr


# ---- features --------------------------------------------------------------------------------------------------------


def faulty(name: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Plants the feature's fault, and returns what is to be reported."""
    if name == "optimizers":
        adamw = memopt.optim.AdamW
        monkeypatch.setattr(memopt.optim, "AdamW", lambda params, lr: adamw(params, lr=lr * 1.001))
        return "AdamW's loss differs"
    if name == "backward":
        whole = memopt.backward
        monkeypatch.setattr(memopt, "backward", lambda fn, batch, model: whole(fn, batch[1:], model=model))
        return "differ from the whole batch's"
    if name == "offload_activations":
        seen, gradients = itertools.count(), feature_part._gradients

        def off(model):
            found = gradients(model)
            found[0].view(torch.int32)[0, 0] ^= next(seen) == 2
            return found

        monkeypatch.setattr(feature_part, "_gradients", off)
        return "differ in bits"
    if name == "auto_checkpoint":
        planned = memopt.auto_checkpoint

        def undone(model, *given, **named):
            plan = planned(model, *given, **named).plan
            memopt.undo_checkpoint(model).plan = plan

        monkeypatch.setattr(memopt, "auto_checkpoint", undone)
        return "of a budget of"
    if name == "linear_cross_entropy":
        real = memopt.nn.linear_cross_entropy
        monkeypatch.setattr(memopt.nn, name, lambda *given, **named: real(*given, **named) * 1.2)
        return "of what its types allow"
    if name == "Prefetcher":
        real = memopt.data.Prefetcher
        monkeypatch.setattr(
            memopt.data,
            "Prefetcher",
            lambda *given, **named: [(x * 1.001, y) for x, y in real(*given, **named)],
        )
        return "8 of 8 batches differ"
    monkeypatch.setattr(memopt.cuda.CudaPool, "pause", lambda self: None)
    monkeypatch.setattr(memopt.cuda.CudaPool, "resume", lambda self: None)
    return "a paused CudaPool holds"


@pytest.mark.sampled("faults that gpu-check finds")
@pytest.mark.parametrize("name", [name for name in feature_part.CHECKS if name not in ("CUDA IPC", "NCCL")])
def test_a_feature_with_a_fault_is_wrong(name, monkeypatch, computing):
    check = {name: feature_part.CHECKS[name]}
    right = run_checks(check, request("features"), {})
    assert right.status == "ok", right
    reported = faulty(name, monkeypatch)
    found = run_checks(check, request("features"), {})
    assert found.status == "wrong" and reported in found.text, found


def test_activations_that_stay_are_wrong(monkeypatch, computing):
    real = memopt.offload_activations
    monkeypatch.setattr(memopt, "offload_activations", lambda min_size, in_flight: real(min_size="1GiB"))
    assert feature_part.offloading(request("features"), {}) == "nothing was offloaded"


@pytest.mark.sampled("faults that gpu-check finds")
def test_a_tensor_that_is_sent_or_refused_without_a_remedy_is_wrong(run_script):
    done = run_script(
        """
import memopt.sim
memopt.sim.activate(memory="1GiB")
import torch
from memopt._gpu_check import feature_part, part_outcome
part_outcome.use_memopts_allocator()
def reported():
    asked = part_outcome.PartRequest("features", True, True)
    return part_outcome.run_checks({"CUDA IPC": feature_part.refused_sending}, asked, {})
assert reported().status == "ok", reported()
def refused(self):
    raise RuntimeError("invalid argument")
torch.UntypedStorage._share_cuda_ = refused
assert reported().text == "CUDA IPC: the refusal names no remedy: invalid argument", reported()
torch.UntypedStorage._share_cuda_ = lambda self: (0, b"", 1 << 22, 0, b"", 0, b"", False)
assert "was sent to another process" in reported().text, reported()
"""
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.sampled("faults that gpu-check finds")
def test_sums_of_all_ranks_are_compared(monkeypatch):
    figures: dict = {}
    assert feature_part.reduced(request("features"), figures, 1) == ""
    assert figures["NCCL all-reduce"] == "1 ranks"
    monkeypatch.setattr(feature_part, "heard", lambda child: ({"sums": [5]}, ""))
    assert "rank 0 has [5], not 1" in feature_part.reduced(request("features"), figures, 1)
