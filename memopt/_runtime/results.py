"""Base of the results of public functions: text on a terminal, HTML in a notebook, plain values for a program."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from html import escape
from typing import TYPE_CHECKING, Any, ClassVar


class Result:
    """Base of what public functions return: a subclass has str(), and where it is a dataclass, as_dict() by its fields.

    Figures in bytes have names that end in _bytes. Their names without it, which an earlier version had, can be read,
    with a DeprecationWarning; and pickles that have them, too.
    """

    _not_plain: ClassVar[tuple[str, ...]] = ()  # fields that as_dict() leaves out

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"

    def as_dict(self) -> dict[str, Any]:
        """Return JSON-able values; a name that ends in _bytes has bytes."""
        return _plain_fields(self, self._not_plain)

    def __setstate__(self, state: dict[str, Any]) -> None:
        known = getattr(type(self), "__dataclass_fields__", {})
        for name, value in state.items():
            today = f"{name}_bytes"
            self.__dict__[today if today in known else name] = value

    if not TYPE_CHECKING:  # where types are checked, an unknown name is an error

        def __getattr__(self, name: str) -> Any:
            new, kind = f"{name}_bytes", type(self)
            if name[0] == "_" or not (hasattr(kind, new) or new in self.__dict__):
                raise AttributeError(
                    f"{kind.__name__!r} object has no attribute {name!r}", name=name, obj=self
                )
            warnings.warn(f"{kind.__name__}.{name} is now named {new}", DeprecationWarning, stacklevel=2)
            return getattr(self, new)


def _plain_fields(result: Any, left_out: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return a dataclass's public fields as JSON-able values."""
    names = (one.name for one in fields(result))
    return {name: plain(getattr(result, name)) for name in names if name[0] != "_" and name not in left_out}


def plain(value: Any) -> Any:
    """Return a value as JSON has it; of a dataclass or a named tuple, its fields by name."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Result):
        return value.as_dict()
    if is_dataclass(value):
        return _plain_fields(value)
    if hasattr(value, "_asdict"):  # a named tuple
        return {name: plain(one) for name, one in value._asdict().items()}
    if isinstance(value, Mapping):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(one) for one in value]
    return str(value)  # a path, a dtype
