"""What lies in a block of a file: the lines that begin there, or windows of as many bytes each."""

from __future__ import annotations

import io
from typing import IO, Any

from memopt import _C
from memopt.data.folder_blocks import Block

_CHUNK = 1 << 16


def lines_of(block: Block, encoding: str, longest: int) -> list[str]:
    """The lines whose first byte is in the block, without their ends (\\n, \\r\\n or \\r): of all blocks of a file each
    line once, however they are cut."""
    raw = _lines_raw(block, longest)
    try:
        # Universal newlines, as of a file that is opened as text.
        text = io.TextIOWrapper(io.BytesIO(raw), encoding=encoding).read()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"memopt.data.FolderStream: {block.path}, bytes {block.begin} to {block.end}: no {encoding}: {error}; give "
            "encoding="
        ) from error
    lines = text.split("\n")
    return lines[:-1] if not lines[-1] else lines


def _lines_raw(block: Block, longest: int) -> bytes:
    with open(block.path, "rb") as file:
        begin = max(0, block.begin - 1)  # its byte says whether a line begins at the block's first
        file.seek(begin)
        raw = _exactly(file, block.end - begin, block)
        if block.begin:
            raw = raw[raw.find(b"\n") + 1 or len(raw) :]
        if not raw or raw.endswith(b"\n"):
            return raw
        # The last line goes on behind the block.
        parts, at = [raw], block.end
        over = len(raw) - raw.rfind(b"\n") - 1
        while at < block.size:
            chunk = _exactly(file, min(_CHUNK, block.size - at), block)
            end = chunk.find(b"\n")
            parts.append(chunk if end < 0 else chunk[: end + 1])
            over += len(parts[-1])
            if over > longest:
                raise ValueError(
                    f"memopt.data.FolderStream: {block.path}: the line in bytes {block.begin} to {block.end} is longer "
                    f"than {_C.format_size(longest)}: give longest_line=, or split= a number of bytes"
                )
            if end >= 0:
                break
            at += len(chunk)
        return b"".join(parts)


def windows_of(block: Block, window: int, drop_last: bool) -> list[Any]:
    """uint8 tensors of shape (window,); the file's last one shorter, or left out."""
    import torch

    with open(block.path, "rb") as file:
        file.seek(block.begin)
        raw = _exactly(file, block.end - block.begin, block)
    if not raw:
        return []
    whole = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    windows = list(whole.split(window))
    return windows[:-1] if drop_last and len(windows[-1]) < window else windows


def _exactly(file: IO[bytes], size: int, block: Block) -> bytes:
    raw = file.read(size)
    if len(raw) < size:
        raise ValueError(
            f"memopt.data.FolderStream: {block.path} is shorter than the {block.size} bytes that it had when it was "
            "listed: make the stream anew"
        )
    return raw
