"""What a root's spiller says of itself, for whoever waits for it or looks."""

from __future__ import annotations

from contextlib import suppress

import msgspec
from msgspec import Struct

from spool.errors import SpoolError
from spool.stores.local import read_file


class Damaged(Struct, frozen=True):
    """A pack that is not as it was recorded and stays where it is.

    Attributes:
        stream: its stream.
        pack: its number.
        why: what is wrong, where, and what to do.
    """

    stream: str
    pack: int
    why: str

    def __str__(self) -> str:
        return self.why


class Status(Struct, frozen=True):
    """What a spiller says of itself, in ``spiller.json`` of the hot root.

    Attributes:
        pid: its process.
        at: seconds since the epoch.
        n_spilled, spilled_bytes: packs brought over since it started, and their bytes in the cold root.
        bytes_per_s: stored bytes a second while it was uploading.
        n_evicted, n_deleted: packs taken out of the hot root.
        damaged: packs that are not as they were recorded and stay where they are.
        error: why the last round failed; None where it did not.
    """

    pid: int
    at: float
    n_spilled: int = 0
    spilled_bytes: int = 0
    bytes_per_s: float = 0.0
    n_evicted: int = 0
    n_deleted: int = 0
    damaged: tuple[Damaged, ...] = ()
    error: str | None = None


SILENT_S = 15.0
"""A spiller that has said nothing for so long may be stopped: it gives a sign of life every few seconds."""


def status_path(root: str) -> str:
    """Return where a root's spiller says how it is doing."""
    return f"{root}/spiller.json"


def read_status(root: str) -> Status | None:
    """Return what the last spiller said of itself, or None where none ever did."""
    with suppress(SpoolError, msgspec.DecodeError):
        return msgspec.json.decode(read_file(status_path(root)), type=Status)
    return None
