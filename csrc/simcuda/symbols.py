"""The functions that NVIDIA's libraries export, a file a library in symbols/, of both CUDA majors.

'#' lines say where the names come from. '@12 SONAME NODE' is the library's soname in that major and the version node
of its exports, none where they are unversioned. Then a name a line, with the major behind it where one alone has it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "symbols"
MAJORS = (12, 13)


@dataclass
class Exports:
    """The exports of a library in one CUDA major."""

    soname: str
    node: str = ""
    names: set[str] = field(default_factory=set)


@dataclass
class Library:
    """A library of both majors. sources: packages with their versions."""

    name: str
    sources: set[str] = field(default_factory=set)
    of: dict[int, Exports] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.name}.txt"


def load(name: str) -> Library:
    """FileNotFoundError where there is no list of it."""
    library = Library(name)
    for line in library.path.read_text().splitlines():
        if line.startswith("# "):
            library.sources.add(line[2:])
        elif line.startswith("@"):
            major, soname, *node = line[1:].split(" ")
            library.of[int(major)] = Exports(soname, *node)
        elif line:
            function, _, only = line.partition(" ")
            for major in [int(only)] if only else library.of:
                library.of[major].names.add(function)
    return library


def store(library: Library) -> None:
    text = [f"# {source}" for source in sorted(library.sources)]
    for major, exports in sorted(library.of.items()):
        text.append(f"@{major} {exports.soname} {exports.node}".rstrip())
    for name in sorted(set().union(*(exports.names for exports in library.of.values()))):
        having = [major for major, exports in library.of.items() if name in exports.names]
        text.append(name if len(having) == len(library.of) else f"{name} {having[0]}")
    library.path.write_text("\n".join(text) + "\n")


def named(soname: str) -> Library:
    """The library of a soname, a new one where no list has it yet."""
    name = soname.removeprefix("lib").partition(".so.")[0]
    return load(name) if (FOLDER / f"{name}.txt").exists() else Library(name)
