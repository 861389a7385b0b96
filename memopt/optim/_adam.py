"""Adam and AdamW in one pass.

Their states are torch's: step, exp_avg, exp_avg_sq and, with amsgrad, max_exp_avg_sq. With 8 or 4 bits exp_avg_scale
and exp_avg_sq_scale lie beside codes. With factored=True exp_avg_sq_row and exp_avg_sq_col are there instead of
exp_avg_sq. master_param is there where there are master weights.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.optimizer import ParamsT

from memopt._runtime.originals import original
from memopt.optim._coded_states import CodedStates
from memopt.optim._state_layout import (
    FACTORS,
    decoded,
    factors,
    is_plain,
    like,
    matrix_shape,
    no_factors,
    one_step,
    product,
    wanted_bits,
    wants_factors,
    wants_master,
)

if TYPE_CHECKING:
    from torch.optim import Adam as _TorchsAdam
    from torch.optim import AdamW as _TorchsAdamW
else:
    _TorchsAdam = original(torch.optim, "Adam")
    _TorchsAdamW = original(torch.optim, "AdamW")

MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamStates(CodedStates):
    """The base, before torch.optim.Adam or AdamW, that makes and converts their states."""

    _moments = MOMENTS
    _like_p = ("max_exp_avg_sq", "master_param")

    def _check_group(self, group: dict[str, Any]) -> None:
        bits = group["state_bits"]
        if bits not in (4, 8, 32):
            raise ValueError(f"Invalid state_bits value: {bits} (4, 8 or 32)")
        if bits != 32 and group["amsgrad"]:
            raise ValueError(
                f"amsgrad=True keeps a maximum of second moments that {bits} bits cannot track: use state_bits=32"
            )
        if group["factored"] and group["amsgrad"]:
            raise ValueError(
                "amsgrad=True keeps a maximum of second moments that averages of rows and columns cannot track: use "
                "factored=False"
            )

    def _complete(self, p: Tensor, group: dict[str, Any]) -> bool:
        state = self.state[p]
        dtype = torch.float32 if wants_master(p, group) else p.dtype
        state["step"] = one_step(state.get("step", 0.0), p)
        if state.get("exp_avg_sq") is None and wants_factors(p, group):
            for name, zeros in zip(FACTORS, no_factors(p), strict=True):
                state.setdefault(name, zeros)
        for name in MOMENTS:
            if name != "exp_avg_sq" or FACTORS[0] not in state:
                self._make(p, group, name, dtype)
        if group["amsgrad"] and state.get("max_exp_avg_sq") is None:
            state["max_exp_avg_sq"] = like(p, dtype)
        if wants_master(p, group) and state.get("master_param") is None:
            state["master_param"] = like(p, torch.float32, p)
        return False

    def _check_state(self, p: Tensor, state: dict[str, Any]) -> str | None:
        has = [name for name in MOMENTS if state.get(name) is not None]
        factored = [name for name in FACTORS if state.get(name) is not None]
        if factored:
            if wrong := _wrong_factors(p, state, factored):
                return wrong
            has.append("exp_avg_sq")
        if len(has) == 1:
            return f"it has only the state {has[0]!r}, without {(set(MOMENTS) - {*has}).pop()!r}"
        return super()._check_state(p, state)

    def _relay(self, p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        plain = is_plain(p)
        dtype = torch.float32 if wants_master(p, group) else p.dtype
        bits = wanted_bits(p, group)
        factored = wants_factors(p, group)
        vectors = [state.pop(name, None) for name in FACTORS]
        if isinstance(vectors[0], Tensor) and isinstance(vectors[1], Tensor):
            if factored:
                state.update(zip(FACTORS, (v.to(p.device, torch.float32) for v in vectors), strict=True))
            else:
                state["exp_avg_sq"] = product(vectors[0], vectors[1], p)
        first, second = (state.get(name) for name in MOMENTS)
        numbers = [value for value in (first, second) if value is not None and value.is_floating_point()]
        if (bits or factored) and len(numbers) == 2:
            # As in kernels/adam_codes.cuh: what is not finite has no code, and without v there is no m.
            state["exp_avg"] = numbers[0].masked_fill(~numbers[1].isfinite(), 0)
        for name in MOMENTS:
            if factored and name == "exp_avg_sq":
                _factor(p, state)
            else:
                self._relay_moment(p, state, group, name, dtype)
        largest = state.get("max_exp_avg_sq")
        if isinstance(largest, Tensor):
            state["max_exp_avg_sq"] = (
                like(p, dtype, largest) if plain else largest.to(dtype=p.dtype, device=p.device)
            )
        master = state.pop("master_param", None)
        if isinstance(master, Tensor) and wants_master(p, group):
            state["master_param"] = like(p, torch.float32, master)
        if "step" in state:
            state["step"] = one_step(state["step"], p)

    def state_dict(self, full: bool = False) -> dict[str, Any]:
        """Return the state, as torch's optimizers do.

        Moments of few bits are in it under their name and _codes (uint8; 8 bits: of the parameter's shape, 4 bits: a
        row of two codes a byte) beside their name and _scale (fp32, one a 256 elements), a factored second moment as
        exp_avg_sq_row and exp_avg_sq_col (fp32, of its rows and columns). Only memopt's optimizers can read these, with
        any state_bits and factored. torch's load them without a word; their next step ends in KeyError before it
        changes anything.

        Args:
            full: Return fp32 moments instead of codes and of rows and columns, which torch.optim's can load, too.

        Returns:
            A state dict of memopt's optimizers and, without codes, rows and columns, of torch's.
        """
        return super().state_dict(full)

    def _full(self, state: dict[str, Any], p: Tensor) -> dict[str, Any]:
        full = super()._full(state, p)
        if FACTORS[0] in full:
            row, column = (full.pop(name) for name in FACTORS)
            full["exp_avg_sq"] = product(row, column, p)
        return full

    def _check_gradient(self, grad: Tensor) -> None:
        if grad.is_sparse:
            raise RuntimeError("Adam does not support sparse gradients, please consider SparseAdam instead")

    def _update_by_torch(
        self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any], found_inf: Tensor | None
    ) -> None:
        states = [self.state[p] for p in params]
        for p, state in zip(params, states, strict=True):
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
                for name in (*MOMENTS, *(["max_exp_avg_sq"] if group["amsgrad"] else [])):
                    state[name] = torch.zeros_like(p, memory_format=torch.preserve_format)
        beta1, beta2 = group["betas"]
        adam(
            params,
            grads,
            [s["exp_avg"] for s in states],
            [s["exp_avg_sq"] for s in states],
            [s["max_exp_avg_sq"] for s in states] if group["amsgrad"] else [],
            [s["step"] for s in states],
            foreach=None if found_inf is None else False,
            capturable=found_inf is None and all(p.device.type == "cuda" for p in params),
            fused=None if found_inf is None else True,
            found_inf=found_inf,
            has_complex=any(p.is_complex() for p in params),
            amsgrad=group["amsgrad"],
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
            decoupled_weight_decay=group["decoupled_weight_decay"],
        )


def _factor(p: Tensor, state: dict[str, Any]) -> None:
    """Replace a loaded second moment, if there is one, by its averages of rows and columns."""
    value, scale = state.pop("exp_avg_sq", None), state.pop("exp_avg_sq_scale", None)
    if isinstance(value, Tensor):
        if isinstance(scale, Tensor) and value.dtype is torch.uint8:
            value = decoded(value, scale, True, p)
        state.update(zip(FACTORS, factors(value, p), strict=True))


def _wrong_factors(p: Tensor, state: dict[str, Any], has: list[str]) -> str | None:
    """Describe why these states, averages of rows and columns, cannot be p's second moment; None if they can."""
    if len(has) == 1:
        return f"it has only the state {has[0]!r}, without {(set(FACTORS) - {*has}).pop()!r}"
    for name, count in zip(FACTORS, matrix_shape(p), strict=True):
        value = state[name]
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.shape != (count,):
            what = (
                f"of {value.dtype}, {tuple(value.shape)}"
                if isinstance(value, Tensor)
                else type(value).__name__
            )
            return f"its state {name!r} is {what}, not {count} floating-point numbers"
    return None


