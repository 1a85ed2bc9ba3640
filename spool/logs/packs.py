"""What a stream's folder says of its packs: which files there are, and what the markers of the tiers hold."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

import msgspec
from msgspec import Struct

from spool.errors import IntegrityError, NotFoundError
from spool.formats.manifest import PackEntry, entry_json, parse_entry
from spool.formats.shard import parse_group
from spool.logs.streams import disk_bytes, log_path, records_path
from spool.model.fields import ArraySize, array_sizes
from spool.stores.local import read_file, write_atomic

log = logging.getLogger("spool.logs")


class Cold(Protocol):
    """What a cold root is asked for while logs are fed and read. It raises what a store raises."""

    def events(self, stream: str, pack: int) -> Sequence[bytes]:
        """Return the events of a pack, as its manifest has them."""
        ...

    def records(self, stream: str, pack: int) -> bytes:
        """Return the records file of a pack."""
        ...

    def sizes(self, stream: str) -> Mapping[str, ArraySize] | None:
        """Return the sizes of each stored array of a stream; None where there is no such stream."""
        ...


class Listing(NamedTuple):
    """The packs of a stream by the files that they have in its ``records`` folder."""

    logs: set[int]
    sealed: set[int]
    cold: set[int]
    gone: set[int]


class ColdMark(Struct, frozen=True):
    """What is read of ``<n>.cold``: the pack is whole in the cold root."""

    hot_bytes: int | None = None
    stored_bytes: int | None = None
    sealed_at: float | None = None


class GoneMark(Struct, frozen=True):
    """What ``<n>.gone`` says, and ``gone/<stream>-<n>`` in a cold root: when and why the pack was deleted.

    Attributes:
        at: seconds since the epoch.
        reason: in words.
        done: nothing is left of it in the cold root, where there is one.
    """

    at: float | None = None
    reason: str | None = None
    done: bool = False


def marker_path(root: str, stream: str, pack: int, kind: str) -> str:
    """Return where the marker ``cold`` or ``gone`` of a pack lies."""
    return f"{root}/streams/{stream}/records/{pack}.{kind}"


def list_packs(folder: str) -> Listing:
    """Return the packs that have files in a ``records`` folder.

    Raises:
        FileNotFoundError: there is no such folder.
    """
    found: dict[str, set[int]] = {".log": set(), ".arrow": set(), ".cold": set(), ".gone": set()}
    for file in os.listdir(folder):
        number, ending = os.path.splitext(file)
        if ending in found and number.isdecimal():
            found[ending].add(int(number))
    return Listing(*found.values())


def has_files(root: str, stream: str, pack: int) -> bool:
    """Whether a stream's folder says anything of a pack: then it is what says in which tiers the pack is."""
    folder = f"{root}/streams/{stream}/records/{pack}"
    # in the order in which one follows the other: one of them is found
    return any(os.path.exists(f"{folder}.{ending}") for ending in ("log", "arrow", "cold", "gone"))


def unspilled(root: str, stream: str, pack: int) -> bytes | None:
    """Return the records of a pack that a hot root has and did not bring over: none yet of one that is open.

    None where it has no such pack.

    Raises:
        StorageError: they cannot be read.
    """
    if any(os.path.exists(marker_path(root, stream, pack, kind)) for kind in ("gone", "cold")):
        return None
    if os.path.exists(log_path(root, stream, pack)):
        return b""
    try:
        return read_file(records_path(root, stream, pack))
    except NotFoundError:
        return None


def has_left(root: str, stream: str, pack: int, path: str) -> bool:
    """Whether a file of a pack is not there because the pack was evicted or deleted, or is just now."""
    folder = f"{root}/streams/{stream}/records/{pack}"
    return not os.path.exists(path) and any(map(os.path.exists, (f"{folder}.cold", f"{folder}.gone")))


