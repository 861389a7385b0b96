"""Training loops that run out of memory, each for a reason of its own, on the simulated device. Run as

    python oom_cases.py CASE [CHANGE …]

it prints JSON: whether the loop completed with the changes made to it by hand, or else what the report of the failure
says would fit (`fixes`), what has not been tried (`untried`), and its lines (`text`)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import memopt.sim

MIB = 1 << 20
# Bytes of the device in each case: enough for what precedes the failure.
MEMORY = {
    "activations": 44,
    "first forward": 40,
    "first step": 92,
    "bf16": 52,
    "second step": 93,
    "foreach": 88,
    "fragmentation": 240,
    "leak": 100,
    "evaluation": 120,
    "evaluation of a larger batch": 70,
    "attention": 70,
    "accumulation": 100,
    "late zero_grad": 60,
    "logits": 125,
    "summed losses": 110,
    "two leaks": 110,
    "kept by the forward": 150,
    "leak in memopt's pool": 80,
    "two optimizers": 108,
    "two optimizers, one of them new": 92,
}


def main(case: str, changes: set[str]) -> dict:
    memopt.sim.activate(memory=MEMORY[case] * MIB, blank=True)
    global torch, nn, F
    import torch
    from torch import nn
    from torch.nn import functional as F

    memopt.enable(backend="pool" if "pool" in {*changes, *case.split()} else "native")
    from memopt._memory.oom import observer, report, trials
    from memopt._memory.recording import recorder

    trials.SECONDS, report._SEARCH = 500.0, 60.0  # of a busy host
    recorder.start("cuda")
    try:
        CASES[case](changes)
    except torch.OutOfMemoryError as error:
        found = observer.report_of(error).tried_out()
        return {
            "completed": False,
            "fixes": [[fix.text, fix.peak, fix.changes] for fix in found.tried.fixes],
            "why": found.tried.why,
            "untried": found.situation.untried,
            "phase": found.location.phase,
            "text": str(found),
        }
    return {"completed": True, "peak": torch.cuda.max_memory_allocated()}


class _Models:
    """Made where torch is there."""

    def __getattr__(self, name):
        class Block(nn.Module):
            def __init__(self, width=256):
                super().__init__()
                self.norm = nn.LayerNorm(width)
                self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

            def forward(self, x):
                return x + self.down(F.gelu(self.up(self.norm(x))))

        class Attention(nn.Module):
            def __init__(self, width=256, heads=8):
                super().__init__()
                self.heads = heads
                self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

            def forward(self, x):
                """Of one sequence: the first dimension is the head's, that of a mask made here too."""
                q, k, v = self.qkv(x).view(len(x), 3, self.heads, -1).permute(1, 2, 0, 3)
                scores = q @ k.transpose(-1, -2)
                barred = torch.full_like(scores, -9e16)
                weights = torch.where(scores > -1e9, scores, barred).softmax(-1)
                return x + self.out((weights @ v).transpose(0, 1).reshape(len(x), -1))

        return {"Block": Block, "Attention": Attention}[name]


models = _Models()


def optimizer_of(model, changes, kind="AdamW"):
    import memopt.optim

    if "eight bits" in changes:
        return getattr(memopt.optim, kind)(model.parameters(), lr=1e-3, state_bits=8)
    return getattr(torch.optim, kind)(model.parameters(), lr=1e-3, fused=True if "fused" in changes else None)


def blocks(count=8, dtype=None):
    return nn.Sequential(*[models.Block() for _ in range(count)]).to("cuda", dtype)


def train(model, optimizer, rows, steps=4, *, late=False, changes=(), dtype=None, micro=1):
    for _ in range(steps):
        for _ in range(micro):
            x = torch.ones(rows, 256, device="cuda", dtype=dtype)
            loss = model(x).square().mean()
            if late and "zero_grad" not in changes:
                optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        if not late or "zero_grad" in changes:
            optimizer.zero_grad()


def activations(changes):
    """The first backward pass, of a batch that a loader gives."""
    data = torch.utils.data.TensorDataset(torch.ones(1024, 256))
    model = blocks(4)
    optimizer = optimizer_of(model, changes)
    for (x,) in torch.utils.data.DataLoader(data, batch_size=512):
        model(x.cuda()).square().mean().backward()
        optimizer.step()


def first_forward(changes):
    model = blocks(8)
    train(model, optimizer_of(model, changes), 512, changes=changes)


def first_step(changes):
    model = blocks(8)
    train(model, optimizer_of(model, changes), 64, changes=changes)


def bf16(changes):
    model = blocks(8, torch.bfloat16)
    train(model, optimizer_of(model, changes, "Adam"), 64, changes=changes, dtype=torch.bfloat16)


def second_step(changes):
    """The first step fits, as its states are not there yet."""
    model = blocks(8)
    train(model, optimizer_of(model, changes), 256, changes=changes)


def foreach(changes):
    """States are there in the first step; then the copy that torch's default takes is too much."""
    model = blocks(8)
    optimizer = optimizer_of(model, changes)
    train(model, optimizer, 16, changes=changes)


