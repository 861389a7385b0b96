"""memopt.deploy.export: a trained model as a file that is known to do what the model does."""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from memopt._estimate.model import batch_of
from memopt._estimate.training import as_arguments
from memopt._memory.oom.exceptions import is_out_of_memory
from memopt._runtime.state_snapshot import Modes, preserve_state
from memopt._runtime.storages import module_bytes
from memopt._runtime.torch_version import require
from memopt.deploy import _inference_memory, _output_check
from memopt.deploy._export_report import Export
from memopt.deploy._formats import (
    FORMATS,
    Call,
    ExportOptions,
    Format,
    dynamic_batch_shapes,
    folder_beside,
    name_of,
    put_beside,
    with_batch_size,
)
from memopt.deploy._output_check import Check, Tolerance, tensors_of
from memopt.deploy._plain_model import PlainModel, plain_model

_NORMS = nn.modules.batchnorm._NormBase


def export(
    model: nn.Module,
    sample: Any,
    path: str | os.PathLike[str] | None = None,
    format: str | None = None,
    *,
    dynamic_batch: bool = False,
    dynamic_shapes: Any = None,
    samples: Iterable[Any] = (),
    tolerance: Tolerance = None,
    verify: bool = True,
    measure: bool = True,
    options: Mapping[str, Any] | None = None,
) -> Export:
    """Export a model, in evaluation mode, as a file that runs without its program, and check the outputs.

    The file contains the plain model, without the additions of auto_checkpoint(), offload_layers(), memopt.checkpoint,
    DDP and torch.compile; masks of torch.nn.utils.prune are merged into the weights. The model itself, its mode,
    buffers and gradients, and the random states are not changed. An offloaded model is exported on the device where its
    parameters live. An existing file is kept until the new one is written and has passed the checks.

    Args:
        model: The model, as it is trained or run.
        sample: The input of forward: one argument, a tuple of them, or a dict by name.
        path: The file; with None everything is done and measured, and only the exporter's program is kept.
        format: "pt2" (torch.export), "onnx" (torch.onnx on torch.export, run by onnxruntime) or "torchscript"
            (torch.jit.trace, deprecated by torch); by default from the path's extension (.pt2, .onnx, .pt), else "pt2".
        dynamic_batch: Whether the first dimension of the sample's tensors may have any size, where it is as long as the
            first tensor's.
        dynamic_shapes: As torch.export.export takes it.
        samples: More samples for the comparison of outputs, of other shapes where these may vary.
        tolerance: The largest difference of an output, as a share of its largest value, or by dtype; by default 1e-10
            for float64, 1e-4 for float32, 1e-2 for float16, 6e-2 for bfloat16, and none for integers.
        verify: Whether to compare outputs with the live model's: on the sample, on the others, and, with a dynamic
            batch, on batches of another size and of 1.
        measure: Whether to run the file in a separate process and report its memory.
        options: Further arguments of the exporter itself (opset_version=, strict=).

    Returns:
        An Export: print it.

    Raises:
        TypeError: The model or an argument cannot be exported; nothing has changed then, as with all of these.
        ValueError: The model is in training mode with dropout or batch norm, sharded, without values, or does not run
            on a sample.
        ImportError: A package that the format needs is missing.
        FileNotFoundError: The path's folder does not exist.
        OutputsDiffer: The file's outputs are not the model's (a RuntimeError).
        RuntimeError: The exporter failed; the message has its error.

    Examples:
        >>> print(memopt.deploy.export(model, sample, "model.onnx", dynamic_batch=True))
    """
    require("memopt.deploy.export()")
    begun = time.monotonic()
    target = None if path is None else _target(path)
    name = name_of(format, target)
    writer = FORMATS[name]
    writer.require(run=verify or measure)
    if name == "torchscript" and dynamic_shapes is not None:
        raise ValueError(
            "deploy.export: a trace has no dynamic shapes: whether it holds for other shapes is checked on samples="
        )
    if dynamic_batch and dynamic_shapes is not None:
        raise ValueError("deploy.export: dynamic_shapes says which dimensions vary: leave dynamic_batch out")
    plain = plain_model(model)
    _check_mode(model)
    call = as_arguments(sample)
    _check_devices(plain, model, call)
    size = _batch_size(call) if dynamic_batch else None
    others = [_named(as_arguments(other)) for other in samples]
    chosen = ExportOptions(dynamic_shapes, dict(options or {}))
    with folder_beside(target) as folder:
        made = folder / (target.name if target is not None else f"model{writer.suffix}")
        with _Heard() as said, _nothing_changes(model, plain):
            calls = [(f"the sample, {_shapes(call)}", call), *others]
            if size is not None:
                calls += [_named(with_batch_size(call, size, count)) for count in _other_sizes(size)]
            expected = _outputs(model, calls) if verify else []
            said.clear()  # what the model warns of when it runs is no news of the exporter's
            home = _home(plain)
            traced = _moved(call, home)
            plain.module.eval()
            if size is not None and name != "torchscript":
                two = max(size, 2)  # torch.export takes 1 for a constant
                traced = with_batch_size(traced, size, two)
                chosen = ExportOptions(dynamic_batch_shapes(plain.module, traced, two), chosen.options)
            try:
                program = _written(writer, plain, traced, made, chosen, name)
            except Exception:
                if not verify:
                    _outputs(model, calls[:1])  # where it does not run itself, that is what is to be said
                raise
            checks = _checks(writer, made, calls, expected, home, tolerance, name) if verify else []
            memory, why = None, ""
            if measure:
                try:
                    memory = _inference_memory.measure(
                        made, name, _moved(call, home), _classes_from(plain.module)
                    )
                except _inference_memory.NotMeasured as error:
                    why = str(error)
        sizes = {file.name: file.stat().st_size for file in folder.iterdir()}
        files = [] if target is None else put_beside(made, target)
    parameters, buffers = module_bytes(plain.module)
    return Export(
        model=type(model).__name__ if not plain.taken_off else type(plain.module).__name__,
        format=name,
        files=[(file, sizes[file.name]) for file in files],
        size_bytes=sum(sizes.values()),
        parameters_bytes=parameters,
        buffers_bytes=buffers,
        checks=checks,
        memory=memory,
        not_measured=why,
        taken_off=plain.taken_off,
        warnings=list(dict.fromkeys(text for one in said if (text := _text(one)))),
        dynamic=_dynamic(size, dynamic_shapes, name),
        versions=_versions(name),
        seconds=time.monotonic() - begun,
        program=program if target is None else None,
    )


