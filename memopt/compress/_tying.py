"""memopt.compress.tie_() and duplicates(): parameters that become one; and what of a model is one memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memopt import _C
from memopt._runtime import arguments
from memopt._runtime.results import Result
from memopt._runtime.storages import memory_of, storage_bytes
from memopt.compress._model_changes import Outcome, carry_out, check_model, unusable
from memopt.compress._saved_report import Evaluate, Report, shortened

_FUNCTION = "tie_"


def tie_(
    model: nn.Module, pairs: Iterable[tuple[str, str]] | None = None, *, evaluate: Evaluate = None
) -> Report:
    """Tie parameters of a model, so that they are stored once, saved once and trained together.

    The values of the second are lost; the report says where they differed. Its gradient is lost, too. An optimizer
    created before still steps the old parameter: create it afterwards. To untie, give a module its own parameter.

    Args:
        model: The model.
        pairs: Names (kept, tied): the second is replaced by the first, whose values are kept. Both are parameters
            ("embed.weight", "head.weight"), or both are modules with parameters of the same names and shapes
            ("layers.0", "layers.1"), all of which are tied. None: the matrices (two dimensions or more) that
            duplicates(model) finds equal byte for byte in separate storages. Vectors and tensors of one repeated value
            are left out, and named in the report, since new norms and biases are equal only because they have not been
            trained yet. Name them in pairs to tie them.
        evaluate: A function of the model that returns its accuracy; it is called before and after, in eval mode and
            without gradients.

    Returns:
        A Report.

    Raises:
        TypeError: An argument has the wrong type. The model is unchanged then, as with ValueError.
        ValueError: The model lacks a name; two parameters differ in shape, type, device or requires_grad; a parameter
            would be tied to itself or to two others; or there is nothing to tie.

    Examples:
        >>> memopt.compress.tie_(model, [("embed.weight", "head.weight")])
    """
    check_model(model, _FUNCTION, replaces=True)
    skipped: dict[str, str] = {}
    wanted = _equal_pairs(model, skipped) if pairs is None else list(_parameter_pairs(model, pairs))
    for kept, tied in wanted:
        _check(model, kept, tied)
    _check_chains(model, wanted)

    def change(outcome: Outcome) -> None:
        outcome.skipped.update(skipped)
        for kept, tied in wanted:
            first, second = model.get_parameter(kept), model.get_parameter(tied)
            if not same_bytes(first, second):
                outcome.notes.append(f"{tied} had other values than {kept}, which are lost")
            for owner, name in _places(model, second):
                setattr(owner, name, first)  # an RNN holds it in a list too
            outcome.changed.append(tied)
        outcome.notes.append("an existing optimizer still steps the old parameters: create it again")

    return carry_out(model, _FUNCTION, change, evaluate)


def _equal_pairs(model: nn.Module, skipped: dict[str, str]) -> list[tuple[str, str]]:
    """Return pairs of equal matrices. Other equal tensors are added to `skipped`, by name with the reason."""
    parameters = dict(model.named_parameters())
    found = []
    for group in duplicates(model).equal:
        for trained in (True, False):
            alike = [
                name for name in group if name in parameters and parameters[name].requires_grad == trained
            ]
            if len(alike) < 2:
                continue
            if why := _accidental(parameters[alike[0]]):
                skipped.update(dict.fromkeys(alike, why))
            else:
                found += [(alike[0], other) for other in alike[1:]]
    if not found:
        left = f" (equal, and left out: {shortened(skipped)})" if skipped else ""
        raise ValueError(
            f"{_FUNCTION}: no two matrices of the model are equal{left}: name pairs= to tie other parameters"
        )
    return found


def _accidental(parameter: torch.Tensor) -> str:
    """Return the reason why a parameter may equal another by accident; empty if it hardly can."""
    if parameter.dim() < 2:
        return "it equals another, but is not a matrix; name it in pairs= to tie it"
    if is_constant(parameter):
        return "it equals another, but all its values are the same; name it in pairs= to tie it"
    return ""


def _parameter_pairs(model: nn.Module, pairs: Any) -> Iterator[tuple[str, str]]:
    if isinstance(pairs, str) or not isinstance(pairs, Iterable):
        raise TypeError(f"{_FUNCTION}: pairs={pairs!r}: expected a list of (name, name)")
    parameters = dict(model.named_parameters(remove_duplicate=False))
    modules = dict(model.named_modules())
    count = 0
    for pair in pairs:
        if isinstance(pair, str) or not isinstance(pair, Iterable):
            raise TypeError(f"{_FUNCTION}: {pair!r} is not a pair of names")
        names = list(pair)
        if len(names) != 2 or not all(isinstance(name, str) for name in names):
            raise TypeError(f"{_FUNCTION}: {pair!r} is not a pair of names")
        for name in names:
            if name not in parameters and name not in modules:
                raise ValueError(f"{_FUNCTION}: the model has no parameter or module {name!r}")
        kept, tied = names
        count += 1
        if kept in parameters and tied in parameters:
            yield kept, tied
        elif kept in modules and tied in modules:
            yield from _of_modules(kept, modules[kept], tied, modules[tied])
        else:
            raise ValueError(
                f"{_FUNCTION}: one of {kept!r} and {tied!r} is a parameter and the other a module"
            )
    if not count:
        raise ValueError(f"{_FUNCTION}: pairs is empty: pass None to tie equal parameters")


def _of_modules(kept: str, first: nn.Module, tied: str, second: nn.Module) -> Iterator[tuple[str, str]]:
    one, other = dict(first.named_parameters()), dict(second.named_parameters())
    if set(one) != set(other) or not one:
        apart = sorted(set(one) ^ set(other))
        raise ValueError(
            f"{_FUNCTION}: {kept!r} and {tied!r} do not have the same parameters"
            + (f": {', '.join(apart[:4])} is in one of them" if apart else ", but none")
        )
    for name in one:
        yield f"{kept}.{name}", f"{tied}.{name}"


def _check(model: nn.Module, kept: str, tied: str) -> None:
    first, second = model.get_parameter(kept), model.get_parameter(tied)
    if first is second:
        raise ValueError(f"{_FUNCTION}: {kept} and {tied} are already one parameter")
    for what in ("shape", "dtype", "device", "layout", "requires_grad"):
        one, other = getattr(first, what), getattr(second, what)
        if one != other:
            raise ValueError(f"{_FUNCTION}: {kept} and {tied} differ in {what}: {one} and {other}")
    for name, one in ((kept, first), (tied, second)):
        if why := unusable(one):
            raise ValueError(f"{_FUNCTION}: {name} {why}")
    if type(first) is not type(second):
        raise ValueError(
            f"{_FUNCTION}: {kept} is a {type(first).__name__} and {tied} a {type(second).__name__}"
        )


def _check_chains(model: nn.Module, wanted: list[tuple[str, str]]) -> None:
    """Refuse pairs in which a parameter is both replaced and tied to."""
    gone: dict[int, str] = {}
    for kept, tied in wanted:
        second = id(model.get_parameter(tied))
        if second in gone:
            raise ValueError(f"{_FUNCTION}: {tied} is tied twice, with {gone[second]} and with {kept}")
        gone[second] = kept
    for kept, tied in wanted:
        if id(model.get_parameter(kept)) in gone:
            raise ValueError(
                f"{_FUNCTION}: {tied} is to be tied to {kept}, which is tied to {gone[id(model.get_parameter(kept))]}: "
                "name that one"
            )


def _places(model: nn.Module, parameter: torch.Tensor) -> list[tuple[nn.Module, str]]:
    return [
        (module, name)
        for module in model.modules()
        for name, found in module._parameters.items()
        if found is parameter
    ]


# ---- duplicates ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Duplicates(Result):
    """Names of parameters and buffers that share a storage, or are equal.

    `tied`: groups that share one storage, as one parameter under several names or as views. `equal`: groups of equal
    shape, type and bytes, each in its own memory. tie_() ties the matrices among them, and others if they are named.
    `could_save_bytes`: bytes of memory that would be freed if each group of `equal` were tied.
    """

    tied: tuple[tuple[str, ...], ...]
    equal: tuple[tuple[str, ...], ...]
    could_save_bytes: int

    def __str__(self) -> str:
        lines = [f"tied: {', '.join(group)}" for group in self.tied]
        lines += [f"equal, and could be tied: {', '.join(group)}" for group in self.equal]
        lines.append(f"tying the equal ones would save {_C.format_size(self.could_save_bytes)}")
        return "\n".join(lines)


def duplicates(model: nn.Module) -> Duplicates:
    """Find parameters and buffers that share a storage, and those that are equal byte for byte without sharing one.

    Values are compared only among tensors of the same shape, type and device, completely and exactly (NaN equals the
    same NaN, 0.0 is not -0.0). Sparse and quantised tensors, and those on the meta device, are checked for sharing
    only.

    Args:
        model: The model to examine; it is not changed.

    Returns:
        The names, as Duplicates.

    Examples:
        >>> print(memopt.compress.duplicates(model))
    """
    arguments.check_module(model, "duplicates: model")
    named = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    tied: dict[object, list[str]] = defaultdict(list)
    for name, tensor in named:
        for place in _storages_of(tensor):
            tied[place].append(name)
    groups = {tuple(dict.fromkeys(names)): None for names in tied.values() if len(set(names)) > 1}
    equal = _equal(named)
    tensors = dict(named)
    everything = [tensor for _, tensor in named]
    merged = {name for group in equal for name in group[1:]}
    kept = [tensor for name, tensor in named if not any(tensor is tensors[gone] for gone in merged)]
    could_save = storage_bytes(everything) - storage_bytes(kept)
    return Duplicates(tuple(groups), tuple(equal), could_save)


def _storages_of(tensor: torch.Tensor) -> set[object]:
    """Return the identity of a tensor's memory; on the meta device, which has none, its storage object."""
    if tensor.is_meta and tensor.layout is torch.strided:
        return {("meta", tensor.untyped_storage()._cdata)}
    return {(device, address) for device, address, *_ in memory_of(tensor)}


