"""Late facts, from any process: annotations, attached arrays, releases, withdrawals."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from spool.arguments import mapping, one_of, text
from spool.catalog.query import SEGMENT, SESSION
from spool.catalog.where import KEYWORDS, NAME
from spool.errors import InputError
from spool.formats import arrays, values
from spool.formats.frames import encode_event
from spool.intake import json_facts
from spool.known import Known
from spool.model.events import Annotated, Attached, Checkpointed, Released, RowsHeld, SessionDiscarded, Single
from spool.model.fields import BUILT_IN, Align, FieldSpec, Schema
from spool.model.refs import Extent, SegmentRef, StepRef
from spool.patience import with_room, with_room_async
from spool.points import reach
from spool.recorder import Recorder
from spool.write.stream import Rows, Run


class Facts:
    """Writes late facts into a stream of this process.

    Args:
        recorder: this process's streams.
        fields: specs that were declared when the spool was opened.
        known: checks what is said something of.
        newest: returns when the newest late fact of a session that the index knows was recorded.
    """

    def __init__(
        self, recorder: Recorder, fields: Sequence[FieldSpec], known: Known, newest: Callable[[str], float]
    ) -> None:
        self._recorder = recorder
        self._fields = {spec.name: spec for spec in fields}
        self._known = known
        self._newest = newest
        self._last_at = 0.0

    def _at(self, session_id: str) -> float:
        """Return the time of a new fact: later than all that are known of its session, wherever the clock went."""
        before = max(self._last_at, self._newest(session_id))
        self._last_at = max(time.time(), math.nextafter(before, math.inf))
        return self._last_at

    def annotate(self, session_id: str, segment: SegmentRef | None, facts: Mapping[str, Any]) -> None:
        """See `Spool.annotate`."""
        if segment is None:
            self._known.sessions([session_id])
        elif not isinstance(segment, SegmentRef) or segment.session_id != session_id:
            raise InputError(f"segment must be a SegmentRef of session {session_id!r}, got {segment!r:.80}")
        else:
            self._known.step(segment)
        self._annotate({session_id: _checked(session_id, facts)}, None if segment is None else segment.key)

    def annotate_many(self, facts: Mapping[str, Mapping[str, Any]]) -> None:
        """See `Spool.annotate_many`."""
        checked = {text("a session id", name): _checked(name, said) for name, said in _by_session(facts)}
        self._known.sessions(checked)
        self._annotate(checked, None)

    def _annotate(self, facts: Mapping[str, dict[str, Any]], segment: str | None) -> None:
        self._record(*(Annotated(name, self._at(name), said, segment) for name, said in facts.items()))
        for name in facts:
            self._recorder.says_late(name)

    def attach(self, ref: SegmentRef | StepRef, late: Mapping[str, Any], align: str | None) -> None:
        """See `Spool.attach`."""
        if not isinstance(ref, SegmentRef | StepRef):
            raise InputError(f"attach takes a segment or step of this spool, got {ref!r:.80}")
        self._known.step(ref)
        if align is not None:
            one_of("align", align, get_args(Align))
        checked = [self._late_rows(ref, name, value, align) for name, value in late.items()]
        for spec, rows in checked:
            self._attach(ref, spec, rows)
        self._recorder.says_late(ref.session_id)

    def _late_rows(
        self, ref: SegmentRef | StepRef, name: str, value: Any, align: str | None
    ) -> tuple[FieldSpec, NDArray[Any]]:
        array = arrays.as_array(value, what=f"{name} of {ref.id}")
        if name in BUILT_IN or name in ref.extents:
            raise InputError(f"{ref.id} has {name} already; attach under another name", field=name)
        spec = self._fields.get(name) or _late_spec(ref, name, array, align)
        if spec.ragged:
            raise InputError(f"{name} is ragged; attach takes arrays with one row a position", field=name)
        if align not in (None, spec.align):
            raise InputError(f"{name} is declared as {spec.align}-aligned, not {align}", field=name)
        expected = _lengths(ref)[spec.align]
        rows = array[None] if spec.align == "step" and expected == 1 and array.shape == spec.row_shape else array
        if not rows.ndim or len(rows) != expected:
            raise InputError(
                f"{name} has shape {array.shape}; {ref.id} has {expected} {spec.align} rows",
                field=name, expected=expected, got=list(array.shape),
            )  # fmt: skip
        values.check_values(rows, spec, what=ref.id, position=0)
        return spec, rows

    def _attach(self, ref: SegmentRef | StepRef, spec: FieldSpec, rows: NDArray[Any]) -> None:
        writer = self._recorder.writer(Schema.of(spec))
        first = ref.response_start if spec.align == "response" else 0
        at = self._at(ref.session_id)

        def fill(dst: NDArray[Any], start: int) -> None:
            arrays.copy_rows(dst, rows[start : start + len(dst)])

        def event(runs: Mapping[str, tuple[Run, ...]]) -> bytes:
            extents, position = [], first
            for run in runs.get(spec.name, ()):
                extents.append(Extent(writer.name, run.row, run.n, position, run.crc))
                position += run.n
            found = {spec.name: tuple(extents)}
            return encode_event(Attached(ref.session_id, at, ref.key, spec, found))

        def hold() -> bytes:
            return encode_event(RowsHeld(ref.session_id, at))

        source = {spec.name: Rows(len(rows), fill)}
        with_room(self._recorder, lambda: writer.append(source, event, hold))

    def discard(self, session_id: str) -> None:
        """See `Spool.discard`."""
        with_room(self._recorder, lambda: self._discard(session_id))

    async def discard_async(self, session_id: str, on_thread: Callable[[Callable[[], None]], Awaitable[None]]) -> None:
        """See `Spool.discard_async`; waiting for room holds no thread."""
        await with_room_async(self._recorder, on_thread, lambda: self._discard(session_id))

    def _discard(self, session_id: str) -> None:
        live = self._recorder.live(session_id)
        if live is not None and live.is_recorded:
            live.abandon()
        else:  # recorded elsewhere, even where somebody here has looked at it
            self._known.sessions([session_id])
            self._recorder.record(SessionDiscarded(session_id, time.time()))
            self._recorder.forget(session_id)

    def withdraw(self, session_ids: Sequence[str]) -> None:
        """Record that sessions are withdrawn, whoever recorded them."""
        self._record(*(SessionDiscarded(session_id, time.time()) for session_id in session_ids))

    def release(self, refs: Sequence[SegmentRef], tag: str | None) -> None:
        """See `Spool.release`."""
        released = self._known.released(refs)
        events = (Released(name, time.time(), tuple(ref.key for ref in own), tag) for name, own in released.items())
        self._record(*events)
        reach("release.recorded")

    def checkpointed(self, tag: str) -> None:
        """See `Spool.checkpointed`."""
        self._record(Checkpointed(tag, time.time()))

    def _record(self, *events: Single) -> None:
        if events:
            with_room(self._recorder, lambda: self._recorder.record(*events))


def _by_session(facts: object) -> Iterator[tuple[str, Mapping[Any, Any]]]:
    """Yield what is said of each session.

    Raises:
        InputError: it is not given by session, or not by name.
    """
    for name, said in mapping("facts", facts, "a mapping of session ids to facts").items():
        yield name, mapping(f"facts of session {name!r:.80}", said, "a mapping of names to values")


def _checked(session_id: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return facts of a session as they are recorded.

    Raises:
        InputError: one cannot be taken.
    """
    _check_names(facts)
    checked = json_facts(facts, f"facts of session {session_id!r}")
    reward = checked.get("reward")
    if reward is not None and (isinstance(reward, bool) or not isinstance(reward, int | float)):
        raise InputError(f"reward of session {session_id!r} must be a number, got {reward!r}", got=repr(reward))
    if reward is not None and not math.isfinite(reward):
        raise InputError(
            f"reward of session {session_id!r} is {reward}, which no filter finds and JSON cannot hold; leave it out, "
            "and note why as another fact",
            got=repr(reward),
        )
    return checked


