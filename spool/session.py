"""A live session: what a rollout worker appends to."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, TypeVar

import msgspec
from msgspec import Struct

from spool.errors import InputError, LockedError, SessionStateError, SpoolError, StepConflictError
from spool.extents import Runs, StepDraft, together
from spool.formats.frames import encode_event
from spool.intake import Intake, StepInput, check_ragged, content_key, json_facts, take
from spool.model.events import (
    Event,
    SessionDiscarded,
    SessionFinalized,
    SessionOpened,
    StepCommitted,
    StepDiscarded,
    ToolsStored,
    Transaction,
)
from spool.model.fields import Schema
from spool.model.outcome import Outcome, check_outcome
from spool.model.refs import SegmentRef, StepRef
from spool.patience import with_room, with_room_async
from spool.rollout.messages import MessageTail, extend
from spool.rollout.state import SessionState
from spool.rollout.views import View, segments
from spool.transaction import Held, TransactionBlock, held_by_task

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from spool.write.stream import StreamWriter

T = TypeVar("T")

FIXED = ("group_id", "sample_index", "rollout_step", "source", "prompt_id", "split", "attempt", "prefer", "trim")
"""What a session keeps from its opening, besides its fields."""


class SuspendToken(Struct, frozen=True, forbid_unknown_fields=True):
    """What `Session.suspend` returns, as JSON."""

    spool: str
    session: str
    n_steps: int
    n_openings: int


class Recorded(NamedTuple):
    """What is recorded of a session.

    Attributes:
        state: folded from its events.
        tails: of the messages of its steps, by index.
        n_openings: how often it was opened or resumed.
        n_foreign: how often by streams that are not this process's.
    """

    state: SessionState
    tails: dict[int, MessageTail]
    n_openings: int
    n_foreign: int


class Host(Protocol):
    """What a session needs of the process that records it.

    Attributes:
        spool_id: identity of the spool.
        roots: where the spool is; hints in references.
        append_timeout_s: how long an append waits for room.
        known_tools: (stream, key) of the tool schemas that this process stored.
    """

    spool_id: str
    roots: tuple[str, ...]
    append_timeout_s: float
    known_tools: set[tuple[str, str]]

    def kept(self, opened: SessionOpened) -> Schema:
        """Return the schema of what is stored of the session's fields."""

    def writer(self, schema: Schema) -> StreamWriter:
        """Return this process's stream of ``schema``."""

    def executor(self) -> Executor:
        """Return the threads of the async twins."""

    def load(self, session_id: str, token: SuspendToken | None, *, own: bool) -> Recorded | None:
        """Return what is recorded of a session that may go on here, or None where nothing is.

        With ``own``, it is recorded here, and this process's streams are read too.
        """

    def check_alone(self, session_id: str, n_foreign: int) -> None:
        """Check that no other process opened the session but for ``n_foreign`` times."""

    def forget(self, session_id: str) -> None:
        """The session will not append any more."""

    def inline(self, refs: list[SegmentRef], fields: Sequence[str]) -> list[SegmentRef]:
        """Return the references with the payload of ``fields`` inside."""


