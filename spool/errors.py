"""The exceptions of Spool, grouped by what the caller does next.

::

    SpoolError
    |-- InputError            fix the call (also a ValueError)
    |   |-- ConfigError         the URI, an option or a field spec is wrong
    |   |-- PayloadError        an array does not fit: names field, step, token, layer, value
    |   |-- StepConflictError   the same step_id with other content
    |   `-- SessionStateError   append after finalize, discard of an inner step, ...
    |-- NotFoundError         look elsewhere (also a LookupError)
    |   `-- ReleasedError       the data was released on purpose
    |-- GapError              rows that were never sent: pass missing=..., or cut the segment
    |-- CapacityError         wait, or give more room
    |-- StorageError          the storage failed: retry, or call its operator (also an OSError)
    |   |-- ReplacedError       another spool is in its place: open that one
    |   `-- LockedError         another process owns this
    |-- RankError             another rank, or who reads for it, failed or is gone: restart the job, or give more time
    `-- IntegrityError        bytes on disk are not what was written: restore them from elsewhere
        `-- AbsentError         a whole file is missing

Every class has a stable ``kind``; every message names what, where, and what to do. Structured facts are in ``details``.
"""

from __future__ import annotations

import errno

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""What the operating system says where a file cannot grow."""


class SpoolError(Exception):
    """Base of every exception that Spool raises on purpose.

    Attributes:
        kind: stable, machine-readable name of the class.
        details: JSON-able facts of this occurrence (field, step, rows, file, expected, got, ...).
    """

    kind = "error"

    def __init__(self, message: str, **details: object) -> None:
        super().__init__(message)
        self.details = details

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), str(self), self.details))


def _rebuild(cls: type[SpoolError], message: str, details: dict[str, object]) -> SpoolError:
    return cls(message, **details)


class InputError(SpoolError, ValueError):
    """The call is wrong; nothing was changed."""

    kind = "input"


class ConfigError(InputError):
    """A URI, an option or a field spec is wrong."""

    kind = "config"


class PayloadError(InputError):
    """An array does not fit what it was declared to be; nothing was written."""

    kind = "payload"


class StepConflictError(InputError):
    """A step id was used again with other content."""

    kind = "step_conflict"


class SessionStateError(InputError):
    """The session cannot do this any more (or yet)."""

    kind = "session_state"


class NotFoundError(SpoolError, LookupError):
    """No such session, step, segment, field or spool."""

    kind = "not_found"


class ReleasedError(NotFoundError):
    """The data was released or discarded on purpose."""

    kind = "released"


class GapError(SpoolError):
    """Rows were asked for that were never sent."""

    kind = "gap"


class CapacityError(SpoolError):
    """There is no room: the hot tier's limit, or the disk's."""

    kind = "capacity"


class StorageError(SpoolError, OSError):
    """The storage failed or cannot be reached."""

    kind = "storage"


def moved_away(root: str) -> StorageError:
    """Return the error for a hot root that is not where it was opened."""
    return StorageError(
        f"the hot root {root} was moved, removed or replaced while it was open, and nothing more is recorded; move it "
        "back, or close this handle and open the spool where it is now",
        root=root,
    )


def another_cold_root(url: str, there: str | None, spool_id: str | None) -> StorageError:
    """Return the error for a cold root that has no identity, or that of spool ``there``."""
    other = f"belongs to spool {there} now, not to spool {spool_id}"
    now = f"has no spool.json now, and was that of spool {spool_id}" if there is None else other
    return StorageError(
        f"{url} {now}: it was emptied, is not mounted, or something else is mounted there; "
        "nothing is read, taken in or forgotten until what was there is back"
    )


class ReplacedError(StorageError):
    """Another spool lies where this one was opened: open that one, or this one where it is now."""

    kind = "replaced"


def replaced(root: str) -> ReplacedError:
    """Return the error for a hot root in whose place another spool's is."""
    return ReplacedError(
        f"the hot root {root} was replaced while it was open: another spool is there, as of a run that was started "
        "anew; close this handle and open the spool where it is now, or the other one",
        root=root,
    )


class LockedError(StorageError):
    """Another live process owns this stream or role."""

    kind = "locked"


class RankError(SpoolError):
    """Another rank of the trainer, or the process that reads for it, failed, died or did not answer in time."""

    kind = "rank"


class IntegrityError(SpoolError):
    """Bytes on disk are missing, short or altered."""

    kind = "integrity"


class AbsentError(IntegrityError):
    """A whole file or object is missing where it was recorded to be."""

    kind = "integrity"
