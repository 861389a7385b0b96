"""Nine training loops as people write them, for measuring what an allocator needs to carry them.

    gpt_fixed               a GPT, every batch alike
    gpt_varlen              the length is drawn for each batch, 128 to 1024
    gpt_varlen_checkpoint   the same, every other layer recomputed in backward
    lora                    a frozen bf16 base, trained adapters, four micro-batches of drawn lengths a step
    moe                     two of eight experts a token, drawn: every expert's share differs each time
    unet                    convolutions at four resolutions, skips kept over the whole depth
    gnn                     batches of ragged graphs: no two steps have a size in common
    train_eval_generate     training, broken by evaluation and by generation whose key-value cache grows by torch.cat
    two_streams             batches copied and normalised on a stream of their own, ahead of the computation

All with AdamW, and with fixed seeds: the requests, and what is free between any two of them, are the same in every run.
(Not so the order of frees that follow each other: autocast drops its casts in the order of a hash table of addresses.)
Nothing depends on what a kernel computes: lengths, routing and graphs are drawn from the CPU's generator, so the loops
run as well on memopt's simulated device, even on a blank one, where a step costs only its launches. At scale 1 the live
peak is 2 to 7 GiB.

Import it after memopt.sim.activate(): it needs torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

StepDone = Callable[[int], None]


@dataclass(frozen=True)
class Loop:
    """The settings of a loop: its steps, its scale, and a function to call after each step."""

    steps: int
    scale: float
    step_done: StepDone
    generator: torch.Generator  # of the CPU: all that is drawn while the loop runs

    def size(self, full: int, multiple: int = 1) -> int:
        """`full` at this scale, a multiple of `multiple`."""
        return max(1, round(full * self.scale / multiple)) * multiple

    def draw(self, low: int, high: int) -> int:
        """A number from low to high, both included."""
        return int(torch.randint(low, high + 1, (), generator=self.generator))

    def tokens(self, batch: int, length: int, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A batch of text and what follows each of its tokens."""
        text = torch.randint(vocabulary, (batch, length + 1), generator=self.generator)
        return text[:, :-1].to("cuda"), text[:, 1:].to("cuda")


@dataclass(frozen=True)
class Workload:
    name: str
    kind: str  # "fixed": every step asks for the same; "varying": it does not
    steps: int
    train: Callable[[Loop], None]

    def run(self, step_done: StepDone, scale: float = 1.0, steps: int | None = None) -> None:
        """Trains on the current CUDA device. step_done(n) is called at the end of step n = 0, 1, 2 …, when that step's
        gradients are gone. Widths, depths and batches shrink with `scale`."""
        torch.manual_seed(0)
        self.train(Loop(steps or self.steps, scale, step_done, torch.Generator().manual_seed(1)))


def autocast() -> torch.autocast:
    return torch.autocast("cuda", torch.bfloat16)


def update(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


# ---- transformers ---------------------------------------------------------------------------------

Cache = tuple[torch.Tensor, torch.Tensor]  # keys and values, (batch, heads, tokens so far, head's width)


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.project = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor, past: Cache | None) -> tuple[torch.Tensor, Cache]:
        batch, length, dim = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=past is None)
        return self.project(y.transpose(1, 2).reshape(batch, length, dim)), (k, v)


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, feed_forward: nn.Module) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = Attention(dim, heads)
        self.feed_forward = feed_forward

    def cached(self, x: torch.Tensor, past: Cache | None) -> tuple[torch.Tensor, Cache]:
        y, present = self.attention(self.norm1(x), past)
        x = x + y
        return x + self.feed_forward(self.norm2(x)), present

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cached(x, None)[0]


def mlp(dim: int, hidden: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))


