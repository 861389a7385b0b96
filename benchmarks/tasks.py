"""The two training tasks that every benchmark, example and test of memopt uses: those of memopt.demo, and how many
bytes a step of them holds.

    task = tasks.get("gpt", "small")
    model = task.build_model("cuda")
    optimizer = task.optimizer(model)
    for batch in task.batches(100, device="cuda"):
        task.loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    print(task.evaluate(model))

`python benchmarks/tasks.py` prints the table of sizes: parameters, and live bytes of a step with the share of
activations.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import platform
import sys
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # started as a script: this folder is on the path, its parent is not
    sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks.live_bytes import StepMemory, measure_step  # noqa: E402
from memopt import demo  # noqa: E402
from memopt.demo import VOCABULARY, Block, digits, make_cnn, standard_library_text  # noqa: E402

__all__ = [
    "TASKS",
    "VOCABULARY",
    "Batch",
    "Block",
    "Task",
    "decode",
    "digits",
    "get",
    "make_cnn",
    "standard_library_text",
    "text_digest",
    "text_tokens",
]

Batch = tuple[torch.Tensor, torch.Tensor]


@functools.cache
def text_digest() -> str:
    """SHA-256 of the training text, a zero byte, the validation text: names the data in results."""
    text = standard_library_text()
    return hashlib.sha256(text["train"] + b"\0" + text["val"]).hexdigest()


@functools.cache
def text_tokens(split: str) -> torch.Tensor:
    """A split of the text as a uint8 tensor of token numbers."""
    table = bytes(VOCABULARY.find(bytes([byte])) % len(VOCABULARY) for byte in range(256))
    return torch.frombuffer(bytearray(standard_library_text()[split].translate(table)), dtype=torch.uint8)


def decode(tokens: torch.Tensor) -> str:
    """Text of a 1-d tensor of token numbers."""
    return bytes(VOCABULARY[i] for i in tokens.tolist()).replace(b"\0", b"?").decode("ascii")


class Task(demo.Task):
    """A task that can be measured. Make a variant by `dataclasses.replace(task, batch_size=64)`."""

    def step_memory(self, device: torch.device | str | None = None) -> StepMemory:
        """Live bytes at the peak of a plain step, and the share of activations (`.activation_share`).

        With no device it is computed from fake CPU tensors: any size in seconds, in no memory. With one, two
        real steps are run there.
        """
        if device is not None:
            model = self.build_model(device)
            batch = next(self.batches(1, device))
            return measure_step(model, self.optimizer(model), lambda: self.loss(model, batch), batch)
        from torch._subclasses.fake_tensor import FakeTensorMode

        real_batch = next(self.batches(1))
        with FakeTensorMode() as mode:
            batch = (mode.from_tensor(real_batch[0]), mode.from_tensor(real_batch[1]))
            model = self.build_model()
            return measure_step(model, self.optimizer(model), lambda: self.loss(model, batch), batch)

    def parameter_count(self) -> int:
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in self.build_model("meta").parameters())

    def metadata(self) -> dict[str, object]:
        """The identity of this task for a result: sizes, seed, parameters, the digest of the data."""
        return {
            **asdict(self),
            "shape": dict(self.shape),
            "name": self.name,
            "parameters": self.parameter_count(),
            "data": f"Python {platform.python_version()} standard library, sha256 {text_digest()}"
            if self.kind == "gpt"
            else "scikit-learn digits",
        }


def get(kind: str, size: str = "small") -> Task:
    """The task "gpt" or "cnn" in size "small", "medium" or "large"."""
    return Task(**vars(demo.get_task(kind, size)))


TASKS = {
    task.name: task for task in (get(k, s) for k in ("gpt", "cnn") for s in ("small", "medium", "large"))
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="The demo tasks: parameters and live bytes of one plain step."
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    options = parser.parse_args(arguments)
    rows = [{**task.metadata(), "step": task.step_memory().as_dict()} for task in TASKS.values()]
    if options.json:
        print(json.dumps(rows, indent=1))
        return 0
    print(
        f"text: Python {platform.python_version()}, {sum(map(len, standard_library_text().values()))} bytes"
    )
    print(f"      sha256 {text_digest()}")
    print(f"{'task':<12}{'batch':>6}{'parameters':>13}{'peak MiB':>10}{'activations':>13}")
    for row in rows:
        step = row["step"]
        print(
            f"{row['name']:<12}{row['batch_size']:>6}{row['parameters']:>13,}{step['peak'] / 2**20:>10.1f}"
            f"{step['activation_share']:>12.0%}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
