"""`open` and the verbs of a spool. It composes the layers below and decides nothing itself."""

from __future__ import annotations

import asyncio
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, get_args, overload

import msgspec
from numpy.typing import NDArray

from spool import arguments, audit
from spool.audit import Report
from spool.catalog import Catalog, GroupLook, PackRow, SessionRow
from spool.catalog.news import News
from spool.catalog.shape import Summary
from spool.config import parse_uri
from spool.derived import derived_segments
from spool.errors import InputError, IntegrityError
from spool.export import Exported, Format, Source
from spool.export import export as write_export
from spool.export.source import DtypeChoice
from spool.facts import Facts
from spool.feeds import Feeds
from spool.history import History, StepMessages
from spool.known import Known
from spool.listing import ARRIVAL, Listing
from spool.logs import LogFeeder, Problem
from spool.logs.cold import ColdFeeder
from spool.logs.keys import FACT_STREAM
from spool.logs.packs import has_files, unspilled
from spool.logs.streams import is_live
from spool.model.events import SessionOpened
from spool.model.fields import FieldSpec
from spool.model.moe import MoEShape
from spool.model.refs import Ref, SegmentRef, StepRef
from spool.observe import Observer
from spool.opening import opening, specs
from spool.read.reader import ByteRange
from spool.read.sample import Coverage, Sample
from spool.read.select import Tokens
from spool.readers import Readers
from spool.record import SuspendToken
from spool.recorder import Recorder
from spool.retention import Decision
from spool.rollout.state import SessionState
from spool.rollout.views import View, check_options, segments
from spool.root import FORMAT, Place, Standing, created_at, find
from spool.session import Session
from spool.spiller.keeper import Keeper
from spool.status import Status
from spool.tiers import Tiers
from spool.units import Units
from spool.write.recover import Recovered, recover

T = TypeVar("T")

RELEASE_WAIT_S = 0.5
"""How long an append waits for room before a spool without cold root has a spiller delete what is released."""

_REFERENCES = "references, as append, finalize and segments() return them"


def open(  # noqa: A001
    uri: str | os.PathLike[str] | None = None,
    *,
    fields: Sequence[FieldSpec] = (),
    create: bool = True,
    readonly: bool = False,
    observer: Observer | None = None,
) -> Spool:
    """Open a spool.

    Args:
        uri: ``file:///path?option=value`` or a path; ``$SPOOL_URI`` where None. The options are those of `Config`.
        fields: specs of the user's own fields, for every session of this handle.
        create: make the spool where there is none.
        readonly: write nothing into the spool, not even into its index; nothing can be recorded, and none is created.
        observer: called with what happens in this process, the events of `spool.observe`; see there.

    Raises:
        ConfigError: the URI or the file system does not fit.
        NotFoundError: there is no spool and it is not to be created.
    """
    config, declared = parse_uri(uri), tuple(specs("fields", fields))
    if observer is not None and not callable(observer):
        raise arguments.refused("observer", "a function of one event", observer)
    place = find(config, create=create and not readonly, join=not readonly, observer=observer)
    return Spool(place, declared, readonly=readonly, observer=observer)


def _reopen(uri: str, fields: tuple[FieldSpec, ...], readonly: bool, observer: Observer | None) -> Spool:
    return open(uri, fields=fields, create=False, readonly=readonly, observer=observer)


