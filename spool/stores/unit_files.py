"""Writing, comparing and reading the file of a multimodal unit."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress

from spool.stores.local import BLOCK, aligned_buffer, map_os_error, pwrite_all, set_direct
from spool.stores.vectors import preadv_all

LARGE_BYTES = 1 << 20
"""Files from this size on leave nothing in the page cache."""
_PIECE_BYTES = 4 << 20


def write(path: str, parts: Sequence[bytes | memoryview], *, sync: bool, direct: bool) -> None:
    """Write a file; one that is large goes past the page cache."""
    size = sum(map(len, parts))
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        if direct and size >= LARGE_BYTES and set_direct(fd, on=True):
            _write_direct(fd, parts, size)
        else:
            offset = 0
            for part in parts:
                pwrite_all(fd, part, offset)
                offset += len(part)
        if sync:
            os.fsync(fd)
    finally:
        os.close(fd)


def read(path: str) -> bytearray:
    """Return a file, which does not stay in the page cache where it is large."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            data = bytearray(os.fstat(fd).st_size)
            got = preadv_all(fd, [memoryview(data)], 0)
            if len(data) >= LARGE_BYTES:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise map_os_error(error, what="read", path=path) from error
    return data[:got] if got < len(data) else data


def _write_direct(fd: int, parts: Sequence[bytes | memoryview], size: int) -> None:
    """Write ``parts`` by whole blocks, in pieces, and the rest behind the last whole block as files are written."""
    block = aligned_buffer(min(_PIECE_BYTES, -(-size // BLOCK) * BLOCK))
    filled = offset = 0
    for part in parts:
        done = 0
        while done < len(part):
            n = min(len(part) - done, len(block) - filled)
            block[filled : filled + n] = part[done : done + n]
            done, filled = done + n, filled + n
            if filled == len(block):
                pwrite_all(fd, block, offset, direct=True)
                offset, filled = offset + filled, 0
    n_whole = filled - filled % BLOCK
    pwrite_all(fd, block[:n_whole], offset, direct=True)
    if filled > n_whole:
        set_direct(fd, on=False)
        pwrite_all(fd, block[n_whole:filled], offset + n_whole)


def same(path: str, parts: Sequence[bytes | memoryview]) -> bool:
    """Return whether a file can be read and consists of ``parts``; a large one does not stay in the page cache."""
    size, offset = sum(map(len, parts)), 0
    with suppress(OSError), open(path, "rb", buffering=0) as file:
        fd = file.fileno()
        if os.fstat(fd).st_size != size:
            return False
        for wanted in (part[at : at + _PIECE_BYTES] for part in parts for at in range(0, len(part), _PIECE_BYTES)):
            found = bytearray(len(wanted))
            if preadv_all(fd, [memoryview(found)], offset) < len(found) or found != wanted:  # type: ignore[comparison-overlap]
                return False
            offset += len(found)
        if size >= LARGE_BYTES:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return True
    return False


def name(draft: str, path: str, parts: Sequence[bytes | memoryview]) -> bool:
    """Give a draft its name unless there is a file with its bytes; return whether it was given."""
    try:
        os.link(draft, path)
    except FileExistsError:
        if same(path, parts):
            os.utime(path)
            return False
        os.rename(draft, path)  # what is there was damaged
    return True
