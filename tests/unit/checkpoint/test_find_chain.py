"""The chain that is found in models of the usual makes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from memopt._checkpoint.stages.model_chain import find_chain


def names(model: nn.Module, *args: object, **kwargs: object) -> list[str]:
    return [call.name for call in find_chain(model, args, kwargs)]


class Block(nn.Module):
    """A transformer's: two branches beside the stream, one of them an nn.Sequential; gives a tuple, as some do."""

    def __init__(self, width: int, gives_tuple: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.gives_tuple = gives_tuple

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None):
        x = x + self.attention(self.norm(x))
        x = x + self.mlp(x)
        return (x, mask) if self.gives_tuple else x


class Transformer(nn.Module):
    def __init__(self, gives_tuple: bool) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(11, 8), nn.Embedding(5, 8)
        self.h = nn.ModuleList(Block(8, gives_tuple) for _ in range(3))
        self.norm = nn.LayerNorm(8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1]))
        for block in self.h:
            x = block(x, mask=torch.ones(5))
            x = x[0] if isinstance(x, tuple) else x
        return self.norm(x)


class WithHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transformer, self.head = Transformer(True), nn.Linear(8, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.transformer(tokens)[:, -2:])


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.conv2, self.relu = (
            nn.Conv2d(width, width, 3, padding=1),
            nn.Conv2d(width, width, 1),
            nn.ReLU(),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.relu(x + self.conv2(self.relu(self.conv1(x))))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        self.layer1 = nn.Sequential(Residual(4), Residual(4))
        self.layer2 = nn.Sequential(nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)), Residual(4))
        self.fc = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.layer2(self.layer1(self.stem(x))).mean((2, 3)))


TOKENS = torch.zeros(2, 5, dtype=torch.long)


def test_a_sequential_is_its_modules_and_those_of_the_ones_in_it() -> None:
    model = nn.Sequential(
        nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
    )
    assert names(model, torch.ones(1, 2)) == ["0", "1.0", "1.1.0", "1.1.1"]


@pytest.mark.parametrize("gives_tuple", [False, True])
def test_the_blocks_of_a_module_list(gives_tuple: bool) -> None:
    """A residual block is one stage: its branches are not on the way from its input to its output."""
    assert names(Transformer(gives_tuple), TOKENS)[-4:] == ["h.0", "h.1", "h.2", "norm"]


def test_blocks_below_a_module_that_adds_a_head() -> None:
    found = names(WithHead(), TOKENS)
    assert [name for name in found if ".h." in name] == [
        "transformer.h.0",
        "transformer.h.1",
        "transformer.h.2",
    ]
    assert found[-1] == "head"


def test_arguments_by_name() -> None:
    assert "h.1" in names(Transformer(False), tokens=TOKENS)


def test_the_stages_of_a_resnet_are_its_blocks() -> None:
    found = names(ResNet(), torch.ones(1, 3, 8, 8))
    assert found == ["stem", "layer1.0", "layer1.1", "layer2.0.0", "layer2.0.1", "layer2.1", "fc"]


class Added(nn.Module):
    """Its shortcut is added in place to what its last module gave."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm, self.conv2 = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)
        self.end = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.conv2(self.norm(self.conv1(x)))
        out += x
        return self.end(out)


def test_a_block_with_its_shortcut_added_in_place_is_one_stage() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Sequential(Added(), Added()), nn.Flatten())
    assert names(model, torch.ones(1, 3, 4, 4)) == ["0", "1.0", "1.1", "2"]


class Passing(nn.Module):
    """As BERT's layer: each of its modules takes what the one before gave, and the last one the input, too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Bilinear(8, 8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.inner(x), x)


def test_modules_that_something_passes_by_are_one_stage() -> None:
    assert names(nn.Sequential(nn.Linear(8, 8), Passing(), Passing()), torch.ones(1, 8)) == ["0", "1", "2"]


def test_what_changes_its_input_is_a_stage_behind_the_one_that_made_it() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2), nn.ReLU(inplace=True)), nn.Tanh())
    calls = find_chain(model, (torch.ones(3, 2),), {})
    assert [(call.name, call.changes) for call in calls] == [
        ("0", False),
        ("1.0", False),
        ("1.1", True),
        ("2", False),
    ]
    # the sample's, which nothing can make again
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(2, 2), nn.ReLU(inplace=True))
    assert names(model, torch.ones(3, 2)) == ["1", "2"]


def test_a_module_that_is_called_twice_is_no_stage() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.end = Block(8), nn.Linear(8, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.end(self.block(self.block(x)))

    assert names(Shared(), torch.ones(1, 8)) == ["end"]


def test_a_model_without_modules_has_no_chain() -> None:
    with pytest.raises(ValueError, match=r"Linear calls none of its modules .* memopt.checkpoint\(\)"):
        names(nn.Linear(2, 2), torch.ones(1, 2))


def test_hooks_and_modes_are_as_before() -> None:
    model = ResNet()
    find_chain(model, (torch.ones(1, 3, 8, 8),), {})
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    with pytest.raises(RuntimeError):
        find_chain(model, (torch.ones(1, 7, 8, 8),), {})
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert torch.is_grad_enabled()


class FastWithoutGraph(nn.Module):
    """As libraries have it: another path where nobody asks for gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
        self.fused = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return self.fused(x)
        for block in self.blocks:
            x = block(x)
        return x


def test_the_chain_is_that_of_a_forward_pass_with_a_graph() -> None:
    found = find_chain(FastWithoutGraph(), (torch.randn(2, 4),), {})
    assert [call.name.partition(".")[0] for call in found] == ["blocks"] * len(found)
    assert len(found) >= 3
