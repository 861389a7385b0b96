"""Real text that every machine has: the source of Python's standard library, as tokens of a character a number."""

from __future__ import annotations

import functools
import hashlib
import sysconfig
import zlib
from pathlib import Path

import torch

VOCABULARY = b"\n\t" + bytes(range(32, 127)) + b"\0"
"""Token i is character VOCABULARY[i]; the last one stands for every byte that is not printable ASCII. Fixed,
not collected from the text, so that a model has the same shape under every Python."""

SITE_SPECIFIC = {"site", "sysconfig"}
"""Modules that distributions of Python rewrite; left out so that the same version gives the same text
elsewhere."""


def _is_validation(module: str) -> bool:
    """Whole modules are held out, one in ten by the checksum of the name: no function is in both splits."""
    return zlib.crc32(module.encode()) % 10 == 0


@functools.cache
def standard_library_text() -> dict[str, bytes]:
    """The source by split ("train", "val"): top-level modules of the standard library, by name, line ends
    \\n.

    Packages are left out (distributions move some of them elsewhere), and so are modules whose names start
    with an underscore (generated ones among them). About 4 MB under Python 3.11.
    """
    library = Path(sysconfig.get_path("stdlib"))
    modules = sorted(path for path in library.glob("[a-z]*.py") if path.stem not in SITE_SPECIFIC)
    if len(modules) < 50:
        raise FileNotFoundError(
            f"{library} holds the source of only {len(modules)} modules of the standard library, and the "
            "character GPT trains on it. Use a Python installed with its .py files, not a zipped one."
        )
    text: dict[str, list[bytes]] = {"train": [], "val": []}
    for path in modules:
        text["val" if _is_validation(path.stem) else "train"].append(
            path.read_bytes().replace(b"\r\n", b"\n")
        )
    return {split: b"".join(parts) for split, parts in text.items()}


@functools.cache
def text_digest() -> str:
    """SHA-256 of the training text, a zero byte, the validation text: names the data in results."""
    text = standard_library_text()
    return hashlib.sha256(text["train"] + b"\0" + text["val"]).hexdigest()


@functools.cache
def text_tokens(split: str) -> torch.Tensor:
    """A split of the text as a uint8 tensor of token numbers."""
    return torch.frombuffer(bytearray(_token_bytes(split)), dtype=torch.uint8)


def decode(tokens: torch.Tensor) -> str:
    """Text of a 1-d tensor of token numbers."""
    return bytes(VOCABULARY[i] for i in tokens.tolist()).replace(b"\0", b"?").decode("ascii")


@functools.cache
def _token_bytes(split: str) -> bytes:
    table = bytes(VOCABULARY.find(bytes([byte])) % len(VOCABULARY) for byte in range(256))
    return standard_library_text()[split].translate(table)


def windows(split: str, starts: list[int], length: int) -> torch.Tensor:
    """(len(starts), length) int64: the tokens that follow each place. The text itself is no tensor: a training's memory
    is its own."""
    tokens = _token_bytes(split)
    joined = bytearray(b"".join(tokens[start : start + length] for start in starts))
    return torch.frombuffer(joined, dtype=torch.uint8).view(len(starts), length).long()
