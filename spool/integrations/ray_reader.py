"""The Ray actor that reads for all ranks of a place: a reorganiser behind methods that ranks call.

Ray does not tell an actor that a rank is gone, so ranks ask for what is new again and again (`Reader.poll`), and one
that does not is dead. The actor ends itself when all have left.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import ray
from ray._private.state import available_resources_per_node  # a developer API: none that is public tells nodes apart

from spool.train.delivery import memory
from spool.train.delivery.memory import Room
from spool.train.delivery.messages import Message
from spool.train.delivery.reorganiser import Reorganiser
from spool.train.delivery.work import Settings

DEAD_S = 10.0
"""A rank that did not ask for so long is dead."""
POLL_S = 2.0
"""How long a rank that asks waits for something new; less than `DEAD_S`."""
LAG_S = 3.0
"""How long memory that was freed may still count as taken: nodes report to each other a few times a second."""
SPILLED_AT = 0.8
"""The part of an object store above which Ray moves objects to disk: its ``object_spilling_threshold``."""
CLOSE_S = 5.0
NAMESPACE = "spool"
_STORE = "object_store_memory"

Item = tuple[Message, list[Any] | None]
"""A message, and a list of the one reference to its memory, which whoever uses it takes out."""


def here() -> str:
    """Return the node of this process."""
    return str(ray.get_runtime_context().get_node_id())


class Inbox:
    """What came in, and whether more can."""

    def __init__(self) -> None:
        self._items: SimpleQueue[Item | None] = SimpleQueue()

    def put(self, item: Item | None) -> None:
        """Add an item, or None where nothing follows."""
        self._items.put(item)

    def take(self, timeout_s: float) -> Item:
        """Return the next item.

        Raises:
            EOFError: nothing more comes.
            Empty: nothing came in this time.
        """
        if (item := self._items.get(timeout=timeout_s)) is None:
            self._items.put(None)  # for whoever asks again
            raise EOFError
        return item


class Reader:
    """The actor: a reorganiser on threads of its own, and what ranks call.

    Args:
        name: its own.
        settings: what ranks want.
    """

    def __init__(self, name: str, settings: Settings) -> None:
        self._name, self._settings = name, settings
        self._peers: dict[str, _Peer] = {}
        self._door = _Door()
        threading.Thread(target=self._run, name="spool-feed-run", daemon=True).start()

    def join(self, key: str, node: str) -> bool:
        """Let a rank in; return whether there is a place for it."""
        if came := self._door.knock(peer := _Peer(node)):
            self._peers[key] = peer
        return came

    def tell(self, key: str, messages: list[Message]) -> None:
        """Take in what a rank says."""
        self._peers[key].tell(messages)

    def leave(self, key: str) -> None:
        """Take in that a rank is gone."""
        self._peers[key].left()

    def poll(self, key: str) -> list[Item] | None:
        """Return what is new for a rank, as soon as something is; None once there is nothing more."""
        return self._peers[key].poll()

    def _run(self) -> None:
        try:
            Reorganiser(self._door, _Objects(self._nodes), self._settings).run()
        finally:
            for peer in list(self._peers.values()):
                peer.wait_until_left()  # one that was refused still has to hear why
            ray.kill(ray.get_actor(self._name, NAMESPACE))

    def _nodes(self) -> set[str]:
        return {here(), *(peer.node for peer in list(self._peers.values()) if not peer.closed)}


class _Door:
    """Where ranks come in, a `transport.Listener`."""

    def __init__(self) -> None:
        self._waiting: SimpleQueue[_Peer] = SimpleQueue()
        self._lock, self._closed = threading.Lock(), False

    def knock(self, peer: _Peer) -> bool:
        """Ask to come in; return whether that can be."""
        with self._lock:
            if not self._closed:
                self._waiting.put(peer)
            return not self._closed

    def accept(self, timeout_s: float) -> _Peer | None:
        """See `transport.Listener.accept`."""
        try:
            return self._waiting.get(timeout=timeout_s)
        except Empty:
            return None

    def close(self) -> None:
        """See `transport.Listener.close`."""
        with self._lock:
            self._closed = True
        while (peer := self.accept(0)) is not None:
            peer.close()


class _Peer:
    """The actor's end, a `transport.Link` to a rank that polls.

    Attributes:
        node: of the rank.
        closed: whether nothing more is sent.
    """

    def __init__(self, node: str) -> None:
        self.node, self.closed = node, False
        self._in, self._out, self._gone = Inbox(), list[Item](), False
        self._changed = threading.Condition()
        self._seen, self._n_asking = time.monotonic(), 0

    def send(self, message: Message, memory: Any = None) -> None:
        """See `transport.Link.send`."""
        with self._changed:
            self._out.append((message, None if memory is None else [memory]))
            self._changed.notify_all()

    def receive(self) -> Item:
        """See `transport.Link.receive`; a rank that does not poll is gone."""
        while True:
            try:
                return self._in.take(1.0)
            except Empty:
                if not self._n_asking and time.monotonic() - self._seen > DEAD_S:
                    raise EOFError from None

    def close(self) -> None:
        """See `transport.Link.close`."""
        with self._changed:
            self._changed.wait_for(lambda: not self._out or self._gone, CLOSE_S)
            self.closed, self._out = True, []
            self._changed.notify_all()
        self._in.put(None)

    def wait_until_left(self) -> None:
        """Return once the rank says that it is gone, or is taken for dead; it does so when it heard of its end."""
        with self._changed:
            self._changed.wait_for(lambda: self._gone or time.monotonic() - self._seen > POLL_S, CLOSE_S)

    def tell(self, messages: list[Message]) -> None:
        """Take in what the rank says."""
        for message in messages:
            self._in.put((message, None))

    def left(self) -> None:
        """Take in that the rank is gone."""
        with self._changed:
            self._gone = True
            self._changed.notify_all()
        self._in.put(None)

    def poll(self) -> list[Item] | None:
        """Return what is new, once something is or time is up; None once nothing comes."""
        with self._changed:
            self._n_asking += 1
            self._changed.wait_for(lambda: self._out or self.closed, POLL_S)
            items, self._out = self._out, []
            self._n_asking, self._seen = self._n_asking - 1, time.monotonic()
            self._changed.notify_all()
            return None if self.closed and not items else items


class _Objects:
    """Micro-batches in Ray's object store, a `transport.Memory`.

    Args:
        nodes: returns the nodes whose stores have to hold them.
    """

    def __init__(self, nodes: Callable[[], set[str]]) -> None:
        self._nodes = nodes

    def room(self, need_bytes: int) -> Room:
        """See `transport.Memory.room`."""
        deadline = time.monotonic() + LAG_S
        while (found := min([memory.room(), *self._stores()])).n_bytes < need_bytes and time.monotonic() < deadline:
            time.sleep(0.1)
        return found

    @contextmanager
    def made(self, n_bytes: int, fill: Callable[[Any], None]) -> Iterator[Any]:
        """Yield a reference to an object; Ray forgets it with the last reference."""
        yield self._put(n_bytes, fill)

    def _put(self, n_bytes: int, fill: Callable[[Any], None]) -> Any:
        into = memory.private(n_bytes)
        fill(into)
        if n_bytes > (found := self.room(n_bytes)).n_bytes:
            raise memory.too_little(n_bytes, found)  # Ray would move objects to disk, and say nothing
        return ray.put(np.frombuffer(into, np.uint8))

    def _stores(self) -> Iterator[Room]:
        free, own = available_resources_per_node(), self._nodes()
        for node in ray.nodes():
            if node["NodeID"] in own and node["Alive"]:
                kept = (1 - SPILLED_AT) * node["Resources"].get(_STORE, 0)
                n_bytes = max(int(free.get(node["NodeID"], {}).get(_STORE, 0) - kept), 0)
                yield Room(n_bytes, f"Ray's object store on node {node['NodeManagerAddress']}")
