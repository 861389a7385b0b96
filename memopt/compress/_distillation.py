"""memopt.compress.DistillationLoss: a small model learns from a large one, which is kept small meanwhile."""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from memopt._offload.layers import OffloadedLayers, offload_layers
from memopt._runtime import arguments
from memopt._runtime.state_snapshot import Modes
from memopt._runtime.to_dtype import to_dtype_
from memopt.compress._model_changes import fraction
from memopt.compress._saved_report import Report, measure, standing

HardLoss: TypeAlias = Callable[..., torch.Tensor]


class DistillationLoss(nn.Module):
    """The loss of a model that learns from a larger one.

    hard_weight * hard_loss(student, target) + (1 - hard_weight) * T² * KL(teacher / T || student / T) + feature_weight
    * mean of the features' squared differences.

    The soft targets are those of Hinton, Vinyals and Dean (https://arxiv.org/abs/1503.02531, section 2), where T² keeps
    their gradients as large as those of the hard targets at every temperature. The features' term is that of FitNets
    (https://arxiv.org/abs/1412.6550). `report` has the teacher's bytes before and after.

    Args:
        teacher: The large model, or None if teacher_logits are given to each call. It is put into eval mode, its
            parameters no longer take gradients, and its floating-point tensors, except those of norms, are converted to
            `teacher_dtype`, in place. It runs without a graph, in that type (autocast), on inputs in that type, after
            the student and within the call. It is not a submodule of this module: parameters(), state_dict(), to() and
            train() do not affect it.
        temperature: T, above 0.
        hard_weight: The hard loss's share, a float from 0 to 1; 0.0 needs no target, 1.0 no teacher.
        hard_loss: A function of logits and target; by default cross-entropy.
        ignore_index: Positions with this target are excluded from both losses.
        teacher_dtype: The teacher's dtype, by default torch.bfloat16; None keeps the teacher's dtypes.
        student: The model that learns, if features are compared.
        features: {"layer2": "layer4"}: the output of the student's module layer2 is to match that of the teacher's
            layer4.
        feature_weight: The weight of the features' term.
        projections: Modules, by the student's names, that bring its features to the teacher's shape. They are
            submodules of this module, to be trained with the student.
        offload: The place of the teacher's parameters ("cpu", or a directory), from which they are copied to the device
            layer by layer: memopt.offload_layers(teacher, to=offload, device=device); .offloaded is its handle.
        device: The device on which an offloaded teacher computes.

    Raises:
        TypeError: An argument has the wrong type. The teacher is unchanged then, as with ValueError.
        ValueError: A model lacks a name, the teacher is the student or on the meta device, or offload_layers() refuses
            the offload.

    Examples:
        >>> distil = DistillationLoss(teacher, temperature=4.0, hard_weight=0.1)
        >>> for inputs, target in loader:
        ...     loss = distil(student(inputs), target, inputs=inputs)
    """

    def __init__(
        self,
        teacher: nn.Module | None = None,
        *,
        temperature: float = 2.0,
        hard_weight: float = 0.5,
        hard_loss: HardLoss | None = None,
        ignore_index: int = -100,
        student: nn.Module | None = None,
        features: Mapping[str, str] | None = None,
        projections: Mapping[str, nn.Module] | None = None,
        feature_weight: float = 1.0,
        teacher_dtype: torch.dtype | None = torch.bfloat16,
        offload: str | os.PathLike[str] | None = None,
        device: torch.device | str | int | None = None,
    ) -> None:
        super().__init__()
        self.temperature = _positive(temperature, "temperature")
        self.hard_weight = fraction(hard_weight, "hard_weight")
        self.feature_weight = _positive(feature_weight, "feature_weight")
        self.hard_loss, self.ignore_index = hard_loss, ignore_index
        self.teacher_dtype = teacher_dtype
        self.offloaded: OffloadedLayers | None = None
        self.report: Report | None = None
        _check_teacher(teacher, student, offload)
        pairs = dict(features or {})
        if pairs and (teacher is None or student is None):
            raise ValueError("features= names modules of a student and a teacher: give both models")
        if student is not None and not pairs:
            raise ValueError("student= is used with features= only; pass the student's logits to each call")
        self.projections = nn.ModuleList(_projections(projections or {}, pairs))
        self._projected = {name: number for number, name in enumerate(projections or {})}
        self._pairs = pairs
        # Not as submodules: nothing that is done to the loss is to be done to them.
        learning = FeatureCapture(student, list(pairs), "student") if pairs and student is not None else None
        taught = (
            FeatureCapture(teacher, list(pairs.values()), "teacher")
            if pairs and teacher is not None
            else None
        )
        object.__setattr__(self, "_models", (teacher, learning, taught))
        if teacher is not None:
            self._keep_small(teacher, offload, device)
        for capture in (learning, taught):
            if capture is not None:
                capture.install()

    @property
    def teacher(self) -> nn.Module | None:
        """The model from whose outputs the student learns; None if teacher_logits are given."""
        found: nn.Module | None = self._models[0]
        return found

    def _keep_small(self, teacher: nn.Module, offload: Any, device: Any) -> None:
        notes: list[str] = []
        before = measure(teacher, notes)
        modes = Modes(teacher)
        flags = [(p, p.requires_grad) for p in teacher.parameters()]
        # What is converted, gradients too, lives on beside its twin while an offload can still fail.
        values = (
            [(t, t.data, t.grad if t.is_leaf else None) for t in standing(teacher)]
            if offload is not None
            else []
        )
        try:
            teacher.eval()
            for p, _ in flags:
                p.requires_grad_(False)
            converted = [] if self.teacher_dtype is None else to_dtype_(teacher, self.teacher_dtype).converted
            if offload is not None:
                self.offloaded = offload_layers(teacher, to=offload, device=device)
        except BaseException:
            modes.restore()
            for tensor, data, gradient in values:
                tensor.grad = None  # one of another type is refused by the assignment of .data
                tensor.data = data
                tensor.grad = gradient
            for p, wanted in flags:
                p.requires_grad_(wanted)
            raise
        if self.offloaded is not None:
            notes.append(str(self.offloaded.plan))
        self.report = Report(
            technique=f"teacher {type(teacher).__name__}",
            before=before,
            after=measure(teacher),
            changed=tuple(converted),
            notes=tuple(notes),
        )

    def teach(self, *inputs: Any, **keywords: Any) -> torch.Tensor:
        """Compute the teacher's logits, without a graph, to be given to several calls as teacher_logits.

        With features, each is taken by the next call.

        Args:
            *inputs: Arguments of the teacher.
            **keywords: Keyword arguments of the teacher.

        Returns:
            The teacher's logits for these inputs.
        """
        teacher = self.teacher
        if teacher is None:
            raise ValueError("DistillationLoss has no teacher: give teacher_logits=")
        args, kwargs = pytree.tree_map(self._low, (inputs, keywords))
        device = next(
            (leaf.device for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)),
            None,
        )
        kind = "cpu" if device is None else device.type
        low = self.teacher_dtype if self.teacher_dtype in (torch.bfloat16, torch.float16) else None
        with torch.no_grad(), torch.autocast(kind, dtype=low, enabled=low is not None):
            return _logits(teacher(*args, **kwargs), "teacher")

    def _low(self, leaf: Any) -> Any:
        fits = self.teacher_dtype is not None and isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
        return leaf.detach().to(self.teacher_dtype) if fits else leaf

    def forward(
        self,
        student_logits: Any,
        target: torch.Tensor | None = None,
        *,
        inputs: Any = None,
        teacher_logits: Any = None,
    ) -> torch.Tensor:
        """Compute the loss.

        Args:
            student_logits: The student's output, or its `.logits`, with classes in the last dimension (or, with your
                own hard_loss, wherever both losses expect them).
            target: The hard loss's target.
            inputs: The teacher's inputs: one argument, a tuple of arguments or a mapping of keyword arguments.
            teacher_logits: The teacher's logits, instead of inputs, in the shape of the student's.

        Returns:
            A scalar.
        """
        student = _logits(student_logits, "student")
        if student.dim() < 2 and (self.hard_weight < 1.0 or self.hard_loss is None):
            raise ValueError(
                f"DistillationLoss: the student's logits are {tuple(student.shape)}: expected classes in the last "
                "dimension and a batch before it; for a single example, use .unsqueeze(0) on the logits and the "
                "target"
            )
        if target is None and self.hard_weight > 0.0:
            raise ValueError(
                f"DistillationLoss: hard_weight={self.hard_weight} needs a target; hard_weight=0.0 needs none"
            )
        if inputs is not None and teacher_logits is not None:
            raise ValueError("DistillationLoss: give inputs= or teacher_logits=, not both")
        taught = None
        if inputs is not None:
            taught = self._teach(inputs)
        elif teacher_logits is not None:
            taught = _logits(teacher_logits, "teacher").detach()
        elif self.hard_weight < 1.0 or self._pairs:
            raise ValueError("DistillationLoss: give the teacher's inputs=, or teacher_logits=")
        if taught is not None and taught.shape != student.shape:
            raise ValueError(
                f"DistillationLoss: the student's logits are {tuple(student.shape)}, the teacher's "
                f"{tuple(taught.shape)}: they must agree"
            )
        total = student.new_zeros((), dtype=torch.promote_types(student.dtype, torch.float32))
        if self.hard_weight > 0.0:
            total = total + self.hard_weight * self._hard(student, target)
        if self.hard_weight < 1.0 and taught is not None:
            total = total + (1.0 - self.hard_weight) * self._soft(student, taught, target)
        if self._pairs:
            total = total + self.feature_weight * self._features()
        return total

    def _teach(self, inputs: Any) -> torch.Tensor:
        if isinstance(inputs, Mapping):
            return self.teach(**inputs)
        return self.teach(*inputs) if isinstance(inputs, (tuple, list)) else self.teach(inputs)

    def _hard(self, student: torch.Tensor, target: torch.Tensor | None) -> torch.Tensor:
        if self.hard_loss is not None:
            return self.hard_loss(student, target)
        assert target is not None
        if target.is_floating_point():  # probabilities
            return nn.functional.cross_entropy(student.flatten(0, -2), target.flatten(0, -2))
        return nn.functional.cross_entropy(
            student.flatten(0, -2), target.flatten(), ignore_index=self.ignore_index
        )

    def _soft(self, student: torch.Tensor, taught: torch.Tensor, target: torch.Tensor | None) -> torch.Tensor:
        student, taught = student.flatten(0, -2), taught.flatten(0, -2)
        wide = torch.promote_types(
            student.dtype, torch.float32
        )  # exponentials of many classes do not add up in less
        ours = nn.functional.log_softmax(student / self.temperature, dim=-1, dtype=wide)
        theirs = nn.functional.log_softmax(
            taught.to(student.device).to(wide) / self.temperature, dim=-1, dtype=wide
        )
        if target is None or target.is_floating_point() or target.numel() != len(student):
            together = nn.functional.kl_div(ours, theirs, reduction="batchmean", log_target=True)
        else:
            each = nn.functional.kl_div(ours, theirs, reduction="none", log_target=True).sum(-1)
            counted = target.flatten() != self.ignore_index
            together = torch.where(counted, each, 0.0).sum() / counted.sum().clamp(min=1)
        return together * self.temperature**2

    def _features(self) -> torch.Tensor:
        _, learning, taught = self._models
        ours, theirs = learning.take(), taught.take()
        losses = []
        for name, other in self._pairs.items():
            mine, wanted = ours[name], theirs[other]
            if name in self._projected:
                mine = self.projections[self._projected[name]](mine)
            if mine.shape != wanted.shape:
                raise ValueError(
                    f"DistillationLoss: the student's {name!r} gives {tuple(mine.shape)}, the teacher's {other!r} "
                    f"{tuple(wanted.shape)}: give a module that maps one to the other in projections={{{name!r}: …}}"
                )
            losses.append(nn.functional.mse_loss(mine, wanted.to(mine)))
        return torch.stack(losses).mean()

    def remove(self) -> None:
        """Remove the hooks from the models, and bring the teacher's parameters back to their former device."""
        _, learning, taught = self._models
        for capture in (learning, taught):
            if capture is not None:
                capture.uninstall()
        if self.offloaded is not None:
            self.offloaded.remove()

    def extra_repr(self) -> str:
        return f"temperature={self.temperature}, hard_weight={self.hard_weight}, features={self._pairs}"


