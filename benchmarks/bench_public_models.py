"""The promises of memopt.auto_checkpoint on models of public libraries, unmodified: 80, 60 and 50 % of the plain peak.

Each model runs in a process of its own, five steps of SGD by the plain model and by each plan: losses and parameters
must be the same bits, and the most live bytes of all steps, counted at torch's allocator, at most the budget. Where no
schedule fits, the least budget that the error names is tried instead. Last a model is planned with half its batch in
1.05 of the whole one's least budget, and trained with the whole one, which is planned in the first step. Activations
are live bytes at the peak of a step that begins with gradients, less these and what lives before the step.

A library that is not installed is named, and its models are left out: they are not dependencies of memopt.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from benchmarks import harness, public_models  # noqa: E402

if TYPE_CHECKING:
    from benchmarks.checkpoint_models import Work

SHARES = (0.8, 0.6, 0.5)
STEPS = 5
DEEP = 8  # stages: deeper models must be cut to these shares of the plain activations
ACTIVATIONS, ACTIVATIONS_UNET = 0.35, 0.45
ROOM = 1.05  # of the least budget, for a batch twice as large as the sample
SECONDS = 900  # for a model


# ---- in the process of a model -----------------------------------------------------------------------------------


def trained(work: Work) -> dict[str, Any]:
    """Five steps of training: every bit that they leave, the most live bytes, and seconds of the fastest step."""
    import torch

    import memopt

    optimizer = torch.optim.SGD(work.model.parameters(), lr=0.01, foreach=False)
    torch.manual_seed(2)
    losses, seconds, peaks = [], [], []
    work.model.zero_grad(set_to_none=True)
    for _ in range(STEPS):
        there = sum(p.grad.nbytes for p in work.model.parameters() if p.grad is not None)
        with memopt.profile("cpu", modules=False) as recorded:
            start = time.perf_counter()
            losses.append(work.step())
            seconds.append(time.perf_counter() - start)
            optimizer.step()
        before = int(recorded.recording.live_bytes()[0])
        peaks.append(work.standing_bytes() + there + recorded.peak_bytes - before)
    work.model.zero_grad(set_to_none=True)
    state = [tensor.detach().clone() for tensor in (*work.model.parameters(), *work.model.buffers())]
    return {
        "peak": max(peaks),
        "first": peaks[0],
        "later": max(peaks[1:]),
        "seconds": min(seconds),
        "bits": [*losses, *state],
    }


def activation_bytes(work: Work) -> int:
    """The most live bytes of a step that begins with gradients, beside these and what lives before it."""
    import torch

    import memopt

    for parameter in work.model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    with memopt.profile("cpu", modules=False) as recorded:
        work.step(keep_gradients=True)
    work.model.zero_grad(set_to_none=True)
    return recorded.peak_bytes - int(recorded.recording.live_bytes()[0])


def planned(name: str, budget: int, plain: dict[str, Any]) -> dict[str, Any]:
    """A row: the plan for this budget and what it does, or the least budget if none fits, or the error."""
    import torch

    from memopt import auto_checkpoint
    from memopt.chain import InfeasibleBudget

    work = public_models.make(name)
    start = time.perf_counter()
    try:
        auto_checkpoint(work.model, work.sample, memory_budget=budget, loss=work.loss)
        seconds = time.perf_counter() - start
        plan = vars(work.model)["plan"]
        found = trained(work)
    except InfeasibleBudget as error:
        return {"budget": budget, "least": error.least_budget}
    except Exception as error:
        traceback.print_exc()
        return {"budget": budget, "error": f"{type(error).__name__}: {error}"}
    same = all(map(torch.equal, found.pop("bits"), plain["bits"]))
    return {
        "budget": budget,
        **found,
        "same": same,
        "stages": len(plan.stages),
        "planning": seconds,
    }


def grown(name: str, budget: int, plain: dict[str, Any]) -> dict[str, Any]:
    """A row: planned with half the batch, and trained with all of it, which is planned in the first step."""
    import torch

    from memopt import auto_checkpoint

    work = public_models.make(name)

    def loss(out: Any) -> torch.Tensor:
        """The model's, or another where that has the whole batch's targets."""
        try:
            return work.loss(out)
        except (ValueError, RuntimeError):
            leaves = torch.utils._pytree.tree_leaves(out)
            return torch.stack(
                [x.square().mean() for x in leaves if torch.is_tensor(x) and x.requires_grad]
            ).sum()

    half = torch.utils._pytree.tree_map_only(
        torch.Tensor, lambda x: x[: len(x) // 2].contiguous(), work.sample
    )
    try:
        auto_checkpoint(work.model, half, memory_budget=budget, loss=loss)
        found = trained(work)
    except Exception as error:
        traceback.print_exc()
        return {"budget": budget, "error": f"{type(error).__name__}: {error}"}
    same = all(map(torch.equal, found.pop("bits"), plain["bits"]))
    return {"budget": budget, **found, "same": same}


def least_activations(name: str) -> int:
    """Activations by the plan that takes least where gradients are there before the step."""
    from memopt import auto_checkpoint
    from memopt.chain import InfeasibleBudget

    work = public_models.make(name)
    try:
        auto_checkpoint(work.model, work.sample, memory_budget=1, loss=work.loss, accumulate=True)
    except InfeasibleBudget as error:
        least = error.least_budget
    auto_checkpoint(work.model, work.sample, memory_budget=least, loss=work.loss, accumulate=True)
    return activation_bytes(work)


def survey(name: str) -> dict[str, Any]:
    """All rows of a model."""
    start = time.perf_counter()
    plain = trained(public_models.make(name))
    activations = activation_bytes(public_models.make(name))
    rows = [planned(name, int(share * plain["peak"]), plain) for share in SHARES]
    least = planned(name, 1, plain)
    if "least" in least:
        least = planned(name, least["least"], plain)
    batches = []
    if "stages" in least:
        least["activations"] = least_activations(name)
        if public_models.MODELS[name].batched:
            batches = [grown(name, int(least["budget"] * ROOM), plain)]
    del plain["bits"]
    return {
        "plain": plain,
        "activations": activations,
        "rows": rows,
        "least": least,
        "grown": batches,
        "wall": time.perf_counter() - start,
    }


def child(name: str) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__).resolve()), "--model", name]
    quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, **quiet}, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"not done after {SECONDS} s"}
    if done.returncode:
        return {"failed": done.stderr.strip()[-2000:]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    errors = [row["error"] for row in rows_of(found) if "error" in row]
    if errors:
        found["stderr"] = done.stderr[-4000:]
    return found


def rows_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [] if "failed" in found else [*found["rows"], found["least"], *found["grown"]]


# ---- the table -------------------------------------------------------------------------------------------------------


def cell(row: dict[str, Any], plain: int) -> str:
    if "error" in row:
        return row["error"].partition(":")[0]
    if "least" in row:
        return f"least {row['least'] / plain:.0%}"
    return f"{'bit' if row['same'] else 'OTHER BITS'} {row['peak'] / row['budget']:.3f}"


def text(table: dict[str, dict[str, Any]]) -> str:
    head = [f"{share:.0%}" for share in SHARES]
    lines = [
        f"{'':<20}{'stages':>7}{'plain MiB':>11}{head[0]:>18}{head[1]:>18}{head[2]:>18}"
        f"{'least':>9}{'':>18}{'activations':>13}{'slower':>8}{'batch doubled, first, later':>34}"
    ]
    for name, found in table.items():
        if "failed" in found:
            lines.append(f"{name:<20} {found['failed'].splitlines()[-1][:120]}")
            continue
        plain, least = found["plain"]["peak"], found["least"]
        cells = "".join(f"{cell(row, plain):>18}" for row in found["rows"])
        line = f"{name:<20}{least.get('stages', '-'):>7}{plain / (1 << 20):>11.1f}{cells}"
        line += f"{least['budget'] / plain if 'stages' in least else 0:>9.0%}{cell(least, plain):>18}"
        if "activations" in least:
            line += f"{least['activations'] / found['activations']:>13.0%}"
            line += f"{least['seconds'] / found['plain']['seconds']:>8.2f}"
        for row in found["grown"]:
            line += f"{cell(row, plain):>18}"
            line += (
                f"{row['first'] / row['budget']:>8.3f}{row['later'] / row['budget']:>8.3f}"
                if "first" in row
                else ""
            )
        lines.append(line)
    return "\n".join(lines)


def promises(report: harness.Report, table: dict[str, dict[str, Any]]) -> None:
    rows = {name: [row for row in rows_of(found) if "peak" in row] for name, found in table.items()}
    failed = [
        name
        for name, found in table.items()
        if "failed" in found or any("error" in row for row in rows_of(found))
    ]
    other = [name for name, found in rows.items() if any(not row["same"] for row in found)]
    over = [
        name
        for name, found in rows.items()
        if any(row["peak"] > row["budget"] for row in found if "stages" in row)
    ]
    doubled = {name: found["grown"] for name, found in table.items() if "failed" not in found}
    after, planning = (
        [
            name
            for name, found in doubled.items()
            if any(row[when] > row["budget"] for row in found if "peak" in row)
        ]
        for when in ("later", "first")
    )
    for case, names in (
        ("models that are not planned, or fail", failed),
        ("models whose losses or parameters are other bits", other),
        ("models over a budget", over),
        ("models over a budget by a doubled batch, once planned", after),
        ("models over a budget while a doubled batch is planned", planning),
    ):
        report.note(case, names)
        report.record(case, {"allowed": 1.0, "found": 1.0 + len(names)}, unit="1 + models", goal=1.0)
    for case, unet, most in (
        ("activations at the least budget, the worst model deeper than 8 stages", False, ACTIVATIONS),
        ("activations at the least budget, the worst U-Net", True, ACTIVATIONS_UNET),
    ):
        shares = [
            found["least"]["activations"] / found["activations"]
            for name, found in table.items()
            if public_models.MODELS[name].unet is unet
            and found.get("least", {}).get("stages", 0) > DEEP
            and "activations" in found["least"]
        ]
        if shares:
            report.record(
                case, {"allowed": most, "measured": max(shares)}, unit="of the plain run's", goal=1.0
            )


def main() -> int:
    parser = harness.parser(__doc__)
    names = list(public_models.MODELS)
    parser.add_argument("--models", nargs="+", choices=names, default=names, help="some of the models")
    parser.add_argument("--model", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.model:
        import torch

        torch.set_num_threads(
            1
        )  # bytes and bits are counted: with more, small operations wait for a busy core
        logging.disable(logging.WARNING)
        with contextlib.redirect_stdout(io.StringIO()):  # libraries print
            found = survey(options.model)
        print(json.dumps(found))
        return 0
    if options.cuda:
        raise SystemExit("bench_public_models counts the CPU allocator's bytes: leave --cuda out")
    report = harness.Report(
        "bench_public_models", options, claim="auto_checkpoint on public models: same bits, within the budget"
    )
    missing = [name for name in options.models if not public_models.MODELS[name].installed]
    for name in missing:
        print(f"LEFT OUT: {name}: {public_models.MODELS[name].library} is not installed", file=sys.stderr)
    table: dict[str, dict[str, Any]] = {}
    for name in options.models:
        if name not in missing:
            table[name] = child(name)
            print(text({name: table[name]}).splitlines()[-1], file=sys.stderr, flush=True)
    if not table:
        raise SystemExit("none of the models' libraries is installed")
    report.note("left out", missing)
    report.note("rows", table)
    promises(report, table)
    print(text(table), end="\n\n", file=sys.stderr if options.json else sys.stdout)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
