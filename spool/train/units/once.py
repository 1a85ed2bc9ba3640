"""Each unit encoded once a mini-batch: features to all micro-batches that use it, gradients summed, one backward.

The one module, with those below it, that runs an encoder. What goes where is planned in `unit_plan`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import isfinite
from numbers import Real
from typing import Any, Literal, get_args

import torch
from msgspec import Struct

from spool.arguments import instance, integer, one_of, refused, seconds
from spool.errors import InputError, RankError
from spool.train.units.encoder import Collate, Load, Meter, UnitEncoder, ranges
from spool.train.units.facts import DTYPES, Facts, agreed, facts_of, with_features
from spool.train.units.index import UnitRows
from spool.train.units.peers import Peers
from spool.train.units.plan import Route, UnitPlan, UnitRun

Missing = Literal["error", "zero"]


class EncodeStats(Struct, frozen=True, kw_only=True):
    """What one process did for a mini-batch so far.

    Attributes:
        n_units: units that it encodes.
        n_uses: places that its micro-batches use a unit, each part of a unit that is cut counted.
        encoder_calls: calls of the encoder, those of recomputation included.
        loaded_units: units loaded, again for recomputation.
        sent_bytes: features and gradients sent to other processes.
        received_bytes: the same from other processes.
        held_bytes: of the encoder's outputs, of features and gradients that are held, and of those that travel, now.
        peak_bytes: the most of these at once. What `EncodeOnce.features` hands out is its caller's, and what autograd
            keeps inside the encoder is not known here.
    """

    n_units: int
    n_uses: int
    encoder_calls: int
    loaded_units: int
    sent_bytes: int
    received_bytes: int
    held_bytes: int
    peak_bytes: int


class EncodeOnce:
    """The features of a mini-batch's units on one process; made by `encode_once`.

    Attributes:
        width: of a feature.
        dtype: of features.
        trainable: whether gradients go back to the encoder.
    """

    def __init__(
        self, units: UnitPlan, encoder: UnitEncoder, peers: Peers, meter: Meter, *, like: Any, accumulate_dtype: Any,
    ) -> None:  # fmt: skip
        self._encoder, self._peers, self._meter = encoder, peers, meter
        routes = units.routes(peers.me)
        self._incoming = [route for route in routes if route.target == peers.me]
        self._outgoing = [route for route in routes if route.source == peers.me]
        self._counts = any(route.returns for route in self._incoming)
        self._place = units.place_of(peers.me)
        self._needs = () if self._place is None else units.needs(self._place)
        self.width, self.dtype, self.trainable = self._agreed(facts_of(units, accumulate_dtype, like))
        self._accumulate = accumulate_dtype or (self.dtype if self.dtype.itemsize > 2 else torch.float32)
        here = encoder.outputs[0].device if encoder.outputs else peers.device
        self._device = here if like is None else like.device
        self._features = self._deliver()
        self._index = _places(self._incoming, self._needs, self._device)
        self._gradient: Any = None
        self._came: set[int] = set()
        self._closed = False
        if not self.trainable:
            encoder.release()

    @property
    def stats(self) -> EncodeStats:
        """What this process did so far."""
        return EncodeStats(
            n_units=self._encoder.n_units, n_uses=sum(map(len, self._needs)), encoder_calls=self._encoder.calls,
            loaded_units=self._encoder.loaded, sent_bytes=self._peers.sent_bytes,
            received_bytes=self._peers.received_bytes, held_bytes=self._meter.held_bytes,
            peak_bytes=self._meter.peak_bytes,
        )  # fmt: skip

    def rows(self, micro: int) -> Any:
        """Return int64 ``[n]`` on the device: the rows of the share that the features of a micro-batch go to.

        Raises:
            InputError: the plan has no such micro-batch, or this process no place in its mesh.
        """
        needs = self._needs_of(micro)
        return torch.from_numpy(ranges((rows.to, rows.stop - rows.start) for rows in needs)).to(self._device)

    def features(self, micro: int) -> Any:
        """Return the features of a micro-batch: ``[n, width]``, row *i* for the share's row ``rows(micro)[i]``.

        A fresh leaf that requires grad: backward through it adds to the gradients that `backward` takes to the
        encoder, and clears its ``.grad``. Micro-batches may overlap and come in any order. Without units, under
        ``torch.no_grad()`` and where the encoder is frozen, it requires none.

        Raises:
            InputError: the plan has no such micro-batch, this process no place in its mesh, or `backward` was called.
        """
        self._needs_of(micro)
        self._check_open("features")
        found = self._features.index_select(0, self._index[micro])
        if self.trainable and torch.is_grad_enabled() and len(found):
            found.requires_grad_(True)
            found.register_post_accumulate_grad_hook(lambda leaf: self._take(micro, leaf))
        return found

    def backward(self, *, scale: float = 1.0, missing: Missing = "error") -> None:
        """Bring the summed gradients to the encoder ranks and run backward there, once for each unit; all call it.

        Gradients are summed over micro-batches, over data-parallel and over context-parallel ranks, and over
        tensor-parallel ones as ``tp_gradients`` of the plan says. The encoder's parameters then have in ``.grad`` what
        the units of *this* encoder rank give: their sum over encoder ranks is the whole (None on one without units).
        Where the encoder is frozen nothing happens. Features are let go of.

        Args:
            scale: times the gradients: ``1 / dp`` where the backbone's gradients are averaged over data-parallel
                ranks, ``n / dp`` where those of the n encoder ranks will be averaged, too.
            missing: of a micro-batch with units whose backward did not run: ``error``, or ``zero``.

        Raises:
            InputError: ``scale`` is no finite number; a gradient is missing, of which micro-batches is named; or it was
                called already.
            RankError: another rank failed, or did not answer in time.
        """
        self._check_open("backward")
        if isinstance(scale, bool) or not isinstance(scale, Real) or not isfinite(scale):
            raise refused("scale", "a finite number", scale)
        one_of("missing", missing, get_args(Missing))
        if self.trainable:
            self._check_came(missing)
        self._closed = True
        if self.trainable:
            gradient = self._collect()
            if self._encoder.outputs:
                self._encoder.backward(gradient.mul_(scale))
            self._meter.drop(gradient)
        self._let_go()

    def _agreed(self, mine: Facts) -> tuple[int, Any, bool]:
        """Encode, and return what features are; where that fails the others hear of it, so that none waits for rows."""
        try:
            self._encoder.encode()
            mine = with_features(mine, self._encoder.outputs)
        except Exception:
            with suppress(RankError):
                self._peers.gather(mine._replace(failed=1))
            raise
        return agreed(self._peers.gather(mine), self._peers.me)

    def _deliver(self) -> Any:
        """Return the features that this process needs, each row once."""
        shape = (sum(route.n_rows for route in self._incoming), self.width)
        held = self._meter.take(torch.empty(shape, dtype=self.dtype, device=self._device))
        wanted = {route.runs for route in self._outgoing}  # tensor-parallel ranks want the same
        made = {runs: self._meter.take(self._encoder.rows(runs)) for runs in wanted}
        sends = {route.target: made[route.runs] for route in self._outgoing}
        receives = _parts(held, self._incoming)
        if self._peers.me in sends:
            receives.pop(self._peers.me).copy_(sends.pop(self._peers.me))
        self._exchange(sends, receives)
        for tensor in made.values():
            self._meter.drop(tensor)
        return held

    def _collect(self) -> Any:
        """Return ``[rows, width]``: the summed gradients of this process's own units."""
        sends = _parts(self._sums(), self._incoming) if self._counts else {}
        self._meter.drop(self._features)
        self._features = None
        returning = {route.target: route for route in self._outgoing if route.returns}
        own = sends.pop(self._peers.me, None)
        receives = {peer: self._zeros(route.n_rows) for peer, route in returning.items() if peer != self._peers.me}
        self._exchange(sends, receives)
        total = self._zeros(self._encoder.n_rows)
        for peer, route in returning.items():  # in order of ranks, so that the sum is the same every time
            part = own if peer == self._peers.me else receives[peer]
            total.index_add_(0, self._encoder.index(route.runs).to(total.device), part)
        for part in receives.values():
            self._meter.drop(part)
        return total

    def _exchange(self, sends: dict[int, Any], receives: dict[int, Any]) -> None:
        """Let rows travel where the group can take them, from and to where they are."""
        there = self._peers.device
        landing = {
            peer: torch.empty_like(part, device=there) for peer, part in receives.items() if part.device != there
        }
        self._peers.exchange({peer: part.to(there) for peer, part in sends.items()}, {**receives, **landing})
        for peer, part in landing.items():
            receives[peer].copy_(part)

    def _take(self, micro: int, leaf: Any) -> None:
        """Add the gradient of a micro-batch's features to the sums."""
        self._check_open("backward of a micro-batch")
        if self._counts:
            self._sums().index_add_(0, self._index[micro], leaf.grad.detach().to(self._accumulate))
        leaf.grad = None
        self._came.add(micro)

    def _sums(self) -> Any:
        """The gradients of held features so far, made with the first one: frozen encoders and replicas need none."""
        if self._gradient is None:
            self._gradient = self._zeros(len(self._features))
        return self._gradient

    def _zeros(self, n_rows: int) -> Any:
        return self._meter.take(torch.zeros((n_rows, self.width), dtype=self._accumulate, device=self._device))

    def _check_came(self, missing: Missing) -> None:
        lost = [micro for micro, rows in enumerate(self._needs) if rows and micro not in self._came]
        lost = lost if missing == "error" else []
        states = self._peers.gather([len(lost)])
        if lost:
            raise InputError(
                f"no gradient came for micro-batches {lost}, which use units: take their features(micro) into the "
                "model and run loss.backward(), or call backward(missing='zero') where they are not to count",
                micro=lost,
            )
        others = [rank for rank, (n_lost,) in enumerate(states) if n_lost]
        if others:
            raise RankError(f"gradients are missing on ranks {others}: their errors say of which", ranks=others)

    def _check_open(self, what: str) -> None:
        if self._closed:
            raise InputError(
                f"{what} after EncodeOnce.backward(): the features of this mini-batch are gone; call encode_once for "
                "the next one"
            )

    def _needs_of(self, micro: int) -> Sequence[UnitRows]:
        if self._place is None:
            raise InputError(f"process {self._peers.me} encodes only: it stands nowhere in the backbone's mesh")
        if not 0 <= integer("micro", micro) < len(self._needs):
            raise InputError(f"micro must be in [0, {len(self._needs)}), the micro-batches of this plan, got {micro}")
        return self._needs[micro]

    def _let_go(self) -> None:
        for held in (self._features, self._gradient):
            if held is not None:
                self._meter.drop(held)
        self._features = self._gradient = None
        self._index = []
        self._encoder.release()


