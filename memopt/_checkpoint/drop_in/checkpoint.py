"""memopt.checkpoint: torch.utils.checkpoint.checkpoint with its bookkeeping in C.

Results, errors and their text are torch's. While something traces (torch.compile, make_fx, torch.fx), torch's own
function is called, because the compiler decides what it does then.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
import torch.utils.checkpoint as torchs
from torch.fx import _symbolic_trace
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from memopt._checkpoint.drop_in import batch_norm
from memopt._checkpoint.drop_in.engine import ENGINE, InternalHook, devices_of
from memopt._runtime import arguments
from memopt._runtime.originals import original

torchs_checkpoint = original(torchs, "checkpoint")
_PROXY = torch._C._TorchDispatchModeKey.PROXY

# Looked up once: checkpoint() is called for every block of every step.
_is_grad_enabled = torch.is_grad_enabled
_dispatch_mode = torch._C._get_dispatch_mode
_function_modes = torch._C._len_torch_function_stack
_NOOP = torchs.noop_context_fn

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]

IS_CURRIED = hasattr(torchs, "_CheckpointedFunction")  # torch 2.15: decorators, and words of its own
_SINCE = "In a future release," if IS_CURRIED else "Starting in PyTorch 2.9,"
_NOT_PASSED = (
    "torch.utils.checkpoint: the use_reentrant parameter should be "
    f"passed explicitly. {_SINCE} calling checkpoint "
    "without use_reentrant will raise an exception. use_reentrant=False is "
    "recommended, but if you need to preserve the current default "
    "behavior, you can pass use_reentrant=True. Refer to docs for more "
    "details on the differences between the two variants."
)
_NOT_REENTRANT = (
    "Passing `context_fn`, `debug`, or `respect_saved_tensors_hooks` is only supported when use_reentrant=False."
    if IS_CURRIED
    else "Passing `context_fn` or `debug` is only supported when use_reentrant=False."
)
_SUPPRESSED = (
    "torch.utils.checkpoint: the forward context provided by "
    "context_fn suppressed an exception raised during the "
    "checkpointed forward. This is not supported because checkpoint "
    "cannot return a value for a failed forward."
)


def checkpoint(
    function: Callable[..., Any] | None = None,
    *args: Any,
    use_reentrant: bool | None = None,
    preserve_rng_state: bool = True,
    context_fn: Callable[[], Contexts] = torchs.noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    respect_saved_tensors_hooks: bool | None = None,
    batch_norm_once: bool = False,
    **kwargs: Any,
) -> Any:
    """Call a function and recompute its intermediate results in the backward pass instead of keeping them.

    A drop-in for torch.utils.checkpoint.checkpoint. Its arguments have the same meaning, including those that this
    version of torch does not have yet; batch_norm_once is memopt's own.

    Args:
        function: The function or module to run. Without it, the call returns a decorator with these arguments.
        *args: Arguments of the function.
        use_reentrant: Whether to use torch's reentrant variant, which runs the function under no_grad first.
        preserve_rng_state: Whether the second run starts from the random states of the first.
        context_fn: Returns two contexts, for the first run and the second, as create_selective_checkpoint_contexts
            does.
        determinism_check: "default" compares shapes, dtypes and devices of the two runs' tensors; "none" compares
            nothing.
        debug: Whether an error about differing runs lists the operations of both.
        early_stop: Whether the second run stops once it has all tensors that the backward needs.
        respect_saved_tensors_hooks: As in torch: whether tensors that the context_fn caches pass through saved-tensor
            hooks.
        batch_norm_once: Whether batch and instance norms count a batch only once in their running statistics, instead
            of again in the second run. It also holds for all regions inside this one.
        **kwargs: Keyword arguments of the function.

    Returns:
        The function's result.

    Raises:
        torch.utils.checkpoint.CheckpointError: In the backward pass, if the second run differs from the first.
        ValueError: The arguments contradict each other, or an argument is unknown.

    Examples:
        >>> y = memopt.checkpoint(block, x, use_reentrant=False)
    """
    if function is None and not args:
        if kwargs:
            raise ValueError("Unexpected keyword arguments: " + ",".join(kwargs))
        return functools.partial(
            _Checkpointed,
            use_reentrant=use_reentrant,
            preserve_rng_state=preserve_rng_state,
            context_fn=context_fn,
            determinism_check=determinism_check,
            debug=debug,
            early_stop=early_stop,
            respect_saved_tensors_hooks=respect_saved_tensors_hooks,
            batch_norm_once=batch_norm_once,
        )
    if torch.compiler.is_compiling() or is_tracing():
        if function is not None and not _is_grad_enabled() and torch.compiler.is_exporting():
            return function(*args, **kwargs)  # what is exported has no backward pass
        # torch.compile knows a context_fn by its being passed.
        options: dict[str, Any] = {} if context_fn is torchs.noop_context_fn else {"context_fn": context_fn}
        if IS_CURRIED:
            options["respect_saved_tensors_hooks"] = respect_saved_tensors_hooks
        return torchs_checkpoint(
            function,
            *args,
            use_reentrant=use_reentrant,
            preserve_rng_state=preserve_rng_state,
            determinism_check=determinism_check,
            debug=debug,
            early_stop=early_stop,
            **options,
            **kwargs,
        )
    arguments.check_function(function, "checkpoint: function", "the arguments that follow it")
    assert function is not None
    if use_reentrant is None:
        warnings.warn(_NOT_PASSED, stacklevel=2)
        use_reentrant = True
    once = batch_norm_once or (batch_norm.of_process.depth > 0 and batch_norm.is_once())
    if use_reentrant:
        if kwargs:
            raise ValueError("Unexpected keyword arguments: " + ",".join(kwargs))
        if context_fn is not torchs.noop_context_fn or debug or respect_saved_tensors_hooks is not None:
            raise ValueError(_NOT_REENTRANT)
        if not _is_grad_enabled() and torch.jit.is_tracing():
            return function(*args)  # the tracer knows nothing of autograd's own functions
        with batch_norm.inside() if once else nullcontext():
            return CheckpointFunction.apply(function, preserve_rng_state, *args)

    on_error = None
    if debug if torchs._checkpoint_debug_enabled is None else torchs._checkpoint_debug_enabled:
        if context_fn is not torchs.noop_context_fn:
            raise ValueError("debug=True is incompatible with non-default context_fn")
        context_fn, on_error = torchs._get_debug_context_and_cb()
    if determinism_check not in ("default", "none"):
        known = list(torchs._allowed_determinism_checks_to_fns)
        raise ValueError(f"determinism_check should be one of {known}, but got {determinism_check}")
    found = devices_of(args)
    contexts = None if context_fn is _NOOP else context_fn()
    if not _is_grad_enabled():
        return function(*args, **kwargs)
    stop = torchs._enable_checkpoint_early_stop
    extras = None
    if contexts is not None or once or _function_modes():
        extras = _extras(function, contexts, once, on_error, respect_saved_tensors_hooks)
    result = ENGINE.run(
        function,
        args,
        kwargs or None,
        found.generators if preserve_rng_state else None,
        found.autocast,
        early_stop if stop is None else stop,
        determinism_check == "default",
        extras,
    )
    if found.uninitialized is not None and preserve_rng_state and found.uninitialized._initialized:
        raise RuntimeError(
            "PyTorch's device state was initialized in the forward pass "
            "of a Checkpoint, which is not allowed. Please open an issue "
            "if you need this feature."
        )
    return result


# ---- what is not of every call ---------------------------------------------------------------------------------------


def _extras(
    function: Callable[..., Any],
    contexts: Contexts | None,
    once: bool,
    on_error: Callable[[Exception], Any] | None,
    respect_saved_tensors_hooks: bool | None,
) -> tuple[Any, Any, Any, Any]:
    """Return the function for the first run, the one for the second, the hooks' marker and the error callback."""
    forward = again = function
    if once:
        forward, again = batch_norm.first(forward), batch_norm.again(again)
    mode = next(
        (m for m in reversed(_get_current_function_mode_stack()) if isinstance(m, DeviceContext)), None
    )
    if contexts is not None:
        if hasattr(contexts[0], "respect_saved_tensors_hooks"):
            contexts[0].respect_saved_tensors_hooks = respect_saved_tensors_hooks
        forward = _under_forward_context(forward, contexts[0])
    if contexts is not None or mode is not None:
        again = _under(
            again, None if contexts is None else contexts[1], None if mode is None else mode.device
        )
    return (forward, again, None if contexts is None else InternalHook, on_error)


