"""What a hot root says of a pack that is no longer only there: ``records/<n>.cold`` and ``records/<n>.gone``."""

from __future__ import annotations

from typing import TypeVar

import msgspec
from msgspec import Struct

from spool.errors import IntegrityError, NotFoundError
from spool.formats.manifest import PackEntry
from spool.stores.local import read_file, write_atomic

T = TypeVar("T")


class Gone(Struct, frozen=True):
    """Content of ``records/<n>.gone``, and of ``gone/<stream>-<n>`` in a cold root.

    Attributes:
        at: when it was decided, seconds since the epoch.
        reason: why.
        done: nothing is left of it in the cold root, where there is one.
    """

    at: float
    reason: str
    done: bool = False


def spilled_path(root: str, stream: str, pack: int) -> str:
    """Return the marker of a pack that is in the cold root, whole and verified."""
    return f"{root}/streams/{stream}/records/{pack}.cold"


def gone_path(root: str, stream: str, pack: int) -> str:
    """Return the marker of a pack that is deleted, or is being."""
    return f"{root}/streams/{stream}/records/{pack}.gone"


def write_spilled(root: str, entry: PackEntry) -> None:
    """Say, durably, that a pack is in the cold root."""
    write_atomic(spilled_path(root, entry.stream, entry.pack), msgspec.json.encode(entry))


def read_spilled(root: str, stream: str, pack: int) -> PackEntry | None:
    """Return what is in the cold root of a pack, or None where the marker is missing.

    Raises:
        IntegrityError: the marker is torn.
    """
    path = spilled_path(root, stream, pack)
    return _read(path, PackEntry)


def write_gone(root: str, stream: str, pack: int, gone: Gone) -> None:
    """Say, durably, that a pack is deleted."""
    write_atomic(gone_path(root, stream, pack), msgspec.json.encode(gone))


def read_gone(root: str, stream: str, pack: int) -> Gone | None:
    """Return when and why a pack was deleted, or None where it was not."""
    return _read(gone_path(root, stream, pack), Gone)


def _read(path: str, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(read_file(path), type=kind)
    except NotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise IntegrityError(
            f"{path} is torn: {error}; remove it, and the pack is brought over again", file=path
        ) from error


def parse_gone(data: bytes, where: str) -> Gone:
    """Return what a marker says.

    Raises:
        IntegrityError: it is torn.
    """
    try:
        return msgspec.json.decode(data, type=Gone)
    except msgspec.DecodeError as error:
        raise IntegrityError(
            f"{where} is torn: {error}; it says when and why a pack was deleted", file=where
        ) from error
