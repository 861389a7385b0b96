"""A file that appears whole or not at all: it is made in a folder beside its place, and renamed into it."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def folder_beside(path: Path | None) -> Iterator[Path]:
    """A folder for files that are being made, gone afterwards with what is still in it.

    It is on the file system of `path`, or where temporary files go.
    """
    made = tempfile.mkdtemp(
        prefix="memopt-export-" if path is None else f".{path.name}.",
        dir=None if path is None else path.parent,
    )
    try:
        yield Path(made)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def put(made: Path, path: Path) -> list[Path]:
    """Rename what is in the folder of `made` to beside `path`, `made` itself to `path`, last.

    An old file is what it was until then. Where weights are in a file of their own, its name is of this export alone,
    and earlier ones go.
    """
    beside = sorted(file for file in made.parent.iterdir() if file != made)
    for file in (*beside, made):
        with open(file, "rb") as written:
            os.fsync(written.fileno())
    if path.exists():
        shutil.copymode(path, made)
    there = []
    try:
        for file in beside:
            os.replace(file, path.parent / file.name)
            there.append(path.parent / file.name)
        os.replace(made, path)
    except BaseException:
        for file in there:
            file.unlink(missing_ok=True)
        raise
    for old in _weights_of(path):
        if old not in there:
            old.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # not every file system can flush a folder
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    return [path, *there]


def _weights_of(path: Path) -> list[Path]:
    """Files of weights of this export and earlier ones, as the ONNX format names them."""
    name = re.compile(re.escape(path.name) + r"\.[0-9a-f]{8}\.data")
    return [file for file in path.parent.iterdir() if name.fullmatch(file.name)]
