"""What happens, for whoever wants to count it: frozen events, handed to a callable that `spool.open` was given.

::

    sp = spool.open(uri, observer=print)

An observer is called where the thing happened, on whichever thread that was, several at once; it shall be quick. What
it raises is logged, once, and goes no further. Without one nothing is measured and nothing is made. A process sees its
own events: the spiller that a writer starts is another one, and `Spool.status` says how it is doing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from msgspec import Struct

log = logging.getLogger("spool.observe")


class Appended(Struct, frozen=True):
    """Steps were committed.

    Attributes:
        n_bytes: of the rows that were stored for them.
        n_steps: how many.
        seconds: of the call, without waiting for room.
    """

    n_bytes: int
    n_steps: int
    seconds: float


class Read(Struct, frozen=True):
    """References were read.

    Attributes:
        requested_bytes: stored bytes of the rows and layers that were asked for; those that several share count once
            for each.
        fetched_bytes: what was read for them, by tier: ``hot``, ``cold``.
        seconds: of the call.
    """

    requested_bytes: int
    fetched_bytes: dict[str, int]
    seconds: float


class Waited(Struct, frozen=True):
    """A call had to wait, whether it succeeded then or not.

    Attributes:
        seconds: how long.
        reason: ``room`` in the hot tier, or ``publish``.
    """

    seconds: float
    reason: str


class IntegrityFailed(Struct, frozen=True):
    """A read met bytes that are missing or altered; the caller got the error, or the bytes of another tier.

    Attributes:
        message: the error.
        stream, field, file: where, as far as the error says.
    """

    message: str
    stream: str | None = None
    field: str | None = None
    file: str | None = None


class Retried(Struct, frozen=True):
    """A request to the cold root is tried again.

    Attributes:
        key: of the object.
    """

    key: str


class Spilled(Struct, frozen=True):
    """The spiller of this process brought packs to the cold root.

    Attributes:
        n_packs: how many.
        n_bytes: what they take there.
        seconds: how long it took.
    """

    n_packs: int
    n_bytes: int
    seconds: float


class Evicted(Struct, frozen=True):
    """The spiller of this process took packs out of the hot tier, which are safe in the cold one.

    Attributes:
        n_packs: how many.
        n_bytes: what they took.
    """

    n_packs: int
    n_bytes: int


class Deleted(Struct, frozen=True):
    """This process deleted packs that retention lets go.

    Attributes:
        n_packs: how many.
        n_bytes: what they took, in both tiers.
    """

    n_packs: int
    n_bytes: int


Event = Appended | Read | Waited | IntegrityFailed | Retried | Spilled | Evicted | Deleted

Observer = Callable[[Event], object]

_told: set[type[BaseException]] = set()


def tell(observer: Observer | None, event: Event) -> None:
    """Hand an event to the observer, if there is one; never raises."""
    if observer is None:
        return
    try:
        observer(event)
    except Exception as error:
        if type(error) not in _told:
            _told.add(type(error))
            log.exception("the observer failed on %s; the like of it is not logged again", type(event).__name__)
