"""Names that a package imports on first use (PEP 562): `import memopt` does not import torch."""

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
    """Return `__getattr__` and `__dir__` for the package whose globals() are `package`.

    homes: for each name, the module that defines it; None for a submodule of the package itself. Once found, a name is
    an ordinary global of the package. A name whose module needs a missing torch raises a ModuleNotFoundError that says
    so, and is not listed, because help() asks for every name that is.

    torch_for: if every name needs torch, the package that an error about a missing or too old one names.
    """

    def find(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package['__name__']!r} has no attribute {name!r}")
        if torch_for:
            from memopt._runtime.torch_version import require

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
            from memopt._runtime.torch_version import missing

            raise missing(f"{package['__name__']}.{name}") from None
        package[name] = value
        return value

    def is_there(name: str) -> bool:
        from memopt._runtime.torch_version import installed

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
