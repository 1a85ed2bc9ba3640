"""A feed for ranks that share no machine: where a place spans nodes, or containers with no sockets in common.

::

    from spool.integrations.ray import connect

    feed = connect(uri, mesh, rank, fields=["token_ids", "loss_mask", "routed_experts"])    # in a Ray actor or task

One Ray actor reads for all ranks of the place and hands micro-batches over through Ray's object store: one transfer a
node, from which each rank of it copies once, since what the store shows cannot be written to. Everything else is as in
`spool.train.connect`, which is the better way where the ranks of a place are on one machine: nothing is copied there.
Needs ``ray``: install ``spool-store[ray]``, and Spool on every node.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Mapping
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np

from spool import train
from spool.arguments import refused
from spool.errors import ConfigError, InputError, RankError
from spool.train.delivery import memory
from spool.train.delivery.messages import Message

try:
    import ray
    from ray.exceptions import GetTimeoutError, RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ImportError:
    raise ConfigError("ray is not installed: install spool-store[ray]") from None
from spool.integrations.ray_reader import CLOSE_S, NAMESPACE, POLL_S, Inbox, Item, Reader, here

if TYPE_CHECKING:
    from spool.handle import Spool
    from spool.train import Feed, Mesh, Place
    from spool.train.delivery.work import Settings

RETRY_S = 0.2
_OURS = ("name", "namespace", "get_if_exists", "lifetime", "max_concurrency", "max_restarts", "max_task_retries")


def connect(
    uri: str | os.PathLike[str] | Spool | None,
    mesh: Mesh,
    place: Place | int,
    *,
    actor_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> Feed:
    """Take part in the feed of a place whose ranks are anywhere in a Ray cluster.

    The first rank that comes starts an actor, named after the spool, the place and ``name``; it ends with its ranks.
    It runs on that rank's node, if there is room, and needs the spool's roots there: a cold root, or a hot one of that
    node. A rank that dies is named to the others within `DEAD_S` seconds or so; one whose interpreter stands still for
    longer is taken for dead.

    Up to ``depth`` micro-batches are in the object store of the actor's node and in those of its ranks, until all
    ranks have copied them, and up to ``depth`` in the memory of each rank. Both are checked before they are taken, so
    that Ray does not move them to disk.

    Args:
        uri: of the spool; ``$SPOOL_URI`` where None.
        mesh: of the trainer.
        place: where this rank stands on it, or its global rank.
        actor_options: of Ray, for the actor: ``num_cpus`` (0), ``resources``, ``runtime_env``,
            ``scheduling_strategy`` (the node of the first rank) and others.
        options: as `spool.train.connect` takes them. ``n_ranks`` are those of the place on all nodes.

    Raises:
        InputError: an argument does not fit.
        ConfigError: Ray is not started in this process.
        RankError: the actor cannot be started, or serves other ranks.
    """
    if not ray.is_initialized():
        raise ConfigError("Ray is not started in this process: connect from a Ray actor or task, or call ray.init()")
    joined = partial(_join, _options(actor_options or {}))
    return train.connect(uri, mesh, place, joined=joined, **options)


def _options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of an actor, but for its name.

    Raises:
        InputError: one is set here, or is none of Ray's.
    """
    if ours := [name for name in _OURS if name in given]:
        raise refused("actor_options", f"without {', '.join(ours)}: a feed sets this", dict(given))
    near = NodeAffinitySchedulingStrategy(here(), soft=True)
    options = {"num_cpus": 0, "scheduling_strategy": near, "enable_task_events": False, **given}
    try:
        ray.remote(Reader).options(**options)
    except (TypeError, ValueError) as error:
        raise InputError(f"actor_options does not fit: {error}") from error
    return options


