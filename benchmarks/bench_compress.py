"""memopt.compress beside the plain calls of the libraries that do its work: the same tensors come out, and the bytes
that a report measures before and after cost next to nothing beside them.

Each contender changes a copy of the model, made anew before each sample and untimed. What both make of it is compared
before anything is timed; a difference ends the run. The rows of tie_() and of packing have no goal: the plain ways are
one assignment, and three operations that check and measure nothing.

Goal: no slower, which is a ratio of at least 0.95, as a shared machine cannot tell less apart. Run it in the
environment `techniques`."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch_pruning
import torchao.quantization as ao
from torch import nn
from torch.ao.pruning import WeightNormSparsifier
from torch.nn import functional as F
from torch.nn.utils import prune
from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import harness  # noqa: E402
from memopt import compress  # noqa: E402

GOAL = 0.95


def perceptron(width: int, depth: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(depth)])


class Convolutions(nn.Module):
    """Blocks with a residual connection and a head."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d(width),
                nn.ReLU(),
                nn.Conv2d(width, 2 * width, 3, padding=1),
                nn.BatchNorm2d(2 * width),
                nn.ReLU(),
                nn.Conv2d(2 * width, width, 3, padding=1),
            )
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((2, 3)))


class Changed:
    """One model that a contender changes, made anew before each sample."""

    def __init__(self, model: nn.Module, change: Callable[[nn.Module], Any]) -> None:
        self._model, self._change = model, change
        self.model: nn.Module | None = None

    def before(self) -> None:
        self.model = None
        self.model = copy.deepcopy(self._model)

    def run(self) -> Any:
        assert self.model is not None
        return self._change(self.model)

    def contender(self) -> harness.Contender:
        return harness.Contender(self.run, self.before)


def compare(
    report: harness.Report,
    case: str,
    model: nn.Module,
    plain: Callable[[nn.Module], Any],
    ours: Callable[[nn.Module], compress.Report],
    library: str,
) -> None:
    """Checks that both make the same of the model, says what memopt reports, and times them."""
    theirs, mine = Changed(model, plain), Changed(model, ours)
    theirs.before()
    mine.before()
    theirs.run()
    said = mine.run()
    assert theirs.model is not None and mine.model is not None
    check_equal(case, theirs.model, mine.model)
    report.record(
        f"bytes of memory a parameter: {case}",
        {
            "before": said.before.memory / elements(model),
            "after": said.after.memory / elements(model),
        },
        unit="bytes",
    )
    report.compare(case, {library: theirs.contender(), "memopt": mine.contender()}, goal=GOAL)