def _under_forward_context(
    function: Callable[..., Any], context: AbstractContextManager[Any]
) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with context:
            return function(*args, **kwargs)
        raise RuntimeError(_SUPPRESSED)

    return run


def _under(
    function: Callable[..., Any], context: AbstractContextManager[Any] | None, device: torch.device | None
) -> Callable[..., Any]:
    """Return the function for a later call with the context, and with today's default device."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            if context is not None:
                stack.enter_context(context)
            if device is not None:
                stack.enter_context(DeviceContext(device))
            return function(*args, **kwargs)

    return run


def is_tracing() -> bool:
    """Return whether torch.fx, or something built on it, records the operations that run."""
    return _dispatch_mode(_PROXY) is not None or _fx_traces()


def _fx_traces_by_flag() -> bool:
    flag: bool = _symbolic_trace._is_fx_tracing_flag
    return flag


# A flag of the thread's own, since torch 2.15.
_fx_traces: Callable[[], bool] = getattr(_symbolic_trace, "_get_is_fx_tracing", _fx_traces_by_flag)


class CheckpointFunction(torch.autograd.Function):
    """use_reentrant=True: the region runs without a graph, and its backward runs it again with one.

    It is called with the arguments of torch.utils.checkpoint's.
    """

    @staticmethod
    def forward(ctx: Any, run_function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        torchs.check_backward_validity(args)
        found = devices_of(args)
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


class _Checkpointed:
    """A function, method or module that the decorator form of checkpoint() has wrapped."""

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        self.function, self.options = function, options
        functools.update_wrapper(self, function, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.function, *args, **self.options, **kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        bind = getattr(self.function, "__get__", None)
        if instance is None or bind is None:
            return self
        return _Checkpointed(bind(instance, owner), **self.options)
