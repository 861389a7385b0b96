"""The smoke test that one built extension passes under every torch: run by benchmarks/torch_versions.py and by the
tests in an environment with a CUDA build of torch. Of the memopt that Python finds, where there is one, else of the
source tree. Prints a JSON object; any failure is an exception."""

import importlib.util
import json
import sys
from pathlib import Path

if importlib.util.find_spec("memopt") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from memopt import _C, sim

sim.activate(memory="256MiB")

import torch  # noqa: E402

import memopt  # noqa: E402


def main() -> dict[str, object]:
    torch.cuda.memory.change_current_allocator(memopt.cuda.allocator())
    before = sim.stats()["bytes"]
    x = torch.arange(1000, dtype=torch.float32).cuda()
    assert torch.equal(x.cpu(), torch.arange(1000, dtype=torch.float32))
    assert memopt.cuda.memory_stats()["live_blocks"] == 1

    caught = None
    try:
        torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError as error:
        caught = str(error)
    assert caught and caught.startswith("CUDA out of memory. Tried to allocate 1024.00 MiB. GPU 0 has"), (
        caught
    )

    gradients = [torch.tensor([2.0, 4.0]).cuda(), torch.tensor([6.0, 8.0, 10.0]).half().cuda()]
    found, inverse = torch.zeros(1).cuda(), torch.full((1,), 0.5).cuda()
    for gradient in gradients:
        memopt.amp.foreach_unscale_([gradient], found, inverse)
    assert gradients[0].cpu().tolist() == [1.0, 2.0] and gradients[1].cpu().tolist() == [3.0, 4.0, 5.0]
    assert found.item() == 0
    gradients[0].copy_(torch.tensor([1.0, float("inf")]))
    memopt.amp.foreach_unscale_(gradients[:1], found, inverse)
    assert found.item() == 1

    del x, gradients, gradient, found, inverse
    stats = memopt.cuda.memory_stats()
    assert stats["live_blocks"] == stats["live_bytes"] == stats["failed_frees"] == 0, stats
    diagnosis = memopt.doctor()
    assert diagnosis.healthy, str(diagnosis)
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
        "extension": Path(_C.__file__).name,
        "installed": not (Path(memopt.__file__).parents[1] / "setup.py").exists(),
        "allocations": stats["allocations"],
        "bytes_before": before,
        "bytes_after": sim.stats()["bytes"],
    }


print(json.dumps(main()))
