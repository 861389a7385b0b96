"""The pages of `make docs`: every public name of memopt, of its packages and of its classes says what it is."""

from __future__ import annotations

import inspect
from types import ModuleType

import memopt


def modules(module: ModuleType) -> list[ModuleType]:
    found = [module]
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.ismodule(value) and hasattr(value, "__all__"):
            found += modules(value)
    return found


def names() -> dict[str, object]:
    """Public names by path: of modules, and what classes of ours define themselves."""
    found: dict[str, object] = {}
    for module in modules(memopt):
        for name in module.__all__:
            value = getattr(module, name)
            found[f"{module.__name__}.{name}"] = value
            if inspect.isclass(value) and value.__module__.startswith("memopt"):
                for member, entry in vars(value).items():
                    if not member.startswith("_") and inspect.isroutine(entry):
                        found[f"{module.__name__}.{name}.{member}"] = getattr(value, member)
    return found


def documented(path: str, value: object) -> bool:
    if not (inspect.ismodule(value) or inspect.isclass(value) or inspect.isroutine(value)):
        return True  # a constant
    return bool((inspect.getdoc(value) or "").strip())


def test_the_packages_are_found():
    found = {module.__name__ for module in modules(memopt)}
    assert {"memopt", "memopt.amp", "memopt.cuda", "memopt.data", "memopt.optim"} <= found


def test_every_public_name_has_a_docstring():
    assert [path for path, value in names().items() if not documented(path, value)] == []


def test_public_docstrings_describe_every_parameter():
    missing = {}
    for path, value in names().items():
        if not inspect.isroutine(value) or inspect.unwrap(value).__module__.startswith("torch"):
            continue
        text = inspect.getdoc(value) or ""
        parameters = [name for name in inspect.signature(value).parameters if name not in ("self", "cls")]
        if lacking := [name for name in parameters if f" {name}: " not in text and f"*{name}: " not in text]:
            missing[path] = lacking
    assert missing == {}
