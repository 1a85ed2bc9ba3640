"""The commit log: a header, then frames ``u32 length, u32 crc32c of the payload, payload``, little-endian.

A payload is one event as msgpack and never empty, so a run of zero bytes is not a frame. A log is valid up to the
first frame that is not whole; `Scan` says where that is and why, and `find_frame` tells a torn end (nothing valid
behind it, the trace of a killed writer) from damage in the middle (valid frames behind it, which are lost).
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec
import numpy as np
from crc32c import crc32c

from spool.errors import InputError, IntegrityError
from spool.model.events import Event

if TYPE_CHECKING:
    import mmap
    from collections.abc import Iterator

VERSION = 1
LOG_HEADER = struct.pack("<8sII", b"spoollog", VERSION, 0)
"""The first 16 bytes of a log."""

_HEAD = struct.Struct("<II")
_MAX_PAYLOAD = (1 << 32) - 1
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)


def encode_event(event: Event) -> bytes:
    """Return the event as a payload, which was read back once: a log holds nothing that a reader would refuse.

    Raises:
        InputError: it holds what msgpack cannot say (text with a lone surrogate, an object, a huge integer), or what
            its struct does not allow.
    """
    try:
        payload = _encoder.encode(event)
        _decoder.decode(payload)
        return payload
    except (TypeError, ValueError, OverflowError, msgspec.ValidationError) as error:
        raise InputError(f"{type(event).__name__} cannot be recorded: {error}; pass JSON-able facts") from error


def decode_event(payload: bytes | memoryview) -> Event:
    """Return the event of a payload.

    Raises:
        IntegrityError: the payload is not an event of this version.
    """
    try:
        return _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise IntegrityError(
            f"a record of {len(payload)} bytes is not an event: {error}; was it written by a newer Spool?"
        ) from error


def frame(payload: bytes) -> bytes:
    """Return ``payload`` framed.

    Raises:
        InputError: it is empty or over 4 GiB.
    """
    if not 0 < len(payload) <= _MAX_PAYLOAD:
        raise InputError(f"a record holds 1 to {_MAX_PAYLOAD} bytes, not {len(payload)}", got=len(payload))
    return _HEAD.pack(len(payload), crc32c(payload)) + payload


def check_header(buffer: bytes | memoryview | mmap.mmap) -> None:
    """Check that a log starts with `LOG_HEADER`.

    Raises:
        IntegrityError: it does not.
    """
    got = bytes(buffer[: len(LOG_HEADER)])
    if got != LOG_HEADER:
        raise IntegrityError(
            f"this is not a commit log of version {VERSION}: it starts with {got!r}; it is torn, damaged, or newer",
            expected=LOG_HEADER.hex(),
            got=got.hex(),
        )


class Frame(NamedTuple):
    """One whole frame at ``[offset, end)`` of its log; the payload is a copy."""

    offset: int
    end: int
    payload: bytes


Stop = Literal["end", "torn", "crc"]


class Scan:
    """The valid frames of a log from an offset on; iterate once.

    Attributes:
        end: one past the last valid frame so far.
        stop: why it ended: ``end`` (nothing left), ``torn`` (what is left is shorter than its frame, or zeros),
            ``crc`` (a checksum does not match); None before that.
    """

    def __init__(self, buffer: bytes | memoryview | mmap.mmap, offset: int) -> None:
        self._buffer = buffer
        self.end = offset
        self.stop: Stop | None = None

    def __iter__(self) -> Iterator[Frame]:
        view, total, unpack = memoryview(self._buffer), len(self._buffer), _HEAD.unpack_from
        offset = self.end
        while total - offset > _HEAD.size:
            length, crc = unpack(view, offset)
            start, end = offset + _HEAD.size, offset + _HEAD.size + length
            if end > total or length == 0:
                break
            payload = bytes(view[start:end])
            if crc32c(payload) != crc:
                self.stop = "crc"
                return
            self.end = end
            yield Frame(offset, end, payload)
            offset = end
        self.stop = "end" if offset == total else "torn"


def scan(buffer: bytes | memoryview | mmap.mmap, offset: int = len(LOG_HEADER)) -> Scan:
    """Return the valid frames of a log, as an iterable that afterwards tells where and why it stopped.

    Args:
        buffer: the whole log, header included.
        offset: where a frame begins.
    """
    return Scan(buffer, offset)


def find_frame(buffer: bytes | memoryview | mmap.mmap, offset: int) -> int | None:
    """Return where the next whole frame begins behind a damaged one at ``offset``, or None: then it was a torn end.

    Every byte position is tried whose payload would look like an event, so damaged lengths do not matter.
    """
    data = np.frombuffer(buffer, np.uint8)
    view = memoryview(buffer)
    for start in _candidates(data, offset + 1):
        length, crc = _HEAD.unpack_from(view, start)
        if crc32c(view[start + _HEAD.size : start + _HEAD.size + length]) == crc:
            return start
    return None


def _candidates(data: np.ndarray[tuple[int], np.dtype[np.uint8]], first: int) -> Iterator[int]:
    """Yield positions from ``first`` on where a frame of an event could begin: length fits, msgpack array of a tag."""
    piece = 1 << 20
    for low in range(first, data.size - 11, piece):
        part = data[low : low + piece + 11]
        n = part.size - 11
        length = sum(part[i : i + n].astype(np.uint32) << np.uint32(8 * i) for i in range(4))
        kind, after, behind = part[8 : 8 + n], part[9 : 9 + n], part[11 : 11 + n]
        short = (kind >> 4 == 0x9) & (after >> 5 == 0b101)
        wide = (kind == 0xDC) & (behind >> 5 == 0b101)
        left = data.size - _HEAD.size - low - np.arange(n)
        for i in np.flatnonzero((short | wide) & (length > 0) & (length <= left)).tolist():
            yield low + i
