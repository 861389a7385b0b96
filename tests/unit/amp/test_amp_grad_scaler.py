"""memopt.amp.GradScaler beside torch.amp.GradScaler, case by case: what it is, its errors in torch's words, its drop-in
functions, and what it offers beyond torch's. (Random sequences of calls are in test_amp_sequences.py.)"""

from __future__ import annotations

import copy
import math
import pickle
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from amp_sequences import Attributed, Counting, bits

import memopt
from memopt.amp import GradScaler, foreach_unscale_, update_scale_

ROOT = Path(__file__).resolve().parents[3]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
BOTH = [torch.amp.GradScaler, GradScaler]


def parameter(*values: float, dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    """One whose gradient has these values."""
    p = torch.nn.Parameter(torch.zeros(len(values), dtype=dtype))
    p.grad = torch.tensor(values, dtype=dtype)
    return p


def scaler_of(cls=GradScaler, scale: float = 4.0, **options):
    scaler = cls("cpu", init_scale=scale, **options)
    scaler.scale(torch.ones(()))
    return scaler


def outcome(function, *arguments, **named):
    """The result, or the error in words."""
    try:
        return bits(function(*arguments, **named))
    except Exception as error:  # compared with torch's
        return type(error), str(error)


# ---- what it is ------------------------------------------------------------------------------------------------------


def test_it_is_one_of_torchs():
    assert issubclass(GradScaler, torch.amp.GradScaler) and memopt.amp.GradScaler is GradScaler
    assert GradScaler.__module__ == "memopt.amp._grad_scaler"
    with pytest.raises(AttributeError, match="no attribute 'GradScalar'"):
        memopt.amp.GradScalar  # noqa: B018


def test_importing_it_needs_no_torch_until_the_class_is_asked_for():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import memopt.amp\n"
        "assert 'GradScaler' in dir(memopt.amp)\n"
        "try: memopt.amp.GradScaler\n"
        "except ImportError as error: print('ImportError')\n"
        "try: memopt.amp.clip_grad_norm_([], 1.0)\n"
        "except ImportError as error: print('ImportError')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "ImportError\nImportError\n", done.stderr


def test_without_cuda_it_is_disabled_with_torchs_warning_at_the_callers_line():
    heard = []
    for cls in BOTH:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert not cls("cuda").is_enabled() and not cls().is_enabled()
        heard.append([(w.category, str(w.message), w.filename) for w in caught])
    if torch.cuda.is_available():
        pytest.skip("there is CUDA")
    assert heard[0] == heard[1] and len(heard[0]) == 2


@pytest.mark.parametrize("wrong", [{"growth_factor": 1.0}, {"backoff_factor": 1.0}])
@pytest.mark.parametrize("enabled", [True, False])
def test_factors_that_go_the_wrong_way_are_refused_in_torchs_words(wrong: dict, enabled: bool):
    def made(cls):
        return cls("cpu", enabled=enabled, **wrong).is_enabled()

    assert outcome(made, GradScaler) == outcome(made, torch.amp.GradScaler)


def test_positional_arguments_are_torchs():
    scaler = GradScaler("cpu", 8.0, 3.0, 0.25, 7, True)
    assert scaler.state_dict() == torch.amp.GradScaler("cpu", 8.0, 3.0, 0.25, 7, True).state_dict()


# ---- torch's cases ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_training_takes_the_steps_that_torchs_takes(dtype: torch.dtype):
    """A net, a few iterations, one with an inf: every parameter and the scale in bits, for each way of stepping."""
    for make in (
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        lambda p: torch.optim.SGD(p, 0.1, fused=True),
        lambda p: torch.optim.AdamW(p, 0.01, fused=True),
        lambda p: torch.optim.Adagrad(p, 0.01),
    ):
        for unscale_first in (False, True):
            seen = []
            for cls in BOTH:
                torch.manual_seed(1)
                net = torch.nn.Sequential(torch.nn.Linear(9, 33), torch.nn.ReLU(), torch.nn.Linear(33, 3)).to(
                    dtype
                )
                optimizer, scaler = make(net.parameters()), scaler_of(cls, 128.3, growth_interval=2)
                for iteration in range(6):
                    optimizer.zero_grad()
                    x = torch.randn(5, 9).to(dtype)
                    scaler.scale((net(x) ** 2).mean()).backward()
                    if iteration == 3:
                        net[0].bias.grad[5] = math.inf
                    if unscale_first:
                        scaler.unscale_(optimizer)
                    scaler.step(optimizer)
                    scaler.update()
                seen.append((bits(list(net.state_dict().values())), scaler.state_dict()))
            assert seen[0] == seen[1]


def test_one_optimizers_inf_skips_its_step_and_backs_off_for_all():
    scaler = scaler_of()
    good, bad = parameter(4.0), parameter(math.nan)
    first, second = torch.optim.SGD([good], 1.0), torch.optim.SGD([bad], 1.0)
    scaler.step(first)
    scaler.step(second)
    assert (bool(scaler.step_skipped(first)), bool(scaler.step_skipped(second))) == (False, True)
    scaler.update()
    assert good.item() == -1.0 and bad.item() == 0.0 and scaler.get_scale() == 2.0
    assert (bool(scaler.step_skipped(first)), bool(scaler.step_skipped(second))) == (False, True)


def test_the_scale_grows_after_the_interval_but_never_to_infinity():
    scaler = scaler_of(scale=3e38, growth_interval=2)
    for tracker in (1, 0, 1, 0):
        scaler.step(torch.optim.SGD([parameter(1.0)], 1.0))
        scaler.update()
        assert scaler._get_growth_tracker() == tracker
    assert scaler.get_scale() == torch.tensor(3e38).item()


ERRORS = {
    "unscale_ before scale": lambda s, o: GradScaler.unscale_(type(s)("cpu"), o),
    "step before scale": lambda s, o: type(s)("cpu").step(o),
    "update before scale": lambda s, o: type(s)("cpu").update(),
    "update(1.0) before scale": lambda s, o: type(s)("cpu").update(1.0),
    "check before scale": lambda s, o: type(s)("cpu")._check_inf_per_device(o),
    "unscale_ twice": lambda s, o: (s.unscale_(o), s.unscale_(o)),
    "unscale_ after step": lambda s, o: (s.step(o), s.unscale_(o)),
    "step twice": lambda s, o: (s.step(o), s.step(o)),
    "closure": lambda s, o: s.step(o, closure=lambda: 0),
    "no gradients": lambda s, o: (o.zero_grad(), s.step(o)),
    "update without step": lambda s, o: s.update(),
    "an int": lambda s, o: s.update(3),
    "a tensor on another device": lambda s, o: s.update(torch.ones((), device="meta")),
    "a tensor of two": lambda s, o: s.update(torch.ones(2)),
    "a tensor with a gradient": lambda s, o: s.update(torch.ones((), requires_grad=True)),
    "pickled in an iteration": lambda s, o: (s.unscale_(o), pickle.dumps(s)),
    "an empty state": lambda s, o: s.load_state_dict({}),
    "half a state": lambda s, o: s.load_state_dict({"scale": 1.0}),
    "scale(3)": lambda s, o: s.scale(3),
    "scale([3])": lambda s, o: s.scale([torch.ones(()), 3]),
    "fp16": lambda s, o: s.unscale_(torch.optim.SGD([parameter(1.0), parameter(1.0, dtype=torch.float16)])),
    "complex": lambda s, o: s.unscale_(torch.optim.SGD([parameter(1.0, dtype=torch.complex64)])),
}


@pytest.mark.parametrize("case", ERRORS)
def test_its_errors_are_torchs_word_for_word(case: str):
    words = []
    for cls in BOTH:
        with pytest.raises(Exception) as caught:
            ERRORS[case](scaler_of(cls), torch.optim.SGD([parameter(1.0)], 1.0))
        words.append((caught.type, str(caught.value)))
    assert words[0] == words[1]


def test_what_is_refused_leaves_every_gradient_as_it_was():
    first, second = parameter(1.0), parameter(1.0, dtype=torch.float16)
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaler_of().unscale_(torch.optim.SGD([first, second], 1.0))
    third = torch.nn.Parameter(torch.zeros(3))
    third.grad = torch.ones(()).expand(3)
    with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
        scaler_of().unscale_(torch.optim.SGD([first, third], 1.0))
    assert first.grad.item() == 1.0 and second.grad.item() == 1.0


def test_fp16_duplicates_of_a_sparse_gradient_overflow_only_when_summed():
    seen = []
    for cls in BOTH:
        p = torch.nn.Parameter(torch.zeros(3, dtype=torch.float16))
        p.grad = torch.sparse_coo_tensor(
            [[1, 1]], torch.tensor([6e4, 6e4], dtype=torch.float16), (3,), check_invariants=False
        )
        founds = scaler_of(cls)._check_inf_per_device(torch.optim.SGD([p], 1.0))
        seen.append((bits(founds), bits(p.grad)))
    assert seen[0] == seen[1] and float(founds[torch.device("cpu")]) == 1.0


def test_an_optimizer_that_knows_scales_is_told_once_and_nothing_is_left_on_it():
    for unscale_first, told in ((False, 4.0), (True, None)):
        scaler, optimizer = scaler_of(), Attributed([parameter(8.0)])
        if unscale_first:
            scaler.unscale_(optimizer)
        _, scale, found = scaler.step(optimizer)
        assert scale == told and found == 0.0
        assert not hasattr(optimizer, "grad_scale") and not hasattr(optimizer, "found_inf")


def test_the_fused_paths_check_writes_nothing():
    """torch's own writes the same bits again."""
    grad = torch.ones(5).requires_grad_(False)
    memory = grad.untyped_storage()
    p = torch.nn.Parameter(torch.zeros(5))
    p.grad = grad
    before = bytes(memory)
    founds = scaler_of()._check_inf_per_device(torch.optim.SGD([p], 1.0))
    assert bytes(memory) == before and float(founds[torch.device("cpu")]) == 0.0


def test_a_framework_may_put_its_own_unscaling_in_place_of_ours():
    """As those do that train in fp16: every path goes through it."""
    scaler, p = scaler_of(), parameter(8.0, dtype=torch.float16)
    original, asked = scaler._unscale_grads_, []

    def theirs(optimizer, inv_scale, found_inf, allow_fp16):
        asked.append(float(inv_scale))
        return original(optimizer, inv_scale, found_inf, True)

    scaler._unscale_grads_ = theirs
    first, second, third = (torch.optim.SGD([p], 1.0) for _ in range(3))
    scaler.unscale_(first)
    scaler.unscale_and_clip_(second, 1e9)
    scaler._check_inf_per_device(third)
    assert asked == [0.25, 0.25, 1.0] and p.grad.item() == 0.5


def test_the_same_tensor_as_two_gradients_is_unscaled_twice_as_torch_does():
    for cls in BOTH:
        a, b = parameter(1.0, 1.0), parameter(1.0, 1.0)
        a.grad = b.grad = torch.tensor([16.0, math.inf])
        scaler_of(cls).unscale_(torch.optim.SGD([a, b], 1.0))
        assert a.grad.tolist() == [1.0, math.inf]


def test_state_dicts_go_both_ways_and_pickles_come_back():
    ours, theirs = scaler_of(scale=8.0, growth_interval=3), scaler_of(torch.amp.GradScaler, 2.0)
    theirs.load_state_dict(ours.state_dict())
    assert theirs.state_dict() == ours.state_dict() and list(theirs.state_dict()) == list(ours.state_dict())
    theirs.update(32.0)
    ours.load_state_dict(theirs.state_dict())
    assert ours.get_scale() == 32.0
    for again in (pickle.loads(pickle.dumps(ours)), copy.deepcopy(ours)):
        assert type(again) is GradScaler and again.state_dict() == ours.state_dict()
        assert (
            again._scale is None
            and outcome(again.scale, torch.ones(()))[-1] == outcome(ours.scale, torch.ones(()))[-1]
        )
    assert GradScaler("cpu", enabled=False).state_dict() == {}


def test_disabled_it_does_what_the_optimizer_does():
    scaler, p = GradScaler("cpu", enabled=False), parameter(3.0, 4.0)
    optimizer = torch.optim.SGD([p], 1.0)
    loss = torch.ones(())
    assert scaler.scale(loss) is loss and scaler.unscale_(optimizer) is None and scaler.get_scale() == 1.0
    assert scaler.unscale_and_clip_(optimizer, 10.0) == 5.0
    scaler.step(optimizer, max_norm=2.5)
    scaler.update()
    assert p.tolist() == pytest.approx([-1.5, -2.0]) and not scaler.step_skipped(optimizer)


# ---- the functions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inv_scale", [1.0, 0.5, 0.3, 2.0**-24, 3e4, 0.0, math.inf, math.nan])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_foreach_unscale_is_torchs_bit_for_bit(dtype: torch.dtype, inv_scale: float):
    torch.manual_seed(3)
    grads = [torch.randn(n).mul_(10.0 ** (n % 7)).to(dtype) for n in (0, 1, 3, 31, 64, 1000, 40000)]
    grads += [
        torch.randn(65).to(dtype)[1:],
        torch.randn(6, 7).to(dtype).t(),
        torch.randn(8, 2).to(dtype)[:, 0],
    ]
    for bad in (None, math.inf, math.nan):
        if bad:
            grads[4][63] = bad
        seen = []
        for op in (torch._amp_foreach_non_finite_check_and_unscale_, foreach_unscale_):
            copies, found = [g.clone(memory_format=torch.preserve_format) for g in grads], torch.zeros(1)
            op(copies, found, torch.tensor(inv_scale))
            seen.append((bits(copies), bits(found)))
        assert seen[0] == seen[1]


@pytest.mark.parametrize(
    ("found", "inverse"),
    [
        (torch.zeros(2), torch.ones(())), (torch.zeros(()), torch.ones(2)),
        (torch.zeros((), dtype=torch.float64), torch.ones(())), (torch.zeros((), device="meta"), torch.ones(())),
    ],
)  # fmt: skip
def test_foreach_unscale_refuses_what_torch_refuses(found: torch.Tensor, inverse: torch.Tensor):
    def called(op):
        return outcome(op, [torch.ones(3)], found.clone(), inverse)

    assert called(foreach_unscale_) == called(torch._amp_foreach_non_finite_check_and_unscale_)


@pytest.mark.parametrize("found", [0.0, 1.0, -2.0, math.nan])
@pytest.mark.parametrize("scale", [65536.0, 1e-45, 3e38, 0.0, math.inf])
def test_update_scale_is_torchs_bit_for_bit(scale: float, found: float):
    seen = []
    for op in (torch._amp_update_scale_, update_scale_):
        current, tracker = torch.tensor(scale), torch.tensor(0, dtype=torch.int32)
        for _ in range(5):
            assert op(current, tracker, torch.tensor([found]), 2.0, 0.3, 2) is current
        seen.append((bits(current), bits(tracker)))
    assert seen[0] == seen[1]


def test_update_scale_names_what_hysteresis_needs():
    arguments = torch.ones(()), torch.zeros((), dtype=torch.int32), torch.zeros(()), 2.0, 0.5, 2
    with pytest.raises(ValueError, match="hysteresis=0: expected at least 1"):
        update_scale_(*arguments, hysteresis=0)
    with pytest.raises(ValueError, match="hysteresis=2 needs a hysteresis_tracker"):
        update_scale_(*arguments, hysteresis=2)


# ---- beyond torch's --------------------------------------------------------------------------------------------------


def iterate(scaler, *values: float) -> float:
    """An iteration for each gradient; the scale after them."""
    for value in values:
        scaler.step(Counting([parameter(value)]))
        scaler.update()
    return scaler.get_scale()


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"min_scale": 0.0}, "min_scale=0.0: expected a positive number"),
        ({"min_scale": 4.0, "max_scale": 2.0}, "max_scale=2.0: expected at least min_scale, 4.0"),
        ({"hysteresis": 0}, "hysteresis=0: expected at least 1"),
        ({"no_gradients": "fine"}, "no_gradients='fine': expected 'error' or 'finite'"),
    ],
)
def test_options_out_of_range_are_refused_by_name(wrong: dict, text: str):
    with pytest.raises(ValueError, match=text):
        GradScaler("cpu", **wrong)


