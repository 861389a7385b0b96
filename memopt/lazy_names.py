"""Names that a package imports when they are first asked for (PEP 562): `import memopt` costs no torch."""

from __future__ import annotations

import importlib

TYPE_CHECKING = (
    False  # type checkers take it for typing's; importing typing would double what `import memopt` costs
)

if TYPE_CHECKING:
    from collections.abc import Callable


def lazy_names(
    package: dict[str, object], homes: dict[str, str | None], *, torch_for: str | None = None
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` for the package whose globals() are `package`.

    homes: for each name, the module it lives in; None for a submodule of the package itself. Found once, it is an
    ordinary global of the package. One whose module needs a torch that is not there is a ModuleNotFoundError that says
    so, and is not listed: help() asks for every name that is.
    torch_for: where every name needs torch, the package whose names an error about a missing or too old one gives."""

    def find(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package['__name__']!r} has no attribute {name!r}")
        if torch_for:
            from memopt.torch_version import require

            require(f"{torch_for}.{name}")
        home = homes[name]
        try:
            if home is None:
                value: object = importlib.import_module(f"{package['__name__']}.{name}")
            else:
                value = getattr(importlib.import_module(home), name)
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            from memopt.torch_version import missing

            raise missing(f"{package['__name__']}.{name}") from None
        package[name] = value
        return value

    def is_there(name: str) -> bool:
        from memopt.torch_version import installed

        if name in homes and name not in package and installed() is None:
            try:
                find(name)
            except ImportError:
                return False
        return True

    def listed() -> list[str]:
        public = package["__all__"]
        assert isinstance(public, list)
        return sorted({*(name for name in package if name[:2] == "__"), *filter(is_there, public)})

    return find, listed
