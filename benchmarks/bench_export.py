"""memopt.deploy.export and memopt.compare_models beside the plain calls of the libraries that they stand on.

Export: the peer calls the exporter, saves, loads the file again and compares its outputs with the model's, as whoever
ships a model should; the files and outputs have to be the same. "written alone" leaves the check out for both. The
helper's own work is the copy without wrappers, the rename, and figures; what is measured in a process of its own is not
timed, since no plain call does that, but noted.

Comparison of models: the peer calls memopt.estimate and torch's FLOP counter for each, on shapes too; the figures have
to be the same. Needs the environment `techniques` for ONNX; without its packages those rows are missing, and said so.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

import memopt  # noqa: E402
from benchmarks import harness  # noqa: E402
from memopt.deploy import export  # noqa: E402

NO_SLOWER = 0.95  # the plain calls' time over the helper's: a twentieth is the noise of an exporter's seconds
FORMATS = ("pt2", "torchscript", "onnx")


class Convolutions(nn.Module):
    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 7, 2, 3)
        self.blocks = nn.Sequential(
            *(
                nn.Sequential(
                    nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
                )
                for _ in range(blocks)
            )
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class Transformer(nn.Module):
    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, blocks, enable_nested_tensor=False)
        self.head = nn.Linear(width, 1000, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embedding(ids)))


def models(quick: bool) -> dict[str, tuple[nn.Module, torch.Tensor]]:
    torch.manual_seed(0)
    width, blocks = (32, 2) if quick else (128, 8)
    found = {
        "convolutions": (Convolutions(width, blocks).eval(), torch.randn(4, 3, 64, 64)),
        "transformer": (Transformer(width, blocks).eval(), torch.randint(0, 1000, (4, 32))),
    }
    return {"transformer": found["transformer"]} if quick else found


# ---- what the plain calls are ---------------------------------------------------------------------------------------


def write(format: str, model: nn.Module, x: torch.Tensor, path: Path) -> None:
    with torch.no_grad():
        if format == "pt2":
            torch.export.save(torch.export.export(model, (x,)), path)
        elif format == "torchscript":
            torch.jit.save(torch.jit.trace(model, (x,)), path)
        else:
            torch.onnx.export(model, (x,), path, dynamo=True, verbose=False, external_data=False)


def run(format: str, path: Path, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        if format == "pt2":
            return torch.export.load(path).module()(x)
        if format == "torchscript":
            return torch.jit.load(path)(x)
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        session = onnxruntime.InferenceSession(path, options)
        return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])


def checked(format: str, model: nn.Module, x: torch.Tensor, path: Path) -> None:
    with torch.no_grad():
        live = model(x)
    write(format, model, x, path)
    torch.testing.assert_close(run(format, path, x), live, rtol=1e-3, atol=1e-4)


def processor_clock(run: Callable[[], object], calls: int) -> float:
    """Seconds of processors, of this process and of its children: the exporters are all arithmetic on one thread, and
    what else runs on the machine does not count."""
    begun = os.times()
    for _ in range(calls):
        run()
    return sum(os.times()[:4]) - sum(begun[:4])


# ---- the rows -------------------------------------------------------------------------------------------------------


def exports(report: harness.Report, folder: Path, formats: list[str]) -> None:
    for name, (model, x) in models(report.options.quick).items():
        for format in formats:
            plain, ours = folder / "plain" / f"{name}.{format}", folder / "memopt" / f"{name}.{format}"
            for path in (plain, ours):
                path.parent.mkdir(exist_ok=True)

            def helper(verify: bool, format=format, model=model, x=x, ours=ours) -> None:
                export(model, x, ours, format, verify=verify, measure=False)

            report.compare(
                f"{format} of the {name}, checked",
                {
                    "plain": lambda a=(format, model, x, plain): checked(*a),
                    "memopt": lambda: helper(True),
                },
                goal=NO_SLOWER,
                calls=1,
                clock=processor_clock,
            )
            if not report.options.quick:
                report.compare(
                    f"{format} of the {name}, written alone",
                    {
                        "plain": lambda a=(format, model, x, plain): write(*a),
                        "memopt": lambda: helper(False),
                    },
                    goal=NO_SLOWER,
                    calls=1,
                    clock=processor_clock,
                )
            if not torch.equal(run(format, plain, x), run(format, ours, x)):
                raise SystemExit(f"bench_export: the {format} files of the {name} give different outputs")
            sizes = {"plain": os.path.getsize(plain), "memopt": os.path.getsize(ours)}
            report.record(f"{format} of the {name}: the file", sizes, unit="bytes", peer="plain", goal=0.99)
            made = export(model, x, ours, format)
            report.note(f"{format} of the {name}", made.as_dict())


def comparisons(report: harness.Report) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    quick = report.options.quick
    makers = {
        "small": lambda: Convolutions(32, 2),
        "wide": lambda: Convolutions(64 if quick else 256, 2),
        "deep": lambda: Convolutions(32, 4 if quick else 16),
    }
    x = torch.randn(4, 3, 64, 64)
    figures: dict[str, dict[str, tuple[int, int, int]]] = {}

    def plain() -> None:
        found = figures["plain"] = {}
        for name, make in makers.items():
            with torch.device("meta"):
                model = make()
            peak = memopt.estimate(
                model, x, optimizer=torch.optim.AdamW, quick=True, method=method
            ).peak_bytes
            with FlopCounterMode(display=False) as counter:
                model(x.to("meta")).sum().backward()
            size = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
            found[name] = (size, peak[1], counter.get_total_flops())

    def ours() -> None:
        told = memopt.compare_models(makers, x, optimizer=torch.optim.AdamW, time=None, method=method)
        figures["memopt"] = {row.name: (row.bytes, row.peak_bytes[1], row.flops) for row in told}

    method = "fake tensors"  # the same way everywhere: a child's start would hide the rest
    report.compare(
        "three models: bytes, peak, FLOPs",
        {"plain": plain, "memopt": ours},
        goal=NO_SLOWER,
        calls=1,
        clock=processor_clock,
    )
    if figures["plain"] != figures["memopt"]:
        raise SystemExit(f"bench_export: compare_models gives other figures than the plain calls: {figures}")


def main() -> int:
    options = harness.parser(__doc__)
    options.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    given: argparse.Namespace = options.parse_args()
    report = harness.Report("bench_export", given, claim="the helpers cost no more than the plain calls")
    warnings.simplefilter("ignore")
    formats = list(given.formats)
    missing = [p for p in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(p) is None]
    if missing and "onnx" in formats:
        formats.remove("onnx")
        report.note("not run", f"onnx: {', '.join(missing)} not installed")
        print(f"bench_export: no ONNX, {', '.join(missing)} not installed", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        exports(report, Path(folder), formats)
    comparisons(report)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