class Session:
    """One rollout that this process records.

    Made by `Spool.session`. Safe from many threads and tasks: the appends of one session happen one after the other.
    """

    def __init__(
        self, host: Host, opened: SessionOpened, token: SuspendToken | None = None, *, fresh: bool = False
    ) -> None:
        self.session_id = opened.session_id
        self._host = host
        self._opened = opened
        self._schema = host.kept(opened)
        self._token = token
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._loaded: SessionState | None = None
        self._tails: dict[int, MessageTail] = {}
        self._in_stream: str | None = None
        self._suspended = False
        self._blocks: weakref.WeakSet[Held] = weakref.WeakSet()
        self._doubtful = False
        self._fresh = fresh  # nobody else can know this id
        self._n_openings = self._n_foreign = 0
        self._used_at = time.monotonic()

    def __repr__(self) -> str:
        return f"<spool.Session {self.session_id!r}>"

    # -- appending ---------------------------------------------------------------------------------------------------

    def append(
        self,
        *,
        prompt_token_ids: Any = None,
        response_token_ids: Any = None,
        logprobs: Any = None,
        loss_mask: Any = None,
        routed_experts: Any = None,
        routed_experts_start: int = 0,
        weight_version: Any = None,
        messages: Sequence[Any] | None = None,
        tools: Sequence[Any] | None = None,
        finish_reason: str | None = None,
        step_id: str | None = None,
        parent: str | int | StepRef | None = None,
        units: Sequence[Any] = (),
        fields: Any = None,
        metadata: Any = None,
    ) -> StepRef:
        """Record one model invocation and return its reference once it is committed.

        Arrays are numpy or torch arrays, or lists; they are read before this returns and never kept.

        Args:
            prompt_token_ids: the whole prompt, ``[p]`` integers. The step extends the chain that it starts with.
            response_token_ids: what was generated, ``[r]`` integers.
            logprobs: of the response tokens, ``[r]`` float32.
            loss_mask: ``[r]`` of 0 and 1; 0 takes a generated token out of training.
            routed_experts: ``[rows, num_layers, topk]`` integers, or a list of `Chunk`. With T = p + r (units expanded)
                there are T-1 rows, or those from ``routed_experts_start`` on; T rows are taken without the last.
            routed_experts_start: token whose forward row 0 is.
            weight_version: one version, or ``(version, start, stop)`` spans over the response tokens.
            messages: the full list of chat messages, JSON-able; stored as a delta to the parent's list.
            tools: tool schemas, JSON-able; stored once by content.
            finish_reason: as the engine gave it.
            step_id: makes the append idempotent: again with equal content it returns the same reference.
            parent: a step id, index or reference, where the parent shall not be found by tokens.
            units: ``(key, position, n_rows)`` of every multimodal placeholder in the prompt.
            fields: mapping of the names of the user's own fields to arrays.
            metadata: JSON-able mapping of facts about the step.

        Raises:
            PayloadError: an array does not fit; nothing was written.
            StepConflictError: ``step_id`` was used with other content.
            SessionStateError: the session is finalised, discarded or suspended.
            CapacityError: no room within ``append_timeout_s``.
        """
        step = StepInput(**{name: value for name, value in locals().items() if name != "self"})
        return self._with_room(lambda: self._append(step))

    async def append_async(self, **arguments: Any) -> StepRef:
        """`append` on Spool's own threads; waiting for room holds none of them.

        Cancelling it commits the step whole or leaves nothing.
        """
        step = StepInput(**arguments)
        return await self._with_room_async(lambda: self._append(step))

    def _with_room(self, call: Callable[[], T]) -> T:
        return with_room(self._host.append_timeout_s, call)

    async def _with_room_async(self, call: Callable[[], T]) -> T:
        return await with_room_async(self._host.append_timeout_s, lambda: self.on_thread(call))

    async def on_thread(self, call: Callable[[], T]) -> T:
        """Run ``call`` on one of Spool's threads, in the context of the calling task."""
        context = contextvars.copy_context()
        return await asyncio.get_running_loop().run_in_executor(self._host.executor(), lambda: context.run(call))

    def _append(self, step: StepInput) -> StepRef:
        with self._owned():
            state, held = self._open_state(), self._held()
            self._used_at = time.monotonic()
            name = state.next_index if step.step_id is None else repr(step.step_id)
            what = f"step {name} of session {self.session_id!r}"
            self._check_declared(step, what)
            intake = take(self._schema, step, prefer=self._opened.prefer, what=what)
            signature = b"" if step.step_id is None else intake.signature(step.finish_reason)
            known = None if step.step_id is None else state.find(step.step_id, held)
            if known is not None:
                if known.signature != signature:
                    raise StepConflictError(
                        f"{what} is recorded with other content; use a new step_id for a new step",
                        session_id=self.session_id, step=step.step_id,
                    )  # fmt: skip
                return state.ref(known.index)
            plan = state.plan(
                intake.prompt,
                intake.response,
                given={field: source.given for field, source in intake.sources.items()},
                parent=step.parent.index if isinstance(step.parent, StepRef) else step.parent,
                units=intake.units,
                step_id=step.step_id,
                transaction=held,
            )
            tail = extend(None if plan.parent is None else self._tails.get(plan.parent), intake.messages)
            draft = StepDraft(
                session_id=self.session_id,
                schema=self._schema,
                plan=plan,
                intake=intake,
                finish_reason=step.finish_reason,
                signature=signature,
                inherited_messages=tail.inherited,
                metadata=json_facts(step.metadata, what),
            )
            with self._recording():
                index = self._store(state, draft, held, what)
                self._tails[index] = tail
            return state.ref(index)

    def _store(self, state: SessionState, draft: StepDraft, held: Held | None, what: str) -> int:
        writer = self._ready_writer()
        rows = {}
        for field, ranges in draft.plan.store.items():
            source = draft.intake.sources[field]
            check_ragged(source, writer.layout, what)
            rows.update(source.rows(ranges))
        tools = self._tools(draft.intake, writer.name)
        committed: list[StepCommitted] = []

        def event(runs: Runs) -> bytes | None:
            committed[:] = [draft.event(runs, writer.name)]
            return encode_event(together(tools, committed[0])) if held is None else None

        writer.append(rows, event)
        if held is not None:
            held.events.extend(filter(None, (tools, committed[0])))
        elif tools is not None:
            self._host.known_tools.add((writer.name, tools.key))
        state.commit(committed[0], transaction=held)
        return committed[0].index

    def _tools(self, intake: Intake, stream: str) -> ToolsStored | None:
        """Return the event that stores the step's tool schemas, unless this stream has them."""
        if not intake.tools:
            return None
        key = content_key(intake.tools)
        return None if (stream, key) in self._host.known_tools else ToolsStored(key, intake.tools)

    def _check_declared(self, step: StepInput, what: str) -> None:
        declared = {spec.name for spec in self._opened.fields}
        if step.routed_experts is not None and "routed_experts" not in declared:
            raise InputError(f"{what} brings routed_experts, but its session has no shape: pass experts= to session()")
        for name in step.fields or ():
            if name not in declared:
                raise InputError(
                    f"{what} brings field {name!r}, which is not declared: pass fields=[spool.FieldSpec(name={name!r}, "
                    f"...)] to session() or open(); declared: {', '.join(sorted(declared))}",
                    field=name,
                )

    # -- the session's life ------------------------------------------------------------------------------------------

    @property
    def steps(self) -> list[StepRef]:
        """References of all steps that are visible here, in the order of append."""
        with self._owned():
            state = self._state()
            return [state.ref(index) for index in state.visible(self._held())]

    def view(self, view: View = "lineage", **options: Any) -> list[SegmentRef]:
        """Return the segments that ``view`` makes of the steps so far; see `finalize` for the options."""
        with self._owned():
            return segments(self._state(), view, **options)

    def finalize(
        self, view: View = "lineage", outcome: Outcome = "completed", inline: Sequence[str] = (), **options: Any
    ) -> list[SegmentRef]:
        """End the session and return its segments. Again with the same arguments it returns the same.

        Args:
            view: ``lineage`` (one segment a leaf) or ``timeline`` (one a step).
            outcome: how the session ended.
            inline: fields whose payload shall travel inside the references.
            **options: ``train_shared_prefix="first"|"all"``, ``superseded="drop"|"keep"``, ``trailing="cut"|"keep"``,
                ``gaps="cut"|"keep"``.

        Raises:
            SessionStateError: it is discarded, suspended, or finalised in another way.
            CapacityError: no room within ``append_timeout_s``.
        """
        return self._with_room(lambda: self._finalize(view, outcome, inline, options))

    async def finalize_async(
        self, view: View = "lineage", outcome: Outcome = "completed", inline: Sequence[str] = (), **options: Any
    ) -> list[SegmentRef]:
        """`finalize` on Spool's own threads; waiting for room holds none of them."""
        return await self._with_room_async(lambda: self._finalize(view, outcome, inline, options))

    def _finalize(
        self, view: View, outcome: Outcome, inline: Sequence[str], options: dict[str, Any]
    ) -> list[SegmentRef]:
        check_outcome(outcome)
        with self._owned():
            state = self._state()
            final = state.finalized
            if final is None:
                self._open_state()
                self._check_no_transaction("finalised")
                made = segments(state, view, outcome=outcome, **options)
                final = SessionFinalized(self.session_id, time.time(), outcome, view, tuple(made), options)
                with self._recording():
                    self._commit(final)
                    state.finalize(final)
                self._host.forget(self.session_id)
            elif (final.view, final.outcome, final.options) != (view, outcome, options):
                raise SessionStateError(
                    f"session {self.session_id!r} is finalised as {final.view}, {final.outcome}, {final.options}; "
                    "use view() for other segments of it",
                    session_id=self.session_id, outcome=final.outcome,
                )  # fmt: skip
        refs = list(final.segments)
        return self._host.inline(refs, inline) if inline else refs

    def discard(self, step: str | int | StepRef) -> None:
        """Withdraw a leaf step.

        Raises:
            NotFoundError: there is no such step.
            SessionStateError: other steps extend it, or the session has ended.
            CapacityError: no room within ``append_timeout_s``.
        """
        self._with_room(lambda: self._discard(step))

    async def discard_async(self, step: str | int | StepRef) -> None:
        """`discard` on Spool's own threads; waiting for room holds none of them."""
        await self._with_room_async(lambda: self._discard(step))

    def _discard(self, step: str | int | StepRef) -> None:
        with self._owned():
            state, held = self._open_state(), self._held()
            index = state.resolve(step.index if isinstance(step, StepRef) else step, held)
            state.check_discard(index, held)
            event = StepDiscarded(self.session_id, index, time.time())
            with self._recording():
                if held is None:
                    self._commit(event)
                else:
                    held.events.append(event)
                state.discard(event, held)

    def abandon(self) -> None:
        """Withdraw the whole session; what `Spool.discard` does with a live one. It does not wait for room."""
        with self._owned():
            event, state = SessionDiscarded(self.session_id, time.time()), self._state()
            with self._recording():
                self._commit(event)
                state.abandon(event)
            self._host.forget(self.session_id)

    def expire(self) -> None:
        """End the session as ``timeout`` if nothing was appended for longer than its ``idle_s``."""
        idle_s = self._opened.idle_s
        if idle_s is None or time.monotonic() - self._used_at < idle_s or not self._lock.acquire(blocking=False):
            return
        try:
            if time.monotonic() - self._used_at >= idle_s and not self._suspended and not self._state().ended:
                self._finalize("lineage", "timeout", (), {})
        finally:
            self._lock.release()

    def suspend(self) -> str:
        """Stop appending here and return a small JSON token; `Spool.resume` goes on with it in any process.

        Raises:
            SessionStateError: the session has ended, or a transaction is open.
            CapacityError: no room within ``append_timeout_s``.
        """
        return self._with_room(self._suspend)

    def _suspend(self) -> str:
        with self._owned():
            state = self._open_state()
            self._check_no_transaction("suspended")
            self._ready_writer()
            self._suspended = True
            self._host.forget(self.session_id)
            token = SuspendToken(self._host.spool_id, self.session_id, len(state.visible()), self._n_openings)
            return msgspec.json.encode(token).decode()

    def transaction(self) -> TransactionBlock:
        """Return a block (``with`` or ``async with``) whose appends hold together or, if it raises, are gone."""
        return TransactionBlock(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and self._goes_on():
            self.finalize(outcome="failed")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and await self.on_thread(self._goes_on):
            await self.finalize_async(outcome="failed")

    def _goes_on(self) -> bool:
        return not self._suspended and not self._state().ended

    # -- transactions ------------------------------------------------------------------------------------------------

    def begin(self) -> Held:
        """Open a transaction for the calling task; used by `TransactionBlock`."""
        with self._owned():
            self._open_state()
            self._check_no_transaction("put into another transaction")
            held = Held()
            self._blocks.add(held)
            return held

    def end(self, held: Held, *, keep: bool) -> None:
        """Commit or drop what ``held`` holds; used by `TransactionBlock`."""
        try:
            self._with_room(lambda: self._end(held, keep=keep))
        except BaseException:
            self._drop(held)
            raise

    async def end_async(self, held: Held, *, keep: bool) -> None:
        """`end` on Spool's own threads; waiting for room holds none of them."""
        try:
            await self._with_room_async(lambda: self._end(held, keep=keep))
        except BaseException:
            await self.on_thread(lambda: self._drop(held))
            raise

    def _end(self, held: Held, *, keep: bool) -> None:
        with self._owned():
            held.open = False
            if not keep:
                self._drop(held)
                return
            state = self._state()
            self._check_whole(state, held)
            with self._recording():
                if held.events:
                    self._commit(Transaction(tuple(held.events)))
                state.settle(held)
                held.over = True

    def _drop(self, held: Held) -> None:
        """Take out of the state what a transaction holds that was not committed, where it is in there."""
        with self._owned():
            if not held.over and not held.spoiled:
                held.over = True
                self._state().rollback(held)

    def _check_whole(self, state: SessionState, held: Held) -> None:
        """Refuse to commit a transaction that others have overtaken."""
        if held.spoiled:
            raise SessionStateError(
                f"an append to session {self.session_id!r} was interrupted while this transaction was open; nothing of "
                "it is kept, do it again",
                session_id=self.session_id,
            )
        if held.events:
            state.check_open()

    def _held(self) -> Held | None:
        return held_by_task(self)

    @contextlib.contextmanager
    def _recording(self) -> Iterator[None]:
        """Change record and state together: after an interruption in between, only the record knows what was done.

        An interruption is whatever a signal handler raises, and Spool does not.
        """
        try:
            yield
        except SpoolError:
            raise
        except BaseException:
            self._loaded, self._in_stream, self._doubtful = None, None, True
            for held in self._blocks:
                held.spoiled = not held.over
            raise

    def _check_no_transaction(self, verb: str) -> None:
        if self._held() is not None:
            raise SessionStateError(f"session {self.session_id!r} cannot be {verb} inside a transaction")

    # -- inside ------------------------------------------------------------------------------------------------------

    def _owned(self) -> threading.RLock:
        if self._pid != os.getpid():
            raise SessionStateError(
                f"session {self.session_id!r} is recorded by process {self._pid}, which this one was forked from; "
                "suspend it there and resume it here, or open a new session",
                session_id=self.session_id,
            )
        return self._lock

    def _state(self) -> SessionState:
        if self._loaded is None:
            if self._doubtful:
                # frames are written in their order, so behind this one lies all that the interrupted call handed over
                self._opened = msgspec.structs.replace(self._opened, resumed=True, at=time.time())
                self._ready_writer()
            look = self._doubtful or not self._fresh
            recorded = self._host.load(self.session_id, self._token, own=self._doubtful) if look else None
            if recorded is None:
                self._loaded = SessionState(self._host.spool_id, self._opened, self._host.roots)
            else:
                self._tails, self._n_openings, self._n_foreign = recorded[1:]
                self._adopt(recorded.state.opened)
                self._loaded = recorded.state
            self._doubtful = False
        return self._loaded

    @property
    def is_live(self) -> bool:
        """It was found to be this process's; not so where another process records it, or nothing was asked yet."""
        return self._loaded is not None

    def check_same(self, wanted: SessionOpened) -> None:
        """Refuse to be taken for a session that was to have other fields, rules or identity.

        Raises:
            SessionStateError: names what differs; what ``wanted`` leaves at its default is not compared.
        """
        _check_same(self._opened, wanted)

    def _adopt(self, recorded: SessionOpened) -> None:
        """Go on with a recorded session: its identity, rules and fields were fixed when it opened."""
        _check_same(recorded, self._opened)
        self._opened = msgspec.structs.replace(recorded, resumed=True, at=time.time())
        self._schema = self._host.kept(self._opened)

    def _open_state(self) -> SessionState:
        if self._suspended:
            raise SessionStateError(f"session {self.session_id!r} was suspended here; resume it with its token")
        state = self._state()
        state.check_open()
        return state

    def _ready_writer(self) -> StreamWriter:
        writer = self._host.writer(self._schema)
        if self._in_stream != writer.name:
            writer.commit(encode_event(self._opened))
            self._n_openings += 1
            try:
                if not self._fresh:
                    self._host.check_alone(self.session_id, self._n_foreign)
            except LockedError:
                self._loaded = None
                raise
            self._in_stream = writer.name
        return writer

    def _commit(self, event: Event) -> None:
        self._ready_writer().commit(encode_event(event))


def _check_same(known: SessionOpened, wanted: SessionOpened) -> None:
    plain = SessionOpened(session_id=wanted.session_id, at=wanted.at)
    for name in FIXED:
        asked, fixed = getattr(wanted, name), getattr(known, name)
        if asked not in (getattr(plain, name), fixed):
            raise SessionStateError(
                f"session {known.session_id!r} was opened with {name}={fixed!r}, not {asked!r}; "
                "use another session_id for another session",
                session_id=known.session_id, name=name,
            )  # fmt: skip
    declared = {spec.name: spec for spec in known.fields}
    for spec in wanted.fields:
        if declared.get(spec.name) != spec:
            raise SessionStateError(
                f"session {known.session_id!r} was opened with {declared.get(spec.name, 'no such field')}, not {spec}",
                session_id=known.session_id, field=spec.name,
            )  # fmt: skip
