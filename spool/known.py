"""What a verb that takes a reference asks first: is it of this spool, and is what it names recorded?"""

from __future__ import annotations

from collections.abc import Iterable

from spool.errors import InputError, NotFoundError, SessionStateError
from spool.history import History, last_step, names_step
from spool.model.refs import Ref, SegmentRef, StepRef
from spool.recorder import Recorder


class Known:
    """Checks references and ids against this process's sessions, and where those do not know against the record.

    Args:
        recorder: this process's sessions.
        history: the record.
    """

    def __init__(self, recorder: Recorder, history: History) -> None:
        self._recorder = recorder
        self._history = history

    def sessions(self, session_ids: Iterable[str]) -> None:
        """Check that sessions are recorded.

        Raises:
            NotFoundError: one is not.
        """
        self._history.require([session_id for session_id in session_ids if not self._is_recorded_here(session_id)])

    def _is_recorded_here(self, session_id: str) -> bool:
        live = self._recorder.live(session_id)
        return live is not None and live.is_recorded

    def own(self, ref: Ref) -> None:
        """Check that a reference is of this spool.

        Raises:
            InputError: it is of another one.
        """
        if ref.spool_id != self._recorder.spool_id:
            raise InputError(
                f"the reference of session {ref.session_id!r} is of spool {ref.spool_id}, this is "
                f"{self._recorder.spool_id}; go to that one with it",
                spool_id=ref.spool_id, session_id=ref.session_id,
            )  # fmt: skip

    def settled(self, refs: Iterable[Ref]) -> None:
        """Check that no reference is of a step whose transaction is open here; costs a look-up each.

        Raises:
            SessionStateError: one is.
        """
        sessions = self._recorder.sessions
        if not sessions:
            return
        for ref in refs:
            if not isinstance(ref, StepRef):  # no view shows a step before it is recorded
                continue
            live = sessions.get(ref.session_id)
            if live is not None and live.is_pending(ref.index):
                raise SessionStateError(
                    f"step {ref.id} is part of an open transaction and not recorded yet; wait until its block ends",
                    session_id=ref.session_id,
                )

    def step(self, ref: StepRef | SegmentRef) -> None:
        """Check that a step, or a segment's last one, is of this spool and recorded as the reference says.

        Raises:
            InputError: it is of another spool.
            SessionStateError: its transaction is open.
            NotFoundError: it is not recorded: it was rolled back, or is unknown here.
        """
        self.own(ref)
        self.settled([ref])
        live = self._recorder.live(ref.session_id)
        event = None if live is None else live.known_step(last_step(ref))
        if event is None or not names_step(ref, event):
            self._history.require_step(ref)

    def released(self, refs: Iterable[SegmentRef]) -> dict[str, list[SegmentRef]]:
        """Return segments by session; those of sessions that are collected already, and so released, are left out.

        Raises:
            InputError: one is of another spool, or of another view than its session was finalised with.
            NotFoundError: a session is not recorded.
        """
        by_session: dict[str, list[SegmentRef]] = {}
        for ref in refs:
            self.own(ref)
            by_session.setdefault(ref.session_id, []).append(ref)
        for session_id, own in list(by_session.items()):
            try:
                self.sessions([session_id])
            except NotFoundError:
                if not any(self._history.is_collected(ref) for ref in own):
                    raise
                del by_session[session_id]
            else:
                self._history.require_final(own)
        return by_session
