"""What a reader needs of a place where bytes are: the hot root, the cold one, another node's."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spool.read.fetch import Batch, Workers
    from spool.read.plan import Piece
    from spool.read.sample import ByteRange
    from spool.read.select import Run
    from spool.read.streams import Source


class Tier(Protocol):
    """Bytes of streams, by the keys and offsets that they have in a hot root, wherever and however they are kept."""

    def read(self, key: str) -> bytes | None:
        """Return a whole document; None where it is not here."""

    def bring(self, pieces: Sequence[Piece], batch: Batch, workers: Workers) -> list[Piece]:
        """Put the rows of ``pieces`` into the targets of ``batch``; return those whose object is not here.

        Raises:
            IntegrityError: an object is here and short or altered.
            StorageError: the place failed.
        """

    def locate(self, source: Source, run: Run) -> list[ByteRange] | None:
        """Return where the rows of ``run`` lie, as bytes of files or objects; None where their object is not here.

        Raises:
            IntegrityError: an object is here and does not hold them.
        """

    def deletion(self, stream: str, pack: int) -> Deletion | None:
        """Return when and why a pack was deleted, where this place knows."""

    def check(self) -> None:
        """Make sure that the place itself is there, when rows are not.

        Raises:
            StorageError: it is not, or cannot be reached.
        """

    def path(self, key: str) -> str:
        """Return the object's path or URL, for people."""

    def close(self) -> None:
        """Let go of what is open."""


class Deletion(NamedTuple):
    """A pack was deleted on purpose.

    Attributes:
        at: seconds since the epoch.
        reason: why.
    """

    at: float
    reason: str
