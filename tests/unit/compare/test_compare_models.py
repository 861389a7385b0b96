"""memopt.compare_models: its figures are those of the calls that it makes, one model is there at a time, and what goes
wrong with one is that one's."""

from __future__ import annotations

import gc
import json
import os
import weakref

import pytest
import torch
from environment_python import run_there
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import memopt
from memopt._compare import candidates, step_costs
from memopt._compare.model_table import ModelComparison, ModelFigures

SOAK = os.environ.get("MEMOPT_SOAK") == "1"
X = torch.ones(16, 64)


def mlp(width: int = 64, depth: int = 2) -> nn.Module:
    return nn.Sequential(*(m for _ in range(depth) for m in (nn.Linear(64, width), nn.Linear(width, 64))))


class Tied(nn.Module):
    """Weights that are one; whole numbers that decide of a shape; a view of more than it shows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.ones(1000)[:64])
        self.register_buffer("chosen", torch.tensor([3, 1, 2]))

    def forward(self, x):
        return (self.second(self.first(x)) * self.scale)[:, self.chosen]


class Refusing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x):
        raise RuntimeError("it does not want to\nand says more")


def not_made() -> nn.Module:
    raise OSError("no such checkpoint")


@pytest.fixture(scope="module")
def found() -> ModelComparison:
    given = {"mlp": mlp(), "tied": Tied, "refusing": Refusing, "none": not_made}
    state = given["mlp"].state_dict()
    before = {name: value.clone() for name, value in state.items()}
    random = torch.get_rng_state()
    comparison = memopt.compare_models(given, X, optimizer=torch.optim.AdamW, rounds=1)
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(before[name], value) for name, value in state.items())
    assert all(p.grad is None and p.device.type == "cpu" for p in given["mlp"].parameters())
    return comparison


def test_figures_are_those_of_the_plain_calls(found):
    model = mlp()
    row = found["mlp"]
    assert row.parameters == sum(p.numel() for p in model.parameters()) and row.bytes == 4 * row.parameters
    with FlopCounterMode(display=False) as counter:
        out = model(X)
        forward = counter.get_total_flops()
        out.sum().backward()
    assert (row.flops_forward, row.flops) == (forward, counter.get_total_flops())
    assert row.flops_forward == 4 * 2 * 16 * 64 * 64
    plain = memopt.estimate(model, X, optimizer=torch.optim.AdamW, quick=True)
    assert (row.peak, row.needed, row.method) == (plain.peak_bytes, plain.needed_bytes, plain.method)
    assert row.seconds > 0 and row.spread[0] <= row.seconds <= row.spread[1] and row.errors == {}


def test_bytes_are_those_of_storages(found):
    model = Tied()
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in model.parameters()}
    bytes_of_buffers = model.chosen.nbytes
    assert found["tied"].bytes == sum(storages.values()) + bytes_of_buffers
    assert found["tied"].bytes == 4 * (64 * 64 + 64 + 64 + 1000) + 24
    assert found["tied"].bytes != sum(p.numel() * 4 for p in model.parameters()) + bytes_of_buffers
    assert found["tied"].peak is not None and found["tied"].errors == {}


def test_what_goes_wrong_with_one_is_said_in_its_row(found):
    assert found["none"].errors == {"the model": "OSError: no such checkpoint"}
    refusing = found["refusing"]
    assert set(refusing.errors) == {"the peak", "FLOPs", "time"} and refusing.parameters == 64 * 65
    text = str(found)
    assert "refusing: no figure for time: RuntimeError: it does not want to" in text
    assert "none: no figure for the model: OSError: no such checkpoint" in text
    assert [row.name for row in found] == ["mlp", "tied", "refusing", "none"] or [
        row.name for row in found
    ] == [
        "tied",
        "mlp",
        "refusing",
        "none",
    ]
    assert "refusing" in found._repr_html_() and json.loads(json.dumps(found.as_dict()))["models"]["none"]


# ---- FLOPs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [1, 4, 8])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_convolutions_backward_counts_each_gradient_as_much_as_the_forward(groups, transposed):
    kind = nn.ConvTranspose2d if transposed else nn.Conv2d
    with torch.device("meta"):
        model = nn.Sequential(*(kind(8, 8, 3, padding=1, groups=groups) for _ in range(2)))
    counted = step_costs.count(model, torch.empty(2, 8, 10, 10), None, train=True)
    one = 2 * (2 * 10 * 10) * 8 * (8 // groups) * 9
    assert counted.forward == 2 * one
    assert counted.step == counted.forward + 3 * one  # the first one's input needs no gradient
    assert step_costs.count(model, torch.empty(2, 8, 10, 10), None, train=False).step == 2 * one


def test_a_bound_is_of_the_slower_of_arithmetic_and_memory():
    counts = step_costs.Counts(0, 0, [(100, 1), (1, 100), (0, 7)])
    assert counts.seconds(10, 1) == 10 + 100 + 7
    assert counts.seconds(1, 10) == 100 + 10 + 0.7
    with torch.device("meta"):
        model = nn.Linear(64, 64, bias=False)
    counted = step_costs.count(model, X, None, train=False)
    assert counted.operations == [(2 * 16 * 64 * 64, 4 * (16 * 64 + 64 * 64 + 16 * 64))]


class ReadingValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x):
        return self.layer(x) if x.sum().item() > 0 else x


def test_a_model_that_reads_values_is_counted_with_some(monkeypatch):
    from memopt._compare import models as comparing

    monkeypatch.setattr(comparing, "estimate_one", lambda *a, **k: pytest.fail("RuntimeError"))
    row = ModelFigures("it")
    one = candidates.Candidate("it", ReadingValues, X)
    made = comparing._shapes(one, row)
    counted = comparing._count(one, made, row, step_costs.Step(torch.device("cpu")))
    assert counted.forward == 2 * 16 * 64 * 64 and row.errors == {}


# ---- one at a time ---------------------------------------------------------------------------------------------------


def test_models_are_timed_by_turns_and_one_is_there_at_a_time():
    made: list[str] = []
    alive: list[weakref.ref[nn.Module]] = []

    def maker(name: str):
        def make() -> nn.Module:
            assert all(ref() is None for ref in alive)
            made.append(name)
            model = nn.Linear(4, 4)
            alive.append(weakref.ref(model))
            return model

        return make

    given = candidates.candidates({name: maker(name) for name in "abc"}, torch.ones(2, 4))
    times = step_costs.measure(given, step_costs.Step(torch.device("cpu"), torch.optim.SGD), rounds=3)
    gc.collect()
    assert made == ["a", "b", "c", "b", "c", "a", "c", "a", "b"]
    assert all(len(one.rounds) == 3 and one.median > 0 for one in times.values())


def test_a_model_writes_into_a_sample_of_its_own():
    taken = []

    class Asking(nn.ReLU):
        def forward(self, x):
            taken.append(x.requires_grad)
            return super().forward(x)

    for given, sample in (
        (nn.Sequential(nn.ReLU(inplace=True), nn.Linear(64, 64)), torch.randn(16, 64)),
        (Asking(), torch.randn(64, requires_grad=True)),
    ):
        before = sample.detach().clone()
        one = candidates.Candidate("it", given, sample)
        times = step_costs.measure([one], step_costs.Step(torch.device("cpu")), rounds=1)["it"]
        assert times.error is None and torch.equal(sample, before) and sample.grad is None
    assert taken and all(taken)


def test_on_meta_nothing_takes_memory_and_ties_stay():
    one = candidates.Candidate("it", Tied, X)
    shapes, _ = one.shapes()
    assert all(t.is_meta for t in (*shapes.parameters(), *shapes.buffers()))
    assert shapes.second.weight is shapes.first.weight
    assert not any(t.is_meta for t in one.for_estimate(shapes).buffers())  # whole numbers decide of shapes
    live = Tied()
    copied, _ = candidates.Candidate("it", live, X).shapes()
    assert copied.first.weight.is_meta and copied.second.weight is copied.first.weight
    assert not live.first.weight.is_meta and copied is not live
    assert candidates.Candidate("it", live, X).for_estimate(copied) is live
    recurrent, _ = candidates.Candidate("it", nn.LSTM(64, 8), X).shapes()
    assert all(t.is_meta for t in recurrent._flat_weights)


def test_a_function_that_needs_values_to_make_its_model_gets_them():
    def make() -> nn.Module:
        widths = [int(w) for w in torch.linspace(8, 16, 2)]
        return nn.Sequential(nn.Linear(64, widths[0]), nn.Linear(widths[0], widths[1]))

    shapes, _ = candidates.Candidate("it", make, X).shapes()
    assert shapes[1].out_features == 16 and shapes[1].weight.is_meta


def test_more_than_the_machine_has_is_not_run(monkeypatch):
    from memopt._compare import models as comparing

    monkeypatch.setattr(comparing, "available", lambda **_: 1 << 20)
    rows = {"large": ModelFigures("large", peak_bytes=(1 << 30, 1 << 30))}
    comparing._measure(
        [candidates.Candidate("large", not_made, X)], rows, step_costs.Step(torch.device("cpu")), 1
    )
    assert rows["large"].errors == {"time": "not run: it takes 1.00 GiB, but only 1.00 MiB are free"}


# ---- the table -------------------------------------------------------------------------------------------------------


def table(**options) -> ModelComparison:
    def row(name, peak, seconds, score=None, parameters=1000):
        return ModelFigures(
            name,
            parameters,
            4 * parameters,
            (peak, peak),
            (peak, peak),
            "fake tensors",
            5,
            15,
            seconds,
            score=score,
        )

    rows = [
        row("a", 100, 3.0, 0.7),
        row("b", 200, 1.0, 0.9),
        row("c", 300, 2.0, 0.95),
        row("d", 400, 2.5, 0.8),
    ]
    rows.append(ModelFigures("e", errors={"the model": "OSError: none"}))
    return ModelComparison({one.name: one for one in rows}, **options)


def test_sorting():
    assert [one.name for one in table()] == ["a", "b", "c", "d", "e"]
    assert [one.name for one in table(sort="time")] == ["b", "c", "d", "a", "e"]
    assert [one.name for one in table(sort="score")] == ["c", "b", "d", "a", "e"]
    assert [one.name for one in table(sort="name")] == ["a", "b", "c", "d", "e"]
    with pytest.raises(ValueError, match="'speed' is not one of 'peak', 'time'"):
        table().sorted("speed")


def test_pareto_front():
    assert table().pareto() == ["a", "b", "c"]  # of peak, time and score
    assert table().pareto("peak", "time") == ["a", "b"]
    assert table().pareto("time", "score") == ["b", "c"]
    assert table().pareto("parameters") == ["a", "b", "c", "d"]  # all are equal
    with pytest.raises(ValueError, match="names have no order"):
        table().pareto("peak", "name")


def test_text_and_html():
    text = str(table(time="measured", machine="a machine", optimizer="AdamW", batch=8))
    assert "5 models, a training step with AdamW, a batch of 8; by peak" in text
    lines = text.splitlines()
    assert lines[2].split()[:2] == ["a", "*"] and "d *" not in text and "on a machine" in text
    assert "e: no figure for the model: OSError: none" in text
    page = table()._repr_html_()
    assert page.count("<tr>") == 6 and "<b>a *</b>" in page


@pytest.mark.parametrize(
    ("error", "match", "models", "options"),
    [
        (ValueError, "nothing to compare", {}, {}),
        (TypeError, "give several", nn.Linear(2, 2), {}),
        (TypeError, "'a' is a int, not a module", {"a": 3}, {}),
        (ValueError, 'write "module:function"', ["resnet50"], {}),
        (ValueError, "sort='size' is not one of", [Tied], {"sort": "size"}),
        (ValueError, "time='guessed' is neither", [Tied], {"time": "guessed"}),
        (ValueError, "rounds=0 is not a number", [Tied], {"rounds": 0}),
        (ValueError, "amp='fp8' is not one of", [Tied], {"amp": "fp8"}),
        (ValueError, "scores= names other, which is not", {"a": Tied}, {"scores": {"other": 1.0}}),
        (TypeError, "pass sample=", [nn.Linear(2, 2)], {"sample": None}),
        (
            TypeError,
            "pass torch.optim.AdamW",
            [Tied],
            {"optimizer": torch.optim.SGD(nn.Linear(2, 2).parameters())},
        ),
    ],
)
def test_what_cannot_be_asked_is_said_before_anything_is_made(error, match, models, options):
    with pytest.raises(error, match=match):
        memopt.compare_models(models, **({"sample": X} | options))


def test_names_of_a_list():
    given = candidates.candidates([Tied, Tied(), Tied, "torch.nn:Identity"], X)
    assert [one.name for one in given] == ["Tied", "Tied (2)", "Tied (3)", "torch.nn:Identity"]
    assert isinstance(given[3].whole()[0], nn.Identity)
    with pytest.raises(TypeError, match="the function returned int"):
        candidates.Candidate("it", lambda: 3, X).whole()
    with pytest.raises(TypeError, match="pass sample="):
        candidates.Candidate("it", Tied, None).whole()
    assert candidates.Candidate("it", lambda: (Tied(), 5), X).whole()[1] == 5


# ---- architectures of timm -------------------------------------------------------------------------------------------

TIMM = """
import memopt.sim; memopt.sim.activate()
import functools, json, sys
import timm, torch
import memopt
names = sys.argv[1:]
found = memopt.compare_models(
    {name: functools.partial(timm.create_model, name) for name in names},
    torch.randn(4, 3, 224, 224),
    optimizer=torch.optim.AdamW,
    scores={name: n for n, name in enumerate(names)},
    rounds=2,
)
figure = found.plot()
figure.savefig("/dev/null", format="png")
labels = sorted(text.get_text() for text in figure.axes[0].texts)
print(found, file=sys.stderr)
print(json.dumps(found.as_dict() | {"labels": labels, "fits": found.fits("24GiB")}))
"""
# Millions of parameters and GMACs of an image, as their papers and timm have them.
PUBLISHED = {
    "mobilenetv3_small_100": (2.54, 0.06),
    "efficientnet_b0": (5.29, 0.39),
    "resnet50": (25.56, 4.1),
    "vit_small_patch16_224": (22.05, 4.6),
}


@pytest.mark.skipif(not SOAK, reason="the long form")
def test_architectures_of_timm():
    told = json.loads(run_there("notebook", TIMM, *PUBLISHED).splitlines()[-1])
    assert told["labels"] == sorted(PUBLISHED) == sorted(told["fits"])
    for name, (millions, gmacs) in PUBLISHED.items():
        row = told["models"][name]
        assert row["errors"] == {} and row["method"] == "simulated device"
        assert row["parameters"] / 1e6 == pytest.approx(millions, abs=0.01)
        assert row["flops_forward"] / 4 / 2e9 == pytest.approx(gmacs, rel=0.07)
        assert row["flops"] / row["flops_forward"] == pytest.approx(3, abs=0.1)  # a backward is two forwards
        # Weights, gradients and both moments, and the activations of four images.
        assert row["peak"][0] > 4 * row["bytes"] and row["seconds"] > 0