def _positive(value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{what}={value!r}: expected a number above zero")
    if not 0.0 < float(value) < math.inf:
        raise ValueError(f"{what}={value!r}: expected a finite number above zero")
    return float(value)


def _check_teacher(teacher: Any, student: Any, offload: Any) -> None:
    for model, who in ((teacher, "teacher"), (student, "student")):
        if model is not None:
            arguments.check_module(model, who)
    if teacher is None:
        if offload is not None:
            raise ValueError("offload= applies to a teacher, but there is none")
        return
    if student is not None and (
        teacher is student or {id(p) for p in teacher.parameters()} & {id(p) for p in student.parameters()}
    ):
        raise ValueError(
            "the teacher and the student share parameters, but the teacher's are not trained: copy the teacher"
        )
    for name, tensor in (*teacher.named_parameters(), *teacher.named_buffers()):
        if tensor.is_meta:
            raise ValueError(f"teacher: {name} is on the meta device and has no values: load them first")


def _projections(projections: Mapping[str, nn.Module], pairs: Mapping[str, str]) -> list[nn.Module]:
    for name, module in projections.items():
        if name not in pairs:
            raise ValueError(f"projections: {name!r} is not among the student's features {sorted(pairs)}")
        arguments.check_module(module, f"projections[{name!r}]")
    return list(projections.values())


def _logits(result: Any, who: str) -> torch.Tensor:
    found = getattr(result, "logits", result)
    if not isinstance(found, torch.Tensor):
        raise TypeError(f"DistillationLoss: the {who}'s output is a {type(result).__name__}, without .logits")
    if found.dim() == 0:
        raise ValueError(
            f"DistillationLoss: the {who}'s logits are a single number, not a score for each class"
        )
    return found


# ---- outputs of modules ----------------------------------------------------------------------------------------------


class FeatureCapture:
    """The outputs of some modules in the latest call of their model.

    A module that runs again after that call, in a checkpointed region's second run for one, is not listened to. Modules
    are held by the hooks alone, and their outputs only until they are taken.
    """

    def __init__(self, model: nn.Module, names: list[str], who: str) -> None:
        modules = dict(model.named_modules())
        for name in names:
            if name not in modules:
                raise ValueError(f"features: the {who} has no module {name!r}")
        self.model, self.names, self.who = model, names, who
        self._found: dict[str, torch.Tensor] = {}
        self._running = False
        self._handles: list[RemovableHandle] = []

    def install(self) -> None:
        # Around all else that is hooked to the model.
        self._handles.append(self.model.register_forward_pre_hook(self._begin, prepend=True))
        for name in self.names:
            self._handles.append(
                self.model.get_submodule(name).register_forward_hook(partial(self._give, name))
            )
        self._handles.append(self.model.register_forward_hook(self._end, always_call=True))

    def uninstall(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._found.clear()

    def take(self) -> dict[str, torch.Tensor]:
        """Return the outputs by name, each once."""
        missing = [name for name in self.names if name not in self._found]
        if missing:
            raise ValueError(
                f"features: the {self.who}'s {', '.join(map(repr, missing))} has not run since the last loss: call "
                f"the {self.who} before each loss"
            )
        found, self._found = self._found, {}
        return found

    def _begin(self, module: nn.Module, inputs: Any) -> None:
        self._found.clear()
        self._running = True

    def _end(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._running = False

    def _give(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if not self._running:
            return
        found = output[0] if isinstance(output, tuple | list) and output else output
        if not isinstance(found, torch.Tensor):
            raise TypeError(
                f"features: the {self.who}'s {name!r} returns a {type(output).__name__}, not a tensor"
            )
        self._found[name] = found