class Spool:
    """An open spool; made by `open`. Safe from many threads, and after a fork; one that is pickled is opened anew."""

    def __init__(
        self,
        place: Place,
        fields: tuple[FieldSpec, ...] = (),
        *,
        readonly: bool = False,
        observer: Observer | None = None,
    ) -> None:
        config = self.config = place.config
        self.spool_id, self._place = place.identity.id, place
        self._fields, self._readonly, self._observer = fields, readonly, observer
        path = "" if config.root is None else os.path.join(config.root, "catalog.sqlite")
        self._catalog = Catalog.open(path, readonly=readonly or config.root is None)
        cold = (
            None
            if place.objects is None
            else ColdFeeder(place.objects, self._catalog, self._is_local, self._unspilled, spool_id=place.identity.id)
        )
        self._feeder = LogFeeder(config.root or "", self._catalog, cold)
        standing = Standing(config.root, self.spool_id)
        self._feeds = Feeds(self._feeder, cold, self._catalog, standing, local=config.root is not None)
        self._history = History(self.spool_id, config, self._catalog, self._feeds)
        self._readers = Readers(config, self.spool_id, self._catalog, self._feeds, observer)
        self._keeper = None
        if config.root is not None and not readonly:
            self._keeper = Keeper(
                config.root,
                config.uri,
                self._catalog,
                interval_s=config.publish_interval_s,
                patience_s=0.0 if config.spill is not None else RELEASE_WAIT_S,
            )
        self._recorder = Recorder(
            config,
            self.spool_id,
            self._catalog,
            self._feeds,
            self._keeper,
            self._readers.inline,
            readonly=readonly,
            observer=observer,
        )
        self._known = Known(self._recorder, self._history)
        self._facts = Facts(self._recorder, fields, self._known, self._catalog.newest_late)
        self._units = Units(config, self._feeds, self._recorder)
        self._tiers = Tiers(
            config,
            self._catalog,
            self._feeds,
            self._known,
            self._recorder,
            self._keeper,
            self._readers.store,
            self._units,
            expire=self.expire_idle,
            withdraw=self._facts.withdraw,
            observer=observer,
        )

    def _is_local(self, stream: str, pack: int) -> bool:
        return self.config.root is not None and has_files(self.config.root, stream, pack)

    def _unspilled(self, stream: str, pack: int) -> bytes | None:
        return None if self.config.root is None else unspilled(self.config.root, stream, pack)

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process opens the same place for itself, with what was declared here."""
        return _reopen, (self.config.uri, self._fields, self._readonly, self._observer)

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
        experts: MoEShape | str | None = None,
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
            experts: the model's routing shape, or its name in `spool.models`; needed to store ``routed_experts``.
            fields: specs of further fields of this session.
            prefer: of forward rows sent again, keep the ``first`` or the ``last``. A ``token`` field's rows stand for
                their tokens: those of a prefix that is there already are kept, what is sent again is not.
            trim: how many final response tokens may be missing from the next prompt.
            idle_s: end as ``timeout`` after so long without an append; the spool's ``session_idle_s`` where None.
            metadata: JSON-able facts about the session.

        Raises:
            InputError: an argument does not fit.
            SessionStateError: the spool was opened to read only, or from its cold root.
        """
        self._recorder.check_recording()
        opened = opening(
            uuid.uuid4().hex if session_id is None else session_id,
            group_id=group_id,
            sample_index=sample_index,
            rollout_step=rollout_step,
            source=source,
            prompt_id=prompt_id,
            split=split,
            attempt=attempt,
            experts=experts,
            fields=(*self._fields, *specs("fields", fields)),
            prefer=prefer,
            trim=trim,
            idle_s=self.config.session_idle_s if idle_s is None else idle_s,
            metadata=metadata,
        )
        return self._recorder.start(opened, fresh=session_id is None)

    def resume(self, token: str) -> Session:
        """Go on, in this process, with a session that `Session.suspend` gave the token of.

        Raises:
            InputError: the text is not a token, or of another spool.
            SessionStateError: the session is live here.
        """
        try:
            suspended = msgspec.json.decode(arguments.text("token", token), type=SuspendToken)
        except msgspec.DecodeError as error:
            raise InputError(f"this is not a suspend token: {error}") from error
        if suspended.spool != self.spool_id:
            raise InputError(f"the token belongs to spool {suspended.spool}, this is {self.spool_id}")
        return self._recorder.go_on(SessionOpened(session_id=suspended.session, at=time.time()), suspended)

    def expire_idle(self) -> list[str]:
        """End open sessions that had no append for longer than their ``idle_s``, as ``timeout``; return their ids.

        Sessions of this process and of dead writers are ended; those of other live processes are theirs to end.
        """
        self._feeds.catch_up()
        return self._recorder.expire(self._catalog.idle(time.time()))

    # -- multimodal units --------------------------------------------------------------------------------------------

    def put_unit(self, array: Any) -> str:
        """Store a multimodal unit (an image, a group of video frames) once, and return its key for ``append(units=)``.

        The key follows from dtype, shape and values. Whoever puts an equal array, in whichever process and on whichever
        node, gets the same key; where it is stored already it is compared, and written only where the file is damaged.
        Its age begins anew, as it does when an append names it. It is there whole or not at all, and with
        ``durability=disk`` outlives a power cut.

        Args:
            array: a numpy or torch array of any shape: bool, integers, floats of 8 to 64 bits. It is read until this
                returns, so nobody may change it meanwhile, and never kept.

        Raises:
            PayloadError: it is no array, or of another dtype.
            CapacityError: no room within ``append_timeout_s``.
            SessionStateError: the spool was opened to read only, or from its cold root.
            StorageError: it cannot be written.
        """
        return self._units.put(array)

    async def put_unit_async(self, array: Any) -> str:
        """`put_unit` on Spool's own threads; waiting for room holds none of them."""
        return await self._units.put_async(array, self._on_thread)

    def read_unit(self, key: str) -> NDArray[Any]:
        """Return a unit; see `read_units`."""
        return self.read_units([key])[0]

    def read_units(self, keys: Sequence[str]) -> list[NDArray[Any]]:
        """Return units as numpy arrays, in the order of ``keys``: writable, and each its own.

        They come from the hot tier, or else from the cold one, several at once. One that is named twice is read once.
        Every byte is checked. Dtypes that numpy lacks are those of ml_dtypes.

        Raises:
            ReleasedError: one was deleted, as nobody named it any more.
            NotFoundError: one was never put, or not published by the node that has it.
            IntegrityError: one is damaged; names the file.
            StorageError: a root cannot be read.
        """
        self._recorder.check_open()
        return self._units.read(arguments.names("keys", keys))

    async def read_units_async(self, keys: Sequence[str]) -> list[NDArray[Any]]:
        """`read_units` on Spool's own threads."""
        return await self._on_thread(lambda: self.read_units(keys))

    # -- late facts and the end --------------------------------------------------------------------------------------

    def annotate(self, session_id: str, /, *, segment: SegmentRef | None = None, **facts: Any) -> None:
        """Record late facts of a session (or one of its segments), such as ``reward=1.0``; of one name the last wins.

        Raises:
            NotFoundError: no such session is recorded.
            InputError: a fact is not JSON-able; it is named as a column or a word of filters, or not by letters, digits
                and underscores; the reward is no finite number.
        """
        self._facts.annotate(arguments.text("session_id", session_id), segment, facts)

    def annotate_many(self, facts: Mapping[str, Mapping[str, Any]], /) -> None:
        """Record late facts of many sessions in one commit, of a cold root in one fact file: all of them, or none.

        Args:
            facts: by session id what `annotate` takes: ``{"u1": {"reward": 1.0}, "u2": {"reward": 0.0}}``.

        Raises:
            NotFoundError: a session is not recorded; nothing was said of any.
            InputError: a fact cannot be taken, see `annotate`; nothing was said of any.
        """
        self._facts.annotate_many(facts)

    def attach(self, ref: SegmentRef | StepRef, /, *, align: str | None = None, **values: Any) -> None:
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
        self._facts.discard(arguments.text("session_id", session_id))

    async def discard_async(self, session_id: str) -> None:
        """`discard` on Spool's own threads."""
        await self._facts.discard_async(arguments.text("session_id", session_id), self._on_thread)

    def release(self, refs: SegmentRef | Sequence[SegmentRef], tag: str | None = None) -> None:
        """Say that segments are consumed, for good or until ``checkpointed(tag)``; twice is the same as once.

        Data goes by the segments that a session was finalised with: where a trainer takes another view of it, those of
        `final_segments` are released.

        Raises:
            InputError: something else than segments of this spool, or of a view that their session was not finalised
                with; nothing was released.
        """
        many = [refs] if isinstance(refs, SegmentRef) else refs
        self._facts.release(
            arguments.listed("refs", many, SegmentRef, "segments, as finalize and segments() return them"),
            arguments.optional(arguments.label, "tag", tag),
        )

    def checkpointed(self, tag: str, *, dry_run: bool = False) -> int:
        """Say that no restart needs what was released under ``tag``; return how many segments that are, so far.

        Args:
            tag: as given to `release`.
            dry_run: say nothing, only count.
        """
        tag = arguments.label("tag", tag)
        self._feeds.catch_up(fresh=True)
        if not dry_run:
            self._facts.checkpointed(tag)
        return self._catalog.n_tagged(tag)

    def publish(self, refs: Ref | Sequence[Ref], *, timeout_s: float = 600.0) -> None:
        """Return when every byte that references need, and the records of their sessions, are durable in the cold root.

        From then on they are read from any node. May be called from any process; those that wait share one roll of a
        stream every ``publish_interval_s``. Of another node's references it waits until that node has published them.
        The multimodal units that they name are there too, as far as this node has them; it is logged which are nowhere.

        Args:
            refs: references of steps or segments.
            timeout_s: how long to wait.

        Raises:
            ConfigError: the spool has no cold root.
            SessionStateError: the hot root was opened to read only, so its writers cannot be asked to seal.
            NotFoundError: a session is still known nowhere when the time is over.
            ReleasedError: some of it was deleted.
            IntegrityError: a pack is not as it was recorded, and stays where it is.
            StorageError: it is not there when the time is over; nothing is lost, publish again.
        """
        self._tiers.publish(_references(refs), arguments.seconds("timeout_s", timeout_s))

    async def publish_async(self, refs: Ref | Sequence[Ref], *, timeout_s: float = 600.0) -> None:
        """`publish`; waiting holds no thread."""
        many = _references(refs)
        await self._tiers.publish_async(many, arguments.seconds("timeout_s", timeout_s), self._on_thread)

    def unpublished(self, refs: Ref | Sequence[Ref]) -> list[tuple[str, int]]:
        """Return the packs, as (stream, number), that references need and that are not in the cold root yet.

        Raises:
            ConfigError: the spool has no cold root.
            ReleasedError: one of them was deleted.
        """
        return self._tiers.unpublished(_references(refs))

    # -- finding -----------------------------------------------------------------------------------------------------

    def sessions(self, where: str | None = None, *, discarded: bool = False) -> Iterator[SessionRow]:
        """Iterate the recorded sessions, oldest first.

        Args:
            where: a filter such as ``reward > 0.5 and source = 'swe'``; names are columns, or late facts that
                some session here has.
            discarded: those that were withdrawn, too.

        Raises:
            InputError: the filter does not parse or has an unknown name; raised by the call.
        """
        self._look(where)
        rows = self._catalog.sessions(where)
        return rows if discarded else (row for row in rows if row.state != "discarded")

    def listing(
        self,
        where: str | None = None,
        *,
        order: Sequence[str] = ARRIVAL,
        discarded: bool = True,
        limit: int | None = None,
    ) -> Listing:
        """Return the recorded sessions in an order, to be looked at a page at a time; for millions of them.

        Args:
            where: a filter, as `sessions` takes it.
            order: names of columns, or ``number``, the order of arrival; ``-`` in front for descending.
            discarded: those that were withdrawn, too.
            limit: at most so many.

        Raises:
            InputError: the filter does not parse or has an unknown name, or the order has one.
        """
        self._look(where)
        return Listing(
            self._catalog,
            self._look,
            where,
            arguments.names("order", order),
            discarded=discarded,
            limit=arguments.optional(arguments.size, "limit", limit),
        )

    def groups(
        self, where: str | None = None, *, order: Sequence[str] = ("-last_at",), limit: int | None = None
    ) -> list[GroupLook]:
        """Return the groups of the recorded sessions that match, with the spread of their rewards.

        Args:
            where: a filter of sessions, as `sessions` takes it.
            order: names of `GroupLook`'s attributes; ``-`` in front for descending.
            limit: at most so many.

        Raises:
            InputError: the filter does not parse or has an unknown name, or the order has one.
        """
        self._look(where)
        return self._catalog.groups(
            where, arguments.names("order", order), arguments.optional(arguments.size, "limit", limit)
        )

    def segments(self, where: str | None = None, view: View | None = None) -> Iterator[SegmentRef]:
        """Iterate the segments of finalised sessions, in the order they were finalised, late facts merged in.

        Args:
            where: a filter such as ``reward > 0.5 and n_tokens < 32768``.
            view: the view; the one each session was finalised with where None.

        Raises:
            InputError: the filter does not parse or has an unknown name, or there is no such view; raised by the call.
        """
        self._look()
        if where is not None:
            self._catalog.check_filter(where, "segments")
        if view is None:
            return self._catalog.segments(where)
        return derived_segments(self._catalog, self._history.state, where, view)

    def _look(self, where: str | None = None) -> list[Problem]:
        """Take in what was recorded up to now, and check a filter of sessions; of a closed spool nothing is asked."""
        self._recorder.check_open()
        problems = self._feeds.catch_up(fresh=True)
        if where is not None:
            self._catalog.check_filter(where, "sessions")
        return problems

    def summary(self, where: str | None = None, *, current_version: str | None = None) -> Summary:
        """Return the shape of the run: totals, shares, histograms, series; counted by the index, no payload is read.

        Args:
            where: a filter of sessions, as `sessions` takes it.
            current_version: the weights that staleness is counted from; those that were newest when each session ended
                where None.

        Raises:
            InputError: the filter does not parse or has an unknown name.
        """
        self._look(where)
        return self._catalog.summary(where, arguments.optional(arguments.label, "current_version", current_version))

    def slowest(self, where: str | None = None, *, limit: int = 10) -> list[SessionRow]:
        """Return the sessions that took longest, from when they were opened to their last event.

        Raises:
            InputError: the filter does not parse or has an unknown name.
        """
        limit = arguments.integer("limit", limit)
        self._look(where)
        return self._catalog.slowest(where, limit)

    def sample(self, n: int, where: str | None = None) -> list[SegmentRef]:
        """Return at most ``n`` segments, spread over those of all sessions that match; the same ones each time.

        Raises:
            InputError: the filter does not parse or has an unknown name.
        """
        n = arguments.integer("n", n)
        self._look(where)
        return self._catalog.sample(n, where)

    def news(self, mark: int | None = None, where: str | None = None) -> tuple[list[News], int]:
        """Return what happened behind a mark, and the mark to ask with next.

        Costs little while nothing happens. Ask again at once until the mark stays the same. Without a mark it only
        returns the one behind all that this handle has looked at so far.

        Args:
            mark: what the last call of this handle returned.
            where: a filter of sessions, as they are when asked; a name that is no column is a late fact.

        Raises:
            InputError: the filter does not parse.
            StorageError: a root cannot be read; ask again with the same mark.
        """
        self._recorder.check_open()
        mark = arguments.optional(arguments.integer, "mark", mark)
        if mark is not None:
            self._feeds.catch_up()
        return self._catalog.news(mark, where)

    def find_session(self, session_id: str) -> SessionRow | None:
        """Return a recorded session, or None."""
        session_id = arguments.text("session_id", session_id)
        self._look()
        return self._catalog.session(session_id)

    def final_segments(self, session_id: str, *, discarded: bool = False) -> list[SegmentRef]:
        """Return the segments that a session was finalised with; those of ``lineage`` where it lives.

        Args:
            session_id: the session.
            discarded: of a discarded session too, to look at it.

        Raises:
            NotFoundError: no such session is recorded.
            ReleasedError: it was discarded, and that was not asked for; or it was deleted.
        """
        final = self._recorded(session_id, discarded=discarded).finalized
        if final is None:
            return self.view(session_id, discarded=discarded)
        return [self._catalog.with_late(ref) for ref in final.segments]

    def steps(self, session_id: str, *, discarded: bool = False) -> list[StepRef]:
        """Return the references of a session's steps, in the order of append; see `final_segments`."""
        state = self._recorded(session_id, discarded=discarded)
        return [state.ref(index) for index in state.visible()]

    def view(
        self, session_id: str, view: View = "lineage", *, discarded: bool = False, **options: Any
    ) -> list[SegmentRef]:
        """Return the segments that ``view`` makes of a session's steps, whether it lives or not; no payload is read.

        Of a discarded session only where ``discarded`` is true; see `final_segments`.
        """
        options = check_options(options)
        state = self._recorded(session_id, discarded=discarded)
        return [self._catalog.with_late(ref) for ref in segments(state, view, **options)]

    def messages(self, ref: StepRef | SegmentRef) -> list[Any]:
        """Return the full list of chat messages of a step, or of a segment's last step."""
        self._known.step(_step_or_segment(ref))
        return self._history.messages(ref)

    def transcript(self, session_id: str, *, discarded: bool = False) -> Iterator[StepMessages]:
        """Iterate what each step of a session adds to the conversation, in the order of append, each read once.

        Of a discarded session only where ``discarded`` is true; see `final_segments`.
        """
        return self._history.transcript(session_id, self._recorded(session_id, discarded=discarded).visible())

    def tools(self, ref: StepRef | SegmentRef) -> list[Any]:
        """Return the tool schemas of a step, or of a segment's last step."""
        self._known.step(_step_or_segment(ref))
        return self._history.tools(ref)

    def _recorded(self, session_id: str, *, discarded: bool = False) -> SessionState:
        self._recorder.check_open()
        return self._history.state(arguments.text("session_id", session_id), discarded=discarded)

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

        Of the tokens asked for, ``token`` fields and ``loss_mask`` have a row each, ``response`` fields (``logprobs``)
        one for each from ``ref.response_start`` on, ``forward`` fields (``routed_experts``) one for each but the last
        token of the reference; ``step`` fields have a row a step. Slices are clipped as Python does.

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
        self._recorder.check_open()
        single = isinstance(refs, Ref)
        many = _references(refs)
        self._known.settled(many)
        tokens, out = ([given] if single and given is not None else given for given in (tokens, out))
        samples = self._readers.read(
            many,
            fields=arguments.optional(arguments.names, "fields", fields),
            tokens=arguments.optional(_one_each, "tokens", tokens),
            layers=layers,
            dtype=dtype,
            out=arguments.optional(_arrays, "out", out),
            missing=missing,
            verify=verify,
        )
        return samples[0] if single else samples

    async def read_async(self, refs: Ref | Sequence[Ref], **options: Any) -> Sample | list[Sample]:
        """`read` on Spool's own threads."""
        return await self._on_thread(lambda: self.read(refs, **options))

    def coverage(self, refs: Sequence[Ref], fields: Sequence[str] | None = None) -> list[dict[str, Coverage]]:
        """Return for each reference, by field, its spec and the positions that were never sent; no payload is read.

        Args:
            refs: references of one spool; they help each other out with specs.
            fields: names, late arrays included; all that each reference has where None. The loss mask is left out.

        Raises:
            NotFoundError: no one knows a field, or the spool is not there.
        """
        self._recorder.check_open()
        many = _references(refs)
        self._known.settled(many)
        return self._readers.coverage(many, arguments.optional(arguments.names, "fields", fields))

    def locate(
        self, ref: Ref, *, fields: Sequence[str] | None = None, tokens: Tokens = None, layers: slice | None = None
    ) -> list[ByteRange]:
        """Return the byte ranges (file, offset, length) that hold a reference, or a slice of it as `read` takes one."""
        self._recorder.check_open()
        arguments.instance("ref", ref, Ref, _REFERENCES)
        self._known.settled([ref])
        chosen = arguments.optional(arguments.names, "fields", fields)
        return self._readers.locate(ref, fields=chosen, tokens=tokens, layers=layers)

    # -- the files ---------------------------------------------------------------------------------------------------

    def verify(self, *, deep: bool = False, progress: Callable[[int, int], None] | None = None) -> Report:
        """Check that everything recorded is there, in the hot root or in the cold one.

        Of multimodal units those that live sessions name; units whose keys are the caller's own are nobody's loss.

        Args:
            deep: re-read everything, check every checksum, and lint the routing.
            progress: called with bytes done and bytes in all.
        """
        if progress is not None and not callable(progress):
            raise arguments.refused("progress", "a function of bytes done and bytes in all", progress)
        problems = self._look()
        states = {(row.stream, row.pack): row.state for row in self._catalog.packs.rows()}
        recorded = audit.Recorded(
            self._history.events(), self._catalog.offsets(), states, problems, self._tiers.named_units()
        )
        return audit.verify(self._readers.store, self._tiers.cold_packs(states), recorded, deep=deep, progress=progress)

    def usage(self, *, quick: bool = False) -> list[dict[str, Any]]:
        """Return rows and bytes by stream, stored array and tier, as `spool du` prints them.

        From a hot root of its own streams in both tiers, from a cold root of all.

        Args:
            quick: count the rows that the arrays' documents list, which does not look at every step; rows that no step
                names any more are among them.

        Raises:
            StorageError: a root cannot be read.
        """
        self._look()
        objects = None if self._feeds.cold is None else self._feeds.cold.objects
        events = None if quick else self._history.events()
        return audit.usage(self._readers.store, objects, self._catalog.packs.rows(), events)

    def info(self) -> dict[str, Any]:
        """Return identity and totals, as `spool info` prints them."""
        self._look()
        totals = msgspec.structs.asdict(self._catalog.totals(without=FACT_STREAM))
        names = self._feeder.stream_names()
        return {
            "root": self.config.root or self.config.url,
            "spill": None if self.config.root is None else self.config.spill,
            "id": self.spool_id,
            "format": FORMAT,
            "created_at": created_at(self._place),
            "n_streams": len(names) if self.config.root is not None else totals["n_streams"],
            "n_live": sum(is_live(self.config.root or "", name) for name in names),
            **{name: number for name, number in totals.items() if name != "n_streams"},
        }

    def rebuild(self) -> dict[str, Any]:
        """Make the catalog anew from the commit logs, and from the cold root's manifests where there is one.

        Returns:
            What it then holds, and as ``problems`` what of the logs could not be taken in.
        """
        problems = self._feeds.rebuild()
        totals = msgspec.structs.asdict(self._catalog.totals(without=FACT_STREAM))
        return {**totals, "problems": [msgspec.structs.asdict(found) for found in problems]}

    def recover(self, *, dry_run: bool = False) -> list[Recovered]:
        """Seal what dead writers left behind; live writers are left alone. Then end idle sessions.

        Where events were lost the catalog is made anew: it may know them still, and others by the wrong number.
        """
        found = recover(self._tiers.hot_root("recovery works on"), dry_run=dry_run)
        if not dry_run:
            if any(stream.damaged_bytes for stream in found):
                self._feeds.rebuild()
            self.expire_idle()
        return found

    def spill(
        self,
        *,
        follow: bool = False,
        until_idle: bool = False,
        dry_run: bool = False,
        stop: threading.Event | None = None,
        lock_fd: int | None = None,
        progress: Callable[[int, int], object] | None = None,
    ) -> list[PackRow]:
        """Be the spiller of the hot root: bring sealed packs to the cold root, evict, recover, collect.

        By default all that is sealed now is brought over, whatever ``spill_when`` says.

        Args:
            follow: go on with what is sealed later, until ``stop`` is set.
            until_idle: go on until nothing needs a spiller.
            dry_run: change nothing, only return what would be brought over; no lock is needed.
            stop: ends it.
            lock_fd: a descriptor that holds the spiller's lock already.
            progress: called with bytes done and bytes in all; not where it goes on.

        Returns:
            The packs, as they are then; one that could not be brought over is still ``sealed``. Nothing where it went
            on.

        Raises:
            LockedError: a spiller works on this root.
            ConfigError: the spool has no hot root here, or no cold one.
            StorageError: a root failed; call it again. Where it goes on it tries again by itself.
        """
        return self._tiers.spill(
            follow=follow, until_idle=until_idle, dry_run=dry_run, stop=stop, lock_fd=lock_fd, progress=progress
        )

    def status(self) -> Status:
        """Return how the spool is doing: bytes by tier, backlog, watermarks, the spiller; see `Status`."""
        return self._tiers.status(self.spool_id)

    def export(
        self,
        what: str | Ref | Sequence[Ref] | None,
        path: str | os.PathLike[str],
        format: Format = "parquet",  # noqa: A002
        *,
        view: View | None = None,
        dtype: DtypeChoice = "stored",
        dry_run: bool = False,
        progress: Callable[[int, int], object] | None = None,
    ) -> Exported:
        """Write chosen segments into a new folder, as Parquet or as a spool of its own.

        ``parquet``: a row for each segment, its fields as lists, with its identity, late facts and messages; what was
        never sent is null. ``spool``: a hot root with the whole sessions of the segments, ids, late facts and arrays as
        they were and every stored byte the same, that reads with no other root; nothing in it is released.

        The folder gets its name when all is in it: one that fails, or is killed, leaves nothing under that name.

        Args:
            what: references of segments or steps of this spool; or a filter of segments, as `segments` takes it; None
                for all segments.
            path: the folder; nothing may be there.
            format: ``parquet`` or ``spool``.
            view: of a filter; the one each session was finalised with where None.
            dtype: of arrays in Parquet: ``stored`` (narrow), or ``train``.
            dry_run: write nothing, only say what would be in it.
            progress: called with bytes done and bytes in all.

        Raises:
            InputError: there is something at ``path``, or segments do not fit into one table.
            ReleasedError, IntegrityError, StorageError: something cannot be read.
            NotFoundError: a session is to be copied whole that is not recorded.
            CapacityError: the disk is full.
        """
        arguments.one_of("format", format, get_args(Format))
        arguments.one_of("dtype", dtype, get_args(DtypeChoice))
        if not isinstance(path, str | os.PathLike) or not os.fspath(path):
            raise arguments.refused("path", "the path of a new folder", path)
        self._feeds.catch_up(fresh=True)
        refs: list[StepRef | SegmentRef]
        if what is None or isinstance(what, str):
            refs = list(self.segments(what, view))
        else:
            refs = [_step_or_segment(ref) for ref in _references(what)]
        return write_export(
            self._source(),
            refs,
            os.fspath(path),
            form=format,
            dtype=dtype,
            check=_check_copy,
            progress=progress,
            dry_run=dry_run,
        )

    def _source(self) -> Source:
        def read(refs: Sequence[Ref], dtype: DtypeChoice, tokens: Sequence[slice] | None) -> list[Sample]:
            return self.read(refs, tokens=tokens, dtype=dtype, missing=0)

        catalog, readers = self._catalog, self._readers
        return Source(
            spool_id=self.spool_id,
            read=read,
            select=readers.select,
            messages=self.messages,
            tools=self.tools,
            session=catalog.session,
            schema=readers.schema,
            events=catalog.session_events,
            late=catalog.late_events,
            tools_at=catalog.tools_at,
            whole=self._feeds.read_events,
            unit=self._units.raw,
        )

    def gc(self, *, dry_run: bool = False, progress: Callable[[int, int], object] | None = None) -> list[Decision]:
        """Delete the packs that ``retention`` lets go, and the units that aged, in the hot and the cold root.

        From a hot root its own streams' packs; from a cold root all of them, which is for one process at a time.

        Args:
            dry_run: change nothing, only say.
            progress: called with bytes done and bytes in all.

        Returns:
            What happened, or would, to each sealed pack, and why; last, where units go, what they are together.

        Raises:
            StorageError: a root failed; call it again.
        """
        return self._tiers.gc(dry_run=dry_run, progress=progress)

    # -- the handle itself -------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Roll this process's packs and return when they are sealed: plain Zarr and Arrow from then on."""
        self._recorder.flush()

    def close(self) -> None:
        """Seal what this process recorded and let everything go. Open sessions may be gone on with elsewhere.

        Whatever is asked of the spool afterwards is refused with SessionStateError.

        Raises:
            SpoolError: a pack could not be sealed. Nothing is lost: `recover` seals it.
        """
        try:
            self._recorder.close()
        finally:
            self._catalog.close()
            self._readers.close()
            self._units.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def _on_thread(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._recorder.executor(), call)


def _check_copy(root: str) -> None:
    """Make the index of a new root, and check that all that it names is there."""
    with open(root) as made:
        # a unit that is named and was not there to be copied is no fault of the copy
        found = [finding for finding in made.verify().findings if finding.field != "units"]
    if found:
        raise IntegrityError(f"the copy is not whole: {found[0].text}; nothing was exported", file=found[0].file)


def _step_or_segment(ref: object) -> StepRef | SegmentRef:
    if not isinstance(ref, StepRef | SegmentRef):
        raise arguments.refused("ref", "a StepRef or SegmentRef", ref)
    return ref


def _one_each(name: str, value: object) -> list[Any]:
    return arguments.listed(name, value, object, "a list with one entry for each of the references")


def _arrays(name: str, value: object) -> list[Any]:
    wanted = "a mapping of field names to arrays"
    return [None if item is None else arguments.mapping(name, item, wanted) for item in _one_each(name, value)]


def _references(refs: Ref | Sequence[Ref]) -> list[Ref]:
    return arguments.listed("refs", [refs] if isinstance(refs, Ref) else refs, Ref, _REFERENCES)
