"""The body of a request, sent from memory that somebody else owns."""

from __future__ import annotations

import io
import os


class Body(io.BytesIO):
    """A file over memory, which is not copied: HTTP clients copy what they take as bytes, whole and once more.

    It is a `BytesIO` as that is what clients send from memory without a thread of their own for reading.

    Args:
        data: stays the caller's. A request that was given up may for a moment go on to send what is there by then; its
            Content-MD5 is that of what was meant, so the server refuses it.
    """

    def __init__(self, data: memoryview) -> None:
        super().__init__()
        self._data = data
        self._at = 0

    def read(self, size: int | None = -1, /) -> memoryview:  # type: ignore[override]
        """Return the next ``size`` bytes, all that are left where it is negative or None; they are no copy."""
        start = self._at
        self._at = len(self._data) if size is None or size < 0 else min(start + size, len(self._data))
        return self._data[start : self._at]

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Go to a position; see `io.BytesIO.seek`."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: len(self._data)}[whence]
        self._at = min(max(base + offset, 0), len(self._data))
        return self._at

    def tell(self) -> int:
        """Return the position."""
        return self._at

    def getbuffer(self) -> memoryview:
        """Return all of it."""
        return self._data[:]

    def __len__(self) -> int:
        return len(self._data)
