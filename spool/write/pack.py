"""The open pack of a stream: a tape for every array, and the commit log."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import NamedTuple

from spool.write.folder import Folder
from spool.write.log import CommitLog
from spool.write.mover import Mover
from spool.write.ring import Ring
from spool.write.tape import Tape


class Mark(NamedTuple):
    """What of a tape is published: write up to ``ready``, and up to ``whole`` it is complete appends."""

    tape: Tape
    ready: int
    whole: int


class Pack:
    """The pack that a stream appends to.

    Args:
        folder: the stream.
        number: of the pack.
        rings: by array; this pack has them to itself.
        direct: write shards past the page cache where the file system allows it.
        sync: make the log's name durable.
        mover: moves blocks of long tails; None where all must be on disk when it is written.

    Attributes:
        number: of the pack.
        tapes: by array.
        log: its commit log.
        opened: ``time.monotonic()`` of its opening.
    """

    def __init__(
        self, folder: Folder, number: int, rings: Mapping[str, Ring], *, direct: bool, sync: bool, mover: Mover | None
    ) -> None:
        """Open an empty pack.

        Raises:
            OSError: its log cannot be created.
        """
        self.number = number
        self.tapes = {
            spec.name: Tape(folder, spec, number, rings[spec.name], direct=direct, mover=mover)
            for spec in folder.schema.arrays
        }
        self._tapes = tuple(self.tapes.values())
        try:
            self.log = CommitLog(folder.path, number, sync=sync)
        except BaseException:
            for tape in self._tapes:
                tape.abandon()
            raise
        self.opened = time.monotonic()

    @property
    def is_empty(self) -> bool:
        """Whether it holds neither rows nor events."""
        return self.log.n_events == 0 and not any(tape.whole for tape in self._tapes)

    @property
    def has_rows(self) -> bool:
        """Whether any row is filled."""
        return any(tape.filled for tape in self._tapes)

    @property
    def n_bytes(self) -> int:
        """Bytes of its rows and its log."""
        return sum(tape.whole for tape in self._tapes) + self.log.end

    @property
    def rows(self) -> dict[str, int]:
        """Rows of complete appends by array."""
        return {name: tape.n_rows for name, tape in self.tapes.items()}

    @property
    def has_partial(self) -> bool:
        """Whether a part of an append is published."""
        return any(tape.ready > tape.whole for tape in self._tapes)

    def publish_part(self) -> None:
        """Offer what is filled to the next leader, as a part of an append."""
        for tape in self._tapes:
            tape.ready = tape.filled

    def publish_whole(self, *, keep: bool) -> None:
        """Offer what is filled as a complete append; ``keep`` it whatever fails later."""
        for tape in self._tapes:
            tape.ready = tape.whole = tape.filled
            if keep:
                tape.kept = tape.filled

    def marks(self) -> list[Mark]:
        """Return what is published now."""
        return [Mark(tape, tape.ready, tape.whole) for tape in self._tapes]

    def forget(self) -> None:
        """Drop what is filled and not published."""
        for tape in self._tapes:
            tape.filled = tape.whole

    def rewind(self, *, to_kept: bool) -> None:
        """Go back to the last complete append or, after a failed write, to what must stay and the frames for it.

        Raises:
            OSError: a file cannot be cut.
        """
        if to_kept:
            self.log.cut()
        for tape in self._tapes:
            if to_kept:
                tape.whole = tape.kept
            tape.rewind()

    def write(self, marks: list[Mark]) -> None:
        """Write what is published.

        Raises:
            OSError: not all of it is on disk.
        """
        for tape, ready, _ in marks:
            tape.write(ready)

    def sync(self) -> None:
        """Make what was written durable.

        Raises:
            OSError, SpoolError: it may not be.
        """
        for tape in self._tapes:
            tape.sync()

    def settle(self) -> None:
        """What was written is committed."""
        for tape in self._tapes:
            tape.settle()

    def close(self) -> None:
        """Close its files."""
        for tape in self._tapes:
            tape.close()
        self.log.close()

    def abandon(self) -> None:
        """Close its files and change nothing, in a forked child too."""
        for tape in self._tapes:
            tape.abandon()
        self.log.close()
