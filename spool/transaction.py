"""Transactions: what a task appends inside ``with session.transaction():`` holds together, or is gone."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, TypeVar

from spool.errors import SessionStateError
from spool.model.events import Single

T = TypeVar("T")


class Owner(Protocol):
    """The session that a transaction belongs to."""

    session_id: str

    async def on_thread(self, call: Callable[[], T]) -> T:
        """Run ``call`` on one of Spool's threads, in the caller's context."""

    def begin(self) -> Held:
        """Open a transaction for the calling task."""

    def end(self, held: Held, *, keep: bool) -> None:
        """Commit or drop what it holds."""

    async def end_async(self, held: Held, *, keep: bool) -> None:
        """`end`, on Spool's own threads."""


class Held:
    """The events of one transaction, until its block ends.

    Attributes:
        events: in the order they happened.
        open: the block has not ended.
        spoiled: an interruption took from the session's state what the events say; they can only be dropped.
        over: they are committed or dropped.
    """

    def __init__(self) -> None:
        self.events: list[Single] = []
        self.open = True
        self.spoiled = False
        self.over = False


_current: contextvars.ContextVar[dict[Owner, Held] | None] = contextvars.ContextVar("spool_transactions", default=None)


def held_by_task(session: Owner) -> Held | None:
    """Return the transaction that the calling task has open on ``session``, or None.

    Raises:
        SessionStateError: it had one, which has ended; what this call wanted to append is not part of anything.
    """
    held = (_current.get() or {}).get(session)
    if held is not None and not held.open:
        raise SessionStateError(f"the transaction of session {session.session_id!r} that this task began has ended")
    return held


class TransactionBlock:
    """``with session.transaction():`` or ``async with``; see `Session.transaction`."""

    def __init__(self, session: Owner) -> None:
        self._session = session
        self._held: Held | None = None
        self._reset: contextvars.Token[dict[Owner, Held] | None] | None = None

    def __enter__(self) -> None:
        self._enter(self._session.begin())

    def _enter(self, held: Held) -> None:
        self._held = held
        self._reset = _current.set({**(_current.get() or {}), self._session: held})

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._session.end(self._exit(), keep=kind is None)

    def _exit(self) -> Held:
        if self._held is None or self._reset is None:
            raise SessionStateError("a transaction block ends once, after it was entered")
        _current.reset(self._reset)
        held, self._held, self._reset = self._held, None, None
        return held

    async def __aenter__(self) -> None:
        self._enter(await self._session.on_thread(self._session.begin))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        held = self._exit()
        # A cancelled task must not leave the transaction neither kept nor dropped.
        await asyncio.shield(self._session.end_async(held, keep=kind is None))