class GPT(nn.Module):
    """Pre-norm, learned positions. checkpointed: that every such layer is recomputed in backward; 0 for none."""

    def __init__(
        self,
        dim: int,
        depth: int,
        vocabulary: int,
        context: int = 1024,
        checkpointed: int = 0,
        feed_forward: Callable[[], nn.Module] | None = None,
    ) -> None:
        super().__init__()
        make = feed_forward or (lambda: mlp(dim, 4 * dim))
        self.tokens, self.positions = nn.Embedding(vocabulary, dim), nn.Embedding(context, dim)
        self.blocks = nn.ModuleList(Block(dim, dim // 64, make()) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocabulary, bias=False)
        self.checkpointed = checkpointed

    def embed(self, tokens: torch.Tensor, start: int) -> torch.Tensor:
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        return self.tokens(tokens) + self.positions(positions)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens, 0)
        for number, block in enumerate(self.blocks):
            if self.checkpointed and number % self.checkpointed == 0:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return self.head(self.norm(x))

    def generate(self, tokens: torch.Tensor, count: int) -> torch.Tensor:
        """Appends `count` sampled tokens, one at a time, with keys and values kept."""
        past: list[Cache | None] = [None] * len(self.blocks)
        text = new = tokens
        for _ in range(count):
            x = self.embed(new, text.shape[1] - new.shape[1])
            for number, block in enumerate(self.blocks):
                x, past[number] = block.cached(x, past[number])
            probabilities = torch.softmax(self.head(self.norm(x[:, -1])).float(), -1)
            new = torch.multinomial(probabilities, 1)
            text = torch.cat([text, new], 1)
        return text


def text_loss(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    with autocast():
        return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def train_gpt(
    loop: Loop, model: GPT, batch: int, lengths: tuple[int, int], vocabulary: int, micro_batches: int = 1
) -> None:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-4)
    for step in range(loop.steps):
        for _ in range(micro_batches):
            tokens, targets = loop.tokens(batch, loop.draw(*lengths), vocabulary)
            (text_loss(model, tokens, targets) / micro_batches).backward()
        update(optimizer)
        loop.step_done(step)


def gpt_fixed(loop: Loop) -> None:
    vocabulary = loop.size(32000, 64)
    with torch.device("cuda"):
        model = GPT(loop.size(1024, 64), loop.size(12), vocabulary)
    train_gpt(loop, model, loop.size(8), (512, 512), vocabulary)


def gpt_varlen(loop: Loop, checkpointed: int = 0) -> None:
    vocabulary = loop.size(32000, 64)
    with torch.device("cuda"):
        model = GPT(loop.size(768, 64), loop.size(12), vocabulary, checkpointed=checkpointed)
    train_gpt(loop, model, loop.size(6), (128, 1024), vocabulary)


def gpt_varlen_checkpoint(loop: Loop) -> None:
    gpt_varlen(loop, checkpointed=2)


class Lora(nn.Module):
    """A frozen bf16 layer and a trained correction of low rank."""

    def __init__(self, base: nn.Linear, rank: int = 16) -> None:
        super().__init__()
        self.base = base.bfloat16().requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False, device=base.weight.device)
        self.up = nn.Linear(rank, base.out_features, bias=False, device=base.weight.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + 2.0 * self.up(self.down(F.dropout(x, 0.05)))


def lora(loop: Loop) -> None:
    vocabulary = loop.size(32000, 64)
    with torch.device("cuda"):
        model = GPT(loop.size(1536, 64), loop.size(16), vocabulary).bfloat16().requires_grad_(False)
        for block in model.blocks:
            attention, feed_forward = block.attention, block.feed_forward
            attention.qkv, attention.project = Lora(attention.qkv), Lora(attention.project)
            feed_forward[0], feed_forward[2] = Lora(feed_forward[0]), Lora(feed_forward[2])
    train_gpt(loop, model, loop.size(4), (256, 1024), vocabulary, micro_batches=4)


class Experts(nn.Module):
    """Two experts of `count` for every token; which, is drawn, with a favour for some that changes each time."""

    def __init__(self, loop: Loop, dim: int, hidden: int, count: int = 8) -> None:
        super().__init__()
        self.generator = loop.generator
        self.router = nn.Linear(dim, count, bias=False)
        self.experts = nn.ModuleList(mlp(dim, hidden) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        favour = torch.softmax(0.5 * torch.randn(len(self.experts), generator=self.generator), 0)
        chosen = torch.multinomial(favour.expand(len(tokens), -1), 2, generator=self.generator)
        weights = torch.softmax(self.router(tokens).float(), -1)
        mixed = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            mine = (chosen == number).any(1).nonzero().flatten().to(tokens.device)
            y = expert(tokens[mine]) * weights[mine, number, None]
            mixed.index_add_(0, mine, y.to(mixed.dtype))
        return mixed.view_as(x)


def moe(loop: Loop) -> None:
    vocabulary, dim = loop.size(32000, 64), loop.size(768, 64)
    with torch.device("cuda"):
        model = GPT(
            dim,
            loop.size(6),
            vocabulary,
            feed_forward=lambda: Experts(loop, dim, loop.size(2048, 64)),
        )
    train_gpt(loop, model, loop.size(8), (512, 512), vocabulary)


def train_eval_generate(loop: Loop) -> None:
    """Every fourth step is followed by an evaluation on batches twice as large, and by generation."""
    vocabulary, batch = loop.size(32000, 64), loop.size(6)
    with torch.device("cuda"):
        model = GPT(loop.size(768, 64), loop.size(12), vocabulary)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for step in range(loop.steps):
        text_loss(model, *loop.tokens(batch, 512, vocabulary)).backward()
        update(optimizer)
        if step % 4 == 3:
            with torch.no_grad():
                for _ in range(2):
                    text_loss(model, *loop.tokens(2 * batch, loop.draw(256, 768), vocabulary))
                with autocast():
                    prompt, _ = loop.tokens(loop.size(16), loop.draw(64, 192), vocabulary)
                    model.generate(prompt, loop.size(48))
        loop.step_done(step)


# ---- convolutions ---------------------------------------------------------------------------------


class Residual(nn.Module):
    """Two convolutions, normalised by groups, with the noise level added between them."""

    def __init__(self, channels: int, out: int, condition: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, channels), nn.GroupNorm(8, out)
        self.first, self.second = nn.Conv2d(channels, out, 3, padding=1), nn.Conv2d(out, out, 3, padding=1)
        self.condition = nn.Linear(condition, out)
        self.skip = nn.Conv2d(channels, out, 1) if channels != out else nn.Identity()

    def forward(self, x: torch.Tensor, level: torch.Tensor) -> torch.Tensor:
        y = self.first(F.silu(self.norm1(x)))
        y = y + self.condition(F.silu(level))[:, :, None, None]
        return self.skip(x) + self.second(F.silu(self.norm2(y)))


class UNet(nn.Module):
    """Down over the resolutions and up again, what was seen on the way down concatenated."""

    def __init__(self, width: int, factors: tuple[int, ...] = (1, 2, 4, 4)) -> None:
        super().__init__()
        condition = 4 * width
        channels = [width * factor for factor in factors]
        self.level = nn.Sequential(nn.Linear(1, condition), nn.SiLU(), nn.Linear(condition, condition))
        self.first, self.last = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        before = [width, *channels[:-1]]
        for inner, outer in zip(before, channels, strict=True):
            self.down.append(Residual(inner, outer, condition))
            self.up.insert(0, Residual(2 * outer, inner, condition))
        self.middle = Residual(channels[-1], channels[-1], condition)

    def forward(self, x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        level, skips = self.level(noise), []
        x = self.first(x)
        for block in self.down:
            x = block(x, level)
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x, level)
        for block in self.up:
            x = F.interpolate(x, scale_factor=2.0, mode="nearest")
            x = block(torch.cat([x, skips.pop()], 1), level)
        return self.last(x)


def unet(loop: Loop) -> None:
    batch, side = loop.size(8), loop.size(256, 16)
    with torch.device("cuda"):
        model = UNet(loop.size(64, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(loop.steps):
        clean = torch.randn(batch, 3, side, side, device="cuda")
        amount, noise = torch.rand(batch, 1, device="cuda"), torch.randn_like(clean)
        with autocast():
            guess = model(torch.lerp(clean, noise, amount[:, :, None, None]), amount)
        F.mse_loss(guess.float(), noise).backward()
        del clean, amount, noise, guess
        update(optimizer)
        loop.step_done(step)


def convolutions(width: int, classes: int) -> nn.Sequential:
    """A plain image classifier with batch norm, a stage of three convolutions for each of four resolutions."""
    layers: list[nn.Module] = []
    channels = 3
    for out in (width, 2 * width, 4 * width, 8 * width):
        for number in range(3):
            layers += [
                nn.Conv2d(channels, out, 3, stride=2 if number == 0 else 1, padding=1, bias=False),
                nn.BatchNorm2d(out),
                nn.ReLU(inplace=True),
            ]
            channels = out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def two_streams(loop: Loop) -> None:
    """The next batch, of a resolution drawn for it, is on its way while this one is computed."""
    batch = loop.size(48)
    with torch.device("cuda"):
        model = convolutions(loop.size(96, 8), 1000)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    computing, copying = torch.cuda.current_stream(), torch.cuda.Stream()

    def fetch() -> tuple[torch.Tensor, torch.Tensor]:
        side = loop.size(32 * loop.draw(5, 9), 4)
        pixels = torch.zeros(batch, 3, side, side, dtype=torch.uint8).pin_memory()
        labels = torch.randint(1000, (batch,), generator=loop.generator).pin_memory()
        with torch.cuda.stream(copying):
            images = pixels.to("cuda", non_blocking=True).float().div_(255)
            images = (images - images.mean((0, 2, 3), keepdim=True)) / 0.25
            return images, labels.to("cuda", non_blocking=True)

    following = fetch()
    for step in range(loop.steps):
        images, labels = following
        computing.wait_stream(copying)
        images.record_stream(computing)
        labels.record_stream(computing)
        following = fetch()
        F.cross_entropy(model(images), labels).backward()
        del images, labels
        update(optimizer)
        loop.step_done(step)


# ---- graphs ---------------------------------------------------------------------------------------


class Messages(nn.Module):
    """Each edge computes a message of its two ends; each node adds up what it gets."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.message = nn.Sequential(nn.Linear(2 * dim, dim), nn.ReLU(), nn.Linear(dim, dim))
        self.update = nn.Sequential(nn.Linear(2 * dim, dim), nn.ReLU(), nn.Linear(dim, dim))
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        messages = self.message(torch.cat([x[source], x[target]], 1))
        received = torch.zeros_like(x).index_add_(0, target, messages)
        return self.norm(x + self.update(torch.cat([x, received], 1)))


def gnn(loop: Loop) -> None:
    dim, graphs, features = loop.size(256, 8), loop.size(32), 32
    with torch.device("cuda"):
        enter, leave = nn.Linear(features, dim), nn.Linear(dim, 1)
        layers = nn.ModuleList(Messages(dim) for _ in range(loop.size(5)))
    parameters = [*enter.parameters(), *layers.parameters(), *leave.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    for step in range(loop.steps):
        sizes = torch.tensor([loop.draw(200, 1200) for _ in range(graphs)])
        nodes = int(sizes.sum())
        edges = nodes * loop.draw(4, 8)
        member = torch.repeat_interleave(torch.arange(graphs), sizes).to("cuda")
        source, target = torch.randint(nodes, (2, edges), generator=loop.generator).to("cuda")
        x = enter(torch.randn(nodes, features, device="cuda"))
        for layer in layers:
            x = layer(x, source, target)
        pooled = torch.zeros(graphs, dim, device="cuda").index_add_(0, member, x)
        F.mse_loss(leave(pooled), torch.zeros(graphs, 1, device="cuda")).backward()
        del x, pooled, member, source, target
        update(optimizer)
        loop.step_done(step)


WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload("gpt_fixed", "fixed", 14, gpt_fixed),
        Workload("gpt_varlen", "varying", 20, gpt_varlen),
        Workload("gpt_varlen_checkpoint", "varying", 20, gpt_varlen_checkpoint),
        Workload("lora", "varying", 12, lora),
        Workload("moe", "varying", 12, moe),
        Workload("unet", "fixed", 16, unet),
        Workload("gnn", "varying", 30, gnn),
        Workload("train_eval_generate", "varying", 24, train_eval_generate),
        Workload("two_streams", "varying", 20, two_streams),
    )
}
