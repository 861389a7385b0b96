"""Read the dynamic symbols of 64-bit ELF libraries: what one exports, imports and needs.

This stands in for nm and readelf, so that neither the build nor a user's machine has to have binutils' readers, and it
reads a library without loading it. The layout is that of the System V ABI and of the GNU symbol versioning extension
(.gnu.version, .gnu.version_r, .gnu.version_d). Standard library only: build scripts use this file by path.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

_SHT_DYNAMIC, _SHT_DYNSYM = 6, 11
_SHT_GNU_VERDEF, _SHT_GNU_VERNEED, _SHT_GNU_VERSYM = 0x6FFFFFFD, 0x6FFFFFFE, 0x6FFFFFFF
_SHT_SYMTAB = 2
_DT_NEEDED, _DT_SONAME = 1, 14
_SHN_UNDEF = 0
_STB_LOCAL, _STB_WEAK = 0, 2
_STT_FUNC, _STT_GNU_IFUNC = 2, 10


@dataclass(frozen=True, order=True)
class Symbol:
    """A dynamic symbol.

    version: name of the version node, '' for an unversioned symbol. provider: of an import, the soname that the version
    was recorded against, '' when unversioned.
    """

    name: str
    version: str = ""
    provider: str = ""
    is_function: bool = True


@dataclass(frozen=True)
class Library:
    """The dynamic symbols of one shared object. Weak imports are left out: a library works without them."""

    soname: str
    needed: tuple[str, ...]
    exports: tuple[Symbol, ...]
    imports: tuple[Symbol, ...]


@dataclass(frozen=True)
class _Section:
    kind: int
    offset: int
    size: int
    link: int
    info: int


def read(path: str | Path, exports: bool = True) -> Library:
    """Read the dynamic part of the shared object at path.

    Without exports it is quick on torch's libraries, which export 10^5 names.

    Raises:
        ValueError: The file is not a 64-bit little-endian ELF file, or is cut short; the message names it.
    """
    with open(path, "rb") as file, _map(path, file) as image:
        try:
            return _read(image, exports)
        except (struct.error, IndexError, OverflowError, StopIteration, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: damaged ELF file ({error or 'a section is missing'})") from error


def defined_in_object(path: str | Path) -> frozenset[str]:
    """The global names that a relocatable object file (.o) defines."""
    with open(path, "rb") as file, _map(path, file) as image:
        sections = _sections(image)
        table = next((section for section in sections if section.kind == _SHT_SYMTAB), None)
        if table is None:
            raise ValueError(f"{path}: no symbol table")
        strings = sections[table.link].offset
        return frozenset(
            _string(image, strings + name)
            for name, info, home in _symbols(image, table)
            if home != _SHN_UNDEF and info >> 4 != _STB_LOCAL
        )


def _map(path: str | Path, file: BinaryIO) -> mmap.mmap:
    head = file.read(20)
    # 64-bit class, little endian, version 1.
    if len(head) < 20 or head[:7] != b"\x7fELF\x02\x01\x01":
        raise ValueError(f"{path}: not a 64-bit little-endian ELF file")
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _sections(image: mmap.mmap) -> list[_Section]:
    (table,) = struct.unpack_from("<Q", image, 40)
    size, count = struct.unpack_from("<HH", image, 58)
    found = []
    for index in range(count):
        _, kind, _, _, offset, length, link, info, _, _ = struct.unpack_from(
            "<IIQQQQIIQQ", image, table + size * index
        )
        found.append(_Section(kind, offset, length, link, info))
    return found


def _string(image: mmap.mmap, at: int) -> str:
    end = image.find(b"\0", at)
    if end < 0:
        raise IndexError("a string extends past the end")
    return image[at:end].decode()


def _symbols(image: mmap.mmap, table: _Section) -> Iterator[tuple[int, int, int]]:
    """Yield (name offset, info byte, section index) of every entry but the reserved first one."""
    entries = struct.iter_unpack("<IBBHQQ", image[table.offset + 24 : table.offset + table.size])
    return ((name, info, home) for name, info, _other, home, _value, _size in entries)


def _versions_needed(image: mmap.mmap, sections: list[_Section]) -> dict[int, tuple[str, str]]:
    """Return by version index (version, soname it comes from)."""
    found: dict[int, tuple[str, str]] = {}
    for section in sections:
        if section.kind != _SHT_GNU_VERNEED:
            continue
        strings, at = sections[section.link].offset, section.offset
        for _ in range(section.info):
            _, count, file, first, following = struct.unpack_from("<HHIII", image, at)
            entry = at + first
            for _ in range(count):
                _hash, _flags, index, name, next_entry = struct.unpack_from("<IHHII", image, entry)
                found[index] = (_string(image, strings + name), _string(image, strings + file))
                entry += next_entry
            at += following
    return found


def _versions_defined(image: mmap.mmap, sections: list[_Section]) -> dict[int, tuple[str, str]]:
    """Return by version index (version, ''). Entry 1 is the library's own name and marks unversioned symbols."""
    found: dict[int, tuple[str, str]] = {}
    for section in sections:
        if section.kind != _SHT_GNU_VERDEF:
            continue
        strings, at = sections[section.link].offset, section.offset
        for _ in range(section.info):
            _, _, index, _, _, first, following = struct.unpack_from("<HHHHIII", image, at)
            (name,) = struct.unpack_from("<I", image, at + first)
            if index > 1:
                found[index] = (_string(image, strings + name), "")
            at += following
    return found


def _read(image: mmap.mmap, want_exports: bool) -> Library:
    sections = _sections(image)
    dynsym = next(section for section in sections if section.kind == _SHT_DYNSYM)
    dynamic = next(section for section in sections if section.kind == _SHT_DYNAMIC)
    versym = next((section for section in sections if section.kind == _SHT_GNU_VERSYM), None)
    versions = _versions_needed(image, sections) | _versions_defined(image, sections)
    strings = sections[dynsym.link].offset

    soname, needed = "", []
    base = sections[dynamic.link].offset
    for at in range(dynamic.offset, dynamic.offset + dynamic.size, 16):
        tag, value = struct.unpack_from("<QQ", image, at)
        if tag == _DT_NEEDED:
            needed.append(_string(image, base + value))
        elif tag == _DT_SONAME:
            soname = _string(image, base + value)

    found: dict[bool, list[Symbol]] = {False: [], True: []}
    for index, (name, info, home) in enumerate(_symbols(image, dynsym), start=1):
        binding, imported = info >> 4, home == _SHN_UNDEF
        if binding == _STB_LOCAL or (binding == _STB_WEAK if imported else not want_exports):
            continue
        version = provider = ""
        if versym is not None:
            (number,) = struct.unpack_from("<H", image, versym.offset + 2 * index)
            version, provider = versions.get(number & 0x7FFF, ("", ""))  # the top bit only says "hidden"
        text = _string(image, strings + name)
        if imported or text != version:  # a version node exports its own name as an absolute symbol
            found[imported].append(Symbol(text, version, provider, info & 15 in (_STT_FUNC, _STT_GNU_IFUNC)))
    return Library(soname, tuple(needed), tuple(sorted(found[False])), tuple(sorted(found[True])))
