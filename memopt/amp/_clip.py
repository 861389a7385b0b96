"""torch.nn.utils.clip_grad_norm_: the norm in one pass, and a second one only where it clips."""

from __future__ import annotations

import math
import types
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, device

from memopt import _C
from memopt._runtime import kernels
from memopt._runtime.originals import original
from memopt.optim._offloaded_gradients import any_offloaded, multiply, norms_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["clip_grad_norm_"]

_torchs = original(torch.nn.utils.clip_grad, "clip_grad_norm_")


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    process_group: ProcessGroup | None = None,
) -> Tensor:
    """Clip gradients by their norm in place, as a drop-in for torch.nn.utils.clip_grad_norm_.

    Dense fp32, fp16 and bf16 gradients on one device, with norm_type 2 or inf, go through memopt's kernels: one pass to
    read them, and one to scale them, which is skipped where the norm is within max_norm already. The norm is fp32,
    within 1e-6 of the norm in double. This also holds for fp16 gradients, whose norm would overflow in fp16 and make
    all of them zero, and for fp32 gradients beyond 1.8e19, whose squares overflow in torch's sum with the same result.
    Everything else (fp64, sparse, strided with gaps, subclasses, several devices, other norms, foreach=False) goes to
    torch's function.

    Args:
        parameters: The parameters whose gradients are clipped, as one vector. DTensors may lie on several meshes and be
            mixed with plain tensors, which torch's function refuses; a plain tensor must then be the same on every
            rank.
        max_norm: The largest norm of the clipped gradients.
        norm_type: The norm's order; inf for the largest magnitude.
        error_if_nonfinite: Whether to raise if the norm is infinite or NaN, which waits for the device.
        foreach: As torch's.
        process_group: Ranks that hold different parameters of one model, such as pipeline stages. The norm is that of
            all their parameters together, and each of these ranks must call this function.

    Returns:
        The norm of the gradients before clipping.

    Raises:
        RuntimeError: The norm is not finite, and error_if_nonfinite is set.

    Examples:
        >>> norm = memopt.amp.clip_grad_norm_(model.parameters(), 1.0)
    """
    if isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    else:
        generated = isinstance(parameters, types.GeneratorType)
        parameters = list(parameters)
        if generated and not parameters:
            warnings.warn(
                "`parameters` is an empty generator, no gradient clipping will occur.", stacklevel=2
            )
    try:
        norm_type = float(norm_type)
        max_norm = float(max_norm) if isinstance(max_norm, str) else max_norm
    except ValueError:
        raise ValueError(
            f"clip_grad_norm_: max_norm={max_norm!r}, norm_type={norm_type!r}: give numbers"
        ) from None
    if process_group is not None or _lie_apart(parameters):
        return _clip_apart(parameters, max_norm, norm_type, error_if_nonfinite, foreach, process_group)
    gradients = _C.Gradients(parameters, of_parameters=True)
    if any_offloaded(gradients.others):
        return _clip_offloaded(parameters, max_norm, norm_type, error_if_nonfinite)
    if foreach is False or len(gradients.devices) != 1 or not has_fast_norm(gradients, norm_type):
        norm: Tensor = _torchs(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
        return norm

    kernels.prepare()
    (number,) = gradients.devices
    norm, clip = (torch.empty((), dtype=torch.float32, device=device_of(number)) for _ in range(2))
    gradients.run(number, norm=norm, clip=clip, max_norm=float(max_norm), maximum=math.isinf(norm_type))
    if error_if_nonfinite:
        refuse_nonfinite(norm, norm_type)
    gradients.multiply(number, clip)
    count_as_written(gradients, number)
    return norm


def _mesh_of(parameter: Tensor) -> object:
    """Return the mesh of a gradient that is a DTensor, None for a plain tensor."""
    return getattr(parameter.grad, "device_mesh", None)


def _lie_apart(parameters: list[Tensor]) -> bool:
    """Return whether some gradients are DTensors of one mesh and others are not."""
    there = [p for p in parameters if p.grad is not None]
    first = _mesh_of(there[0]) if there else None
    return any(_mesh_of(p) != first for p in there)


def _clip_apart(
    parameters: list[Tensor],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
    foreach: bool | None,
    process_group: ProcessGroup | None,
) -> Tensor:
    """Clip by the norms that torch computes for each mesh, combined into one."""
    import torch.distributed as dist
    from torch.nn.utils import clip_grads_with_norm_, get_total_norm

    by_mesh: dict[object, list[Tensor]] = {}
    for p in parameters:
        if p.grad is not None:
            by_mesh.setdefault(_mesh_of(p), []).append(p)
    norms = []
    for members in by_mesh.values():
        norm: Any = get_total_norm(
            [p.grad for p in members if p.grad is not None], norm_type, foreach=foreach
        )
        norms.append(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
    device = norms[0].device if norms else parameters[0].device if parameters else torch.device("cpu")
    total = torch.zeros((), device=device)
    if norms:
        total = torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms]).float(), norm_type)
    if process_group is not None:
        if math.isinf(norm_type):
            dist.all_reduce(total, dist.ReduceOp.MAX, process_group)
        else:
            total = total**norm_type
            dist.all_reduce(total, dist.ReduceOp.SUM, process_group)
            total = total ** (1.0 / norm_type)
    if error_if_nonfinite:
        refuse_nonfinite(total, norm_type)
    for members in by_mesh.values():
        clip_grads_with_norm_(members, max_norm, total, foreach)
    return total


def _clip_offloaded(
    parameters: list[Tensor], max_norm: float, norm_type: float, error_if_nonfinite: bool
) -> Tensor:
    """Clip by the norms that gradients had when they left for the host's memory."""
    if norm_type != 2.0:
        raise ValueError(
            f"norm_type={norm_type}: gradients that offload_gradients=True keeps in the host's memory have norms of "
            "order 2 alone"
        )
    grads = [p.grad for p in parameters if p.grad is not None]
    norms = norms_of(grads)
    norm, clip = (torch.empty((), dtype=torch.float32, device=norms.device) for _ in range(2))
    _C.Gradients([norms]).run(norms.get_device(), norm=norm, clip=clip, max_norm=float(max_norm))
    if error_if_nonfinite:
        refuse_nonfinite(norm, norm_type)
    multiply(grads, clip)
    return norm


def device_of(number: int) -> device:
    """Return torch's name of a device that memopt._C numbers."""
    return torch.device("cpu") if number < 0 else torch.device("cuda", number)


def has_fast_norm(gradients: _C.Gradients, norm_type: float) -> bool:
    """Return whether memopt's kernels can compute this norm. Not for fp64, because their norm is fp32."""
    return norm_type in (2.0, math.inf) and not gradients.others and torch.float64 not in gradients.dtypes


def refuse_nonfinite(norm: Tensor, norm_type: float) -> None:
    """Raise torch's error if the norm is not finite; waits for the device."""
    if not norm.isfinite():
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from "
            "`parameters` is non-finite, so it cannot be clipped. To disable "
            "this error and scale the gradients by the non-finite norm anyway, "
            "set `error_if_nonfinite=False`"
        )


def count_as_written(gradients: _C.Gradients, number: int) -> None:
    """Tell autograd, as mul_() would, that these tensors have changed."""
    torch.autograd.graph.increment_version(gradients.tensors(number))
