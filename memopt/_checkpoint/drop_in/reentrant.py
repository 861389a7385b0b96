"""use_reentrant=True: the region runs without a graph, and its backward runs it again with one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint as torchs

from memopt._checkpoint.drop_in import batch_norm, devices
from memopt._checkpoint.drop_in.engine import ENGINE


class CheckpointFunction(torch.autograd.Function):
    """The autograd function of reentrant checkpointing, with the arguments of torch.utils.checkpoint's."""

    @staticmethod
    def forward(ctx: Any, run_function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        torchs.check_backward_validity(args)
        found = devices.of(args)
        ctx.run_function = run_function
        ctx.surroundings = ENGINE.surroundings(
            found.generators if preserve_rng_state else None, found.autocast
        )
        ctx.once = batch_norm.is_once()
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        ctx.inputs = [None if isinstance(arg, torch.Tensor) else arg for arg in args]
        ctx.tensor_indices = [i for i, arg in enumerate(args) if isinstance(arg, torch.Tensor)]
        ctx.save_for_backward(*tensors)
        with torch.no_grad():
            return run_function(*args)

    @staticmethod
    def backward(ctx: Any, *args: Any) -> Any:  # type: ignore[override]
        if not torch.autograd._is_checkpoint_valid():
            raise RuntimeError(
                "When use_reentrant=True, torch.utils.checkpoint is incompatible"
                " with .grad() or passing an `inputs` parameter to .backward()."
                " To resolve this error, you can either set use_reentrant=False,"
                " or call .backward() without passing the `inputs` argument."
            )
        inputs = list(ctx.inputs)
        for index, tensor in zip(ctx.tensor_indices, ctx.saved_tensors, strict=True):
            inputs[index] = tensor
        detached = torchs.detach_variable(tuple(inputs))
        function = batch_norm.again(ctx.run_function) if ctx.once else ctx.run_function
        outputs = ctx.surroundings.call(function, detached, None)
        if isinstance(outputs, torch.Tensor):
            outputs = (outputs,)
        pairs = [
            (output, args[i])
            for i, output in enumerate(outputs)
            if isinstance(output, torch.Tensor) and output.requires_grad
        ]
        if not pairs:
            raise RuntimeError("none of output has requires_grad=True, this checkpoint() is not necessary")
        torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])
        gradients = tuple(one.grad if isinstance(one, torch.Tensor) else None for one in detached)
        return (None, None, *gradients)