def read_cold(root: str, stream: str, pack: int) -> ColdMark:
    """Return what the marker of a spilled pack says; nothing where it cannot be read."""
    return _read(marker_path(root, stream, pack, "cold"), ColdMark) or ColdMark()


def read_gone(root: str, stream: str, pack: int) -> GoneMark | None:
    """Return what the marker of a deleted pack says; None where there is none."""
    path = marker_path(root, stream, pack, "gone")
    return _read(path, GoneMark) or (GoneMark() if os.path.exists(path) else None)


Mark = TypeVar("Mark", ColdMark, GoneMark)


def _read(path: str, kind: type[Mark]) -> Mark | None:
    try:
        with open(path, "rb") as file:
            return msgspec.json.decode(file.read(), type=kind)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        log.warning("%s cannot be read, its numbers are left out: %s", path, error)
        return None


def pack_bytes(root: str, stream: str, pack: int) -> int:
    """Return the bytes that the shards and records of a sealed pack take on disk."""
    folder = f"{root}/streams/{stream}"
    paths = [f"{folder}/records/{pack}.arrow"]
    for entry in _folders(folder):
        shard = f"{folder}/{entry}/c/{pack}"  # a file where a row has no inner shape, else a folder
        paths += [shard, *(f"{at}/{name}" for at, _, names in os.walk(shard) for name in names)]
    return sum(map(disk_bytes, paths))


def _folders(folder: str) -> list[str]:
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries if entry.is_dir() and entry.name != "records"]


class KnownSizes:
    """Sizes of each stored array of any stream; streams are frozen, so each is read once.

    Args:
        root: the hot root.
        cold: asked for streams that are not in it.
    """

    def __init__(self, root: str, cold: Cold | None) -> None:
        self._root = root
        self._cold = cold
        self._known: dict[str, Mapping[str, ArraySize]] = {}

    def __call__(self, stream: str) -> Mapping[str, ArraySize] | None:
        """Return them by array; None where there is no such stream.

        Raises:
            StorageError: the cold root cannot be asked.
        """
        known = self._known.get(stream)
        if known is None:
            known = self._read(stream)
            if known is not None:
                self._known[stream] = known
        return known

    def _read(self, stream: str) -> Mapping[str, ArraySize] | None:
        if "/" in stream or stream.startswith("."):
            return None
        path = f"{self._root}/streams/{stream}/zarr.json"
        try:
            with open(path, "rb") as file:
                return array_sizes(*parse_group(file.read()))
        except FileNotFoundError:
            return self._cold.sizes(stream) if self._cold is not None else None
        except IntegrityError as error:
            log.warning("%s is damaged, so rows of other packs in this stream are not known: %s", path, error)
            return None


def write_cold(root: str, entry: PackEntry, url: str) -> None:
    """Say, durably, that a pack is in the cold root at ``url``, whole and verified.

    Raises:
        SpoolError: it cannot be written.
    """
    write_atomic(marker_path(root, entry.stream, entry.pack, "cold"), entry_json(entry, url))


def read_entry(root: str, stream: str, pack: int) -> PackEntry | None:
    """Return what ``<n>.cold`` says of a pack; None where there is no such marker.

    Raises:
        IntegrityError: it is torn.
    """
    try:
        return parse_entry(read_file(marker_path(root, stream, pack, "cold")))
    except NotFoundError:
        return None


def write_gone(root: str, stream: str, pack: int, gone: GoneMark) -> None:
    """Say, durably, that a pack is deleted.

    Raises:
        SpoolError: it cannot be written.
    """
    write_atomic(marker_path(root, stream, pack, "gone"), msgspec.json.encode(gone))


def parse_tombstone(data: bytes, where: str) -> GoneMark:
    """Return what a cold root says of a deleted pack; that it is deleted where nothing else can be read."""
    try:
        return msgspec.json.decode(data, type=GoneMark)
    except msgspec.DecodeError as error:
        log.warning("%s is torn, when and why the pack was deleted is lost: %s", where, error)
        return GoneMark()