def fragmentation(changes):
    model = blocks(2)
    optimizer = optimizer_of(model, changes, "SGD")
    kept = []
    for step in range(5):
        x = torch.ones(64, 256, device="cuda")
        scratch = torch.empty(110 * MIB, dtype=torch.uint8, device="cuda")
        loss = model(x).square().mean()
        loss.backward()
        del scratch
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            pieces = [torch.empty(4 * MIB, dtype=torch.uint8, device="cuda") for _ in range(40)]
            kept = pieces[::5]
            del pieces
    assert kept


def leak(changes):
    model = blocks(4)
    optimizer = optimizer_of(model, changes)
    history = []
    for _ in range(40):
        x = torch.ones(64, 256, device="cuda")
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        level = model(x).mean()
        history.append(level.detach() if "let go" in changes else level)
    assert history


def evaluation(changes):
    """Each batch's graph is kept by the sum of the losses."""
    model = blocks(4)
    optimizer = optimizer_of(model, changes)
    train(model, optimizer, 64, 3, changes=changes)
    model.eval()
    total = torch.zeros((), device="cuda")
    for _ in range(60):
        x = torch.ones(128, 256, device="cuda")
        loss = model(x).square().mean()
        total += loss.detach() if "let go" in changes else loss
    assert total is not None


def evaluation_of_a_larger_batch(changes):
    model = blocks(4)
    optimizer = optimizer_of(model, changes)
    train(model, optimizer, 64, 3, changes=changes)
    model.eval()
    model(torch.ones(1024, 256, device="cuda"))


def attention(changes):
    model = nn.Sequential(*[models.Attention() for _ in range(4)]).cuda()
    optimizer = optimizer_of(model, changes)
    for _ in range(3):
        model(torch.ones(512, 256, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def late_zero_grad(changes):
    """Gradients of the step before live through the next forward pass."""
    model = blocks(8)
    train(model, optimizer_of(model, changes, "SGD"), 224, late=True, changes=changes)


def accumulation(changes):
    model = blocks(8)
    train(model, optimizer_of(model, changes), 256, changes=changes, micro=2)


def logits(changes):
    head = nn.Linear(256, 16384, bias=False).cuda()
    body = blocks(2)
    model = nn.Sequential(body, head)
    optimizer = optimizer_of(model, changes)
    for _ in range(3):
        x = torch.ones(256, 256, device="cuda")
        target = torch.zeros(256, dtype=torch.long, device="cuda")
        F.cross_entropy(model(x), target).backward()
        optimizer.step()
        optimizer.zero_grad()


def summed_losses(changes):
    """A loss beside the one that is trained is summed with its graph."""
    model, critic = blocks(4), blocks(1)
    optimizer = optimizer_of(model, changes)
    summed = 0
    for _ in range(40):
        x = torch.ones(128, 256, device="cuda")
        hidden = model(x)
        beside = critic(hidden.detach()).mean()
        summed = summed + (beside.detach() if "let go" in changes else beside)
        hidden.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def two_leaks(changes):
    """Neither suffices alone: the other one goes on."""
    model = blocks(4)
    optimizer = optimizer_of(model, changes)
    levels, batches = [], []
    for _ in range(40):
        x = torch.ones(128, 256, device="cuda")
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        level = model(x).mean()
        levels.append(level.detach() if "let go" in changes else level)
        batch = torch.ones(1 << 18, device="cuda")
        batches.append(batch.cpu() if "let go" in changes else batch)
    assert levels and batches


def kept_by_the_forward(changes):
    """A model that keeps tensors of the running pass, which its graph needs."""

    class Keeping(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = blocks(8)
            self.outputs = []

        def forward(self, x):
            self.outputs = []
            for layer in self.layers:
                x = layer(x)
                self.outputs.append(x)
            return sum(self.outputs)

    model = Keeping()
    train(model, optimizer_of(model, changes), 768, changes=changes)


def two_optimizers(changes):
    """That step in turn, as a GAN's."""
    first, second = blocks(4), blocks(4)
    one, other = optimizer_of(first, changes), optimizer_of(second, changes, "Adam")
    for _ in range(4):
        for model, optimizer in ((first, one), (second, other)):
            if "zero_grad" not in changes:
                optimizer.zero_grad()
            model(torch.ones(512, 256, device="cuda")).square().mean().backward()
            optimizer.step()
            if "zero_grad" in changes:
                optimizer.zero_grad()


CASES = {
    "activations": activations,
    "first forward": first_forward,
    "first step": first_step,
    "bf16": bf16,
    "second step": second_step,
    "foreach": foreach,
    "fragmentation": fragmentation,
    "leak": leak,
    "evaluation": evaluation,
    "evaluation of a larger batch": evaluation_of_a_larger_batch,
    "attention": attention,
    "accumulation": accumulation,
    "late zero_grad": late_zero_grad,
    "logits": logits,
    "summed losses": summed_losses,
    "two leaks": two_leaks,
    "kept by the forward": kept_by_the_forward,
    "leak in memopt's pool": leak,
    "two optimizers": two_optimizers,
    "two optimizers, one of them new": two_optimizers,
}

if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], {*sys.argv[2:]})))
