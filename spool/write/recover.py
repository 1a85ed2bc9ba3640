"""Sealing what dead writers left.

A stream whose lock is free and that has commit logs was left by a writer that died. Its events say how many rows of
each pack count; they may be in a later log than their pack's, so all logs are read before the first is sealed.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping

from msgspec import Struct

from spool import locks
from spool.errors import IntegrityError, LockedError, NotFoundError, SpoolError
from spool.formats import records
from spool.formats.frames import decode_event
from spool.formats.shard import padded_rows, parse_rows
from spool.model.events import Attached, StepCommitted, parts
from spool.model.fields import ArraySpec
from spool.stores.local import map_os_error, read_file, write_atomic
from spool.write.folder import NEW, Folder, is_stream_name, lock_folder, open_folder
from spool.write.log import LogContents, log_path, read_log
from spool.write.seal import Shortfall, find_payload, packs_of, seal_pack


class Recovered(Struct, frozen=True, kw_only=True):
    """What was found in a stream, and done about it (or would be).

    Attributes:
        stream: its name.
        packs: packs sealed.
        n_events: events of those packs.
        torn_bytes: ends of logs that the writer had not finished: events that nobody was promised.
        damaged_bytes: of logs, between events that can be read: events that were there once.
        shortfalls: rows that events refer to and that are not on disk; reading them raises `IntegrityError`.
        rebuilt: metadata files that were torn and are written anew, relative to the stream's folder.
        removed: it was never finished, and is removed.
        error: why it could not be recovered.
    """

    stream: str
    packs: tuple[int, ...] = ()
    n_events: int = 0
    torn_bytes: int = 0
    damaged_bytes: int = 0
    shortfalls: tuple[Shortfall, ...] = ()
    rebuilt: tuple[str, ...] = ()
    removed: bool = False
    error: str | None = None


Ends = Mapping[tuple[str, int], int]
"""Rows that count, by array and pack."""


def recover(root: str, *, dry_run: bool = False) -> list[Recovered]:
    """Seal the packs of every stream whose writer is dead. Streams that are locked are left alone.

    May break off at any point, and be run again and beside live writers.

    Args:
        root: the hot root.
        dry_run: change nothing, only report.

    Returns:
        A report on each stream that needed something.

    Raises:
        SpoolError: the root cannot be read. What fails in one stream is in its report.
    """
    streams = f"{root}/streams"
    try:
        names = sorted(os.listdir(streams)) if os.path.isdir(streams) else []
    except OSError as error:
        raise map_os_error(error, what="list", path=streams) from error
    found = (_recover(root, name, dry_run=dry_run) for name in names)
    return [report for report in found if report is not None and report != Recovered(stream=report.stream)]


def _recover(root: str, name: str, *, dry_run: bool) -> Recovered | None:
    half_made = name.startswith(NEW)
    if not half_made and not is_stream_name(name):
        return None
    path = f"{root}/streams/{name}"
    try:
        lock = lock_folder(path, create=half_made)
    except (LockedError, NotFoundError):  # alive, or renamed or removed just now
        return None
    except SpoolError as error:
        return Recovered(stream=name, error=str(error))
    try:
        if half_made:
            if not dry_run:
                shutil.rmtree(path, ignore_errors=True)
            return Recovered(stream=name, removed=True)
        return _recover_stream(root, name, dry_run=dry_run)
    except SpoolError as error:
        return Recovered(stream=name, error=str(error))
    except OSError as error:
        return Recovered(stream=name, error=str(map_os_error(error, what="recover", path=path)))
    finally:
        locks.release(lock)


def _recover_stream(root: str, name: str, *, dry_run: bool) -> Recovered:
    folder, group = open_folder(root, name)
    logs = {pack: _read_records(folder, pack) for pack in packs_of(folder, ".log")}
    ends = count_rows(folder, (payload for contents in logs.values() for payload in contents.payloads))
    rows = {pack: {spec.name: ends.get((spec.name, pack), 0) for spec in folder.schema.arrays} for pack in logs}
    shortfalls = tuple(_shortfalls(folder, rows))
    if not dry_run:
        _sweep(folder)
        if group is not None:
            write_atomic(f"{folder.path}/zarr.json", group)
    rebuilt = (*(["zarr.json"] if group is not None else []), *_rebuild_arrays(folder, logs, dry_run=dry_run))
    if not dry_run:
        for pack, contents in logs.items():
            seal_pack(folder, pack, rows[pack], contents, direct=True)
    return Recovered(
        stream=name,
        packs=tuple(logs),
        n_events=sum(len(contents.payloads) for contents in logs.values()),
        torn_bytes=sum(contents.torn_bytes for contents in logs.values()),
        damaged_bytes=sum(contents.damaged_bytes for contents in logs.values()),
        shortfalls=shortfalls,
        rebuilt=rebuilt,
    )


def _read_records(folder: Folder, pack: int) -> LogContents:
    """Return a log's contents; where sealing broke off at its very end, of the Arrow file that was made of it.

    A log that a power cut brought back may lack what is in there: it was not durable itself.
    """
    contents = read_log(log_path(folder.path, pack))
    with contextlib.suppress(NotFoundError, IntegrityError):
        sealed = records.decode(read_file(f"{folder.path}/records/{pack}.arrow"))
        if len(sealed) >= len(contents.payloads):
            return LogContents(list(sealed), 0, 0)
    return contents


def count_rows(folder: Folder, payloads: Iterable[bytes]) -> Ends:
    """Return how far events refer to the rows of each array in each pack, counted from the pack's first row.

    Raises:
        IntegrityError: a payload is not an event.
    """
    ends: dict[tuple[str, int], int] = {}
    for payload in payloads:
        for event in parts(decode_event(payload)):
            if not isinstance(event, StepCommitted | Attached):
                continue
            for array, extents in event.extents.items():
                shard_rows = folder.layout.shard_rows.get(array, 0)
                for extent in extents:
                    if extent.stream != folder.name or not shard_rows:
                        continue
                    first, n_rows = extent.whole
                    pack, row = divmod(first, shard_rows)
                    ends[array, pack] = max(row + n_rows, ends.get((array, pack), 0))
    return ends


def _shortfalls(folder: Folder, rows: Mapping[int, Mapping[str, int]]) -> Iterator[Shortfall]:
    for pack, counts in rows.items():
        for spec in folder.schema.arrays:
            expected, got = counts[spec.name] * spec.row_bytes, find_payload(folder, spec, pack).end
            if got < expected:
                yield Shortfall(spec.name, pack, expected, got)


def _rebuild_arrays(folder: Folder, logs: Mapping[int, LogContents], *, dry_run: bool) -> Iterator[str]:
    """Write torn metadata of arrays anew, from the events of the packs that are sealed; sealing adds the others.

    Where records were evicted, which may name rows of packs that are here, the rows of a pack are all that its shard
    has chunks for: better zeros that nobody names than rows that are lost.
    """
    torn = [spec for spec in folder.schema.arrays if not _is_readable(f"{folder.path}/{spec.name}/zarr.json")]
    if not torn:
        return
    sealed = packs_of(folder, ".arrow")
    events = (
        payload for pack in sealed for payload in records.decode(read_file(f"{folder.path}/records/{pack}.arrow"))
    )
    ends = count_rows(folder, itertools.chain(events, *(contents.payloads for contents in logs.values())))
    evicted = not set(sealed).issuperset(packs_of(folder, ".cold"))
    for spec in torn:
        if not dry_run:
            shard_rows = folder.layout.shard_rows[spec.name]
            least = {pack: _padded_rows(folder, spec, pack) if evicted else 0 for pack in sealed}
            counts = ((pack * shard_rows, max(ends.get((spec.name, pack), 0), least[pack])) for pack in sealed)
            valid = [(start, count) for start, count in counts if count]
            os.makedirs(f"{folder.path}/{spec.name}", exist_ok=True)
            write_atomic(f"{folder.path}/{spec.name}/zarr.json", folder.metadata(spec, valid))
        yield f"{spec.name}/zarr.json"


def _padded_rows(folder: Folder, spec: ArraySpec, pack: int) -> int:
    chunk_rows, shard_rows = (sizes[spec.name] for sizes in (folder.layout.chunk_rows, folder.layout.shard_rows))
    return padded_rows(
        find_payload(folder, spec, pack).end,
        chunk_bytes=chunk_rows * spec.row_bytes,
        chunk_rows=chunk_rows,
        shard_rows=shard_rows,
    )


def _is_readable(path: str) -> bool:
    try:
        parse_rows(read_file(path))
    except SpoolError:
        return False
    return True


def _sweep(folder: Folder) -> None:
    """Remove temporary files that a killed writer left beside what it was replacing."""
    for path in (
        folder.path,
        f"{folder.path}/records",
        *(f"{folder.path}/{spec.name}" for spec in folder.schema.arrays),
    ):
        for name in os.listdir(path):
            if name.startswith(".") and name.endswith(".tmp"):
                os.unlink(f"{path}/{name}")
