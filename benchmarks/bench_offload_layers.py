"""offload_layers: what a training step takes of the device when the parameters live on the host, what is copied, and
what it costs in time; beside the plain model and FSDP2's CPUOffloadPolicy.

    python benchmarks/bench_offload_layers.py [--quick] [--cuda]

Without --cuda on the simulated device (run it with the Python of .venv/sim): bytes are those of a GPU, as torch's own
allocator deals them out; seconds are not a GPU's, for its kernels compute nothing and its copies are the host's: they
say what the bookkeeping costs. With --cuda on the GPU that is there.

The model is a transformer of 12 blocks, dim 1024, trained with AdamW; the batch is such that activations are 20 % of
the plain step's peak. --quick: 6 blocks of dim 256, which is no claim."""

from __future__ import annotations

import argparse
import copy
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import harness  # noqa: E402

MIB = 1 << 20
LENGTH, WORDS = 64, 512


def options() -> argparse.Namespace:
    parser = harness.parser(__doc__)
    parser.add_argument(
        "--only", choices=["memory", "time"], help="one half of it; the other takes long on few cores"
    )
    return parser.parse_args()


def main() -> int:
    chosen = options()
    if not chosen.cuda:
        import memopt.sim

        memopt.sim.activate(memory="8GiB")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29541")
    import torch
    from torch import nn

    import memopt
    from tests.helpers.offloaded_models import Transformer, loss_of, words_of

    torch.set_num_threads(1)
    blocks, width = (6, 256) if chosen.quick else (12, 1024)
    report = harness.Report("bench_offload_layers", chosen)

    def make(device: str = "cpu") -> nn.Module:
        """Values are not computed with here: they are made small, not random."""
        with torch.device("meta"):
            model = Transformer(
                blocks=blocks, width=width, words=WORDS, length=LENGTH, tied=False, dropout=0.0
            )
        model.to_empty(device=device)
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.fill_(0.01)
        return model

    def trainer(model: nn.Module, batch: int):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
        words = words_of(model, batch).cuda()

        def step() -> None:
            optimizer.zero_grad()
            loss_of(model, words).backward()
            optimizer.step()

        return step

    def peak_of(step, steps: int = 2) -> tuple[int, int]:
        """Most live bytes in a step after the first, and those that stand before it (workspaces, states)."""
        step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        standing = torch.cuda.memory_allocated()
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated(), standing

    def memory() -> None:
        # ---- memory: activations are 20 % of the plain peak ----

        def plain_peak(batch: int) -> tuple[int, int]:
            model = make("cuda")
            states = 4 * sum(p.nbytes for p in model.parameters())  # parameters, gradients, AdamW's two
            peak, _ = peak_of(trainer(model, batch))
            return peak, peak - states

        batch = 1
        one = plain_peak(1)[1]
        per_sample = plain_peak(3)[1] - plain_peak(2)[1]
        states = 4 * sum(p.nbytes for p in make("cuda").parameters())
        batch = max(1, round((0.25 * states - max(one - per_sample, 0)) / per_sample))
        peak, activations = plain_peak(batch)
        model = make()
        block = sum(p.nbytes for p in model.blocks[0].parameters())
        handle = memopt.offload_layers(model, device="cuda")
        step = trainer(model, batch)
        step()
        before = handle.bytes_in, handle.bytes_out
        step()
        moved = handle.bytes_in - before[0], handle.bytes_out - before[1]
        offloaded, _ = peak_of(step)
        bound = 1.05 * (activations + 3 * 2 * block)
        report.record(
            f"activations, share of the plain peak (batch {batch})", {"plain": activations / peak}, unit=""
        )
        report.record("peak live bytes of a plain step", {"plain": peak / MIB}, unit="MiB")
        report.record(
            "peak live bytes of a step",
            {"bound": bound / MIB, "memopt": offloaded / MIB},
            unit="MiB",
            peer="bound",
            goal=1.0,
        )

        # ---- bytes copied, against those needed ----
        everything = sum(p.nbytes for p in model.parameters())
        again = sum(p.nbytes for n, p in model.blocks[0].named_parameters() if p.dim() == 2 or "before" in n)
        stay = 1 if chosen.quick else 2  # blocks that the forward pass leaves there, and all behind them
        needed_in = everything + (blocks - stay) * again
        report.record(
            "copied to the device in a step",
            {"needed": needed_in / MIB, "memopt": moved[0] / MIB},
            unit="MiB",
            peer="needed",
            goal=1.0,
        )
        report.record(
            "copied from the device in a step",
            {"needed": everything / MIB, "memopt": moved[1] / MIB},
            unit="MiB",
            peer="needed",
            goal=1.0,
        )
        handle.remove()
        del handle, step, model

        # ---- the plain model's losses ----
        if not chosen.cuda:
            from memopt.sim import Compute

            with Compute():
                small = Transformer(blocks=3)
                pairs = []
                for offload in (False, True):
                    torch.manual_seed(0)
                    twin = copy.deepcopy(small).cuda()
                    if offload:
                        memopt.offload_layers(twin)
                    optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-3, foreach=False)
                    words, losses = words_of(twin).cuda(), []
                    for seed in range(20):
                        torch.manual_seed(seed)
                        optimizer.zero_grad()
                        loss = loss_of(twin, words)
                        loss.backward()
                        optimizer.step()
                        losses.append(loss.item())
                    pairs.append(losses)
            equal = sum(a == b for a, b in zip(*pairs, strict=True))
            report.record(
                "losses that are not bit-equal to the plain model's, of 20",
                {"memopt": 20 - equal},
                unit="steps",
            )
            assert equal == 20, pairs

        # ---- parameters alone exceed the device ----
        if not chosen.cuda and not chosen.quick:  # of a small model, a library's workspace would be the most
            params = everything
            model = make()
            handle = memopt.offload_layers(model, device="cuda")
            step = trainer(model, 1)
            torch.cuda.empty_cache()
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(0.8 * params / total)
            with memopt.offload_activations():
                step()
            torch.cuda.set_per_process_memory_fraction(1.0)
            report.record(
                "device, of the parameters alone, on which a step runs (with offload_activations)",
                {"memopt": 0.8},
                unit="",
            )
            handle.remove()
            del model, handle, step

    def time() -> None:
        # ---- time ----
        timed = 16 if chosen.cuda else 2
        contenders = {}

        def lazily(name: str, build):
            made = build()
            contenders[name] = harness.Contender(made)

        lazily("plain", lambda: trainer(make("cuda"), timed))

        def offloaded_step(prefetch: bool):
            model = make()
            handle = memopt.offload_layers(model, device="cuda")
            if not prefetch:
                handle._residency.carrier.typical = 0
            keep.append(handle)
            return trainer(model, timed)

        keep: list[object] = []
        lazily("memopt", lambda: offloaded_step(True))
        lazily("memopt, no overlap", lambda: offloaded_step(False))
        try:
            import torch.distributed as dist
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

            dist.init_process_group("nccl" if chosen.cuda else "gloo", rank=0, world_size=1)
            mesh = init_device_mesh("cuda", (1,))

            def sharded():
                model = make()
                for layer in model.blocks:
                    fully_shard(layer, mesh=mesh, offload_policy=CPUOffloadPolicy())
                fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy())
                model.scale = model.scale.cuda()
                return trainer(model, timed)

            step = sharded()
            step()
            fsdp_peak, _ = peak_of(step)
            contenders["FSDP2 CPUOffloadPolicy"] = harness.Contender(step)
            print(f"FSDP2's peak at batch {timed}: {fsdp_peak / MIB:.0f} MiB")
        except Exception as error:
            print(f"FSDP2's CPUOffloadPolicy does not run here: {type(error).__name__}: {error}")
        report.compare(f"a step, batch {timed}", contenders, peer="plain")

    if chosen.only != "time":
        memory()
    if chosen.only != "memory":
        time()
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