# ---- what is refused -------------------------------------------------------------------------------------------------


def _target(path: str | os.PathLike[str]) -> Path:
    target = Path(path)
    if not target.parent.is_dir():
        raise FileNotFoundError(
            f"deploy.export: there is no folder {target.parent} to write {target.name} to"
        )
    if target.is_dir():
        raise IsADirectoryError(f"deploy.export: {target} is a folder: name a file in it")
    if not os.access(target.parent, os.W_OK):
        raise PermissionError(f"deploy.export: the folder {target.parent} cannot be written to")
    return target


def _check_mode(model: nn.Module) -> None:
    """Refuse modules in training mode that evaluation mode would change, because the mode may be intended."""
    found = [
        f"{name or 'the model'} ({type(module).__name__})"
        for name, module in model.named_modules()
        if module.training and _differs_in_training(module)
    ]
    if found:
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        raise ValueError(
            f"deploy.export: in training mode {', '.join(found[:3])}{more} would behave differently than when it is "
            "deployed: call model.eval() first"
        )


def _differs_in_training(module: nn.Module) -> bool:
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return bool(module.p > 0)
    if isinstance(module, _NORMS):
        return bool(module.track_running_stats)
    if isinstance(module, nn.RReLU):
        return True
    if isinstance(module, nn.MultiheadAttention | nn.RNNBase):
        return float(module.dropout) > 0
    return False


