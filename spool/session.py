"""A live session: what a rollout worker appends to."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import msgspec

from spool.arguments import names, refused
from spool.errors import InputError, LockedError, NotFoundError, SessionStateError, SpoolError, StepConflictError
from spool.extents import Runs, StepDraft, together
from spool.formats.frames import encode_event
from spool.intake import Intake, StepInput, check_plain, check_ragged, content_key, json_facts, take
from spool.model.events import (
    RowsHeld,
    SessionDiscarded,
    SessionFinalized,
    SessionOpened,
    Single,
    StepCommitted,
    StepDiscarded,
    ToolsStored,
    Transaction,
)
from spool.model.outcome import Outcome, check_outcome
from spool.model.refs import SegmentRef, StepRef
from spool.model.units import own_keys
from spool.observe import Appended, tell
from spool.patience import with_room, with_room_async
from spool.record import Host, Record, StoredTools, SuspendToken, check_same
from spool.rollout.messages import extend
from spool.rollout.state import SessionState
from spool.rollout.views import View, check_options, segments
from spool.transaction import Held, TransactionBlock, held_by_task

if TYPE_CHECKING:
    from spool.write.stream import StreamWriter

T = TypeVar("T")


class Session:
    """One rollout that this process records.

    Made by `Spool.session`. Safe from many threads and tasks: the appends of one session happen one after the other.

    ``with session:`` and ``async with session:`` end it as ``failed`` where the block raises, as ``aborted`` where its
    task is cancelled. A block that ends well leaves it open: `finalize` it, or go on later.
    """

    def __init__(
        self, host: Host, opened: SessionOpened, token: SuspendToken | None = None, *, fresh: bool = False
    ) -> None:
        self.session_id = opened.session_id
        self._host = host
        self._record = Record(host, opened, token, fresh=fresh)
        self._suspended = False
        self._blocks: weakref.WeakSet[Held] = weakref.WeakSet()
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
            weight_version: one version, of at most 1,024 bytes, or ``(version, start, stop)`` spans over the response
                tokens.
            messages: the full list of chat messages, JSON-able; stored as a delta to the parent's list.
            tools: tool schemas, JSON-able; stored once by content.
            finish_reason: as the engine gave it.
            step_id: makes the append idempotent: again with equal content it returns the same reference.
            parent: a step id, index or reference, where the parent shall not be found by tokens.
            units: ``(key, position, n_rows)`` of every multimodal placeholder in the prompt. Keys are those that
                ``put_unit`` returned, or your own, of which Spool stores nothing. A step has fewer than 2**31 rows.
            fields: mapping of the names of the user's own fields to arrays.
            metadata: JSON-able mapping of facts about the step.

        Raises:
            PayloadError: an array does not fit; nothing was written.
            StepConflictError: ``step_id`` was used with other content.
            SessionStateError: the session is finalised, discarded or suspended.
            CapacityError: no room within ``append_timeout_s``.
        """
        arguments = locals()
        del arguments["self"]
        step = StepInput(**arguments)
        return self._with_room(lambda: self._append(step))

    async def append_async(self, **arguments: Any) -> StepRef:
        """`append` on Spool's own threads; waiting for room holds none of them.

        Cancelling it commits the step whole or leaves nothing.
        """
        step = StepInput(**arguments)
        return await self._with_room_async(lambda: self._append(step))

    def _with_room(self, call: Callable[[], T]) -> T:
        return with_room(self._host, call)

    async def _with_room_async(self, call: Callable[[], T]) -> T:
        return await with_room_async(self._host, self.on_thread, call)

    async def on_thread(self, call: Callable[[], T]) -> T:
        """Run ``call`` on one of Spool's threads, in the context of the calling task."""
        context = contextvars.copy_context()
        return await asyncio.get_running_loop().run_in_executor(self._host.executor(), lambda: context.run(call))

    def _append(self, step: StepInput) -> StepRef:
        observer = self._host.observer
        if observer is None:
            return self._append_step(step)[0]
        began = time.perf_counter()
        ref, n_bytes = self._append_step(step)
        if n_bytes is not None:
            tell(observer, Appended(n_bytes, 1, time.perf_counter() - began))
        return ref

    def _append_step(self, step: StepInput) -> tuple[StepRef, int | None]:
        """Return a step's reference, and the bytes that were stored for it; None where it was recorded before."""
        with self._record.owned():
            state, held = self._open_state(), self._held()
            self._used_at = time.monotonic()
            name = state.next_index if step.step_id is None else repr(step.step_id)
            what = f"step {name} of session {self.session_id!r}"
            check_plain(step, what)
            self._check_declared(step, what)
            intake = take(self._record.schema, step, prefer=self._record.opened.prefer, what=what)
            metadata, parent = json_facts(step.metadata, f"metadata of {what}"), self._own_step(step.parent)
            signature, known = b"", None
            if step.step_id is not None:
                named = state.find(parent, held) if isinstance(parent, str) else None
                signature = intake.signature(step.finish_reason, parent if named is None else named.index, metadata)
                known = state.find(step.step_id, held)
            if known is not None:
                if known.signature != signature:
                    raise StepConflictError(
                        f"{what} is recorded with other content; use a new step_id for a new step",
                        session_id=self.session_id, step=step.step_id,
                    )  # fmt: skip
                return state.ref(known.index), None
            plan = state.plan(
                intake.prompt,
                intake.response,
                given={field: source.given for field, source in intake.sources.items()},
                parent=parent,
                units=intake.units,
                step_id=step.step_id,
                transaction=held,
            )
            tail = extend(None if plan.parent is None else self._record.tails.get(plan.parent), intake.messages)
            draft = StepDraft(
                session_id=self.session_id,
                schema=self._record.schema,
                plan=plan,
                intake=intake,
                finish_reason=step.finish_reason,
                signature=signature,
                inherited_messages=tail.inherited,
                metadata=metadata,
            )
            with self._recording():
                index, n_bytes = self._store(state, draft, held, what)
                self._record.tails[index] = tail
            return state.ref(index), n_bytes

    def _store(self, state: SessionState, draft: StepDraft, held: Held | None, what: str) -> tuple[int, int]:
        writer = self._record.writer()
        if draft.plan.units:
            self._host.uses_units(own_keys(draft.plan.units))
        rows = {}
        for field, ranges in draft.plan.store.items():
            source = draft.intake.sources[field]
            check_ragged(source, writer.layout, what)
            rows.update(source.rows(ranges))
        tools = _tools(draft.intake)
        committed: list[StepCommitted] = []
        stored: list[StoredTools] = []

        def hold() -> bytes:
            return encode_event(RowsHeld(self.session_id, time.time()))

        def event(runs: Runs) -> bytes:
            committed[:] = [draft.event(runs, writer.name)]
            if held is not None:
                return hold()
            stored[:] = self._missing_tools(filter(None, [tools]), writer)
            return encode_event(together(tools if stored else None, committed[0]))

        wrote = writer.append(rows, event, hold)
        if held is None:
            self._host.known_tools.update(stored)
        else:
            known = tools in held.events
            held.events.extend(filter(None, (None if known else tools, committed[0])))
        state.commit(committed[0], transaction=held)
        n_bytes = 0 if self._host.observer is None else writer.stored_bytes(wrote)
        return committed[0].index, n_bytes

    def _own_step(self, step: str | int | StepRef | None) -> str | int | None:
        if not isinstance(step, StepRef):
            return step
        if (step.spool_id, step.session_id) != (self._host.spool_id, self.session_id):
            raise InputError(f"step {step.id} is of another session than {self.session_id!r}", step=step.id)
        return step.index

    def _missing_tools(self, tools: Iterable[ToolsStored], writer: StreamWriter) -> list[StoredTools]:
        """Return which of these tool schemas the open pack does not have: a pack that goes takes no other's along."""
        places = [StoredTools(writer.name, writer.position.pack, item.key) for item in tools]
        return [place for place in places if place not in self._host.known_tools]

    def _check_inline(self, inline: Sequence[str]) -> None:
        known = sorted(spec.name for spec in self._record.opened.fields)
        for name in inline:
            if name not in known:
                raise NotFoundError(f"inline names {name!r}, but this session has {', '.join(known)}", field=name)

    def _check_declared(self, step: StepInput, what: str) -> None:
        declared = {spec.name for spec in self._record.opened.fields}
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
        with self._record.owned():
            state = self._record.state()
            return [state.ref(index) for index in state.visible(self._held())]

    def view(self, view: View = "lineage", **options: Any) -> list[SegmentRef]:
        """Return the segments that ``view`` makes of the steps so far; see `finalize` for the options."""
        options = check_options(options)
        with self._record.owned():
            return self._host.with_late(self.session_id, segments(self._record.state(), view, **options))

    def finalize(
        self, view: View = "lineage", outcome: Outcome = "completed", inline: Sequence[str] = (), **options: Any
    ) -> list[SegmentRef]:
        """End the session and return its segments. Again with the same arguments it returns the same.

        Args:
            view: ``lineage`` (one segment a leaf) or ``timeline`` (one a step).
            outcome: how the session ended.
            inline: fields whose payload shall travel inside the references.
            **options: the first of each is the default.
                ``train_shared_prefix="first"|"all"``: tokens that several segments share are trained once, or in each.
                ``superseded="drop"|"keep"``: a leaf whose prompt a later step sent again is a client's retry.
                ``trailing="cut"|"keep"``: observations behind the last generated token.
                ``gaps="cut"|"keep"``: a segment ends before the first row of routing that was never sent (a segment
                without any has no gap); one that would lose all its generated tokens is left out. ``cut_tokens`` of a
                reference says what was cut.

        Raises:
            NotFoundError: ``inline`` names a field that the session or a segment does not have; it is not finalised.
            GapError: rows of a field in ``inline`` were never sent; it is not finalised.
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
        options, inline = check_options(options), names("inline", inline)
        with self._record.owned():
            state = self._record.state()
            final = state.finalized
            if final is None:
                self._open_state()
                self._check_no_transaction("finalised")
                self._check_inline(inline)
                made = segments(state, view, outcome=outcome, **options)
                refs = self._handed_out(made, inline)
                final = SessionFinalized(self.session_id, time.time(), outcome, view, tuple(made), options)
                with self._recording():
                    self._record.commit(final)
                    state.finalize(final)
                self._host.forget(self.session_id)
                return refs
            if (final.view, final.outcome, final.options) != (view, outcome, options):
                raise SessionStateError(
                    f"session {self.session_id!r} is finalised as {final.view}, {final.outcome}, {final.options}; "
                    "use view() for other segments of it",
                    session_id=self.session_id, outcome=final.outcome,
                )  # fmt: skip
        return self._handed_out(list(final.segments), inline)

    def _handed_out(self, made: list[SegmentRef], inline: Sequence[str]) -> list[SegmentRef]:
        """Return segments as they leave: with the late facts that are known, and the payload that travels inside."""
        refs = self._host.with_late(self.session_id, made)
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
        if isinstance(step, bool) or not isinstance(step, str | int | StepRef):
            raise refused("step", "a step's id, index or reference", step)
        with self._record.owned():
            state, held = self._open_state(), self._held()
            own = self._own_step(step)
            assert own is not None
            index = state.resolve(own, held)
            state.check_discard(index, held)
            event = StepDiscarded(self.session_id, index, time.time())
            with self._recording():
                if held is None:
                    self._record.commit(event)
                else:
                    held.events.append(event)
                state.discard(event, held)

    def abandon(self) -> None:
        """Withdraw the whole session; what `Spool.discard` does with a live one. It does not wait for room."""
        with self._record.owned():
            event, state = SessionDiscarded(self.session_id, time.time()), self._record.state()
            with self._recording():
                self._record.commit(event)
                state.abandon(event)
            self._host.forget(self.session_id)

    def expire(self) -> bool:
        """End the session as ``timeout`` if nothing was appended for longer than its ``idle_s``.

        Returns:
            It was ended now; not so one of which a transaction is open.

        Raises:
            SpoolError: it cannot be ended. Where that is another process's to do, it is refused here for good.
        """
        if not self._is_idle() or not self._record.owned().acquire(blocking=False):
            return False
        try:
            open_blocks = any(held.open for held in self._blocks)
            if not self._is_idle() or self._suspended or open_blocks or self._record.state().ended:
                return False
            self._finalize("lineage", "timeout", (), {})
        except LockedError as error:
            self._record.refusal = error
            raise
        finally:
            self._record.owned().release()
        return True

    def _is_idle(self) -> bool:
        idle_s = self._record.opened.idle_s
        return idle_s is not None and time.monotonic() - self._used_at >= idle_s

    def suspend(self) -> str:
        """Stop appending here and return a small JSON token; `Spool.resume` goes on with it in any process.

        Raises:
            SessionStateError: the session has ended, or a transaction is open.
            CapacityError: no room within ``append_timeout_s``.
        """
        return self._with_room(self._suspend)

    def _suspend(self) -> str:
        with self._record.owned():
            state = self._open_state()
            self._check_no_transaction("suspended")
            self._record.writer()
            self._suspended = True
            self._host.forget(self.session_id)
            token = SuspendToken(self._host.spool_id, self.session_id, len(state.visible()), self._record.n_openings)
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
            self.finalize(outcome=_outcome_of(kind))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and await self.on_thread(self._goes_on):
            await self.finalize_async(outcome=_outcome_of(kind))

    def _goes_on(self) -> bool:
        return not self._suspended and not self._record.state().ended

    # -- transactions ------------------------------------------------------------------------------------------------

    def begin(self) -> Held:
        """Open a transaction for the calling task; used by `TransactionBlock`."""
        with self._record.owned():
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
        with self._record.owned():
            held.open = False
            if not keep:
                self._drop(held)
                return
            state = self._record.state()
            self._check_whole(state, held)
            with self._recording():
                if held.events:
                    self._commit_together(held.events)
                state.settle(held)
                held.over = True

    def _commit_together(self, events: Sequence[Single]) -> None:
        writer, stored = self._record.writer(), list[StoredTools]()

        def event(_: Runs) -> bytes:
            stored[:] = self._missing_tools((item for item in events if isinstance(item, ToolsStored)), writer)
            keys = {place.key for place in stored}
            kept = (item for item in events if not isinstance(item, ToolsStored) or item.key in keys)
            return encode_event(Transaction(tuple(kept)))

        writer.append({}, event)
        self._host.known_tools.update(stored)

    def _drop(self, held: Held) -> None:
        """Take out of the state what a transaction holds that was not committed, where it is in there."""
        with self._record.owned():
            if not held.over and not held.spoiled:
                held.over = True
                self._record.state().rollback(held)

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
            self._record.doubt()
            for held in self._blocks:
                held.spoiled = not held.over
            raise

    def _check_no_transaction(self, verb: str) -> None:
        if self._held() is not None:
            raise SessionStateError(f"session {self.session_id!r} cannot be {verb} inside a transaction")

    # -- inside ------------------------------------------------------------------------------------------------------

    @property
    def is_live(self) -> bool:
        """It was found to be this process's; not so where another process records it, or nothing was asked yet."""
        return self._record.is_loaded

    @property
    def is_refused(self) -> bool:
        """It cannot go on as it was asked to; another one of its id may."""
        return self._record.refusal is not None

    @property
    def is_recorded(self) -> bool:
        """Its opening is written, by this process or by an owner before."""
        return self._record.n_openings > 0

    def is_pending(self, index: int) -> bool:
        """Whether a step belongs to an open transaction here; waits for nothing."""
        state = self._record.loaded
        return state is not None and state.is_pending(index)

    def known_step(self, index: int) -> StepCommitted | None:
        """Return a step that this process knows, or None; waits for nothing."""
        state = self._record.loaded
        return None if state is None else state.steps.get(index)

    def check_same(self, wanted: SessionOpened) -> None:
        """Refuse to be taken for a session that was to have other fields, rules or identity.

        Raises:
            SessionStateError: names what differs; what ``wanted`` leaves at its default is not compared.
        """
        check_same(self._record.opened, wanted)

    def _open_state(self) -> SessionState:
        if self._suspended:
            raise SessionStateError(f"session {self.session_id!r} was suspended here; resume it with its token")
        state = self._record.state()
        state.check_open()
        return state


def _tools(intake: Intake) -> ToolsStored | None:
    """Return the event that stores a step's tool schemas."""
    return ToolsStored(content_key(intake.tools), intake.tools) if intake.tools else None


def _outcome_of(kind: type[BaseException]) -> Outcome:
    return "aborted" if issubclass(kind, asyncio.CancelledError) else "failed"
