"""`restore`: a batch of references as the arrays that a trainer takes, read in one pass."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np

from spool.arguments import instance, integer, names, one_of, optional, refused
from spool.errors import InputError
from spool.formats.arrays import Ragged
from spool.formats.layers import bounds
from spool.model.fields import LOGPROBS, LOSS_MASK, ROUTED_EXPERTS, TOKEN_IDS, FieldSpec, numpy_dtype
from spool.model.refs import Ref
from spool.read.fetch import Verify
from spool.read.lookup import names_of
from spool.read.sample import Coverage
from spool.read.select import positions
from spool.train import gaps, layouts
from spool.train.entries import Entry, Lengths, check_drop, entries_of, kept
from spool.train.gaps import Missing
from spool.train.handles import handle
from spool.train.layouts import STALENESS, VERSIONS, Batch, Column, Layout
from spool.train.lazy import LazyRouting
from spool.train.ranks import WHOLE, RankSlice
from spool.train.tensors import Framework, converter
from spool.train.versions import VersionOrder, masked_versions, staleness, token_versions, version_order

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from spool.handle import Spool
    from spool.model.moe import MoEShape
    from spool.read.sample import Sample

_DERIVED = frozenset({VERSIONS.name, STALENESS.name})


def restore(
    sp: Spool | str | os.PathLike[str],
    refs: Ref | Sequence[Ref | None],
    layout: Layout = "slime",
    *,
    fields: Sequence[str] | None = None,
    lengths: Lengths | None = None,
    experts: MoEShape | str | None = None,
    rank_slice: RankSlice | None = None,
    framework: Framework = "numpy",
    device: Any = None,
    missing: Missing = "error",
    version: str | int | Sequence[str] | None = None,
    mask_versions: Literal["all", "last"] | int = "all",
    drop: Sequence[str] = (),
    max_staleness: int | None = None,
    lazy: bool = False,
    verify: Verify = "whole",
) -> dict[str, Any]:
    """Return a batch in the form of a trainer: one read, in which rows that references share are fetched once.

    Every array is writable, C-contiguous, and shares memory with no other. Of the response region are loss masks,
    log probabilities (float32, 0.0 on observations), weight versions and staleness, but for ``nested`` and ``packed``,
    which have the masks and versions of all tokens. Routing has a row for each token but the last, int32, absolute
    layers.

    ========== ======================================================================================================
    layout     what is returned
    ========== ======================================================================================================
    ``slime``  lists by ``tokens``, ``loss_masks``, ``rollout_log_probs``, ``rollout_routed_experts``; with
               ``total_lengths``, ``response_lengths``, ``truncated``, and ``sample_indices`` and ``rewards`` where all
               references know theirs
    ``miles``  the same; a row of routing that is missing is -1 with ``missing="mask"``
    ``verl``   ``input_ids``, ``prompts``, ``responses``, ``response_mask``, ``position_ids``, ``attention_mask``,
               ``rollout_log_probs``, ``routed_experts`` (uint8 or int16); jagged nested tensors, with numpy lists
    ``nested`` the fields by their own names, jagged nested tensors, with numpy lists
    ``packed`` the fields by their own names, one array each, a row a token (of routing a row of the forward, the last
               one filled), ``cu_seqlens``, ``cu_rows``, ``max_seqlen``, ``position_ids``
    ========== ======================================================================================================

    All have ``kept``, which of ``refs`` are in it, ``weight_versions`` (int64, -1 for none; ``version_names`` by
    number, where versions are no numbers), and with ``version`` also ``staleness``.

    Args:
        sp: an open spool, or its URI: that is opened once a process.
        refs: references of one spool; None for a sample that failed: all is 0, its mask too.
        layout: whose form.
        fields: names, as `Spool.read` takes them, and ``weight_versions`` or ``staleness``; all that any reference has
            where None.
        lengths: where ``refs`` has None ``(n_tokens, response_length)``, else None.
        experts: the routing shape, needed only where no reference has routing.
        rank_slice: the tokens and layers of one rank; sequences are counted in tokens, not in rows of units.
        framework: ``numpy`` or ``torch``.
        device: of torch: stored, narrow bytes are copied there, and widened there. Where None tensors are on the CPU.
        missing: rows that were never sent: ``error``; ``arange``, consecutive experts stand for missing routing;
            ``mask``, that too, 0 for other fields, and tokens are not trained that have no row, or that the forward
            predicted of which there is none.
        version: of the current weights, for ``staleness``; or all versions, oldest first, where they are no numbers.
        mask_versions: tokens of ``all`` weights train, those of a segment's ``last`` ones, or those that are at most so
            many versions behind ``version``.
        drop: segments to leave out, by outcome, or as ``superseded``, ``nonfinite`` (log probabilities) or
            ``untrained``.
        max_staleness: segments to leave out too: whose oldest weights are further behind ``version``.
        lazy: routing is a `LazyRouting` that reads a layer when asked.
        verify: as in `Spool.read`.

    Raises:
        InputError: an argument does not fit; nothing was read.
        GapError: rows were never sent for which nothing may stand.
        NotFoundError, ReleasedError, IntegrityError, StorageError: as `Spool.read`.
    """
    convert = converter(framework, device)
    rules = _rules(layout, framework, device, rank_slice, missing, mask_versions)
    shape, asked = gaps.expert_spec(experts), optional(names, "fields", fields)
    entries, reasons = entries_of(refs, lengths), check_drop(drop)
    order = version_order([entry.ref for entry in entries], version)
    _check_staleness(order, mask_versions, optional(integer, "max_staleness", max_staleness))
    entries = kept(entries, reasons, max_staleness, order)
    spool = handle(sp)
    plan = _plan(spool, entries, asked, shape, missing, order)
    routing = None
    if lazy and ROUTED_EXPERTS in plan.specs:
        routing = _lazy(spool, entries, rules, experts=experts, framework=framework, device=device, verify=verify)
        plan = plan.without(ROUTED_EXPERTS)
    batch = _read(spool, entries, plan, rules, order, verify)
    made = layouts.formed(batch, layout, convert, as_torch=framework == "torch")
    if routing is not None:
        made[layouts.FORMS[layout].names.get(ROUTED_EXPERTS, ROUTED_EXPERTS)] = routing
    if VERSIONS.name in batch.columns and order.names is not None:
        made["version_names"] = list(order.names)
    return made


def _lazy(spool: Spool, entries: Sequence[Entry], rules: _Rules, **options: Any) -> LazyRouting:
    return LazyRouting(
        spool,
        [None if entry.failed else entry.ref for entry in entries],
        lengths=[(entry.ref.n_tokens, entry.ref.response_length) if entry.failed else None for entry in entries],
        rank_slice=rules.rank,
        missing="error" if rules.missing == "error" else "arange",
        **options,
    )


class _Rules(NamedTuple):
    """How rows become those of a batch.

    Attributes:
        rank: what this rank has of them.
        missing: what stands for gaps.
        mask_versions: whose tokens train.
        ids: whether consecutive experts stand for missing routing, or -1.
        widen_late: whether rows are read as they are stored, and widened when the batch takes its form: on a device,
            or when they are put together.
    """

    rank: RankSlice
    missing: Missing
    mask_versions: Any
    ids: bool
    widen_late: bool


def _rules(
    layout: Layout, framework: Framework, device: Any, rank_slice: Any, missing: Missing, mask_versions: Any
) -> _Rules:
    one_of("layout", layout, get_args(Layout))
    one_of("missing", missing, get_args(Missing))
    if mask_versions not in ("all", "last") and (type(mask_versions) is not int or mask_versions < 0):
        raise refused("mask_versions", "all, last, or how many versions behind a token may be", mask_versions)
    rank = WHOLE if rank_slice is None else instance("rank_slice", rank_slice, RankSlice, "a RankSlice")
    form = layouts.FORMS[layout]
    joins = form.joined == "packed" or (form.joined == "jagged" and framework == "torch")
    late = joins or device is not None or layout == "verl"
    return _Rules(rank, missing, mask_versions, missing != "mask" or form.lacking == "consecutive", late)


def _check_staleness(order: VersionOrder, mask_versions: Any, max_staleness: int | None) -> None:
    if order.current is None and (max_staleness is not None or isinstance(mask_versions, int)):
        name = "mask_versions=" if max_staleness is None else "max_staleness="
        raise InputError(f"{name} counts from the current weights; say which these are (version=)", argument="version")


class _Plan(NamedTuple):
    """What is to be in a batch.

    Attributes:
        specs: of the fields, the loss mask and what follows from references alone included.
        covers: of each entry by field what of it is missing; nothing for a failed sample.
    """

    specs: dict[str, FieldSpec]
    covers: list[dict[str, Coverage]]

    @property
    def has_gaps(self) -> bool:
        """Whether anything is missing."""
        return any(found.gaps for covers in self.covers for found in covers.values())

    def without(self, name: str) -> _Plan:
        """Return the plan for the other fields; what ``name`` lacks still counts."""
        return self._replace(specs={other: spec for other, spec in self.specs.items() if other != name})


def _plan(
    spool: Spool,
    entries: Sequence[Entry],
    asked: Sequence[str] | None,
    shape: FieldSpec | None,
    missing: Missing,
    order: VersionOrder,
) -> _Plan:
    refs = [entry.ref for entry in entries if not entry.failed]
    chosen = _names(refs, asked, shape, order)
    stored = [name for name in chosen if name not in _DERIVED and name != LOSS_MASK.name]
    found = iter(gaps.covers_of(spool, refs, stored, shape))
    covers = [{} if entry.failed else next(found) for entry in entries]
    known = {spec.name: spec for spec in (TOKEN_IDS, LOGPROBS, _MASK, VERSIONS, STALENESS)}
    known |= {} if shape is None else {ROUTED_EXPERTS: shape}
    for entry, fields in zip(entries, covers, strict=True):
        for name, cover in fields.items():
            known[name] = cover.spec
            gaps.check_gaps(entry.ref, cover, missing)
    unknown = [name for name in chosen if name not in known]
    if unknown:
        raise InputError(
            f"no reference of the batch says what {unknown[0]} is; leave it out (fields=), or pass experts= for "
            f"{ROUTED_EXPERTS}",
            fields=unknown,
        )
    return _Plan({name: known[name] for name in chosen}, covers)


_MASK = FieldSpec(name=LOSS_MASK.name, dtype=LOSS_MASK.dtype, align="token")
"""The loss mask as a read returns it: over all tokens."""


def _names(refs: Sequence[Ref], asked: Sequence[str] | None, shape: FieldSpec | None, order: VersionOrder) -> list[str]:
    """Return the fields of a batch.

    Raises:
        InputError: a recorded field is named like one that is made here.
    """
    if asked is not None:
        if STALENESS.name in asked and order.current is None:
            raise InputError("staleness is counted from the current weights; say which these are (version=)")
        return list(dict.fromkeys(asked))
    found = dict.fromkeys([TOKEN_IDS.name, LOSS_MASK.name] + [name for ref in refs for name in names_of(ref, None)])
    clash = [name for name in found if name in _DERIVED]
    if clash:
        raise InputError(f"a recorded field is called {clash[0]}, as what a batch says of versions; name fields=")
    if not refs:
        found[LOGPROBS.name] = None
    if shape is not None:
        found[ROUTED_EXPERTS] = None
    return [*found, VERSIONS.name, *([] if order.current is None else [STALENESS.name])]


# -- reading -----------------------------------------------------------------------------------------------------------


class _Place(NamedTuple):
    """What this rank has of one sequence.

    Attributes:
        entry: the sequence.
        at: its tokens, int64.
        rows: rows of the forward that these expand to, the last of the sequence included, int64.
    """

    entry: Entry
    at: NDArray[np.int64]
    rows: NDArray[np.int64]

    def positions(self, align: str) -> NDArray[np.int64]:
        """Return the positions of a field that the tokens have rows of; of a step field all."""
        ref = self.entry.ref
        if align == "response":
            return self.at[self.at >= ref.response_start]
        if align == "forward":
            return self.rows[self.rows < ref.n_rows - 1]
        if align == "step":
            return np.arange(*positions("step", ref, [])[0], dtype=np.int64)
        return self.at


def _place(entry: Entry, rank: RankSlice) -> _Place:
    ref, ranges = entry.ref, rank.ranges(entry.ref.n_tokens)
    if not ref.units:
        at = _counted(ranges)
        return _Place(entry, at, at)
    starts = np.append(gaps.first_rows(ref), ref.n_rows)
    return _Place(entry, _counted(ranges), _counted([(starts[first], starts[stop]) for first, stop in ranges]))


def _counted(ranges: Sequence[tuple[int, int]]) -> NDArray[np.int64]:
    return np.concatenate([np.arange(*each, dtype=np.int64) for each in ranges] or [np.zeros(0, np.int64)])


def _read(
    spool: Spool, entries: Sequence[Entry], plan: _Plan, rules: _Rules, order: VersionOrder, verify: Verify
) -> Batch:
    late = rules.widen_late and (rules.ids or not plan.has_gaps)
    samples = _samples(spool, entries, [name for name in plan.specs if name not in _DERIVED], rules, late, verify)
    parts: dict[str, list[Any]] = {name: [] for name in plan.specs}
    places = [_place(entry, rules.rank) for entry in entries]
    for place, sample, covers in zip(places, samples, plan.covers, strict=True):
        versions = token_versions(place.entry.ref, order)
        for name, spec in plan.specs.items():
            if name == VERSIONS.name:
                part: Any = versions[place.at]
            elif name == STALENESS.name:
                part = staleness(versions[place.at], order)
            else:
                part = sample.get(name) if sample is not None else None
                part = _zeros(spec, place, rules.rank.layers, late) if part is None else part
            if name == LOSS_MASK.name:
                _clear(part, place, covers, versions, order, rules)
            elif name in covers and covers[name].gaps and not isinstance(part, Ragged):
                ids = rules.ids or part.dtype.kind == "u"
                gaps.fill(part, place.positions(spec.align), covers[name], ids=ids, layers=rules.rank.layers)
            parts[name].append(part)
    columns = {name: Column(spec, parts[name]) for name, spec in plan.specs.items()}
    at, rows = [place.at for place in places], [place.rows for place in places]
    return Batch(entries, at, rows, columns, rules.rank.layers, parted=rules.rank.cp_size > 1)


def _samples(
    spool: Spool, entries: Sequence[Entry], fields: Sequence[str], rules: _Rules, late: bool, verify: Verify
) -> list[Sample | None]:
    """Return what is recorded of each entry, in one read; None for failed samples."""
    refs = [entry.ref for entry in entries if not entry.failed]
    rank = rules.rank
    if not gaps.have_routing(refs):
        fields = [name for name in fields if name != ROUTED_EXPERTS]
    tokens = [[slice(*each) for each in rank.ranges(ref.n_tokens)] for ref in refs]
    samples = iter(
        spool.read(
            refs,
            fields=fields,
            tokens=tokens,
            layers=rank.layers,
            dtype="stored" if late else "train",
            missing=0,
            verify=verify,
        )
    )
    return [None if entry.failed else next(samples) for entry in entries]


def _zeros(spec: FieldSpec, place: _Place, layers: slice | None, late: bool) -> NDArray[Any] | Ragged:
    """Return the rows of a field of a sample that failed, or that has no tokens."""
    shape = spec.row_shape
    if spec.num_layers is not None:
        start, stop = bounds(spec, layers)
        shape = (stop - start, *shape[1:])
    dtype = numpy_dtype(spec.dtype if late else spec.train_dtype or spec.dtype)
    n = len(place.positions(spec.align))
    if spec.ragged:
        return Ragged(np.zeros((0, *shape), dtype), np.zeros(n + 1, np.int64))
    return np.zeros((n, *shape), dtype)


def _clear(
    mask: NDArray[Any],
    place: _Place,
    covers: dict[str, Coverage],
    versions: NDArray[np.int64],
    order: VersionOrder,
    rules: _Rules,
) -> None:
    """Take tokens out of the loss mask: those of old weights, and those that lack rows."""
    old = masked_versions(place.entry.ref, versions, order, rules.mask_versions)
    if old is not None:
        mask[old[place.at]] = 0
    for found in covers.values():
        if found.gaps and rules.missing == "mask":
            mask[gaps.untrained(place.entry.ref, found)[place.at]] = 0