def _check_devices(plain: PlainModel, model: nn.Module, call: Call) -> None:
    there = {p.device for p in plain.module.parameters()}
    if plain.moved:
        there = {b.device for b in model.buffers()} or {leaf.device for leaf in _tensors(call)}
    for leaf in _tensors(call):
        if leaf.is_meta:
            raise ValueError(
                "deploy.export: the sample is on meta and has no values, but the model must run on it"
            )
        if len(there) == 1 and leaf.device not in there:
            raise ValueError(
                f"deploy.export: the sample is on {leaf.device} but the model is on {next(iter(there))}: move the "
                "sample there"
            )


def _batch_size(call: Call) -> int:
    size = batch_of(call)
    if size is None:
        raise ValueError("deploy.export: dynamic_batch needs a tensor with a first dimension in the sample")
    return size


# ---- running both ----------------------------------------------------------------------------------------------------


@contextmanager
def _nothing_changes(model: nn.Module, plain: PlainModel) -> Iterator[None]:
    """Put the live model into evaluation mode; restore it and the random states afterwards."""
    modes = Modes(model)
    devices = {t.device.type for t in (*plain.module.parameters(), *model.buffers())} | {"cpu"}
    with ExitStack() as stack:
        stack.enter_context(preserve_state(model))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        for device in sorted(devices):
            stack.enter_context(torch.autocast(device, enabled=False))
        stack.callback(modes.restore)
        modes.set_eval()
        for module in model.modules():
            if isinstance(module, nn.parallel.DistributedDataParallel):
                # Its forward would broadcast buffers, for which all ranks were needed: it may be one that exports.
                synced = module.require_forward_param_sync
                stack.callback(setattr, module, "require_forward_param_sync", synced)
                module.require_forward_param_sync = False
        yield


def _outputs(model: nn.Module, calls: list[tuple[str, Call]]) -> list[list[torch.Tensor]]:
    """Return the outputs of each call, one after the other, in the order of the file's runs: a model may count its
    calls."""
    with preserve_state(model):
        return [_live(model, call, what) for what, call in calls]


def _live(model: nn.Module, call: Call, what: str) -> list[torch.Tensor]:
    args, kwargs = _copied(call)
    try:
        outputs = model(*args, **kwargs)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        if is_out_of_memory(error):
            raise
        raise ValueError(f"deploy.export: the model does not run on {what}: {error}") from error
    return [tensor.detach().cpu().clone() for tensor in tensors_of(outputs)]


def _written(
    writer: Format, plain: PlainModel, call: Call, made: Path, chosen: ExportOptions, name: str
) -> Any:
    try:
        return writer.write(plain.module, _copied(call), made, chosen)
    except OSError:
        raise
    except Exception as error:  # whatever the exporters raise, which have classes of their own
        if is_out_of_memory(error):
            raise
        inner = error.__cause__ or error  # torch.onnx wraps what has happened
        first = next((line for line in str(inner).splitlines() if line.strip()), "")
        other = "" if name == "pt2" else "; torch.export ('pt2') exports more"
        raise RuntimeError(
            f"deploy.export: {name} cannot be made from a {type(plain.module).__name__}: {type(inner).__name__}: "
            f"{first}{other}"
        ) from error


def _checks(
    writer: Format,
    made: Path,
    calls: list[tuple[str, Call]],
    expected: list[list[torch.Tensor]],
    home: torch.device | None,
    tolerance: Tolerance,
    name: str,
) -> list[Check]:
    run = writer.load(made)
    traced = calls[0][1]
    checks = []
    for (what, call), live in zip(calls, expected, strict=True):
        try:
            found = [
                tensor.detach().cpu() for tensor in run(_copied(_moved(_in_order_of(traced, call), home)))
            ]
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise RuntimeError(
                f"deploy.export: the {name} file does not run on {what}, but the model does: {error}"
            ) from error
        try:
            checks.append(_output_check.compare(what, live, found, tolerance))
        except _output_check.OutputsDiffer as error:
            raise _output_check.OutputsDiffer(f"deploy.export: {name}, {error}") from None
    return checks


