"""The demo tasks: the same model, data and result each time, and live bytes that add up."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the demo tasks train torch models")

from benchmarks import tasks  # noqa: E402
from benchmarks.live_bytes import LiveBytes, StepMemory, peak_by_category  # noqa: E402
from memopt._demo import tasks as demo_tasks  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
ROOT = Path(__file__).resolve().parents[2]
KINDS = ("gpt", "cnn")


def train(task: tasks.Task, steps: int) -> tuple[torch.nn.Module, list[float]]:
    model = task.build_model()
    optimizer = task.optimizer(model)
    losses = []
    for batch in task.batches(steps):
        loss = task.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


def test_text_is_the_same_in_a_fresh_process() -> None:
    code = "from benchmarks import tasks; print(tasks.text_digest())"
    fresh = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert fresh.stdout.strip() == tasks.text_digest()


def test_text_is_known_for_the_python_it_was_measured_on() -> None:
    if sys.version_info[:3] != (3, 11, 7):
        pytest.skip("the digest in benchmarks/README.md is of Python 3.11.7")
    assert tasks.text_digest() in (ROOT / "benchmarks" / "README.md").read_text()


def test_text_splits_are_large_and_share_no_module() -> None:
    text = tasks.standard_library_text()
    assert len(text["train"]) > 2_000_000 and len(text["val"]) > 100_000
    for name in (b"class ArgumentParser", b"class TextCalendar", b"class Fraction", b"class TarFile"):
        assert (name in text["train"]) + (name in text["val"]) == 1


def test_tokens_decode_to_the_text() -> None:
    text = tasks.standard_library_text()["val"][:5000]
    decoded = tasks.decode(tasks.text_tokens("val")[:5000])
    expected = "".join(chr(b) if b in b"\n\t" or 32 <= b < 127 else "?" for b in text)
    assert decoded == expected


def test_tokens_are_below_the_size_of_the_vocabulary() -> None:
    for split in ("train", "val"):
        assert int(tasks.text_tokens(split).max()) < len(tasks.VOCABULARY) == 98


def test_digits_splits_cover_all_images_once() -> None:
    (train_images, train_labels), (val_images, val_labels) = tasks.digits("train"), tasks.digits("val")
    assert len(train_labels) + len(val_labels) == 1797 and len(val_labels) == 360
    assert train_images.shape[1:] == (1, 8, 8) and val_images.dtype == torch.float32
    assert float(train_images.min()) == 0.0 and float(train_images.max()) == 1.0
    assert set(train_labels.tolist()) == set(val_labels.tolist()) == set(range(10))


@pytest.mark.parametrize("kind", KINDS)
def test_batches_repeat_for_a_seed_and_differ_between_seeds(kind: str) -> None:
    task = tasks.get(kind)
    first, again = list(task.batches(15)), list(task.batches(15))
    assert all(
        torch.equal(a, b) for x, y in zip(first, again, strict=True) for a, b in zip(x, y, strict=True)
    )
    assert not torch.equal(first[0][0], next(task.batches(1, seed=7))[0])
    assert not torch.equal(first[0][0], first[1][0])


def test_gpt_targets_are_the_inputs_one_character_on() -> None:
    inputs, targets = next(tasks.get("gpt").batches(1))
    assert inputs.shape == targets.shape == (16, 128) and inputs.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_gpt_sees_no_future_character() -> None:
    task = tasks.get("gpt")
    model = task.build_model()
    inputs, _ = next(task.batches(1))
    changed = inputs.clone()
    changed[:, 64:] = (changed[:, 64:] + 1) % len(tasks.VOCABULARY)
    with torch.no_grad():
        before, after = model(inputs), model(changed)
    assert torch.equal(before[:, :64], after[:, :64])
    assert not torch.equal(before[:, 64:], after[:, 64:])


@pytest.mark.parametrize("kind", KINDS)
def test_building_a_model_repeats_and_leaves_the_random_state(kind: str) -> None:
    task = tasks.get(kind)
    state = torch.get_rng_state()
    first, again = task.build_model(), task.build_model()
    assert torch.equal(state, torch.get_rng_state())
    assert all(
        torch.equal(a, b)
        for a, b in zip(first.state_dict().values(), again.state_dict().values(), strict=True)
    )
    other = replace(task, seed=1).build_model()
    assert any(not torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("kind, batch_size, steps, accuracy", [("gpt", 4, 30, 0.2), ("cnn", 64, 22, 0.9)])
def test_small_tasks_learn_and_repeat_exactly(
    kind: str, batch_size: int, steps: int, accuracy: float
) -> None:
    task = replace(tasks.get(kind), batch_size=batch_size)
    untrained = task.evaluate(task.build_model())
    model, losses = train(task, steps)
    _, again = train(task, 10)
    trained = task.evaluate(model)
    assert losses[:10] == again
    assert trained["loss"] < untrained["loss"] - 1.0
    assert trained["accuracy"] > accuracy > untrained["accuracy"]
    assert model.training


def test_evaluation_changes_nothing() -> None:
    task = tasks.get("cnn")
    model = task.build_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert task.evaluate(model) == task.evaluate(model)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("name", tasks.TASKS)
def test_activations_are_at_least_sixty_percent_of_the_plain_peak(name: str) -> None:
    assert tasks.TASKS[name].step_memory().activation_share >= 0.60


@pytest.mark.parametrize("kind", KINDS)
def test_fake_and_real_steps_hold_the_same_bytes(kind: str) -> None:
    task = tasks.get(kind)
    computed, measured = task.step_memory(), task.step_memory("cpu")
    assert computed == measured


@pytest.mark.parametrize("kind", KINDS)
def test_step_memory_adds_up_and_counts_what_is_known(kind: str) -> None:
    task = tasks.get(kind)
    model = task.build_model()
    step = task.step_memory("cpu")
    parts = step.as_dict()
    share = parts.pop("activation_share")
    assert parts.pop("peak") == sum(parts.values())
    assert share == step.activations / step.peak
    assert step.parameters == sum(p.numel() * 4 for p in model.parameters())
    assert step.buffers == sum(b.numel() * b.element_size() for b in model.buffers())
    # AdamW holds two moments and one 4-byte counter a tensor.
    assert step.optimizer_state == 2 * step.parameters + 4 * len(list(model.parameters()))
    assert step.batch == sum(t.numel() * t.element_size() for t in next(task.batches(1)))


def test_a_larger_batch_raises_the_share_of_activations() -> None:
    task = tasks.get("cnn")
    small, large = replace(task, batch_size=8).step_memory(), replace(task, batch_size=256).step_memory()
    assert small.parameters == large.parameters
    assert small.activation_share < 0.6 < large.activation_share


def test_live_bytes_count_a_storage_once_and_forget_it_when_it_dies() -> None:
    live = LiveBytes()
    with live:
        a = torch.zeros(1000)
        view = a[10:20].view(5, 2)
        b = a + 1
        del a
        assert sum(size for _, size in live.log) == 8000  # the view still holds a's storage
        del view
        assert sum(size for _, size in live.log) == 4000
        b.untyped_storage().resize_(0)
        live.see(b)
        assert sum(size for _, size in live.log) == 0


def test_peak_is_the_largest_prefix_sum_and_split_by_category() -> None:
    log = [(0, 100), (1, 50), (2, 30), (1, -50), (3, 60), (0, -100)]
    peak = peak_by_category(log, {0: "parameters", 3: "gradients"})
    assert peak == StepMemory(190, 100, 0, 0, 60, 0, 30)


def test_metadata_names_size_parameters_and_data() -> None:
    described = tasks.get("gpt").metadata()
    assert described["name"] == "gpt-small" and described["parameters"] == 834_914
    assert tasks.text_digest() in str(described["data"])
    assert tasks.get("gpt", "large").metadata()["parameters"] == 85_599_842


def test_an_unknown_task_is_named_with_the_known_ones() -> None:
    with pytest.raises(KeyError, match=r"gpt-huge.*gpt-small"):
        tasks.get("gpt", "huge")


def test_a_batch_larger_than_the_data_is_refused() -> None:
    with pytest.raises(ValueError, match="2000 from 1437"):
        next(replace(tasks.get("cnn"), batch_size=2000).batches(1))


def test_a_standard_library_without_sources_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_tasks.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(FileNotFoundError, match="0 modules of the standard library"):
        tasks.standard_library_text.__wrapped__()
