"""Which generated tokens a loss mask cleared, as the few bytes of a step's record."""

from __future__ import annotations

import zlib

import numpy as np
from numpy.typing import NDArray

from spool.errors import IntegrityError


def pack_cleared(mask: NDArray[np.uint8]) -> bytes:
    """Return ``mask`` ``[r]`` of 0 and 1 as zlib of bits, the first token highest: 1 where a token is cleared."""
    return zlib.compress(np.packbits(mask == 0).tobytes(), 1)


def cleared_before(data: bytes, n: int) -> NDArray[np.int64]:
    """Return int64 ``[n + 1]``: how many of the first 0, 1, ... n tokens are cleared.

    Args:
        data: what `pack_cleared` returned; empty where nothing is cleared.
        n: tokens of the response.

    Raises:
        IntegrityError: it is torn, or of fewer tokens.
    """
    counts = np.zeros(n + 1, np.int64)
    if data:
        try:
            bits = zlib.decompressobj().decompress(data, (n + 7) // 8)
        except zlib.error as error:
            raise _damaged(n) from error
        if len(bits) * 8 < n:
            raise _damaged(n)
        np.cumsum(np.unpackbits(np.frombuffer(bits, np.uint8), count=n), out=counts[1:])
    return counts


def _damaged(n: int) -> IntegrityError:
    return IntegrityError(
        f"a step's record does not say which of its {n} generated tokens are cleared; restore its log"
    )