def _classes_from(module: nn.Module) -> list[str]:
    """Return the modules that define the classes of its tensors, if these are not torch's own (quantised ones)."""
    kinds = {type(tensor) for tensor in (*module.parameters(), *module.buffers())}
    return sorted({kind.__module__ for kind in kinds if not kind.__module__.startswith("torch.")} - {"torch"})


def _home(plain: PlainModel) -> torch.device | None:
    """Return the device of an offloaded model's parameters, None for a model that computes where its parameters are."""
    return next(plain.module.parameters()).device if plain.moved else None


def _moved(call: Call, home: torch.device | None) -> Call:
    if home is None:
        return call
    return _mapped(call, lambda leaf: leaf.to(home))


def _copied(call: Call) -> Call:
    """Return copies of the arguments, because a model may write into them."""
    return _mapped(call, lambda leaf: leaf.detach().clone())


def _mapped(call: Call, change: Callable[[torch.Tensor], torch.Tensor]) -> Call:
    changed: Call = pytree.tree_map(
        lambda leaf: change(leaf) if isinstance(leaf, torch.Tensor) else leaf, call
    )
    return changed


def _in_order_of(first: Any, other: Any) -> Any:
    """Return the other structure with the keys of its dicts in the first one's order, in which a file's inputs are
    numbered."""
    kind = type(first)
    if kind is not type(other):
        return other
    if kind in (dict, OrderedDict):
        keys = [key for key in first if key in other] + [key for key in other if key not in first]
        return kind((key, _in_order_of(first.get(key), other[key])) for key in keys)
    if kind in (tuple, list) and len(first) == len(other):
        return kind(_in_order_of(one, two) for one, two in zip(first, other, strict=True))
    return other


def _tensors(call: Call) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(call) if isinstance(leaf, torch.Tensor)]


def _other_sizes(size: int) -> list[int]:
    """Return the next size, and a batch of 1, which exporters treat differently."""
    return [count for count in (size + 1, 1) if count != size]


def _named(call: Call) -> tuple[str, Call]:
    return _shapes(call), call


def _shapes(call: Call) -> str:
    shown = [str(list(leaf.shape)) for leaf in _tensors(call)]
    return ", ".join(shown[:3]) + (", …" if len(shown) > 3 else "")


# ---- what is said ----------------------------------------------------------------------------------------------------


class _Heard:
    """A context that collects warnings and repeats them at its end: after a failure they may give the reason.

    The list remains."""

    def __enter__(self) -> list[warnings.WarningMessage]:
        self._catching = warnings.catch_warnings(record=True)
        self._said = self._catching.__enter__()
        warnings.simplefilter("always")
        return self._said

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        self._catching.__exit__(kind, error, traceback)
        _say(self._said, error)


def _say(said: list[warnings.WarningMessage], error: BaseException | None) -> None:
    """Repeat the exporter's warnings where they are seen.

    Those of a deprecation appear at the line that asked for it. One that the program's filters make an exception is a
    note of `error`, where there is one.
    """
    level = 2
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("memopt."):
        frame, level = frame.f_back, level + 1
    for one in {(str(one.message), one.category): one for one in said}.values():
        try:
            if issubclass(one.category, DeprecationWarning):
                warnings.warn(one.message, stacklevel=level)
            else:
                warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
        except Warning as refused:
            if error is None:
                raise
            error.add_note(f"{type(refused).__name__}: {refused}")


def _text(one: warnings.WarningMessage) -> str:
    """Return the text of a warning that concerns the user.

    A FutureWarning concerns torch itself, so its text is empty."""
    if issubclass(one.category, FutureWarning):
        return ""
    return " ".join(str(one.message).split())


def _dynamic(size: int | None, shapes: Any, name: str) -> str:
    if name == "torchscript":
        return "" if size is None else "a trace: it holds for the batch sizes that were compared"
    if size is not None:
        return "the batch may have any size"
    return "" if shapes is None else f"as given by dynamic_shapes: {shapes}"


def _versions(name: str) -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    import memopt

    found = {"memopt": memopt.__version__, "torch": str(torch.__version__)}
    for package in ("onnx", "onnxscript", "onnxruntime") if name == "onnx" else ():
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
