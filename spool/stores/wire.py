"""What a remote store has to be able to do, one blocking try at a time; `spool.stores.remote` does the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from spool.errors import SpoolError
from spool.stores.objects import ObjectInfo
from spool.stores.retry import TransientError

CHECK_SERVER = "check that the store can be reached and is well, then try again"
CHECK_RIGHTS = (
    "check that the credentials are there, are still valid, and may read, list, write and delete below the root"
)


class WrongLengthError(Exception):
    """A body holds another number of bytes than were asked for.

    Args:
        got: how many.
    """

    def __init__(self, got: int) -> None:
        super().__init__(got)
        self.got = got


class ChangedError(Exception):
    """The object is not the version that was asked for any more."""


class OutOfRangeError(Exception):
    """The range begins at or behind the object's end."""


class Version(NamedTuple):
    """An object as it is now.

    Attributes:
        info: key, size and time.
        tag: changes with its content, as far as the store can tell.
    """

    info: ObjectInfo
    tag: str


class Whole(NamedTuple):
    """What reading a whole object gave.

    Attributes:
        data: all of it; None where it is larger than was wanted.
        size: its bytes, as the store says.
        tag: as `Version` has it.
    """

    data: bytes | None
    size: int
    tag: str


class Wire(Protocol):
    """One try of each request. Keys are relative to the root; ``timeout_s`` is the most that a try may take.

    The methods raise the three errors above, or whatever the client raises, which `explain` sorts. `read` and `write`
    are called from many threads at once.
    """

    has_parts: bool
    """Large objects are put with `begin`, `put_part` and `complete`."""

    def read(self, key: str, start: int, stop: int, tag: str | None, timeout_s: float) -> bytes:
        """Return a range, which is not empty, of the object, or of its version ``tag`` as `read_whole` gave it."""
        ...

    def read_whole(self, key: str, most_bytes: int, timeout_s: float) -> Whole:
        """Return the object; a larger one than ``most_bytes`` may be left to `read`."""
        ...

    def write(self, key: str, data: memoryview, timeout_s: float) -> None:
        """Put a whole object, with a checksum on the request where the store takes one."""
        ...

    def create(self, key: str, data: memoryview, timeout_s: float) -> bool:
        """Put a whole object unless there is one, as far as the store can tell; return whether it was put."""
        ...

    def stat(self, key: str, timeout_s: float) -> Version | None:
        """Return the object's version, or None where there is none."""
        ...

    def page(self, prefix: str, token: str | None, timeout_s: float) -> tuple[Sequence[ObjectInfo], str | None]:
        """Return some of the objects whose keys start with ``prefix``, and what to go on with."""
        ...

    def delete(self, keys: Sequence[str], timeout_s: float) -> None:
        """Delete up to 1,000 objects, absent ones included."""
        ...

    def begin(self, key: str, timeout_s: float) -> str:
        """Begin an upload in parts and return its id."""
        ...

    def put_part(self, key: str, upload: str, number: int, data: memoryview, timeout_s: float) -> str:
        """Put part ``number``, from 1, and return its tag."""
        ...

    def complete(self, key: str, upload: str, tags: Sequence[str], timeout_s: float) -> None:
        """Make the parts one object."""
        ...

    def abort(self, key: str, upload: str, timeout_s: float) -> None:
        """Drop an upload and its parts; one that is gone is fine."""
        ...

    def uploads(self, before: float, timeout_s: float) -> Sequence[tuple[str, str]]:
        """Return key and id of the unfinished uploads, in parts or under temporary names, begun before ``before``."""
        ...

    def explain(self, error: Exception, what: str, key: str) -> SpoolError | TransientError:
        """Return what ``error`` means for the operation ``what``; nothing secret gets into the text."""
        ...

    def close(self) -> None:
        """Close this process's connections."""
        ...
