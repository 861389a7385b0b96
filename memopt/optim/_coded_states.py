"""Optimizers of which some states may be codes of few bits: beside a state's name, name + "_scale" has their scales."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memopt.optim._one_pass import OnePass
from memopt.optim._state_layout import (
    blocks,
    codes_shape,
    decoded,
    encoded,
    held_bits,
    is_plain,
    like,
    no_codes,
    not_like,
    one_step,
    wanted_bits,
    wants_master,
)


class CodedStates(OnePass):
    """The base of those that keep `_moments` in few bits, all but the first of them as second moments."""

    _moments: tuple[str, ...] = ()

    def _make(self, p: Tensor, group: dict[str, Any], name: str, dtype: torch.dtype) -> None:
        """Create a missing moment of zeros."""
        state = self.state[p]
        if state.get(name) is None:
            if bits := wanted_bits(p, group):
                state[name], state[name + "_scale"] = no_codes(p, bits)
            else:
                state[name] = like(p, dtype)

    def _relay_moment(
        self, p: Tensor, state: dict[str, Any], group: dict[str, Any], name: str, dtype: torch.dtype
    ) -> None:
        """Convert a loaded moment, if there is one, to codes or to that type."""
        value, scale = state.get(name), state.pop(name + "_scale", None)
        second, bits = name != self._moments[0], wanted_bits(p, group)
        if not isinstance(value, Tensor):
            return
        if isinstance(scale, Tensor) and value.dtype is torch.uint8:
            if held_bits(p, value) == bits and (bits == 4 or value.stride() == p.stride()):
                state[name] = value.to(p.device)
                state[name + "_scale"] = scale.to(device=p.device, dtype=torch.float32)
                return
            value = decoded(value, scale, second, p)
        strided = value.layout is torch.strided
        if bits and strided:
            state[name], state[name + "_scale"] = encoded(value, p, second, bits)
        else:
            plain = strided and is_plain(p)
            state[name] = like(p, dtype, value) if plain else value.to(dtype=p.dtype, device=p.device)

    def _read(self, state: dict[str, Any]) -> None:
        for name in self._moments:
            if name + "_codes" in state:
                state[name] = state.pop(name + "_codes")

    def _check_state(self, p: Tensor, state: dict[str, Any]) -> str | None:
        for name in self._moments:
            value, scale = state.get(name), state.get(name + "_scale")
            codes = held_bits(p, value)
            if value is None:
                continue
            if not codes and scale is None:
                wrong = not_like(p, state, name)
            elif not codes or not isinstance(scale, Tensor):
                wrong = (
                    f"its states {name!r} and '{name}_scale' are not codes (uint8, of its shape or, of 4 bits, "
                    f"{codes_shape(p, 4)}) with scales"
                )
            elif scale.shape != (blocks(p),):
                wrong = f"its state '{name}_scale' has the shape {tuple(scale.shape)}, not {(blocks(p),)}"
            else:
                wrong = None
            if wrong:
                return wrong
        return super()._check_state(p, state)

    def state_dict(self, full: bool = False) -> dict[str, Any]:
        """Return the state, as torch's optimizers do.

        Moments of few bits are in it under their name and _codes (uint8; 8 bits: of the parameter's shape, 4 bits: a
        row of two codes a byte) beside their name and _scale (fp32, one a 256 elements), which only memopt's optimizers
        can read, with any state_bits. torch's load them without a word: the next step of its Adam and AdamW ends in
        KeyError: 'exp_avg' before it changes anything, its SGD and Muon begin with new momentum.

        Args:
            full: Return fp32 moments instead of codes, which torch.optim's can load, too.

        Returns:
            A state dict of memopt's optimizers and, without codes, of torch's.
        """
        held: dict[str, Any] = super().state_dict()
        for number, p in enumerate(p for group in self.param_groups for p in group["params"]):
            if isinstance(state := held["state"].get(number), dict):
                held["state"][number] = self._full(state, p) if full else _coded(state)
        return held

    def _full(self, state: dict[str, Any], p: Tensor) -> dict[str, Any]:
        full = dict(state)
        for name in self._moments:
            scale = full.pop(name + "_scale", None)
            if scale is not None:
                full[name] = decoded(full[name], scale, name != self._moments[0], p)
        return full


class CodedMomentum(CodedStates):
    """The base of those that keep a momentum buffer, in 8 bits or not."""

    _moments = ("momentum_buffer",)

    def _check_group(self, group: dict[str, Any]) -> None:
        bits = group["state_bits"]
        if bits not in (8, 32):
            raise ValueError(f"Invalid state_bits value: {bits} (8 or 32)")
        if bits != 32 and group["momentum"] == 0:
            raise ValueError(
                f"state_bits={bits} is of the momentum, and there is none: give momentum=, or use state_bits=32"
            )

    def _relay(self, p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        master, wide = state.pop("master_param", None), wants_master(p, group)
        self._relay_moment(p, state, group, "momentum_buffer", torch.float32 if wide else p.dtype)
        if "step" in state or "momentum_buffer_scale" in state:
            count_steps(p, state)
        if isinstance(master, Tensor) and wide:
            state["master_param"] = like(p, torch.float32, master)


def count_steps(p: Tensor, state: dict[str, Any]) -> None:
    """Create or convert the count of steps, of which a rounding up or down is made."""
    state["step"] = one_step(state.get("step", 0.0), p)


def _coded(state: dict[str, Any]) -> dict[str, Any]:
    """Rename codes so that torch's optimizers do not take them for moments."""
    return {name + "_codes" if name + "_scale" in state else name: value for name, value in state.items()}