def test_the_scale_stays_within_its_bounds():
    scaler = scaler_of(growth_interval=1, min_scale=3.0, max_scale=10.0)
    assert iterate(scaler, math.inf, math.inf) == 3.0
    assert iterate(scaler, 1.0, 1.0, 1.0) == 10.0
    assert iterate(scaler, math.inf) == 5.0
    scaler.update(1.0)  # the user's word is law
    assert scaler.get_scale() == 1.0


def test_with_hysteresis_the_scale_backs_off_after_so_many_infs_in_a_row():
    scaler = scaler_of(scale=64.0, growth_interval=2, hysteresis=3)
    assert iterate(scaler, math.inf, math.inf) == 64.0
    assert iterate(scaler, 1.0) == 64.0 and scaler._get_growth_tracker() == 1  # starts again
    assert iterate(scaler, math.inf) == 64.0 and scaler._get_growth_tracker() == 0
    assert iterate(scaler, math.inf) == 64.0
    assert iterate(scaler, math.inf) == 32.0
    assert iterate(scaler, math.inf) == 16.0
    assert iterate(scaler, 1.0, 1.0) == 32.0


def test_hysteresis_goes_on_where_it_was_saved():
    scaler = scaler_of(hysteresis=2)
    iterate(scaler, math.inf)
    state = scaler.state_dict()
    assert state["_hysteresis_tracker"] == 1 and "_hysteresis_tracker" not in scaler_of().state_dict()
    loaded, unpickled = scaler_of(scale=1.0, hysteresis=2), pickle.loads(pickle.dumps(scaler))
    loaded.load_state_dict(state)
    unpickled.scale(torch.ones(()))
    assert iterate(loaded, math.inf) == iterate(unpickled, math.inf) == 2.0
    torch.amp.GradScaler("cpu").load_state_dict(state)
    loaded.load_state_dict(torch.amp.GradScaler("cpu").state_dict())
    assert loaded._get_hysteresis_tracker() == 2