def encode_once(
    encoder: Callable[[Any], Any] | None,
    units: UnitPlan,
    *,
    load: Load,
    collate: Collate | None = None,
    max_rows: int | None = None,
    recompute: bool = False,
    group: Any = None,
    like: Any = None,
    accumulate_dtype: Any = None,
    timeout_s: float = 600.0,
) -> EncodeOnce:
    """Encode each unit of a mini-batch once, and bring the features to the ranks whose micro-batches use them.

    Every process of the group calls this, then trains its micro-batches with `EncodeOnce.features`, then calls
    `EncodeOnce.backward`. A plan of one process needs no group.

    Args:
        encoder: what encodes a batch of units: ``[sum of their rows, width]``, or one such tensor for each. May be
            None on a process without units. Of a module that is wrapped for data parallelism give the inner one: how
            often it is called differs from rank to rank.
        units: the plan; the same on every rank.
        load: gives an array for each of a list of keys, in order.
        collate: makes of a list of arrays what the encoder takes; None: a list of tensors on the device of ``like``.
        max_rows: most rows that the encoder gets at once; None: all of a rank in one call. Calls have backward run
            one by one, so they must not share a graph, as that of weights which the encoder computes once and keeps.
        recompute: keep no activations of the encoder; in `EncodeOnce.backward` each batch is loaded and encoded again,
            so that those of one batch are there at once. Random numbers (dropout) come again as they were.
        group: the process group; None for the default one.
        like: a tensor that has the features' width as its last size, their dtype and their device, such as the
            embedding table. Checked, and needed where a mini-batch may have no units at all: nothing else says them
            then. None: features stay where the encoder's are.
        accumulate_dtype: of the sums of gradients; None: float32 for features of two bytes, else theirs.
        timeout_s: most that this process waits for another.

    Raises:
        InputError: an argument is wrong, the ranks' plans differ, or the group has fewer processes than the plan.
        PayloadError: a unit is encoded to another number of rows than its references say; names it.
        RankError: another rank failed, or did not answer in time.
    """
    instance("units", units, UnitPlan, "a UnitPlan, as plan_units() makes it")
    for name, given, wanted in (
        ("encoder", encoder, "a function of a batch, or None on a process without units"),
        ("load", load, "a function of keys, as sp.read_units"),
        ("collate", collate, "a function of a list of arrays, or None"),
    ):
        if not callable(given) and (given is not None or name == "load"):
            raise refused(name, wanted, given)
    if max_rows is not None and integer("max_rows", max_rows) < 1:
        raise refused("max_rows", "at least 1", max_rows)
    if like is not None:
        instance("like", like, torch.Tensor, "a tensor like the features, such as the embedding table")
        if not like.ndim or like.dtype not in DTYPES:
            raise refused("like", f"of one of {', '.join(map(str, DTYPES))} and have a last size", like)
    if accumulate_dtype is not None and accumulate_dtype not in DTYPES:
        raise refused("accumulate_dtype", f"one of {', '.join(map(str, DTYPES))}", accumulate_dtype)
    n_needed, meter = units.n_processes, Meter()
    peers = Peers(group, alone=n_needed == 1, n_needed=n_needed, timeout_s=seconds("timeout_s", timeout_s))
    batches = UnitEncoder(
        encoder, units, peers.me, load=load, collate=collate, max_rows=max_rows, recompute=recompute,
        device=None if like is None else like.device, meter=meter,
    )  # fmt: skip
    return EncodeOnce(units, batches, peers, meter, like=like, accumulate_dtype=accumulate_dtype)


def _parts(buffer: Any, routes: Sequence[Route]) -> dict[int, Any]:
    """Return for each source the rows of a buffer that its route fills."""
    found, at = {}, 0
    for route in routes:
        found[route.source] = buffer[at : at + route.n_rows]
        at += route.n_rows
    return found


def _places(routes: Sequence[Route], needs: Sequence[Sequence[UnitRows]], device: Any) -> list[Any]:
    """Return for each micro-batch int64 ``[n]``: where its rows are among those that routes bring."""
    runs: dict[int, list[tuple[UnitRun, int]]] = {}
    at = 0
    for route in routes:
        for run in route.runs:
            runs.setdefault(run.unit, []).append((run, at))
            at += run.n_rows
    return [torch.from_numpy(ranges(_place(rows, runs[rows.unit]) for rows in micro)).to(device) for micro in needs]


def _place(rows: UnitRows, runs: Sequence[tuple[UnitRun, int]]) -> tuple[int, int]:
    run, at = runs[bisect_right(runs, rows.start, key=lambda found: found[0].start) - 1]
    return at + rows.start - run.start, rows.stop - rows.start