def _equal(named: list[tuple[str, torch.Tensor]]) -> list[tuple[str, ...]]:
    """Return groups of equal tensors, in the order of their first names."""
    alike: dict[object, list[list[tuple[str, torch.Tensor]]]] = defaultdict(list)
    for name, tensor in named:
        if type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer) or not memory_of(tensor):
            continue
        if tensor.layout is not torch.strided or tensor.is_quantized or not tensor.numel():
            continue
        groups = alike[tensor.shape, tensor.dtype, tensor.device, _beginning(tensor)]
        if any(_storages_of(tensor) & _storages_of(other) for group in groups for _, other in group):
            continue  # one memory already: said as tied
        for group in groups:
            if same_bytes(group[0][1], tensor):
                group.append((name, tensor))
                break
        else:
            groups.append([(name, tensor)])
    found = [
        tuple(name for name, _ in group) for groups in alike.values() for group in groups if len(group) > 1
    ]
    order = {name: number for number, (name, _) in enumerate(named)}
    return sorted(found, key=lambda group: order[group[0]])


def _beginning(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the first few elements of a non-empty tensor, so that different tensors are seldom compared whole."""
    row = tensor.detach()[(0,) * (tensor.dim() - 1)] if tensor.dim() else tensor.detach().reshape(1)
    return tuple(_as_bytes(row[:16]).tolist())


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare two plain tensors of the same shape, type and device."""
    return bool(torch.equal(_as_bytes(one.detach()), _as_bytes(other.detach())))


def is_constant(tensor: torch.Tensor) -> bool:
    """Return whether all elements of a non-empty plain tensor are the same byte for byte."""
    elements = _as_bytes(tensor.detach()).view(tensor.numel(), -1)
    return bool((elements == elements[0]).all())


_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements as integers, among which NaN is equal to itself."""
    plain = tensor.contiguous().flatten()
    return plain.view(_OF_SIZE.get(plain.element_size(), torch.uint8))
