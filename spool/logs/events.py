"""Places in the catalog -> whole events, from the commit log or the sealed records."""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Callable, Sequence
from functools import partial

from spool.catalog import Located, Place
from spool.errors import AbsentError, IntegrityError, NotFoundError, ReleasedError, SpoolError, StorageError
from spool.formats import records
from spool.formats.frames import decode_event, scan
from spool.logs.packs import GoneMark, marker_path
from spool.logs.streams import log_path, records_path
from spool.model.events import Event, Single, parts
from spool.sizes import format_time
from spool.stores.local import map_os_error

log = logging.getLogger("spool.logs")

_FIRST_BYTES = 64 << 10

ColdRecords = Callable[[str, int], bytes | None]
"""Returns the records file of a pack from the cold root; None where no cold root is known."""

Gone = Callable[[str, int], GoneMark | None]
"""Returns when and why a pack was deleted; None where it was not."""


def map_file(path: str) -> mmap.mmap:
    """Map a file to read; it is unmapped with the last view of it.

    Raises:
        IntegrityError: the file is empty.
        OSError: it cannot be opened.
    """
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            raise IntegrityError(f"{path} is empty; restore it from a copy", file=path)
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def read_events(root: str, places: Sequence[Place], cold_records: ColdRecords, gone: Gone) -> list[Single]:
    """Return the whole events at ``places``, in their order; each file is opened once.

    Args:
        root: the hot root.
        places: where they are.
        cold_records: asked for packs that are not in the hot root.
        gone: asked for packs that are not there, before it is called a loss.

    Raises:
        ReleasedError: a pack was released or discarded, and deleted.
        IntegrityError: a record is damaged, or a pack is lost.
        StorageError: one cannot be read.
    """
    packs: dict[tuple[str, int], list[int]] = {}
    for number, place in enumerate(places):
        packs.setdefault((place.stream, place.pack), []).append(number)
    found: dict[int, Single] = {}
    for (stream, pack), numbers in packs.items():
        wanted = [places[number] for number in numbers]
        whole = _from_log(log_path(root, stream, pack), wanted)
        if whole is None:
            whole = _from_records(records_path(root, stream, pack), wanted, partial(cold_records, stream, pack))
        if whole is None:
            whole = _from_cold(root, stream, pack, wanted, cold_records, gone)
        found.update(zip(numbers, map(_inner, whole, wanted), strict=True))
    return [found[number] for number in range(len(places))]


def _inner(event: Event, place: Place) -> Single:
    inner = parts(event)
    found = inner[place.inner] if place.inner < len(inner) else None
    if found is None or (isinstance(place, Located) and _name(found) != _name(place.event)):
        raise IntegrityError(
            f"event {place.seq} of pack {place.pack} of stream {place.stream} is not the one that the catalog knows: "
            "events before it were lost; rebuild the catalog",
            stream=place.stream, pack=place.pack,
        )  # fmt: skip
    return found


def _name(event: Single) -> tuple[object, ...]:
    return type(event), getattr(event, "session_id", None), getattr(event, "index", None)


def _from_log(path: str, places: Sequence[Place]) -> list[Event] | None:
    """Read from the log; None where it is sealed, or was when the catalog took its events in."""
    if any(place.offset < 0 for place in places):
        return None
    try:
        with open(path, "rb", buffering=0) as file:
            return [decode_event(_payload_at(file.fileno(), path, place.offset)) for place in places]
    except FileNotFoundError:
        return None
    except OSError as error:
        raise map_os_error(error, what="read", path=path) from error


def _payload_at(fd: int, path: str, offset: int) -> bytes:
    n_bytes = _FIRST_BYTES
    while True:
        data = os.pread(fd, n_bytes, offset)
        for frame in scan(data, 0):
            return frame.payload
        if len(data) < n_bytes:
            raise IntegrityError(
                f"{path} has no whole event at byte {offset}: it was altered; rebuild the catalog",
                file=path,
                offset=offset,
            )
        n_bytes *= 4


def _from_records(path: str, places: Sequence[Place], cold: Callable[[], bytes | None]) -> list[Event] | None:
    """Read from the sealed records, from their copy where they are damaged; None where they are not in the hot root."""
    try:
        return _decode(map_file(path), path, places)
    except FileNotFoundError:
        return None
    except IntegrityError as damage:
        try:
            data = cold()
            found = None if data is None else _decode(data, "the copy in the cold root", places)
        except SpoolError as error:
            raise damage from error
        if found is None:
            raise
        log.warning("%s; it was read from the cold root", damage)
        return found
    except OSError as error:
        raise map_os_error(error, what="read", path=path) from error


def _from_cold(
    root: str, stream: str, pack: int, places: Sequence[Place], cold_records: ColdRecords, gone: Gone
) -> list[Event]:
    where = f"pack {pack} of stream {stream}"
    mark = gone(stream, pack)
    if mark is not None:
        at = "" if mark.at is None else f" on {format_time(mark.at)}"
        raise ReleasedError(
            f"{where} was {mark.reason or 'released or discarded'} and deleted{at}", stream=stream, pack=pack
        )
    try:
        data = cold_records(stream, pack)
    except NotFoundError as error:
        raise AbsentError(f"{where} is lost: {error}; restore it from a copy", stream=stream, pack=pack) from error
    if data is not None:
        return _decode(data, f"the records of {where} in the cold root", places)
    if os.path.exists(marker_path(root, stream, pack, "cold")):
        raise StorageError(f"{where} is in the cold root only; open the spool with spill=", stream=stream, pack=pack)
    raise IntegrityError(
        f"{records_path(root, stream, pack)} is lost: it is neither there nor marked as released; restore it",
        stream=stream, pack=pack,
    )  # fmt: skip


def _decode(buffer: bytes | mmap.mmap, path: str, places: Sequence[Place]) -> list[Event]:
    try:
        if len(places) == 1:
            return [decode_event(records.one(buffer, places[0].seq))]
        payloads = records.decode(buffer)
    except IntegrityError as error:
        raise IntegrityError(f"{path}: {error}", file=path) from error
    if max(place.seq for place in places) >= len(payloads):
        raise IntegrityError(
            f"{path} has {len(payloads)} events, the catalog knows more; rebuild the catalog", file=path
        )
    return [decode_event(payloads[place.seq]) for place in places]
