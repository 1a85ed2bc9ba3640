"""What one process records: its streams, its live sessions, its threads."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from functools import partial

from spool.catalog import Catalog, Located
from spool.config import Config
from spool.errors import (
    CapacityError,
    ConfigError,
    IntegrityError,
    LockedError,
    NotFoundError,
    ReleasedError,
    SessionStateError,
    SpoolError,
    StorageError,
)
from spool.feeds import Feeds
from spool.formats import messages as message_format
from spool.formats.frames import encode_event
from spool.logs import FeedTimer, Room
from spool.logs.streams import is_live
from spool.model.events import SessionOpened, Single, StepCommitted, Transaction
from spool.model.fields import BUILT_IN, Schema
from spool.model.refs import SegmentRef
from spool.observe import Observer
from spool.record import KnownTools, Recorded, SuspendToken
from spool.rollout.messages import MessageTail, resume
from spool.rollout.state import SessionState
from spool.root import check_there
from spool.session import Session
from spool.spiller.keeper import Keeper
from spool.stores.units import HotUnits
from spool.upkeep import Upkeep
from spool.write.stream import StreamWriter, create_stream

log = logging.getLogger("spool")

ENDED_KEPT = 4096
"""Sessions that ended here and that the index, at most 50 ms late, may not have yet."""


class Recorder:
    """The writing side of a handle. A forked child starts with an empty one of its own.

    Attributes:
        spool_id: identity of the spool.
        roots: where the spool is; hints in references.
        append_timeout_s: how long an append waits for room.
        known_tools: the tool schemas that this process stored in its streams' latest packs.
        observer: told of what happens; None for nobody.
    """

    def __init__(
        self,
        config: Config,
        spool_id: str,
        catalog: Catalog,
        feeds: Feeds,
        keeper: Keeper | None,
        inline: Callable[[list[SegmentRef], Sequence[str]], list[SegmentRef]],
        *,
        readonly: bool = False,
        observer: Observer | None = None,
    ) -> None:
        self.spool_id = spool_id
        self.append_timeout_s = config.append_timeout_s
        self.roots = config.urls
        self.inline = inline
        self.observer = observer
        self._config = config
        self._readonly = readonly
        self._catalog = catalog
        self._feeds = feeds
        self._feeder = feeds.hot
        self._keeper = keeper
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        _recorders.add(self)
        self._lock = threading.RLock()
        self._opening = threading.Lock()
        self._sessions: dict[str, Session] = {}
        self._ended: dict[str, None] = {}
        self._said_late: set[str] = set()
        self._writers: dict[str, StreamWriter] = {}
        self._threads: ThreadPoolExecutor | None = None
        self._timer: FeedTimer | None = None
        self._room = Room(self._catalog, self._feeder, self._config.hot_bytes, self._config.root)
        self._upkeep = Upkeep(self._do_upkeep)
        self._closed = False
        self.known_tools = KnownTools()
        self._unended: set[str] = set()
        self._said_failing: dict[str, str] = {}

    def _own(self) -> threading.RLock:
        """Return the lock, of this process."""
        if self._pid != os.getpid():
            self._reset()
        self.check_open()
        return self._lock

    def check_open(self) -> None:
        """Refuse what is asked of a spool that was closed.

        Raises:
            SessionStateError: it was.
        """
        if self._closed:
            raise SessionStateError(f"the spool at {self._config.url} was closed; open it again")

    def check_writable(self) -> None:
        """Refuse what is asked of a spool that was opened to read only.

        Raises:
            SessionStateError: it was.
        """
        if self._readonly:
            raise SessionStateError(f"the spool at {self._config.url} was opened to read only")

    def check_recording(self) -> None:
        """Refuse to record what no process may record here.

        Raises:
            SessionStateError: the spool was closed, or opened to read only, or from its cold root.
        """
        self.check_open()
        self.check_writable()
        if self._config.root is None:
            raise SessionStateError(
                f"the spool was opened from its cold root {self._config.url}: recording needs a hot root in front, "
                f"file:///nvme/spool?spill={self._config.url}"
            )

    # -- sessions ----------------------------------------------------------------------------------------------------

    def start(self, opened: SessionOpened, *, fresh: bool = False) -> Session:
        """Return the live session of that id, or make it; a ``fresh`` id was drawn here and is recorded nowhere."""
        with self._own():
            live = self._sessions.get(opened.session_id)
            if live is not None and not live.is_refused:
                live.check_same(opened)
                return live
            if opened.idle_s is not None:
                self._upkeep.watch(opened.idle_s)
            live = self._sessions[opened.session_id] = Session(self, opened, fresh=fresh)
            return live

    def go_on(self, opened: SessionOpened, token: SuspendToken) -> Session:
        """Make the live session of a suspended one.

        Raises:
            SessionStateError: it is live here.
        """
        with self._own():
            known = self._sessions.get(opened.session_id)
            if known is not None and known.is_live:
                raise SessionStateError(f"session {opened.session_id!r} is live in this process already")
            live = self._sessions[opened.session_id] = Session(self, opened, token)
        return live

    @property
    def sessions(self) -> Mapping[str, Session]:
        """The live sessions of this process, to look at."""
        return self._sessions if self._pid == os.getpid() else {}

    def live(self, session_id: str) -> Session | None:
        """Return the live session of that id, or None."""
        with self._own():
            return self._sessions.get(session_id)

    def forget(self, session_id: str) -> None:
        """Drop a session that has ended from the live ones."""
        with self._own():
            self._sessions.pop(session_id, None)
            self._said_late.discard(session_id)
            self._ended[session_id] = None
            if len(self._ended) > ENDED_KEPT:
                del self._ended[next(iter(self._ended))]

    def says_late(self, session_id: str) -> None:
        """Note that this process says something of one of its live sessions."""
        with self._own():
            if session_id in self._sessions:
                self._said_late.add(session_id)

    def with_late(self, session_id: str, refs: list[SegmentRef]) -> list[SegmentRef]:
        """Return a session's references with its late facts: all that this process recorded, and what is known.

        Raises:
            StorageError: what was recorded here cannot be read.
        """
        if session_id in self._said_late:
            self._feeder.catch_up(self.stream_names())
        return [self._catalog.with_late(ref) for ref in refs] if self._catalog.newest_late(session_id) else refs

    def _do_upkeep(self) -> None:
        writers = list(self._writers.values())
        if self._keeper is not None and writers:
            if self._config.spill is not None:
                self._attempt(f"a spiller for {self._config.root}", self._keeper.keep_running)
            self._attempt(f"the seals that are wanted in {self._config.root}", partial(self._keeper.serve, writers))
        for writer in writers:
            self._attempt(f"the age of stream {writer.name}", writer.roll_if_aged)
        for session in list(self._sessions.values()):
            self._attempt(f"the end of idle session {session.session_id!r}", session.expire)
            if session.is_refused:
                self._drop(session)

    def _attempt(self, what: str, work: Callable[[], object]) -> None:
        """Do a part of the upkeep; why it fails is said once, until it is another reason."""
        try:
            work()
        except (SpoolError, OSError) as error:
            if self._said_failing.get(what) != str(error):
                log.warning("upkeep goes on without %s: %s", what, error)
            self._said_failing[what] = str(error)
        else:
            self._said_failing.pop(what, None)

    def _drop(self, session: Session) -> None:
        """Let go of a session that was refused: nothing of it is recorded here."""
        with self._lock:
            if self._sessions.get(session.session_id) is session:
                del self._sessions[session.session_id]
                self._said_late.discard(session.session_id)

    def expire(self, idle: Sequence[str]) -> list[str]:
        """End the sessions of ``idle`` that this process may end, as ``timeout``; return their ids."""
        ended = []
        for session_id in idle:
            live = self.live(session_id)
            try:
                if live is not None and not live.expire():
                    continue  # by its own clock it goes on, or a transaction of it is open
                if live is None:
                    self.start(SessionOpened(session_id=session_id, at=time.time())).finalize(outcome="timeout")
            except LockedError:
                self.forget(session_id)
            except (IntegrityError, ReleasedError, NotFoundError) as error:  # the others shall end all the same
                self.forget(session_id)
                if session_id not in self._unended:
                    log.warning("the idle session %r cannot be ended: %s", session_id, error)
                    self._unended.add(session_id)
            else:
                ended.append(session_id)
        return ended

    def load(self, session_id: str, token: SuspendToken | None, *, own: bool = False) -> Recorded | None:
        """Return what is recorded of a session that may go on here, or None where nothing is.

        Args:
            session_id: the session.
            token: of its suspension, if it was.
            own: it is this process's own, and this process's streams are to be read too.

        Raises:
            NotFoundError: there is a token, but no such session.
            SessionStateError: the record has gone on since the token was made.
            LockedError: another live process, or another node, records this session.
            StorageError: whether it is recorded cannot be told.
        """
        # What this process records itself is known here, or in the index soon after it ended.
        known = set() if own or session_id in self._ended else set(self.stream_names())
        openings = self._look_up(session_id, known)
        if token is not None and len(openings) < token.n_openings:  # it comes from another node
            self._feeds.catch_up(whole=True)
            openings = self._catalog.openings(session_id)
        if not openings and token is None and not own:
            openings = self._look_elsewhere(session_id)
        located = self._catalog.session_events(session_id)
        if not located:
            if token is not None:
                raise NotFoundError(f"no session {session_id!r} in {self._config.url}", session_id=session_id)
            return None
        state = SessionState.from_events(self.spool_id, [item.event for item in located], self.roots)
        n_steps = len(state.visible())
        if token is not None and (token.n_steps, token.n_openings) != (n_steps, len(openings)):
            raise SessionStateError(
                f"session {session_id!r} has {n_steps} steps and was taken up {len(openings)} times, its token was "
                f"made at {token.n_steps} and {token.n_openings}: another process went on with it",
                session_id=session_id,
            )
        if token is None and not own and not state.ended:
            self._check_unowned(session_id, {item.stream for item in (*openings, *located)})
        return Recorded(
            state,
            self._message_tails(located),
            after=[(item.stream, item.event.at) for item in located if isinstance(item.event, SessionOpened)][-1],
            n_openings=len(openings),
            n_foreign=len(_foreign(openings, self.stream_names())),
        )

    def check_alone(self, session_id: str, n_foreign: int) -> None:
        """Check, once the session's opening is written here, that no other process has opened it meanwhile.

        Each writes its opening first and looks then, so of two that do it at once at least one sees the other.

        Args:
            session_id: the session.
            n_foreign: openings in streams of other processes that were known before.

        Raises:
            LockedError: another process did.
        """
        own = self.stream_names()
        others = _foreign(self._look_up(session_id, set(own)), own)
        if len(others) != n_foreign:
            raise LockedError(
                f"session {session_id!r} was opened by another process at the same time (stream {others[-1].stream}); "
                "one process records a session: give each its own id, or suspend and resume it",
                session_id=session_id, stream=others[-1].stream,
            )  # fmt: skip

    def _look_up(self, session_id: str, known: Collection[str]) -> list[Located]:
        """Take in what this root has of a session, but for streams that are ``known``; return its openings."""
        names = [name for name in self._feeder.stream_names() if name not in known]
        self._feeder.catch_up(names)
        return self._catalog.openings(session_id)

    def _look_elsewhere(self, session_id: str) -> list[Located]:
        """Take in what other nodes published of a session, and an index made anew left out; return its openings.

        Raises:
            StorageError: packs of this root are in the cold root only, which cannot be reached.
        """
        if self._feeds.cold is None:
            return []
        problems = self._feeds.catch_up_elsewhere()
        openings = self._catalog.openings(session_id)
        lost = next((problem for problem in problems if problem.kind == "evicted"), None)
        if lost is not None and not openings:
            raise StorageError(
                f"whether session {session_id!r} is recorded cannot be told: {lost.message}; try again when the cold "
                "root is reached, or take an id that is drawn (session_id=None)",
                session_id=session_id,
            )
        return openings

    def _check_unowned(self, session_id: str, streams: set[str]) -> None:
        for stream in sorted(streams - {writer.name for writer in self._writers.values()}):
            elsewhere = stream not in self._feeder.stream_names()
            if elsewhere or is_live(self._config.root or "", stream):
                who = "another node" if elsewhere else "another live process, or another handle of this one"
                lost = "; if that node is lost, discard the session and record under another id" if elsewhere else ""
                raise LockedError(
                    f"session {session_id!r} is being recorded by {who} (stream {stream}); suspend it there and resume "
                    f"it here with the token{lost}",
                    session_id=session_id, stream=stream,
                )  # fmt: skip

    def _message_tails(self, located: Sequence[Located]) -> dict[int, MessageTail]:
        tails: dict[int, MessageTail] = {}
        steps = [item for item in located if isinstance(item.event, StepCommitted)]
        for event in self._feeds.read_events(steps):
            assert isinstance(event, StepCommitted)
            parent = tails.get(event.parent) if event.parent is not None else None
            own = message_format.split_messages(event.messages)
            tails[event.index] = resume(parent, event.inherited_messages, own)
        return tails

    # -- streams and threads -----------------------------------------------------------------------------------------

    def kept(self, opened: SessionOpened) -> Schema:
        """Return the schema of what this spool stores of a session's fields."""
        wanted, declared = self._config.fields, {spec.name for spec in opened.fields}
        for name in wanted or ():
            if name not in declared | BUILT_IN:
                raise ConfigError(
                    f"?fields= names {name!r}, which session {opened.session_id!r} does not declare; it declares "
                    f"{', '.join(sorted(declared))}",
                    field=name,
                )
        return Schema.of(*(spec for spec in opened.fields if wanted is None or spec.name in wanted))

    def writer(self, schema: Schema) -> StreamWriter:
        """Return this process's stream of ``schema``, opened on first use."""
        self._own()
        writer = self._writers.get(schema.key)
        if writer is not None:
            return writer
        # Making a stream syncs folders: meanwhile nobody who only starts a session shall wait.
        with self._opening:
            writer = self._writers.get(schema.key)
            if writer is None:
                writer = self._writers[schema.key] = self._make_writer(schema)
            return writer

    def _make_writer(self, schema: Schema) -> StreamWriter:
        self.check_recording()
        assert self._config.root is not None
        check_there(self._config.root, self.spool_id)
        if self._config.pack_age_s is not None:
            self._upkeep.watch(self._config.pack_age_s)
        if self._config.spill is not None or self._config.hot_bytes is not None:
            self._upkeep.watch(self._config.publish_interval_s)
        if self._timer is None:
            self._timer = FeedTimer(self._feeder, self.stream_names)
        return create_stream(
            self._config.root,
            schema,
            space=self._room,
            durability=self._config.durability,
            pack_age_s=self._config.pack_age_s,
            direct=self._config.direct,
            on_commit=self._timer.notify,
            spool_id=self.spool_id,
        )

    def press(self, error: CapacityError, waited_s: float) -> None:
        """Have room made for what was refused with ``error``; what fails of it is left to the next try.

        The spiller hears of it, and the packs that are open here are sealed: they may hold the room themselves.
        """
        if self._keeper is None:
            return
        with suppress(SpoolError, OSError):
            self._keeper.press(error, waited_s)
        for writer in list(self._writers.values()):
            with suppress(SpoolError):
                writer.roll(for_room=True)

    @property
    def room(self) -> Room:
        """The room of the hot root, for what belongs to no stream."""
        with self._own():
            return self._room

    def uses_units(self, keys: Iterable[str]) -> None:
        """Note that a step names multimodal units: those that are here age from now on.

        Raises:
            StorageError: the hot root failed.
        """
        if self._config.root is not None:
            units = HotUnits(self._config.root)
            for key in keys:
                units.touch(key)

    def stream_names(self) -> list[str]:
        """Return the names of this process's streams."""
        return [writer.name for writer in list(self._writers.values())]

    def record(self, *events: Single) -> None:
        """Commit events that bring no payload together, in any stream of this process; without a hot root, in a file.

        Raises:
            CapacityError: there is no room now.
            StorageError: the cold root cannot be written to.
        """
        self._own()
        if self._config.root is None and self._feeds.cold is not None and not self._readonly:
            self._feeds.cold.write_facts(events)
            return
        payload = encode_event(events[0] if len(events) == 1 else Transaction(events))
        writer = next(iter(list(self._writers.values())), None) or self.writer(Schema())
        try:
            writer.commit(payload)
        except CapacityError:
            self.writer(Schema()).commit(payload)  # a pack without arrays takes least; what is said may give room back

    def executor(self) -> Executor:
        """Return the threads of the async twins, made on first use."""
        with self._own():
            if self._threads is None:
                count = self._config.threads or min(32, 2 * (os.cpu_count() or 1) + 2)
                self._threads = ThreadPoolExecutor(count, thread_name_prefix="spool")
            return self._threads

    def flush(self) -> None:
        """Roll every stream's pack and wait until it is sealed."""
        with self._own():
            writers = list(self._writers.values())
        for writer in writers:
            writer.flush()

    def close(self) -> None:
        """Wait for running appends, seal, unlock; open sessions may be resumed elsewhere.

        Raises:
            SpoolError: a pack could not be sealed; all is let go of all the same, and recovery will seal it.
        """
        if self._pid != os.getpid() or self._closed:
            return
        with self._lock, self._opening:
            self._closed = True
        self._upkeep.close()
        if self._threads is not None:
            self._threads.shutdown(wait=True)
        if self._timer is not None:
            self._timer.close()
        try:
            self.seal()
        finally:
            self._sessions.clear()
            self._writers.clear()

    def end(self) -> None:
        """As the process ends: `seal` what is its own and not closed; threads are let be."""
        if self._pid == os.getpid() and not self._closed:
            self.seal()

    def seal(self) -> None:
        """Seal and unlock this process's streams, and bring the index up to that.

        Raises:
            SpoolError: a pack could not be sealed; the others are.
        """
        failures = []
        for writer in self._writers.values():
            try:
                writer.close()
            except SpoolError as error:
                failures.append(error)
        if self._writers:
            self._attempt("the index", lambda: self._feeder.catch_up(self.stream_names()))
        if failures:
            raise failures[0]


def _at_exit() -> None:
    for recorder in list(_recorders):
        with suppress(SpoolError):  # the streams' own end says it, which comes after this
            recorder.end()


_recorders: weakref.WeakSet[Recorder] = weakref.WeakSet()
atexit.register(_at_exit)


def _foreign(openings: Sequence[Located], own: Collection[str]) -> list[Located]:
    return [item for item in openings if item.stream not in own]
