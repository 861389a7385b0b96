"""memopt.compress.DistillationLoss: Hinton's loss, a teacher kept small, features, and what is refused."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import weakref

import pytest
import torch
from compress_state import differences, kept, perceptron
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import memopt
from memopt.compress import DistillationLoss


def hinton(student, taught, target, temperature, hard_weight):
    """The formula, written out in double precision."""
    s, t = student.double(), taught.double()
    soft = F.softmax(t / temperature, -1) * (
        F.log_softmax(t / temperature, -1) - F.log_softmax(s / temperature, -1)
    )
    hard = F.cross_entropy(s, target)
    return hard_weight * hard + (1 - hard_weight) * temperature**2 * soft.sum() / len(s)


@settings(max_examples=30, deadline=None)
@given(
    temperature=st.floats(0.25, 20),
    hard_weight=st.floats(0, 1),
    classes=st.integers(2, 9),
    rows=st.integers(1, 6),
    seed=st.integers(0, 999),
)
def test_the_loss_and_its_gradient_are_the_formulas(temperature, hard_weight, classes, rows, seed):
    torch.manual_seed(seed)
    student = torch.randn(rows, classes, requires_grad=True)
    taught, target = torch.randn(rows, classes), torch.randint(0, classes, (rows,))
    loss = DistillationLoss(temperature=temperature, hard_weight=hard_weight)
    got = loss(student, target, teacher_logits=taught)
    (gradient,) = torch.autograd.grad(got, student)
    expected = hinton(student, taught, target, temperature, hard_weight)
    (wanted,) = torch.autograd.grad(expected, student)
    assert got.shape == () and got.dtype == torch.float32
    # T² makes more of what float32 rounds of a divergence that is almost nothing.
    assert torch.allclose(got.double(), expected, rtol=1e-4, atol=1e-5 + 1e-6 * temperature**2)
    assert torch.allclose(gradient, wanted, rtol=1e-3, atol=1e-5)


def test_it_is_the_plain_call_of_torchs_losses():
    torch.manual_seed(0)
    student, taught, target = torch.randn(8, 5), torch.randn(8, 5), torch.randint(0, 5, (8,))
    soft = nn.KLDivLoss(reduction="batchmean", log_target=True)(
        F.log_softmax(student / 4, -1), F.log_softmax(taught / 4, -1)
    )
    plain = 0.3 * F.cross_entropy(student, target) + 0.7 * 16 * soft
    got = DistillationLoss(temperature=4.0, hard_weight=0.3)(student, target, teacher_logits=taught)
    assert torch.allclose(got, plain, rtol=1e-6)


def test_sequences_and_ignored_positions_count_as_in_cross_entropy():
    torch.manual_seed(0)
    student, taught = torch.randn(2, 6, 5), torch.randn(2, 6, 5)
    target = torch.randint(0, 5, (2, 6))
    target[0, 3:] = -100
    counted = target != -100
    got = DistillationLoss(temperature=2.0)(student, target, teacher_logits=taught)
    assert torch.allclose(
        got.double(), hinton(student[counted], taught[counted], target[counted], 2.0, 0.5), rtol=1e-5
    )


def test_half_precision_logits_are_summed_in_float32():
    student = (torch.randn(4, 50_000) * 3).bfloat16()
    taught = (torch.randn(4, 50_000) * 3).bfloat16()
    got = DistillationLoss(temperature=2.0, hard_weight=0.0)(student, teacher_logits=taught)
    expected = hinton(student, taught, torch.zeros(4, dtype=torch.long), 2.0, 0.0)
    assert got.dtype == torch.float32 and torch.allclose(got.double(), expected, rtol=1e-3)


def test_a_loss_of_your_own_and_probabilities_as_targets():
    student, taught = torch.randn(4, 5), torch.randn(4, 5)
    target = torch.softmax(torch.randn(4, 5), -1)
    got = DistillationLoss(hard_weight=1.0)(student, target, teacher_logits=taught)
    assert torch.allclose(got, F.cross_entropy(student, target))
    own = DistillationLoss(hard_weight=1.0, hard_loss=lambda s, t: (s - t).abs().sum())
    assert torch.allclose(own(student, target), (student - target).abs().sum())


# ---- the teacher


def test_the_teacher_is_halved_frozen_in_eval_mode_and_no_part_of_the_loss():
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Dropout(0.9), nn.Linear(64, 5))
    plain = copy.deepcopy(teacher).eval()
    distil = DistillationLoss(teacher)
    distil.train()
    assert distil.teacher is teacher and not any(module.training for module in teacher.modules())
    assert not any(p.requires_grad for p in teacher.parameters())
    assert list(distil.parameters()) == [] and distil.state_dict() == {}
    assert teacher[0].weight.dtype == torch.bfloat16 and teacher[1].weight.dtype == torch.float32
    by_hand = sum(t.untyped_storage().nbytes() for t in [*teacher.parameters(), *teacher.buffers()])
    assert distil.report.after.memory_bytes == by_hand < distil.report.before.memory_bytes
    assert distil.report.saved_bytes == (64 * 64 + 64 + 5 * 64 + 5) * 2 and "teacher Sequential" in str(
        distil.report
    )
    x = torch.randn(8, 64)
    logits = distil.teach(x)
    assert not logits.requires_grad and torch.allclose(logits.float(), plain(x), atol=0.05)
    student = nn.Linear(64, 5)
    target = torch.randint(0, 5, (8,))
    loss = distil(student(x), target, inputs=x)
    assert torch.equal(loss, distil(student(x), target, teacher_logits=logits))
    loss.backward()
    assert student.weight.grad is not None and all(p.grad is None for p in teacher.parameters())


def test_bytes_of_the_teacher_are_storages_and_not_elements():
    """Its weights lie in one large storage, of which they show a part."""
    teacher, flat = perceptron(8, 8, 8, bias=False), torch.randn(1000)
    teacher[0].weight = nn.Parameter(flat[:64].view(8, 8))
    teacher[2].weight = nn.Parameter(flat[64:128].view(8, 8))
    distil = DistillationLoss(teacher)
    assert (distil.report.before.memory_bytes, distil.report.after.memory_bytes) == (4000, 2000)
    kept_whole = DistillationLoss(perceptron(8, 8), teacher_dtype=None)
    assert kept_whole.report.saved_bytes == 0 and kept_whole.teacher[0].weight.dtype == torch.float32


def test_inputs_are_an_argument_a_tuple_or_keywords_and_outputs_may_have_logits():
    class Answer:
        def __init__(self, logits: torch.Tensor) -> None:
            self.logits = logits

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor, scale: torch.Tensor) -> Answer:
            return Answer(self.a(x) * scale)

    distil = DistillationLoss(Two(), hard_weight=0.0)
    x, scale, student = torch.randn(2, 4), torch.tensor(2), Answer(torch.randn(2, 3))
    found = {
        float(distil(student, inputs=inputs)) for inputs in ((x, scale), [x, scale], {"x": x, "scale": scale})
    }
    assert len(found) == 1


def test_the_teacher_lives_in_a_file_and_the_loss_is_the_same(tmp_path):
    torch.manual_seed(0)
    teacher, student = perceptron(32, 64, 64, 5), nn.Linear(32, 5)
    twin = copy.deepcopy(teacher)
    x, target = torch.randn(4, 32), torch.randint(0, 5, (4,))
    expected = DistillationLoss(twin)(student(x), target, inputs=x)
    distil = DistillationLoss(teacher, offload=str(tmp_path))
    for _ in range(2):
        assert torch.equal(distil(student(x), target, inputs=x), expected)
    assert distil.offloaded is not None and any("layer" in note for note in distil.report.notes)
    distil.remove()
    assert torch.equal(distil(student(x), target, inputs=x), expected)


def test_it_is_pickled_and_copied_with_its_teacher():
    teacher, x = perceptron(8, 4), torch.randn(2, 8)
    student = torch.randn(2, 4)
    distil = DistillationLoss(teacher, hard_weight=0.0)
    for other in (pickle.loads(pickle.dumps(distil)), copy.deepcopy(distil)):
        assert (
            torch.equal(other(student, inputs=x), distil(student, inputs=x)) and other.teacher is not teacher
        )


# ---- features


def test_features_pull_the_students_modules_towards_the_teachers():
    torch.manual_seed(0)
    teacher, student = perceptron(8, 32, 4), perceptron(8, 16, 4)
    projection = nn.Linear(16, 32)
    distil = DistillationLoss(
        teacher, student=student, features={"1": "1"}, projections={"1": projection}, feature_weight=3.0,
        hard_weight=1.0, teacher_dtype=None,
    )  # fmt: skip
    x, target = torch.randn(5, 8), torch.randint(0, 4, (5,))
    logits = student(x)
    loss = distil(logits, target, inputs=x)
    features = F.mse_loss(projection(student[:2](x)), teacher[:2](x))
    assert torch.allclose(loss, F.cross_entropy(logits, target) + 3 * features)
    loss.backward()
    assert projection.weight.grad is not None and list(distil.parameters()) == list(projection.parameters())
    with pytest.raises(ValueError, match="has not run since the last loss"):
        distil(logits, target, inputs=x)
    distil.remove()
    assert not student._forward_hooks and not student[1]._forward_hooks and not teacher[1]._forward_hooks


def test_features_of_a_checkpointed_student_are_the_plain_runs_and_are_not_kept():
    torch.manual_seed(0)
    teacher, plain = perceptron(8, 16, 4), perceptron(8, 16, 4)

    class Checkpointed(nn.Module):
        def __init__(self, body: nn.Module) -> None:
            super().__init__()
            self.body = body

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return memopt.checkpoint(self.body, x, use_reentrant=False)

    student = Checkpointed(copy.deepcopy(plain))
    x, target = torch.randn(5, 8), torch.randint(0, 4, (5,))
    first = DistillationLoss(copy.deepcopy(teacher), student=plain, features={"1": "1"})
    second = DistillationLoss(teacher, student=student, features={"body.1": "1"})
    expected = first(plain(x), target, inputs=x)
    loss = second(student(x), target, inputs=x)
    assert torch.equal(loss, expected)
    expected.backward()
    loss.backward()
    assert all(
        torch.equal(p.grad, q.grad) for p, q in zip(plain.parameters(), student.parameters(), strict=True)
    )
    assert not second._models[1]._found  # the run in the backward pass was not listened to


def test_nothing_of_a_step_is_kept():
    teacher, student = perceptron(8, 4, 4), perceptron(8, 4, 4)
    distil = DistillationLoss(teacher, student=student, features={"1": "1"})
    x, outputs = torch.randn(3, 8), []
    for model in (teacher, student):
        model[1].register_forward_hook(lambda module, inputs, output: outputs.append(weakref.ref(output)))
    distil(student(x), torch.tensor([0, 1, 2]), inputs=x).backward()
    gc.collect()
    assert [output() for output in outputs] == [None, None]


# ---- bad input


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"temperature": 0.0}, ValueError, "temperature"),
        ({"temperature": -1}, ValueError, "temperature"),
        ({"temperature": math.nan}, ValueError, "temperature"),
        ({"temperature": math.inf}, ValueError, "temperature"),
        ({"temperature": True}, TypeError, "temperature"),
        ({"temperature": "4"}, TypeError, "temperature"),
        ({"hard_weight": 1.5}, ValueError, "hard_weight"),
        ({"hard_weight": 1}, TypeError, "hard_weight"),
        ({"feature_weight": 0.0}, ValueError, "feature_weight"),
        ({"teacher": 3}, TypeError, "teacher"),
        ({"student": 3}, TypeError, "student"),
        ({"student": nn.Linear(2, 2)}, ValueError, "student= is used with features= only"),
        ({"features": {"0": "0"}}, ValueError, "give both models"),
        (
            {"features": {"0": "7"}, "student": perceptron(8, 4, 4)},
            ValueError,
            "the teacher has no module '7'",
        ),
        (
            {"features": {"7": "0"}, "student": perceptron(8, 4, 4)},
            ValueError,
            "the student has no module '7'",
        ),
        ({"projections": {"0": nn.Linear(2, 2)}}, ValueError, "not among the student's features"),
        ({"teacher": None, "offload": "cpu"}, ValueError, "there is none"),
        ({"teacher_dtype": torch.int8}, TypeError, "floating-point type"),
        ({"offload": "/no/such/directory"}, ValueError, "expected 'cpu', or a directory"),
        ({"teacher": perceptron(8, 4, 4).to("meta")}, ValueError, "meta"),
    ],
)
def test_what_cannot_be_is_refused_and_the_teacher_stays_as_it_was(arguments, kind, words):
    teacher = perceptron(8, 4, 4)
    before = kept(teacher)
    with pytest.raises(kind, match=words):
        DistillationLoss(**{"teacher": teacher, **arguments})
    assert not differences(before, teacher)


def test_an_offload_that_is_refused_leaves_gradients_as_they_were():
    teacher = perceptron(8, 4, 4)
    teacher(torch.randn(2, 8)).sum().backward()
    before = kept(teacher)
    gradients = [(p.grad, p.grad.clone()) for p in teacher.parameters()]
    with pytest.raises(ValueError, match="expected 'cpu', or a directory"):
        DistillationLoss(teacher, offload="/no/such/directory")
    assert not differences(before, teacher)
    for p, (gradient, values) in zip(teacher.parameters(), gradients, strict=True):
        assert p.grad is gradient and p.grad.dtype is p.dtype and torch.equal(p.grad, values)


def test_a_student_that_shares_the_teachers_parameters_is_refused():
    teacher, student = perceptron(8, 4, 4), perceptron(8, 4, 4)
    student[2] = teacher[2]
    for other in (teacher, student):
        before = kept(teacher)
        with pytest.raises(ValueError, match="share parameters"):
            DistillationLoss(teacher, student=other, features={"1": "1"})
        assert not differences(before, teacher)


def test_calls_that_lack_something_say_what():
    teacher, logits, target = perceptron(8, 4), torch.randn(2, 4), torch.tensor([1, 2])
    distil = DistillationLoss(teacher)
    x = torch.randn(2, 8)
    for arguments, kind, words in [
        ((logits,), ValueError, "needs a target"),
        ((logits, target), ValueError, "give the teacher's inputs=, or teacher_logits="),
        ((torch.randn(2, 5), target), ValueError, "must agree"),
        (("logits", target), TypeError, "without .logits"),
        ((torch.tensor(1.0), target), ValueError, "single number"),
    ]:
        keywords = {} if "give" in words or "needs" in words else {"inputs": x}
        with pytest.raises(kind, match=words):
            distil(*arguments, **keywords)
    with pytest.raises(ValueError, match="not both"):
        distil(logits, target, inputs=x, teacher_logits=logits)
    for distils in (distil, DistillationLoss(hard_weight=1.0)):
        with pytest.raises(ValueError, match=r"logits are \(4,\): .* a batch before it"):
            distils(torch.randn(4), torch.tensor(1), teacher_logits=torch.randn(4))
    with pytest.raises(ValueError, match="no teacher"):
        DistillationLoss().teach(x)
    student = perceptron(8, 6, 4)
    mismatched = DistillationLoss(perceptron(8, 5, 4), student=student, features={"1": "1"})
    with pytest.raises(ValueError, match="projections="):
        mismatched(student(x), target, inputs=x)
