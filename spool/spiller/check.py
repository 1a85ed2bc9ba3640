"""Whether rows that leave for the cold root are those that were recorded: each extent's checksum, piece by piece."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from crc32c import crc32c

from spool.errors import IntegrityError
from spool.formats.frames import decode_event
from spool.model.events import Attached, StepCommitted, parts


@dataclass(slots=True)
class Named:
    """Rows ``[row, row + n)`` of an array that an event names, their checksum, and that of what was seen of them."""

    row: int
    n: int
    crc: int
    session_id: str
    got: int = 0


def named_in(
    payloads: Iterable[bytes], stream: str, pack: int, shard_rows: Mapping[str, int]
) -> dict[str, list[Named]]:
    """Return by array the whole extents of a pack that its own events name, in the order of their rows.

    Rows whose event lies in a later pack (of a transaction, or a split append) are not among them.

    Args:
        payloads: all events of the pack.
        stream: its stream.
        pack: its number.
        shard_rows: R by array.

    Raises:
        IntegrityError: a payload is no event.
    """
    found: dict[str, dict[tuple[int, int, int], Named]] = {name: {} for name in shard_rows}
    for event in chain.from_iterable(parts(decode_event(payload)) for payload in payloads):
        if isinstance(event, StepCommitted | Attached):
            for array, extents in event.extents.items():
                for extent in extents:
                    if extent.stream == stream and extent.n and extent.row // shard_rows[array] == pack:
                        whole = Named(*extent.whole, extent.crc, event.session_id)
                        found[array].setdefault((whole.row, whole.n, whole.crc), whole)
    return {array: sorted(wholes.values(), key=lambda whole: whole.row) for array, wholes in found.items()}


class Checker:
    """Compares the rows of one array of a pack, as they pass, with what was recorded of them.

    Args:
        what: names array, pack and stream in errors.
        wholes: by their first row.
        row_bytes: bytes of a row.
        first: row of the array that the first byte belongs to.
    """

    def __init__(self, what: str, wholes: Sequence[Named], row_bytes: int, first: int) -> None:
        self._what = what
        self._coming = list(reversed(wholes))
        self._open: list[Named] = []
        self._row_bytes = row_bytes
        self._row = first

    def feed(self, view: memoryview) -> None:
        """Look at the next rows.

        Raises:
            IntegrityError: an extent that ends in them is not what was recorded.
        """
        start, width = self._row, self._row_bytes
        stop = self._row = start + len(view) // width
        while self._coming and self._coming[-1].row < stop:
            self._open.append(self._coming.pop())
        for whole in self._open:
            low, high = max(whole.row, start), min(whole.row + whole.n, stop)
            whole.got = crc32c(view[(low - start) * width : (high - start) * width], whole.got)
            if whole.row + whole.n <= stop and whole.got != whole.crc:
                raise self._damaged(whole, f"have crc32c {whole.got:08x}, {whole.crc:08x} was recorded")
        self._open = [whole for whole in self._open if whole.row + whole.n > stop]

    def end(self) -> None:
        """Check that no rows are missing.

        Raises:
            IntegrityError: some are.
        """
        for whole in (*self._open, *reversed(self._coming)):
            raise self._damaged(whole, f"are not all there, the shard ends at row {self._row}")

    def _damaged(self, whole: Named, why: str) -> IntegrityError:
        rows = [whole.row, whole.row + whole.n]
        return IntegrityError(
            f"{self._what}: rows {rows[0]} to {rows[1]} of session {whole.session_id!r} {why}; restore the file, or "
            "discard the session: `spool verify --deep` tells what is affected",
            rows=rows,
            session_id=whole.session_id,
        )