def test_fp16_gradients_are_unscaled_where_they_are_allowed():
    scaler, p = scaler_of(allow_fp16=True), parameter(8.0, dtype=torch.float16)
    optimizer = torch.optim.SGD([p], 1.0)
    scaler.unscale_(optimizer)
    assert p.grad.item() == 2.0
    scaler.step(optimizer)
    assert p.item() == -2.0


@pytest.mark.parametrize("make", [Counting, Attributed])
def test_an_optimizer_without_gradients_may_count_as_finite(make):
    p = parameter(1.0)
    p.grad = None
    scaler = scaler_of(no_gradients="finite", growth_interval=1)
    optimizer = make([p])
    assert scaler.step(optimizer) is not None and optimizer.steps == 1
    scaler.update()
    assert scaler.get_scale() == 8.0


def test_a_scale_without_a_finite_reciprocal_poisons_no_parameter_once_repaired():
    for cls, options, expected in ((torch.amp.GradScaler, {}, math.nan), (GradScaler, {"repair": True}, 0.0)):
        scaler, p = scaler_of(cls, 1e-39, **options), parameter(0.0)
        scaler.step(torch.optim.SGD([p], 1.0))
        scaler.update()
        assert p.item() == expected or (math.isnan(p.item()) and math.isnan(expected))
    assert scaler.get_scale() == 2.0**-126
    assert iterate(scaler, math.inf, math.inf) == 2.0**-126