def elements(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def check_equal(case: str, one: nn.Module, other: nn.Module) -> None:
    first, second = one.state_dict(), other.state_dict()
    assert sorted(first) == sorted(second), case
    for name, tensor in first.items():
        for mine, theirs in zip(dense(tensor), dense(second[name]), strict=True):
            if not torch.equal(mine, theirs):
                raise SystemExit(f"{case}: {name} is not what the library makes")


def dense(tensor: torch.Tensor) -> list[torch.Tensor]:
    if hasattr(tensor, "__tensor_flatten__"):
        return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    return [tensor if tensor.layout is torch.strided else tensor.to_dense()]


# ---- the plain calls


def masked(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            prune.l1_unstructured(module, "weight", 0.5)
            prune.remove(module, "weight")


def two_of_four(model: nn.Module) -> None:
    sparsifier = WeightNormSparsifier(sparsity_level=1.0, sparse_block_shape=(1, 4), zeros_per_block=2)
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    sparsifier.prepare(model, [{"tensor_fqn": f"{name}.weight"} for name in names])
    sparsifier.step()
    sparsifier.squash_mask()


def channels(model: nn.Module, sample: torch.Tensor) -> None:
    assert isinstance(model, Convolutions)
    torch_pruning.pruner.BasePruner(
        model,
        sample,
        importance=torch_pruning.importance.GroupMagnitudeImportance(p=2),
        pruning_ratio=0.5,
        ignored_layers=[model.head],
        in_channel_groups={},
        out_channel_groups={},
    ).step()


def to_csr(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(module.weight.detach().to_sparse_csr(), requires_grad=False)


def main() -> int:
    options = harness.parser(__doc__).parse_args()
    warnings.simplefilter("ignore")
    report = harness.Report(
        "bench_compress", options, claim="the plain calls' results, no slower, with bytes measured"
    )
    width, depth, more = (256, 3, 3) if options.quick else (2048, 3, 12)
    model, large = perceptron(width, depth), perceptron(width, more)
    report.note("linear layers", f"{depth} of {width} x {width}; to quantise {more}")

    compare(
        report,
        "prune_ l1_unstructured",
        model,
        masked,
        lambda m: compress.prune_(m, 0.5, "l1_unstructured"),
        "torch.nn.utils.prune",
    )
    compare(
        report,
        "prune_ 2:4",
        model,
        two_of_four,
        lambda m: compress.prune_(m, method="2:4"),
        "torch.ao.pruning",
    )
    configs: dict[str, Any] = {
        "int8_weight_only": ao.Int8WeightOnlyConfig(set_inductor_config=False),
        "int8_dynamic": ao.Int8DynamicActivationInt8WeightConfig(set_inductor_config=False),
        "int4": PrototypeInt4WeightOnlyConfig(group_size=128, set_inductor_config=False),
    }
    for method, config in configs.items():
        compare(
            report,
            f"quantize_ {method}",
            large,
            lambda m, config=config: ao.quantize_(m, config),
            lambda m, method=method: compress.quantize_(m, method),
            "torchao",
        )
    sparse = copy.deepcopy(model)
    compress.prune_(sparse, 0.9, "l1_unstructured")
    compare(
        report, "sparsify_ csr, 10 % dense", sparse, to_csr,
        lambda m: compress.sparsify_(m, "csr", index_dtype=torch.int64), "to_sparse_csr()",
    )  # fmt: skip
    small = copy.deepcopy(sparse)
    said = compress.sparsify_(small, "csr")
    report.record(
        "bytes of memory a parameter: csr with int32 indices, 10 % dense",
        {
            "before": said.before.memory_bytes / elements(model),
            "after": said.after.memory_bytes / elements(model),
        },
        unit="bytes",
    )
    net = Convolutions(*((16, 2) if options.quick else (128, 6)))
    sample = torch.randn(1, 3, 32, 32)
    compare(
        report, "prune_ structured", net, lambda m: channels(m, sample),
        lambda m: compress.prune_(m, 0.5, "structured", sample=sample), "torch-pruning",
    )  # fmt: skip
    distillation(report, options.quick)
    inputs(report, options.quick)
    ties(report, width)
    return report.finish()


def distillation(report: harness.Report, quick: bool) -> None:
    """Loss and backward on logits of a vocabulary."""
    rows, classes = (64, 1000) if quick else (512, 32_000)
    torch.manual_seed(0)
    student, taught = torch.randn(rows, classes, requires_grad=True), torch.randn(rows, classes)
    target = torch.randint(0, classes, (rows,))
    ours = compress.DistillationLoss(temperature=4.0, hard_weight=0.3)

    def by_hand() -> torch.Tensor:
        soft = F.kl_div(
            F.log_softmax(student / 4, -1),
            F.log_softmax(taught / 4, -1),
            reduction="batchmean",
            log_target=True,
        )
        loss = 0.3 * F.cross_entropy(student, target) + 0.7 * 16 * soft
        loss.backward()
        student.grad = None
        return loss.detach()

    def by_memopt() -> torch.Tensor:
        loss = ours(student, target, teacher_logits=taught)
        loss.backward()
        student.grad = None
        return loss.detach()

    assert torch.allclose(by_hand(), by_memopt(), rtol=1e-5)
    report.compare(
        f"DistillationLoss, {rows} x {classes}", {"by hand": by_hand, "memopt": by_memopt}, goal=GOAL
    )


def inputs(report: harness.Report, quick: bool) -> None:
    """A batch of images; by hand it is neither measured nor known to be finite."""
    batch = torch.rand(16 if quick else 128, 3, 64 if quick else 224, 64 if quick else 224)
    low, high = (float(one) for one in batch.aminmax())

    def pack() -> torch.Tensor:
        return ((batch - low) / (high - low) * 255).round_().to(torch.uint8)

    values = pack()
    packed = compress.pack_inputs(batch)
    assert int((values.int() - packed.batch.values.int()).abs().max()) <= 1
    report.record(
        "bytes of memory an element: pack_inputs uint8",
        {
            "before": packed.report.before.memory_bytes / batch.numel(),
            "after": packed.report.after.memory_bytes / batch.numel(),
        },
        unit="bytes",
    )
    report.compare(
        "unpack uint8",
        {
            "by hand": lambda: values.float().div_(255).mul_(high - low).add_(low),
            "memopt": lambda: packed.unpack(),
        },
        goal=GOAL,
    )
    report.compare(
        "pack_inputs uint8, checked and measured",
        {"by hand": pack, "memopt": lambda: compress.pack_inputs(batch)},
    )


def ties(report: harness.Report, width: int) -> None:
    """The cost of measuring where the change itself is one assignment."""
    model = perceptron(width, 4)
    mine = Changed(model, lambda m: compress.tie_(m, [("0.weight", "1.weight")]))

    def plain(m: nn.Module) -> None:
        m[1].weight = m[0].weight  # type: ignore[index]

    theirs = Changed(model, plain)
    report.compare(
        "tie_, with what it frees", {"an assignment": theirs.contender(), "memopt": mine.contender()}
    )


if __name__ == "__main__":
    sys.exit(main())
