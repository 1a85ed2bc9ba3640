"""What a reorganiser and its ranks say to each other."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from spool import errors
from spool.errors import RankError, SpoolError
from spool.model.fields import ROUTED_EXPERTS
from spool.train.delivery.arrays import Array
from spool.train.delivery.work import Settings


class Hello(Struct, frozen=True, tag="hello"):
    """A rank joins.

    Attributes:
        tp: which of the ranks that share the reorganiser it is.
        pid: its process.
        settings: how it wants micro-batches.
    """

    tp: int
    pid: int
    settings: Settings


class Submit(Struct, frozen=True, tag="submit"):
    """A rank says what its mini-batch ``number`` is; every rank that does says the same.

    Attributes:
        number: mini-batches that it submitted before.
        work: an encoded `Work`.
    """

    number: int
    work: bytes


class Finish(Struct, frozen=True, tag="finish"):
    """There are ``n`` mini-batches, and no more."""

    n: int


class Released(Struct, frozen=True, tag="released"):
    """A rank let go of the memory of a micro-batch."""

    serial: int


class Failed(Struct, frozen=True, tag="failed"):
    """A rank failed, and says why before it goes."""

    reason: str


class Bye(Struct, frozen=True, tag="bye"):
    """A rank needs nothing more."""


class Welcome(Struct, frozen=True, tag="welcome"):
    """A rank is let in.

    Attributes:
        pid: the reorganiser's process.
    """

    pid: int


class Planned(Struct, frozen=True, tag="planned"):
    """What mini-batch ``number`` is."""

    number: int
    work: bytes


class Ready(Struct, frozen=True, tag="ready"):
    """A micro-batch; its memory comes with the message.

    Attributes:
        serial: micro-batches that were ready before, of all mini-batches.
        mini_batch: number of the mini-batch, as it was submitted.
        number: of the micro-batch in it.
        arrays: what lies in the memory.
        n_bytes: of the memory.
        fetched_bytes: that were read for it.
    """

    serial: int
    mini_batch: int
    number: int
    arrays: tuple[Array, ...]
    n_bytes: int
    fetched_bytes: int

    @property
    def absent(self) -> int | None:
        """What marks an absent entry inside a row of the routing; None where there is no such mark."""
        return next((array.absent for array in self.arrays if array.name == ROUTED_EXPERTS), None)


class Pulse(Struct, frozen=True, tag="pulse"):
    """The process that reads lives.

    Attributes:
        waits_for: what it waits for, in words; empty where it waits for no rank in particular.
        trouble: what keeps it from reading, in words; empty where nothing does.
    """

    waits_for: str
    trouble: str = ""


class End(Struct, frozen=True, tag="end"):
    """All mini-batches were handed out."""


class Failure(Struct, frozen=True, tag="failure"):
    """The first thing that went wrong; nothing more comes.

    Attributes:
        name: of the class of the exception, in `spool.errors`.
        message: of it.
        details: of it.
    """

    name: str
    message: str
    details: dict[str, Any] = {}

    @classmethod
    def of(cls, error: BaseException, who: str = "the process that reads for this feed") -> Failure:
        """Return what ranks are told of an exception of ``who``."""
        if not isinstance(error, SpoolError):
            error = RankError(f"{who} failed: {type(error).__name__}: {error}")
        name = next(base.__name__ for base in type(error).__mro__ if base.__module__ == errors.__name__)
        return cls(name, str(error), msgspec.to_builtins(error.details, enc_hook=repr))

    def error(self) -> SpoolError:
        """Return the exception, anew: each that is raised has a traceback of its own."""
        found: SpoolError = getattr(errors, self.name)(self.message, **self.details)
        return found


Message = Hello | Submit | Finish | Released | Failed | Bye | Welcome | Planned | Ready | Pulse | End | Failure