def _join(options: Mapping[str, Any], digest: str, settings: Settings) -> _RayLink:
    """Return a connection to the actor of a place, started where there is none: see `transport.Join`."""
    name, key, deadline = f"spool-feed-{digest}", uuid.uuid4().hex, time.monotonic() + settings.join_timeout_s
    kind = ray.remote(Reader).options(
        **options, name=name, namespace=NAMESPACE, get_if_exists=True, lifetime="detached",
        max_concurrency=4 * settings.n_ranks + 8,
    )  # fmt: skip
    reached = False
    while True:
        try:
            actor = kind.remote(name, settings)
            if ray.get(actor.join.remote(key, here()), timeout=max(deadline - time.monotonic(), 1.0)):
                return _RayLink(actor, name, key)
            why = "it serves ranks that have not left: give each job a name of its own (connect(name=))"
            reached = True
        except GetTimeoutError:
            why = "it did not start: are there nodes with what actor_options asks for?"
            if not reached:
                ray.kill(actor)  # else whoever asks for less would find this one
        except (RayError, ValueError) as error:  # it ended while this looked for it
            why = _words(error)
        if time.monotonic() > deadline:
            raise RankError(f"no place in the actor {name} within {settings.join_timeout_s:g} s: {why}", actor=name)
        time.sleep(RETRY_S)


def _words(error: BaseException) -> str:
    return " ".join(str(error).split())


class _RayLink:
    """A rank's end, a `transport.RankLink`: a thread that sends, and one that asks for what is new."""

    def __init__(self, actor: Any, name: str, key: str) -> None:
        self._actor, self._name, self._key = actor, name, key
        self._in, self._out = Inbox(), SimpleQueue[Message | None]()
        self._why, self._closing = "", False
        self._sender = threading.Thread(target=self._send_all, name="spool-feed-send", daemon=True)
        self._sender.start()
        threading.Thread(target=self._poll_all, name="spool-feed-poll", daemon=True).start()

    def send(self, message: Message, memory: Any = None) -> None:  # noqa: ARG002 - ranks send none
        """See `transport.Link.send`."""
        self._out.put(message)

    def receive(self) -> Item:
        """See `transport.Link.receive`."""
        while True:
            try:
                return self._in.take(POLL_S)
            except Empty:
                self._check_ray()

    def map(self, held: list[Any], n_bytes: int) -> Any:
        """Return a copy of what is in the object store, which may drop it then."""
        mapped = memory.private(n_bytes)
        try:
            np.frombuffer(mapped, np.uint8)[:] = ray.get(held.pop())
        except RayError as error:
            self._why = _words(error)
            raise EOFError from error
        return mapped

    def drop(self, held: list[Any] | None) -> None:
        """See `transport.RankLink.drop`."""
        if held is not None:
            held.clear()

    def death(self, pid: int | None) -> str:
        """See `transport.RankLink.death`."""
        return f"the actor that reads for this feed, {self._name} (process {pid}), died: {self._why}"

    def close(self) -> None:
        """See `transport.Link.close`; the actor answers by an end to what comes."""
        self._closing = True
        self._out.put(None)
        if threading.current_thread() is not self._sender:
            self._sender.join(CLOSE_S)

    def _send_all(self) -> None:
        """Send what waits, in one call at a time: calls of an actor with many threads overtake each other."""
        last = False
        while not last:
            messages = [self._out.get()]
            while not self._out.empty():
                messages.append(self._out.get())
            last = None in messages
            last |= not self._told(self._actor.tell, [message for message in messages if message is not None])
        self._closing = True  # who cannot say anything is to hear of it
        self._told(self._actor.leave)

    def _told(self, method: Any, *arguments: Any) -> bool:
        """Call the actor; whoever receives hears of it where it is gone."""
        try:
            self._ask(method, *arguments)
        except Exception as error:  # noqa: BLE001 - Ray raises errors of any kind while it is shut down
            self._why = self._why or _words(error)
            return False
        return True

    def _ask(self, method: Any, *arguments: Any) -> Any:
        self._check_ray()
        return ray.get(method.remote(self._key, *arguments))

    def _check_ray(self) -> None:
        """Raise EOFError where Ray was shut down: what waits then may wait for ever, and a call starts a Ray anew."""
        if not ray.is_initialized():
            self._why = "Ray was shut down in this process"
            raise EOFError(self._why)

    def _poll_all(self) -> None:
        try:
            while not self._closing and (items := self._ask(self._actor.poll)) is not None:
                for item in items:
                    self._in.put(item)
            self._why = self._why or "it let go of this rank"
        except Exception as error:  # noqa: BLE001 - as above
            self._why = _words(error)
        self._in.put(None)