@pytest.mark.parametrize("make", [Attributed, Counting])
def test_repaired_every_path_skips_where_the_scale_is_zero(make):
    scaler = scaler_of(scale=0.0, repair=True)
    takes = [scaler.unscale_, lambda o: scaler.unscale_and_clip_(o, 1.0), lambda o: None]
    optimizers = [make([parameter(0.0)]) for _ in takes]
    for take, optimizer in zip(takes, optimizers, strict=True):
        take(optimizer)
        scaler.step(optimizer)
        assert scaler.step_skipped(optimizer)


def test_repaired_the_scale_grows_again_after_the_interval_was_lowered():
    for cls, options, expected in ((torch.amp.GradScaler, {}, 4.0), (GradScaler, {"repair": True}, 8.0)):
        scaler = scaler_of(cls, growth_interval=10, **options)
        iterate(scaler, 1.0, 1.0, 1.0)
        scaler.set_growth_interval(2)
        assert iterate(scaler, 1.0) == expected


def test_step_skipped_is_of_the_iteration_that_is_or_the_one_that_was():
    scaler, optimizer = scaler_of(), torch.optim.SGD([parameter(math.inf)], 1.0)
    with pytest.raises(RuntimeError, match=r"step_skipped\(\): step\(\) was not called on this optimizer"):
        scaler.step_skipped(optimizer)
    scaler.step(optimizer)
    answer = scaler.step_skipped(optimizer)
    scaler.update()
    assert (
        answer.dtype == torch.bool
        and answer.shape == ()
        and bool(answer)
        and bool(scaler.step_skipped(optimizer))
    )
    scaler.update(2.0)
    with pytest.raises(RuntimeError, match="in this iteration or the last"):
        scaler.step_skipped(optimizer)
