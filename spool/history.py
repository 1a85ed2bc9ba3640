"""What is recorded of a session, read back from the index and the logs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from spool.catalog import Catalog, Located
from spool.config import Config
from spool.errors import InputError, IntegrityError, NotFoundError, ReleasedError
from spool.feeds import Feeds
from spool.formats import messages as message_format
from spool.model.events import Event, SessionDiscarded, StepCommitted, ToolsStored
from spool.model.fields import TOKEN_IDS
from spool.model.refs import SegmentRef, StepRef
from spool.rollout.state import SessionState

READ_STEPS = 256
"""Steps of a session whose messages are in memory at a time."""


class StepMessages(NamedTuple):
    """What a step adds to the conversation.

    Attributes:
        step: index of the step in its session.
        parent: index of the step whose chain it extends; None where it begins one.
        n_inherited: messages of the parent's full list that this step's begins with.
        messages: the rest of its list.
    """

    step: int
    parent: int | None
    n_inherited: int
    messages: list[Any]


class History:
    """Answers from the catalog, after it has caught up with the logs.

    Args:
        spool_id: identity of the spool.
        config: where it is; hints in references, and for errors.
        catalog: the index.
        feeds: feed it, and read events with their messages.
    """

    def __init__(self, spool_id: str, config: Config, catalog: Catalog, feeds: Feeds) -> None:
        self._spool_id = spool_id
        self._url, self._roots = config.url, config.urls
        self._catalog = catalog
        self._feeds = feeds

    def state(self, session_id: str, *, discarded: bool = False) -> SessionState:
        """Return a session's state.

        Args:
            session_id: the session.
            discarded: also of a discarded one, as long as it is not deleted.

        Raises:
            NotFoundError: no such session is recorded.
            ReleasedError: it was discarded, or packs with events of it were deleted.
        """
        located = self._located(session_id)
        if not discarded and any(isinstance(item.event, SessionDiscarded) for item in located):
            raise ReleasedError(f"session {session_id!r} was discarded", session_id=session_id)
        try:
            return SessionState.from_events(self._spool_id, [item.event for item in located], roots=self._roots)
        except IntegrityError as error:
            self._check_deleted(session_id, located, error)
            raise

    def _check_deleted(self, session_id: str, located: Sequence[Located], error: IntegrityError) -> None:
        """Raise ReleasedError where what is missing of a session may have been in a pack that was deleted.

        That the session was withdrawn with it may be on its way: another process recorded it.
        """
        for stream in sorted({item.stream for item in located}):
            for row in self._catalog.packs.rows("gone", stream=stream):
                raise ReleasedError(
                    f"session {session_id!r} is there in part only ({error}): pack {row.pack} of stream {stream} was "
                    f"deleted, {row.reason or 'released or discarded'}",
                    session_id=session_id, stream=stream, pack=row.pack,
                ) from error  # fmt: skip

    def require(self, session_ids: Sequence[str]) -> None:
        """Check that sessions are recorded.

        Raises:
            NotFoundError: one is not.
        """
        unknown = session_ids
        for fresh in (False, True):
            if unknown:
                self._feeds.catch_up(fresh=fresh)
                unknown = [session_id for session_id in unknown if self._catalog.session(session_id) is None]
        if unknown:
            raise self._unknown(*unknown)

    def require_step(self, ref: StepRef | SegmentRef) -> None:
        """Check that a step, or a segment's last one, is recorded as the reference says.

        Raises:
            NotFoundError: it is not.
        """
        index = last_step(ref)
        for fresh in (False, True):
            self._feeds.catch_up(fresh=fresh)
            found = self._catalog.steps_at(ref.session_id, index)
            if any(names_step(ref, event) for event in found):
                return
        if self._catalog.session(ref.session_id) is None:
            raise self._unknown(ref.session_id)
        raise NotFoundError(
            f"session {ref.session_id!r} has {'another' if found else 'no'} step {index} than {ref.id} names: that was "
            "rolled back, or is not published yet",
            ref=ref.id,
        )

    def require_final(self, refs: Sequence[SegmentRef]) -> None:
        """Check that segments of a session are of the view that it was finalised with, where that is known here.

        Raises:
            InputError: one is of another view.
        """
        final = self._catalog.final_view(refs[0].session_id)
        for ref in refs:
            if final not in (None, ref.view):
                raise InputError(
                    f"segment {ref.id} is of view {ref.view}, and session {ref.session_id!r} was finalised with view "
                    f"{final}: its data goes when the segments of that are released, sp.final_segments"
                    f"({ref.session_id!r}), however it was trained on",
                    ref=ref.id, view=final,
                )  # fmt: skip

    def is_collected(self, ref: SegmentRef) -> bool:
        """Whether packs of a stream that holds the segment were deleted, as they are once all of it was released."""
        streams = {extent.stream for extents in ref.extents.values() for extent in extents}
        return any(True for stream in streams for _ in self._catalog.packs.rows("gone", stream=stream))

    def messages(self, ref: StepRef | SegmentRef) -> list[Any]:
        """See `Spool.messages`."""
        by_index = self._steps(ref.session_id)
        path = []
        index: int | None = last_step(ref)
        while index is not None:
            path.append(_at(by_index, index, ref))
            event = path[-1].event
            assert isinstance(event, StepCommitted)
            index = event.parent if event.inherited_messages else None
        self._check_owner(ref, path)
        messages: list[Any] = []
        for event in reversed(self._feeds.read_events(path)):
            assert isinstance(event, StepCommitted)
            messages[event.inherited_messages :] = message_format.decode_messages(event.messages)
        return messages

    def transcript(self, session_id: str, indexes: Sequence[int]) -> Iterator[StepMessages]:
        """Iterate what these steps of a session add to the conversation; see `Spool.transcript`."""
        by_index = self._steps(session_id)
        steps = [by_index[index] for index in indexes if index in by_index]
        for first in range(0, len(steps), READ_STEPS):
            for event in self._feeds.read_events(steps[first : first + READ_STEPS]):
                assert isinstance(event, StepCommitted)
                own = message_format.decode_messages(event.messages)
                yield StepMessages(event.index, event.parent, event.inherited_messages, own)

    def tools(self, ref: StepRef | SegmentRef) -> list[Any]:
        """See `Spool.tools`."""
        step = _at(self._steps(ref.session_id), last_step(ref), ref)
        self._check_owner(ref, [step])
        event = step.event
        assert isinstance(event, StepCommitted)
        if event.tools_key is None:
            return []
        place = self._catalog.tools_at(event.tools_key)
        if place is None:
            raise NotFoundError(f"the tool schemas {event.tools_key} of {ref.id} are not recorded", ref=ref.id)
        stored = self._feeds.read_events([place])[0]
        assert isinstance(stored, ToolsStored)
        return list(message_format.decode_messages(stored.json))

    def _check_owner(self, ref: StepRef | SegmentRef, steps: Sequence[Located]) -> None:
        """Refuse to take the steps that count for those of an owner that does not, where two recorded a session."""
        streams = {extent.stream for extents in ref.extents.values() for extent in extents}
        other = {item.stream for item in steps} - streams
        if other and self._catalog.is_contested(ref.session_id):
            raise NotFoundError(
                f"session {ref.session_id!r} was recorded by two owners at once, and what counts is the record of the "
                f"other one (stream {min(other)}): the messages and tools of {ref.id} are not listed, its arrays can "
                "be read; give each session an id of its own",
                ref=ref.id,
            )

    def events(self) -> Iterator[Event]:
        """Iterate the steps, ends and late arrays of all sessions, as the catalog has them."""
        for row in self._catalog.sessions():
            yield from (item.event for item in self._catalog.session_events(row.session_id))
            yield from self._catalog.attachments(row.session_id)

    def _located(self, session_id: str) -> list[Located]:
        self._feeds.catch_up()
        located = self._catalog.session_events(session_id)
        if not located:
            self._feeds.catch_up(fresh=True)
            located = self._catalog.session_events(session_id)
        if not located:
            raise self._unknown(session_id)
        return located

    def _steps(self, session_id: str) -> dict[int, Located]:
        located = self._located(session_id)
        return {item.event.index: item for item in located if isinstance(item.event, StepCommitted)}

    def _unknown(self, session_id: str, *others: str) -> NotFoundError:
        more = f", nor {len(others)} others of those named" if others else ""
        return NotFoundError(f"no session {session_id!r} in {self._url}{more}", session_id=session_id)


def _at(steps: Mapping[int, Located], index: int, ref: StepRef | SegmentRef) -> Located:
    if index not in steps:
        raise NotFoundError(f"session {ref.session_id!r} has no step {index}, which {ref.id} names", ref=ref.id)
    return steps[index]


def last_step(ref: StepRef | SegmentRef) -> int:
    """Return the index of a step, or of a segment's last one.

    Raises:
        NotFoundError: the segment has no steps.
    """
    if isinstance(ref, StepRef):
        return ref.index
    if not ref.steps:
        raise NotFoundError(f"segment {ref.id} has no steps")
    return ref.steps[-1]


def names_step(ref: StepRef | SegmentRef, event: StepCommitted) -> bool:
    """Whether a reference is of this very step, and not of one that was rolled back before it got the index."""
    if isinstance(ref, SegmentRef):
        return ref.n_tokens <= event.n_tokens
    own, named = event.extents.get(TOKEN_IDS.name), ref.extents.get(TOKEN_IDS.name)
    return (ref.step_id, ref.response_start, ref.n_tokens) == (event.step_id, event.n_prompt, event.n_tokens) and (
        not own or not named or own[-1] == named[-1]
    )