def _check_names(facts: Iterable[str]) -> None:
    """Refuse names that a filter would take for something else.

    Raises:
        InputError: lists the names that are taken.
    """
    taken = (SESSION.known.keys() | SEGMENT.known.keys()) - {"reward"}
    odd = [name for name in facts if not _names_a_fact(name) or name in taken]
    if odd:
        raise InputError(
            f"{', '.join(map(repr, odd))} cannot name a fact, which filters could not find: use letters, digits and "
            f"underscores, not starting with a digit, and none of {', '.join(sorted(taken | KEYWORDS))}",
            names=odd,
        )


def _names_a_fact(name: object) -> bool:
    return isinstance(name, str) and name.lower() not in KEYWORDS and NAME.fullmatch(name) is not None


def _late_spec(ref: SegmentRef | StepRef, name: str, array: NDArray[Any], align: str | None) -> FieldSpec:
    """Return the spec of an undeclared late array: aligned as ``align``, or as its length says."""
    lengths = _lengths(ref)
    lengths.pop("step")
    rows = array.shape[0] if array.ndim else None
    fits = [kind for kind, n in lengths.items() if rows == n]
    chosen: Any = align or (fits[0] if len(fits) == 1 else None)
    if chosen is None or (chosen != "step" and chosen not in fits):
        raise InputError(
            f"{name} has shape {array.shape}; {ref.id} has "
            + ", ".join(f"{n} {kind} rows" for kind, n in lengths.items())
            + ("; pass align= to say which" if fits and align is None else ""),
            field=name,
            expected=lengths,
            got=list(array.shape),
        )
    one = chosen == "step" and _lengths(ref)["step"] == 1
    shape = array.shape if one else array.shape[1:]
    return FieldSpec(name=name, dtype=np.dtype(array.dtype).name, align=chosen, shape=shape)


def _lengths(ref: SegmentRef | StepRef) -> dict[str, int]:
    return {
        "token": ref.n_tokens,
        "response": ref.response_length,
        "forward": max(ref.n_rows - 1, 0),
        "step": len(ref.steps) if isinstance(ref, SegmentRef) else 1,
    }
