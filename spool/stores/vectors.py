"""Scattered and direct reads of one open file, within the limits of the system calls."""

from __future__ import annotations

import os

from spool.stores.local import BLOCK

IOV_MAX = 1024
"""Buffers that one ``preadv`` takes."""
MAX_CALL_BYTES = 0x7FFFF000
"""Bytes that one ``preadv`` moves."""


def preadv_all(fd: int, buffers: list[memoryview], offset: int) -> int:
    """Fill byte ``buffers`` from ``offset`` on in as few calls as the kernel's limits allow; return the bytes read.

    Fewer than asked for means that the file ends there.
    """
    got, left = 0, buffers
    while left:
        n = os.preadv(fd, _one_call(left), offset + got)
        if n == 0:
            break
        got += n
        left = split(left, n)[1]
    return got


def _one_call(buffers: list[memoryview]) -> list[memoryview]:
    """Return what one call may fill: `IOV_MAX` buffers, `MAX_CALL_BYTES` bytes."""
    batch = buffers[:IOV_MAX]
    return split(batch, MAX_CALL_BYTES)[0] if sum(map(len, batch)) > MAX_CALL_BYTES else batch


def read_direct(fd: int, block: memoryview, offset: int, length: int) -> int:
    """Read ``length`` bytes at ``offset`` to ``block[offset % BLOCK:]``; return how many came.

    Args:
        fd: opened for direct I/O.
        block: page-aligned, with room for the whole blocks that hold the range.
        offset: of the first byte, at any alignment.
        length: bytes, of any number.
    """
    skew = offset % BLOCK
    want, got = whole_blocks(skew + length), 0
    while got < want:
        n = os.preadv(fd, [block[got : min(want, got + MAX_CALL_BYTES)]], offset - skew + got)
        got += n
        # only the end of the file leaves less than a whole block
        if n == 0 or n % BLOCK:
            break
    return min(max(got - skew, 0), length)


def split(buffers: list[memoryview], n_bytes: int) -> tuple[list[memoryview], list[memoryview]]:
    """Cut a list of byte buffers after ``n_bytes`` bytes."""
    left = n_bytes
    for i, buffer in enumerate(buffers):
        if left < len(buffer):
            return ([*buffers[:i], buffer[:left]] if left else buffers[:i]), [buffer[left:], *buffers[i + 1 :]]
        left -= len(buffer)
    return buffers, []


def flat(buffer: memoryview) -> memoryview:
    """Return a view of the same memory as single bytes."""
    return buffer if buffer.ndim == 1 and buffer.format == "B" else buffer.cast("B")


def whole_blocks(n_bytes: int) -> int:
    """Return ``n_bytes`` rounded up to whole blocks."""
    return -(-n_bytes // BLOCK) * BLOCK
