"""A session's record as the process that writes it knows it: its state, its stream, and whose it is."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec
from msgspec import Struct

from spool.errors import CapacityError, LockedError, NotFoundError, SessionStateError, SpoolError
from spool.formats.frames import encode_event
from spool.model.events import Event, SessionOpened
from spool.model.fields import Schema
from spool.model.refs import SegmentRef
from spool.observe import Observer
from spool.rollout.messages import MessageTail
from spool.rollout.state import SessionState

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from spool.write.stream import StreamWriter

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
        after: its last opening, by stream and time; see `SessionOpened.after`.
        n_openings: how often it was opened or resumed.
        n_foreign: how often by streams that are not this process's.
    """

    state: SessionState
    tails: dict[int, MessageTail]
    after: tuple[str, float] | None
    n_openings: int
    n_foreign: int


class StoredTools(NamedTuple):
    """Tool schemas that are in a pack."""

    stream: str
    pack: int
    key: str


class KnownTools:
    """The tool schemas in the latest pack of each stream of this process. Safe from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._packs: dict[str, tuple[int, set[str]]] = {}

    def __contains__(self, place: StoredTools) -> bool:
        pack, keys = self._packs.get(place.stream, (-1, set()))
        return pack == place.pack and place.key in keys

    def update(self, places: Iterable[StoredTools]) -> None:
        """Note tool schemas that are committed; of an older pack than is known, nothing is kept."""
        with self._lock:
            for place in places:
                pack, keys = self._packs.get(place.stream, (-1, set()))
                if place.pack > pack:
                    self._packs[place.stream] = place.pack, {place.key}
                elif place.pack == pack:
                    keys.add(place.key)


class Host(Protocol):
    """What a session needs of the process that records it.

    Attributes:
        spool_id: identity of the spool.
        roots: where the spool is; hints in references.
        append_timeout_s: how long an append waits for room.
        known_tools: the tool schemas that this process stored in its streams' latest packs.
        observer: told of what happens; None for nobody.
    """

    spool_id: str
    roots: tuple[str, ...]
    append_timeout_s: float
    observer: Observer | None
    known_tools: KnownTools

    def press(self, error: CapacityError, waited_s: float) -> None:
        """Have room made for what was refused with ``error``."""

    def kept(self, opened: SessionOpened) -> Schema:
        """Return the schema of what is stored of the session's fields."""

    def writer(self, schema: Schema) -> StreamWriter:
        """Return this process's stream of ``schema``."""

    def uses_units(self, keys: Iterable[str]) -> None:
        """Note that a step names multimodal units."""

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

    def with_late(self, session_id: str, refs: list[SegmentRef]) -> list[SegmentRef]:
        """Return a session's references with its late facts: all that this process recorded, and what is known."""


class Record:
    """The state of one session and where this process writes it; used under its lock.

    Args:
        host: the process that records it.
        opened: how it was to be opened.
        token: of its suspension, if it goes on from there.
        fresh: the id was drawn here, so nobody else can know it.

    Attributes:
        opened: how it was opened.
        schema: what is stored of its fields.
        tails: the messages of its steps, by index.
        n_openings: how often it was opened or resumed.
        refusal: why it cannot go on as it was asked to, for good: its token is stale, or its fields are others.
    """

    def __init__(self, host: Host, opened: SessionOpened, token: SuspendToken | None, *, fresh: bool) -> None:
        self.opened = opened
        self.schema = host.kept(opened)
        self.tails: dict[int, MessageTail] = {}
        self.n_openings = 0
        self._host = host
        self._token = token
        self._fresh = fresh
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._loaded: SessionState | None = None
        self._in_stream: str | None = None
        self._doubtful = False
        self._n_foreign = 0
        self._next_index = 0
        self._after: tuple[str, float] | None = None
        self.refusal: SpoolError | None = None

    @property
    def is_loaded(self) -> bool:
        """Its state is known here."""
        return self._loaded is not None

    @property
    def loaded(self) -> SessionState | None:
        """Its state, if it is known here."""
        return self._loaded

    def owned(self) -> threading.RLock:
        """Return the session's lock.

        Raises:
            SessionStateError: this process was forked from the one that records it.
        """
        if self._pid != os.getpid():
            raise SessionStateError(
                f"session {self._id!r} is recorded by process {self._pid}, which this one was forked from; "
                "suspend it there and resume it here, or open a new session",
                session_id=self._id,
            )
        return self._lock

    @property
    def _id(self) -> str:
        return self.opened.session_id

    def state(self) -> SessionState:
        """Return the session's state; what is recorded of it already is read when it is first asked for."""
        if self.refusal is not None:
            raise self.refusal
        if self._loaded is None:
            try:
                self._loaded = self._load()
            except (NotFoundError, SessionStateError) as error:
                self.refusal = error
                raise
        return self._loaded

    def _load(self) -> SessionState:
        if self._doubtful:
            # Frames are written in their order, so behind this one lies all that the interrupted call handed over.
            self.opened = msgspec.structs.replace(self.opened, resumed=True, at=time.time())
            self.writer()
        look = self._doubtful or not self._fresh
        recorded = self._host.load(self._id, self._token, own=self._doubtful) if look else None
        if recorded is None:
            state = SessionState(self._host.spool_id, self.opened, self._host.roots)
        else:
            self._adopt(recorded.state.opened, recorded.after)
            state = recorded.state
            self.tails, self.n_openings, self._n_foreign = recorded.tails, recorded.n_openings, recorded.n_foreign
        state.skip_to(self._next_index)
        self._doubtful = False
        return state

    def _adopt(self, recorded: SessionOpened, after: tuple[str, float] | None) -> None:
        """Go on with a recorded session: its identity, rules and fields were fixed when it opened."""
        check_same(recorded, self.opened)
        self.opened = msgspec.structs.replace(recorded, resumed=True, at=time.time())
        self._after = after
        self.schema = self._host.kept(self.opened)

    def doubt(self) -> None:
        """Forget the state: a call was interrupted, and only the record knows what it did."""
        if self._loaded is not None:
            self._next_index = self._loaded.next_index
        self._loaded, self._in_stream, self._doubtful = None, None, True

    def writer(self) -> StreamWriter:
        """Return the stream to write to, in which the session is opened.

        Raises:
            LockedError: another process opened it at the same time.
        """
        writer = self._host.writer(self.schema)
        if self._in_stream != writer.name:
            opened = msgspec.structs.replace(self.opened, after=self._after)
            self._after = writer.name, opened.at
            writer.commit(encode_event(opened))
            self.n_openings += 1
            try:
                if not self._fresh:
                    self._host.check_alone(self._id, self._n_foreign)
            except LockedError:
                self._loaded, self.n_openings = None, 0
                raise
            self._in_stream = writer.name
        return writer

    def commit(self, event: Event) -> None:
        """Commit an event that brings no payload."""
        self.writer().commit(encode_event(event))


def check_same(known: SessionOpened, wanted: SessionOpened) -> None:
    """Refuse to take a session for one that was to be opened otherwise; defaults of ``wanted`` are not compared.

    Raises:
        SessionStateError: names what differs.
    """
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