class Adam(AdamStates, _TorchsAdam):
    """Adam in one pass over memory, with torch.optim.Adam's arguments and results.

    It differs from torch.optim.Adam as memopt.optim.AdamW differs from torch.optim.AdamW.

    Args:
        params: As torch.optim.Adam's, like all that are not named here.
        state_bits: As memopt.optim.AdamW's, like the next six.
        factored: Whether second moments are two vectors of averages, of rows and of columns.
        min_8bit_size: The smallest number of elements for states of 8 or 4 bits, or factored ones.
        master_weights: Whether to keep an fp32 copy of fp16 and bf16 parameters.
        stochastic_rounding: Whether to round fp16 and bf16 parameters stochastically.
        offload_gradients: Whether gradients of parameters on a CUDA device wait for the step in the host's memory.
        offload_states: Whether states of parameters on a CUDA device lie in the host's memory between steps; or a
            directory on a disk for states.
        step_in_backward: Whether each parameter is stepped as backward() completes its gradient, which is dropped then.

    Raises:
        ValueError: As memopt.optim.AdamW does.
        OSError: As memopt.optim.AdamW does.

    Examples:
        >>> optimizer = memopt.optim.Adam(model.parameters(), lr=1e-3)
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        state_bits: int = 32,
        factored: bool = False,
        min_8bit_size: int = 4096,
        master_weights: bool = False,
        stochastic_rounding: bool = False,
        offload_gradients: bool = False,
        offload_states: bool | str | os.PathLike[str] = False,
        step_in_backward: bool = False,
    ) -> None:
        self._own_defaults = {
            "state_bits": state_bits,
            "factored": factored,
            "min_8bit_size": min_8bit_size,
            "master_weights": master_weights,
            "stochastic_rounding": stochastic_rounding,
            "offload_gradients": offload_gradients,
            "offload_states": offload_states,
            "step_in_backward": step_in_backward,
        }
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            decoupled_weight_decay=decoupled_weight_decay,
        )


class AdamW(AdamStates, _TorchsAdamW):
    """AdamW in one pass over memory, with torch.optim.AdamW's arguments and results.

    A step does not wait for the GPU, not even under a gradient scaler. foreach, fused and capturable are accepted and
    change nothing: this step is always fused and can always be captured. As with torch's fused step, the update does
    not increment a parameter's version counter. memopt's own options may also be given in a param group.

    With the same inputs a step gives torch's numbers to within 6 roundings of their terms in the parameter's type
    (fp32: 4e-7, fp64: 7e-16), with these exceptions:

    - A gradient beyond 1.8e19, whose square overflows fp32, makes exp_avg_sq infinite. Its parameter (unless it is
      fp64) then changes only by the decay, as torch's does from 5.8e20 on (betas[1] = 0.999).
    - fp16 and bf16 parameters get the results of fused=True, which rounds each number once a step; torch's loops round
      after each operation.
    - For fp64 parameters with an fp32 tensor as lr, torch rounds 1 - lr * weight_decay and the step size to fp32, this
      optimizer to fp64: a difference of 1.2e-7 of the parameter and of its update.
    - After an infinite gradient exp_avg is infinite, torch's is NaN; the parameter is NaN with both.
    - Under a gradient scaler it behaves like torch's fused step: fp16 gradients are accepted, a skipped step leaves
      gradients scaled, and a skipped first step creates states of zeros on CUDA.
    - A parameter whose dtype changes needs its states loaded again. Until then torch's steps accept them or raise,
      depending on foreach and fused. This one accepts fp32 states of fp16 and bf16 parameters and otherwise behaves
      like torch's with foreach=None.

    With states of 8 or 4 bits an element whose gradient is infinite or NaN, or whose square overflows fp32, affects
    only its own parameter, and its moments become 0. A large gradient below that determines the scale of the 255 other
    elements of its block: with 8 bits from 1000 times theirs on, it slows them for as long as exp_avg_sq remembers it,
    and from 8000 times on, they lose their first moments for some steps. With 4 bits it slows them from 180 times
    theirs on. There both moments are rounded up or down so that their means are right. Where gradients are nothing but
    noise, single steps are then off by two thirds of themselves, and longer than with 32 bits by a sixth.

    With factored=True the second moment of a contiguous parameter of several dimensions is that of Adafactor (Shazeer
    and Stern, 2018): R and C, fp32 averages of the mean squares of each row and of each column, make v = R * C /
    mean(R). Of more than two dimensions the first ones together count the rows, the last ones the columns, divided
    where rows and columns are fewest: a convolution's (64, 32, 3, 3) is 64 x 288, an expert layer's (8, 512, 2048) is
    4096 x 2048. All else is Adam's: first moment, bias corrections, decay. A step reads gradients twice and takes 1/32
    byte an element of its largest parameter, or 16 MiB, for its length. It has the same bits with every instruction set
    and on CUDA. Others keep the second moment that they would have without it: those of fp64, those below
    min_8bit_size, and those whose R and C would take more than half a byte an element, as of a single row. An element
    whose gradient is infinite or NaN, or whose square overflows fp32, stays out of R and C, affects only its own
    parameter, and its first moment becomes 0. A large gradient below that raises v in its whole row and column: one
    that is K times the others slows a row of n elements once K * K > n.

    Args:
        params: As torch.optim.AdamW's, like all that are not named here.
        state_bits: 8 keeps the two moments in 2.03 bytes a parameter instead of 8, 4 in 1.03 (of parameters that are
            not contiguous, as with channels_last, in 2.03); see state_dict() for how such states are exchanged.
        factored: Whether second moments are two vectors. With state_bits=4 the states then take 0.52 bytes a parameter
            and four a row and a column (4096 x 4096: 0.518), with 8 bits 1.02, with 32 bits 4.
        min_8bit_size: The smallest number of elements of a parameter for moments of 8 or 4 bits, or factored ones.
        master_weights: Whether fp16 and bf16 parameters have an fp32 copy and fp32 states, on which the step works.
        stochastic_rounding: Whether fp16 and bf16 parameters without such a copy are rounded stochastically, so that
            small updates are not lost on average; deterministic from run to run.
        offload_gradients: Whether gradients of parameters on a CUDA device wait for the step in pinned memory of the
            host. Each leaves as backward() completes it, beside the rest of the backward pass, and the step brings
            them back, some at a time: of all gradients the device has two of the largest at once (but where a model is
            compiled as a whole, which makes all at once). In p.grad is then a
            tensor of the same shape that holds no memory there; p.grad.cpu() is the gradient. Accumulation,
            zero_grad(), memopt.amp.clip_grad_norm_ (order 2; exact) and memopt.amp.GradScaler work as ever, with the
            same bits, but that norms of fp64 gradients are fp32, and that gradients of 16 bits are rounded by
            scaler.step(max_norm=), too. torch's own clipping and scaler are refused by name, so that nothing is
            clipped in silence. Sparse gradients stay.
        offload_states: Whether the moments and master weights of parameters on a CUDA device lie in pinned memory of
            the host. The step, with the same bits, brings them to the device and back, some at a time: two turns of at
            most 256 MiB or of one parameter's gradient and states are there at once. The host does not wait; read
            state_dict(), which does, rather than `state`, whose tensors the last step may still be writing.
            Or a directory on a disk, also for parameters on the CPU: the states lie in a file there, of which nothing
            is left however the process ends. A step reads each turn's states ahead, while earlier turns compute, and
            writes them behind, with the same bits, through 256 MiB of pinned memory at most; turns have 64 MiB. It ends
            when all is written. The disk's room is taken as states are made, so no step finds it full. state_dict()
            reads the states into pages of a second file there, which takes as much of the disk while it lives.
            Where the disk fails in a step, no further one is taken until a state dict is loaded. After a failed write
            the step is taken to its end first, and what could not be written is kept in the host's memory, of which it
            may need much: load_state_dict(state_dict()) goes on with all of it. After a failed read parameters of
            earlier turns are stepped (of one that is stepped in pieces, those), the others not, each with its own
            states: load a state dict that was saved.
        step_in_backward: Whether each parameter is stepped, with the same bits, as backward() completes its gradient,
            which is dropped then: of all gradients the device has two of the largest at once, none waits on the host,
            and states on the host (offload_states, or memopt.offload_layers(), whose parameters are stepped there) come
            and go beside the backward pass. It is for steps that need no gradient of another parameter: no clipping by
            a global norm, no accumulation, no gradient scaler. Each is refused by name where it would read a gradient
            that is gone, which is after that step. step() is called as ever, and does what backward() has not done;
            the learning rate is that at backward(). A backward pass steps all parameters that it reaches, and one that
            fails those that it has reached. A model that is compiled as a whole makes all gradients before the first
            hook: compile its blocks.

    Raises:
        ValueError: As torch's, for differentiable=True, for amsgrad=True with state_bits=8 or 4 or with factored=True,
            and for step_in_backward=True beside offload_gradients=True or a directory for states; for either with a
            parameter that another optimizer has so.
        OSError: offload_states is a directory that does not exist, cannot be written to, or has no room for the states
            (step(), before any parameter has changed; with the bytes needed and free), or the disk fails (step(), see
            offload_states).
        RuntimeError: offload_gradients=True or step_in_backward=True in a process of several ranks.
        MemoryError: The host can lock no memory for states (step(), before any parameter has changed; with
            step_in_backward=True backward(), at the first parameter for which there is none).

    Examples:
        >>> optimizer = memopt.optim.AdamW(model.parameters(), lr=3e-4, state_bits=8)
        >>> on_disk = memopt.optim.AdamW(model.parameters(), lr=3e-4, offload_states="/scratch")
        >>> smallest = memopt.optim.AdamW(model.parameters(), lr=3e-4, state_bits=4, factored=True)
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        state_bits: int = 32,
        factored: bool = False,
        min_8bit_size: int = 4096,
        master_weights: bool = False,
        stochastic_rounding: bool = False,
        offload_gradients: bool = False,
        offload_states: bool | str | os.PathLike[str] = False,
        step_in_backward: bool = False,
    ) -> None:
        self._own_defaults = {
            "state_bits": state_bits,
            "factored": factored,
            "min_8bit_size": min_8bit_size,
            "master_weights": master_weights,
            "stochastic_rounding": stochastic_rounding,
            "offload_gradients": offload_gradients,
            "offload_states": offload_states,
            "step_in_backward": step_in_backward,
        }
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
        )
