"""`open` and the verbs of a spool. It composes the layers below and decides nothing itself."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, overload

import msgspec

from spool import audit
from spool.audit import Report
from spool.catalog import Catalog, SessionRow
from spool.config import Config, parse_uri, search_roots
from spool.derived import derived_segments
from spool.errors import ConfigError, InputError, NotFoundError, ReleasedError
from spool.facts import Facts, target_of
from spool.formats import messages as message_format
from spool.formats.frames import encode_event
from spool.logs import LogFeeder
from spool.logs.streams import is_live
from spool.model.events import Event, SessionOpened, StepCommitted, ToolsStored
from spool.model.fields import BUILT_IN, LOGPROBS, LOSS_MASK, ROUTED_EXPERTS, TOKEN_IDS, FieldSpec, Schema, expert_field
from spool.model.moe import MoEShape
from spool.model.refs import Inline, Ref, SegmentRef, StepRef
from spool.read.reader import ByteRange, Reader
from spool.read.sample import Sample
from spool.read.select import Tokens
from spool.recorder import Recorder
from spool.rollout.state import SessionState
from spool.rollout.views import View, segments
from spool.root import FORMAT, make_identity, read_identity
from spool.session import Session, SuspendToken
from spool.stores.hot import HotStore
from spool.write.recover import Recovered, recover

T = TypeVar("T")
MAX_TEXT_BYTES = 1024


def open(  # noqa: A001
    uri: str | None = None, *, fields: Sequence[FieldSpec] = (), create: bool = True, readonly: bool = False
) -> Spool:
    """Open a spool.

    Args:
        uri: ``file:///path?option=value`` or a path; ``$SPOOL_URI`` where None. The options are those of `Config`.
        fields: specs of the user's own fields, for every session of this handle.
        create: make the spool where there is none.
        readonly: write nothing into the spool, not even into its index; nothing can be recorded, and none is created.

    Raises:
        ConfigError: the URI or the file system does not fit.
        NotFoundError: there is no spool and it is not to be created.
    """
    config = parse_uri(uri)
    identity = make_identity(config.root) if create and not readonly else read_identity(config.root)
    if identity is None:
        raise NotFoundError(f"there is no spool at {config.root} (no spool.json)", root=config.root)
    return Spool(config, identity.id, tuple(fields), readonly=readonly)


class Spool:
    """An open spool; made by `open`. Safe from many threads, and after a fork."""

    def __init__(
        self, config: Config, spool_id: str, fields: tuple[FieldSpec, ...] = (), *, readonly: bool = False
    ) -> None:
        self.config = config
        self.spool_id = spool_id
        self._fields = fields
        self._catalog = Catalog.open(os.path.join(config.root, "catalog.sqlite"), readonly=readonly)
        self._feeder = LogFeeder(config.root, self._catalog)
        self._store = self._store_at(config.root)
        self._readers = {spool_id: Reader(self._store, threads=config.threads)}
        self._recorder = Recorder(config, spool_id, self._catalog, self._feeder, self._inline, readonly=readonly)
        self._facts = Facts(self._recorder, fields, self._require)

    def __repr__(self) -> str:
        return f"<spool.Spool {self.config.url}>"

    # -- recording ---------------------------------------------------------------------------------------------------

    def session(
        self,
        session_id: str | None = None,
        *,
        group_id: str | None = None,
        sample_index: int | None = None,
        rollout_step: int | None = None,
        source: str | None = None,
        prompt_id: str | None = None,
        split: str | None = None,
        attempt: int = 0,
        experts: MoEShape | None = None,
        fields: Sequence[FieldSpec] = (),
        prefer: Literal["first", "last"] = "first",
        trim: int = 0,
        idle_s: float | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Session:
        """Return the live session of that id, or start one; a recorded open session of a dead writer is gone on with.

        Nothing is written before the first append.

        Args:
            session_id: any text of 1 to 1,024 bytes; a random one where None.
            group_id, sample_index, rollout_step, source, prompt_id, split, attempt: identity, carried in references.
            experts: the model's routing shape, needed to store ``routed_experts``.
            fields: specs of further fields of this session.
            prefer: of rows sent again, keep the ``first`` or the ``last``.
            trim: how many final response tokens may be missing from the next prompt.
            idle_s: end as ``timeout`` after so long without an append; the spool's ``session_idle_s`` where None.
            metadata: JSON-able facts about the session.

        Raises:
            InputError: an argument does not fit.
        """
        if prefer not in ("first", "last") or not isinstance(trim, int) or trim < 0:
            raise InputError(f'prefer must be "first" or "last" and trim at least 0, got {prefer!r}, {trim!r}')
        opened = SessionOpened(
            session_id=_text("session_id", uuid.uuid4().hex if session_id is None else session_id),
            at=time.time(),
            group_id=_optional_text("group_id", group_id),
            sample_index=_number("sample_index", sample_index),
            rollout_step=_number("rollout_step", rollout_step),
            source=_optional_text("source", source),
            prompt_id=_optional_text("prompt_id", prompt_id),
            split=_optional_text("split", split),
            attempt=_number("attempt", attempt) or 0,
            prefer=prefer,
            trim=trim,
            idle_s=self.config.session_idle_s if idle_s is None else idle_s,
            fields=self._declared(experts, fields),
            metadata=dict(metadata or {}),
        )
        encode_event(opened)
        return self._recorder.start(opened, fresh=session_id is None)

    def resume(self, token: str) -> Session:
        """Go on, in this process, with a session that `Session.suspend` gave the token of.

        Raises:
            InputError: the text is not a token, or of another spool.
            SessionStateError: the session is live here.
        """
        try:
            suspended = msgspec.json.decode(token, type=SuspendToken)
        except msgspec.DecodeError as error:
            raise InputError(f"this is not a suspend token: {error}") from error
        if suspended.spool != self.spool_id:
            raise InputError(f"the token belongs to spool {suspended.spool}, this is {self.spool_id}")
        return self._recorder.go_on(SessionOpened(session_id=suspended.session, at=time.time()), suspended)

    def _declared(self, experts: MoEShape | None, fields: Sequence[FieldSpec]) -> tuple[FieldSpec, ...]:
        own = {spec.name: spec for spec in (*self._fields, *fields)}
        if own.keys() & (BUILT_IN - {ROUTED_EXPERTS}) or (experts is not None and ROUTED_EXPERTS in own):
            raise ConfigError(f"one of {sorted(own)} is defined by Spool already; give your field another name")
        if ROUTED_EXPERTS in own and own[ROUTED_EXPERTS].bound is None:
            raise ConfigError("a spec of routed_experts comes from spool.expert_field(shape, ...)")
        built_in = (TOKEN_IDS, LOGPROBS, LOSS_MASK, *((expert_field(experts),) if experts is not None else ()))
        return Schema.of(*built_in, *own.values()).fields

    def expire_idle(self) -> list[str]:
        """End open sessions that had no append for longer than their ``idle_s``, as ``timeout``; return their ids.

        Sessions of this process and of dead writers are ended; those of other live processes are theirs to end.
        """
        self._feeder.catch_up()
        return self._recorder.expire(self._catalog.idle(time.time()))

    # -- late facts and the end --------------------------------------------------------------------------------------

    def annotate(self, session_id: str, *, segment: SegmentRef | None = None, **facts: Any) -> None:
        """Record late facts of a session (or one of its segments), such as ``reward=1.0``; of one name the last wins.

        Raises:
            NotFoundError: no such session is recorded.
            InputError: a fact is not JSON-able.
        """
        self._facts.annotate(session_id, segment, facts)

    def attach(self, ref: SegmentRef | StepRef, *, align: str | None = None, **values: Any) -> None:
        """Store late arrays of a segment or step, e.g. ``teacher_logprobs=array``; reads by that name find them.

        Args:
            ref: what they belong to.
            align: ``token``, ``response``, ``forward`` or ``step``; found by the length where None.
            **values: one array a field; a field declared in `open` keeps its spec.

        Raises:
            InputError: the length fits nothing, or more than one thing.
        """
        self._facts.attach(ref, values, align)

    def discard(self, session_id: str) -> None:
        """Withdraw a session, alive or finalised, from whichever process: views and filters leave it out.

        Raises:
            NotFoundError: no such session is recorded.
        """
        self._facts.discard(session_id)

    async def discard_async(self, session_id: str) -> None:
        """`discard` on Spool's own threads."""
        await self._on_thread(lambda: self.discard(session_id))

    def release(self, refs: SegmentRef | Sequence[SegmentRef], tag: str | None = None) -> None:
        """Say that segments are consumed, for good or until ``checkpointed(tag)``; twice is the same as once."""
        self._facts.release([refs] if isinstance(refs, SegmentRef) else refs, tag)

    def checkpointed(self, tag: str) -> None:
        """Say that no restart needs what was released under ``tag``."""
        self._facts.checkpointed(_text("tag", tag))

    # -- finding -----------------------------------------------------------------------------------------------------

    def sessions(self, where: str | None = None, *, discarded: bool = False) -> Iterator[SessionRow]:
        """Iterate the recorded sessions, oldest first.

        Args:
            where: a filter such as ``reward > 0.5 and source = 'swe'``; names it does not know are late facts.
            discarded: those that were withdrawn, too.

        Raises:
            InputError: the filter does not parse; raised by the call.
        """
        self._feeder.catch_up()
        rows = self._catalog.sessions(where)
        return rows if discarded else (row for row in rows if row.state != "discarded")

    def segments(self, where: str | None = None, view: View | None = None) -> Iterator[SegmentRef]:
        """Iterate the segments of finalised sessions, in the order they were finalised, late facts merged in.

        Args:
            where: a filter such as ``reward > 0.5 and n_tokens < 32768``.
            view: the view; the one each session was finalised with where None.
        """
        self._feeder.catch_up()
        if view is None:
            return self._catalog.segments(where)
        return derived_segments(self._catalog, self._recorded, where, view)

    def find_session(self, session_id: str) -> SessionRow | None:
        """Return a recorded session, or None."""
        self._feeder.catch_up()
        return self._catalog.session(session_id)

    def final_segments(self, session_id: str) -> list[SegmentRef]:
        """Return the segments that a session was finalised with; those of ``lineage`` where it lives.

        Raises:
            NotFoundError: no such session is recorded.
        """
        final = self._recorded(session_id).finalized
        return [self._catalog.with_late(ref) for ref in final.segments] if final is not None else self.view(session_id)

    def steps(self, session_id: str) -> list[StepRef]:
        """Return the references of a session's steps, in the order of append."""
        state = self._recorded(session_id)
        return [state.ref(index) for index in state.visible()]

    def view(self, session_id: str, view: View = "lineage", **options: Any) -> list[SegmentRef]:
        """Return the segments that ``view`` makes of a session's steps, whether it lives or not; no payload is read."""
        state = self._recorded(session_id)
        return [self._catalog.with_late(ref) for ref in segments(state, view, **options)]

    def messages(self, ref: StepRef | SegmentRef) -> list[Any]:
        """Return the full list of chat messages of a step, or of a segment's last step."""
        by_index = self._steps_of(ref.session_id)
        path = []
        index: int | None = self._step_of(ref)
        while index is not None:
            path.append(by_index[index])
            event = path[-1].event
            index = event.parent if event.inherited_messages else None
        messages: list[Any] = []
        for event in reversed(self._feeder.read_events(path)):
            assert isinstance(event, StepCommitted)
            messages[event.inherited_messages :] = message_format.decode_messages(event.messages)
        return messages

    def tools(self, ref: StepRef | SegmentRef) -> list[Any]:
        """Return the tool schemas of a step, or of a segment's last step."""
        event = self._steps_of(ref.session_id)[self._step_of(ref)].event
        if event.tools_key is None:
            return []
        place = self._catalog.tools_at(event.tools_key)
        if place is None:
            raise NotFoundError(f"the tool schemas {event.tools_key} of {ref.id} are not recorded", ref=ref.id)
        stored = self._feeder.read_event(place)
        assert isinstance(stored, ToolsStored)
        return list(message_format.decode_messages(stored.json))

    def _step_of(self, ref: StepRef | SegmentRef) -> int:
        if isinstance(ref, StepRef):
            return ref.index
        if not ref.steps:
            raise NotFoundError(f"segment {ref.id} has no steps")
        return ref.steps[-1]

    def _steps_of(self, session_id: str) -> dict[int, Any]:
        self._feeder.catch_up()
        located = self._catalog.session_events(session_id)
        return {item.event.index: item for item in located if isinstance(item.event, StepCommitted)}

    def _recorded(self, session_id: str) -> SessionState:
        self._feeder.catch_up()
        located = self._catalog.session_events(session_id)
        if not located:
            raise NotFoundError(f"no session {session_id!r} in {self.config.url}", session_id=session_id)
        state = SessionState.from_events(self.spool_id, [item.event for item in located], roots=(self.config.url,))
        if state.discarded is not None:
            raise ReleasedError(f"session {session_id!r} was discarded", session_id=session_id)
        return state

    def _require(self, session_id: str) -> None:
        if self._recorder.live(session_id) is None:
            self._feeder.catch_up()
            if self._catalog.session(session_id) is None:
                raise NotFoundError(f"no session {session_id!r} in {self.config.url}", session_id=session_id)

    # -- reading -----------------------------------------------------------------------------------------------------

    @overload
    def read(
        self,
        refs: Ref,
        *,
        fields: Sequence[str] | None = None,
        tokens: Tokens = None,
        layers: slice | None = None,
        dtype: Literal["train", "stored"] = "train",
        out: Mapping[str, Any] | None = None,
        missing: Literal["error"] | int = "error",
        verify: Literal["whole", "always", "never"] = "whole",
    ) -> Sample: ...
    @overload
    def read(
        self,
        refs: Sequence[Ref],
        *,
        fields: Sequence[str] | None = None,
        tokens: Sequence[Tokens] | None = None,
        layers: slice | None = None,
        dtype: Literal["train", "stored"] = "train",
        out: Sequence[Mapping[str, Any]] | None = None,
        missing: Literal["error"] | int = "error",
        verify: Literal["whole", "always", "never"] = "whole",
    ) -> list[Sample]: ...
    def read(
        self,
        refs: Ref | Sequence[Ref],
        *,
        fields: Sequence[str] | None = None,
        tokens: Any = None,
        layers: slice | None = None,
        dtype: Literal["train", "stored"] = "train",
        out: Any = None,
        missing: Literal["error"] | int = "error",
        verify: Literal["whole", "always", "never"] = "whole",
    ) -> Sample | list[Sample]:
        """Read exactly the rows asked for, of one reference or of many in one pass.

        Rows that several references share are read once. Arrays are fresh, writable and C-contiguous.

        Args:
            refs: a reference (a `Sample` is returned) or several (a list).
            fields: names; all that the reference has, and ``loss_mask``, where None.
            tokens: a slice, or slices to be concatenated; for several references a list with one such entry each.
            layers: a slice of absolute layers, for fields that have layers.
            dtype: ``train`` (what trainers take: int32 experts) or ``stored`` (narrow).
            out: arrays to fill, by field; for several references a list of such mappings.
            missing: ``error``, or the number that stands for rows that were never sent.
            verify: check ``whole`` extents (default), widen partial reads to check them too (``always``), or ``never``.

        Raises:
            GapError: rows are asked for that were never sent.
            IntegrityError: bytes are missing, short or altered; names stream, field, rows and file.
            NotFoundError: a field or the spool of a reference is not there.
        """
        single = isinstance(refs, Ref)
        many = [refs] if isinstance(refs, Ref) else list(refs)
        if fields is not None:
            many = [self._with_attached(ref, fields) for ref in many]
        owner = {ref.spool_id for ref in many}
        if len(owner) > 1:
            raise InputError(f"one read takes references of one spool, got {sorted(owner)}")
        reader = self._reader_of(many[0]) if many else self._readers[self.spool_id]
        samples = reader.read(
            many,
            fields=fields,
            tokens=[tokens] if single and tokens is not None else tokens,
            layers=layers,
            dtype=dtype,
            out=[out] if single and out is not None else out,
            missing=missing,
            verify=verify,
        )
        return samples[0] if single else samples

    async def read_async(self, refs: Ref | Sequence[Ref], **options: Any) -> Sample | list[Sample]:
        """`read` on Spool's own threads."""
        return await self._on_thread(lambda: self.read(refs, **options))

    def locate(self, ref: Ref, **selection: Any) -> list[ByteRange]:
        """Return the byte ranges (file, offset, length) that hold a reference, or a slice of it as `read` takes one."""
        fields = selection.get("fields")
        whole = ref if fields is None else self._with_attached(ref, fields)
        return self._reader_of(whole).locate(whole, **selection)

    def _with_attached(self, ref: Ref, fields: Sequence[str]) -> Ref:
        """Return ``ref`` with the extents of late arrays among ``fields`` that it does not carry."""
        if not isinstance(ref, StepRef | SegmentRef) or ref.spool_id != self.spool_id:
            return ref
        known = ref.extents.keys() | ref.inline.keys() | BUILT_IN
        if all(name in known or f"{name}.offsets" in known for name in fields):
            return ref
        self._feeder.catch_up()
        target, late = target_of(ref), {}
        for attached in self._catalog.attachments(ref.session_id):
            if attached.target == target:
                late.update(attached.extents)
        return msgspec.structs.replace(ref, extents={**ref.extents, **late}) if late else ref

    def _inline(self, refs: list[SegmentRef], fields: Sequence[str]) -> list[SegmentRef]:
        samples = self.read(refs, fields=list(fields))
        return [
            msgspec.structs.replace(
                ref,
                inline={name: Inline(array.dtype.name, array.shape, array.tobytes()) for name, array in sample.items()},
            )
            for ref, sample in zip(refs, samples, strict=True)
        ]

    def _reader_of(self, ref: Ref) -> Reader:
        """Return the reader of the reference's spool: this one, one in ``$SPOOL_ROOTS``, or where its hints say."""
        reader = self._readers.get(ref.spool_id)
        if reader is None:
            hints = [root.removeprefix("file://") for root in ref.roots]
            for root in (*search_roots(), *hints):
                identity = read_identity(root)
                if identity is not None and identity.id == ref.spool_id:
                    elsewhere = Reader(self._store_at(root), threads=self.config.threads)
                    return self._readers.setdefault(ref.spool_id, elsewhere)
            raise NotFoundError(
                f"the reference is of spool {ref.spool_id}, this is {self.spool_id}; name its root in SPOOL_ROOTS",
                spool_id=ref.spool_id,
            )
        return reader

    def _store_at(self, root: str) -> HotStore:
        config = self.config
        return HotStore(root, page_cache_bytes=config.page_cache_bytes, max_open_files=config.max_open_files)

    # -- the files ---------------------------------------------------------------------------------------------------

    def verify(self, *, deep: bool = False, progress: Callable[[int, int], None] | None = None) -> Report:
        """Check that everything recorded is on disk.

        Args:
            deep: re-read everything, check every checksum, and lint the routing.
            progress: called with bytes done and bytes in all.
        """
        problems = self._feeder.catch_up()
        recorded = audit.Recorded(self._events(), self._catalog.offsets(), problems)
        return audit.verify(self._store, recorded, deep=deep, progress=progress)

    def usage(self) -> list[dict[str, Any]]:
        """Return rows and bytes by stream and stored array, as `spool du` prints them."""
        self._feeder.catch_up()
        return audit.usage(self._store, self._events())

    def info(self) -> dict[str, Any]:
        """Return identity and totals, as `spool info` prints them."""
        self._feeder.catch_up()
        totals = msgspec.structs.asdict(self._catalog.totals())
        names = self._feeder.stream_names()
        identity = read_identity(self.config.root)
        return {
            "root": self.config.root,
            "id": self.spool_id,
            "format": FORMAT,
            "created_at": identity.created if identity is not None else None,
            "n_streams": len(names),
            "n_live": sum(is_live(self.config.root, name) for name in names),
            **{name: number for name, number in totals.items() if name != "n_streams"},
        }

    def rebuild(self) -> dict[str, Any]:
        """Make the catalog anew from the commit logs, which alone count.

        Returns:
            What it then holds, and as ``problems`` what of the logs could not be taken in.
        """
        problems = self._feeder.rebuild()
        totals = msgspec.structs.asdict(self._catalog.totals())
        return {**totals, "problems": [msgspec.structs.asdict(found) for found in problems]}

    def recover(self, *, dry_run: bool = False) -> list[Recovered]:
        """Seal what dead writers left behind; live writers are left alone. Then end idle sessions.

        Where events were lost the catalog is made anew: it may know them still, and others by the wrong number.
        """
        found = recover(self.config.root, dry_run=dry_run)
        if not dry_run:
            if any(stream.damaged_bytes for stream in found):
                self._feeder.rebuild()
            self.expire_idle()
        return found

    def _events(self) -> Iterator[Event]:
        for row in self._catalog.sessions():
            yield from (item.event for item in self._catalog.session_events(row.session_id))
            yield from self._catalog.attachments(row.session_id)

    # -- the handle itself -------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Roll this process's packs and return when they are sealed: plain Zarr and Arrow from then on."""
        self._recorder.flush()

    def close(self) -> None:
        """Seal what this process recorded and let everything go. Open sessions may be gone on with elsewhere.

        Raises:
            SpoolError: a pack could not be sealed. Nothing is lost: `recover` seals it.
        """
        try:
            self._recorder.close()
        finally:
            self._catalog.close()
            for reader in self._readers.values():
                reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def _on_thread(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._recorder.executor(), call)


def _text(name: str, value: str) -> str:
    """Return ``value`` if it can name something: 1 to 1,024 bytes of UTF-8."""
    if not isinstance(value, str):
        raise InputError(f"{name} must be text, got {type(value).__name__}", got=repr(value))
    try:
        size = len(value.encode())
    except UnicodeEncodeError as error:
        raise InputError(
            f"{name} {value!r} holds a lone surrogate, which no file or index can hold: {error}"
        ) from error
    if not 0 < size <= MAX_TEXT_BYTES:
        raise InputError(f"{name} must be 1 to {MAX_TEXT_BYTES} bytes long, got {size}", got=size)
    return value


def _optional_text(name: str, value: str | None) -> str | None:
    return None if value is None else _text(name, value)


def _number(name: str, value: int | None) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise InputError(f"{name} must be an integer, got {value!r}", got=repr(value))
    return value
