"""Checksums of extents, also where an extent was read in several parts and by several threads."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

_POLYNOMIAL = 0x82F63B78
_ONE = 1 << 31
_X = 1 << 30


class Check(NamedTuple):
    """What the bytes of an extent must sum up to.

    Attributes:
        key: the object they lie in.
        length: how many there are.
        crc: expected crc32c.
        stream: the stream's name.
        field: the field's name.
        start: first stored row.
        stop: one past the last.
    """

    key: str
    length: int
    crc: int
    stream: str
    field: str
    start: int
    stop: int


class Part(NamedTuple):
    """The crc32c of ``length`` bytes at ``offset`` of an object."""

    offset: int
    length: int
    crc: int


def total(parts: list[Part]) -> int:
    """Return the crc32c of the bytes of ``parts``, which follow on each other in some order."""
    crc = 0
    for part in sorted(parts):
        crc = combine(crc, part.crc, part.length)
    return crc


def combine(first: int, second: int, n_bytes: int) -> int:
    """Return the crc32c of two runs of bytes from theirs, where the second has ``n_bytes``.

    A CRC is linear: bytes that follow multiply the polynomial of what came before by ``x ** (8 * n_bytes)``.
    """
    return _multiply(_power(8 * n_bytes), first) ^ second


@lru_cache(maxsize=256)
def _power(exponent: int) -> int:
    result, base = _ONE, _X
    while exponent:
        if exponent & 1:
            result = _multiply(base, result)
        base = _multiply(base, base)
        exponent >>= 1
    return result


def _multiply(one: int, other: int) -> int:
    """Return the product modulo the polynomial; bit 31 is the coefficient of ``x ** 0``."""
    product = 0
    for bit in range(31, -1, -1):
        if one >> bit & 1:
            product ^= other
        other = other >> 1 ^ (_POLYNOMIAL if other & 1 else 0)
    return product
