"""What a batch is made of: which fields it has, what of them is missing, and one read of a rank's rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from spool.errors import InputError
from spool.formats.arrays import Ragged
from spool.formats.layers import bounds
from spool.model.fields import LOGPROBS, LOSS_MASK, ROUTED_EXPERTS, TOKEN_IDS, FieldSpec, numpy_dtype
from spool.read.lookup import names_of
from spool.read.select import positions
from spool.train.restoring import gaps
from spool.train.restoring.fields import agreed, covers_of, have_routing
from spool.train.restoring.layouts import STALENESS, VERSIONS, Batch, Column
from spool.train.restoring.versions import VersionOrder, masked_versions, staleness, token_versions

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from spool.handle import Spool
    from spool.model.refs import Ref
    from spool.read.fetch import Verify
    from spool.read.sample import Coverage, Sample
    from spool.train.planning.ranks import RankSlice
    from spool.train.restoring.entries import Entry
    from spool.train.restoring.gaps import Missing

_DERIVED = frozenset({VERSIONS.name, STALENESS.name})

_MASK = FieldSpec(name=LOSS_MASK.name, dtype=LOSS_MASK.dtype, align="token")
"""The loss mask as a read returns it: over all tokens."""


class Rules(NamedTuple):
    """How rows become those of a batch.

    Attributes:
        rank: what this rank has of them.
        order: of weight versions.
        missing: what stands for gaps.
        mask_versions: whose tokens train.
        ids: whether consecutive experts stand for missing routing, or -1.
        narrow: whether rows stay as they are stored: they are widened on a device, or when they are put together.
        verify: what is checked.
    """

    rank: RankSlice
    order: VersionOrder
    missing: Missing
    mask_versions: Any
    ids: bool
    narrow: bool
    verify: Verify


class Plan(NamedTuple):
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

    def without(self, name: str) -> Plan:
        """Return the plan for the other fields; what ``name`` lacks still counts."""
        return self._replace(specs={other: spec for other, spec in self.specs.items() if other != name})


def make_plan(
    spool: Spool,
    entries: Sequence[Entry],
    asked: Sequence[str] | None,
    shape: FieldSpec | None,
    missing: Missing,
    order: VersionOrder,
    *,
    packed: bool,
) -> Plan:
    """Return what is to be in a batch; no payload is read.

    Args:
        spool: where the references are read.
        entries: of the batch.
        asked: names of the fields; all that any reference has where None.
        shape: of the routing, should nobody know.
        missing: what may stand for gaps.
        order: of weight versions.
        packed: each field becomes one array.

    Raises:
        InputError: nobody says what a field is, or references say what does not go together.
        NotFoundError: nobody knows a field.
        GapError: something is missing for which nothing may stand.
    """
    refs = [entry.ref for entry in entries if not entry.failed]
    chosen = _names(refs, asked, shape, order)
    stored = [name for name in chosen if name not in _DERIVED and name != LOSS_MASK.name]
    found = iter(covers_of(spool, refs, stored, shape))
    covers = [{} if entry.failed else next(found) for entry in entries]
    known = {spec.name: spec for spec in (TOKEN_IDS, LOGPROBS, _MASK, VERSIONS, STALENESS)}
    known |= {} if shape is None else {ROUTED_EXPERTS: shape}
    for entry, fields in zip(entries, covers, strict=True):
        for cover in fields.values():
            gaps.check_gaps(entry.ref, cover, missing)
    for name in stored:
        each = zip(entries, covers, strict=True)
        spec = agreed([(entry.ref, fields[name].spec) for entry, fields in each if name in fields], packed=packed)
        known |= {} if spec is None else {name: spec}
    unknown = [name for name in chosen if name not in known]
    if unknown:
        raise InputError(
            f"no reference of the batch says what {unknown[0]} is; leave it out (fields=), or pass experts= for "
            f"{ROUTED_EXPERTS}",
            fields=unknown,
        )
    return Plan({name: known[name] for name in chosen}, covers)


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


class _Sequence(NamedTuple):
    """What this rank has of one sequence.

    Attributes:
        ref: its reference, or what stands for one that failed.
        at: its tokens, int64.
        rows: rows of the forward that these expand to, the last of the sequence included, int64.
        sample: what was read; None for one that failed.
        covers: by field what is missing.
        versions: of all tokens of the sequence, int64.
    """

    ref: Ref
    at: NDArray[np.int64]
    rows: NDArray[np.int64]
    sample: Sample | None
    covers: dict[str, Coverage]
    versions: NDArray[np.int64]

    def positions(self, spec: FieldSpec) -> NDArray[np.int64]:
        """Return the positions of a field that the tokens have rows of; of a step field all."""
        if spec.align == "response":
            return self.at[self.at >= self.ref.response_start]
        if spec.align == "forward":
            return self.rows[self.rows < self.ref.n_rows - 1]
        if spec.align == "step":
            return np.arange(*positions("step", self.ref, [])[0], dtype=np.int64)
        return self.at

    def part(self, spec: FieldSpec, rules: Rules) -> Any:
        """Return the rows of a field, gaps filled; of the loss mask what trains."""
        if spec.name == VERSIONS.name:
            return self.versions[self.at]
        if spec.name == STALENESS.name:
            return staleness(self.versions[self.at], rules.order)
        read = None if self.sample is None else self.sample.get(spec.name)
        part: Any = self._zeros(spec, rules) if read is None else read
        cover = self.covers.get(spec.name)
        if spec.name == LOSS_MASK.name:
            self._clear(part, rules)
        elif cover is not None and cover.gaps and not isinstance(part, Ragged):
            ids = rules.ids or part.dtype.kind == "u"
            gaps.fill(part, self.positions(spec), cover, ids=ids, layers=rules.rank.layers)
        return part

    def _zeros(self, spec: FieldSpec, rules: Rules) -> NDArray[Any] | Ragged:
        """Return the rows of a field of which nothing is recorded."""
        shape = spec.row_shape
        if spec.num_layers is not None:
            start, stop = bounds(spec, rules.rank.layers)
            shape = (stop - start, *shape[1:])
        dtype, n = (
            numpy_dtype(spec.dtype if rules.narrow else spec.train_dtype or spec.dtype),
            len(self.positions(spec)),
        )
        if spec.ragged:
            return Ragged(np.zeros((0, *shape), dtype), np.zeros(n + 1, np.int64))
        return np.zeros((n, *shape), dtype)

    def _clear(self, mask: NDArray[Any], rules: Rules) -> None:
        """Take tokens out of the loss mask: those of old weights, and those that lack rows."""
        old = masked_versions(self.ref, self.versions, rules.order, rules.mask_versions)
        if old is not None:
            mask[old[self.at]] = 0
        for cover in self.covers.values():
            if cover.gaps and rules.missing == "mask":
                mask[gaps.untrained(self.ref, cover)[self.at]] = 0


def read_batch(spool: Spool, entries: Sequence[Entry], plan: Plan, rules: Rules) -> Batch:
    """Read the rank's rows of all fields of a plan, in one pass.

    Raises:
        InputError: ``verify`` is unknown, or a field has not the rank's layers.
        NotFoundError, ReleasedError, IntegrityError, StorageError: as `Spool.read`.
    """
    rules = rules._replace(narrow=rules.narrow and (rules.ids or not plan.has_gaps))
    samples = _samples(spool, entries, [name for name in plan.specs if name not in _DERIVED], rules)
    sequences = [
        _sequence(entry, sample, covers, rules)
        for entry, sample, covers in zip(entries, samples, plan.covers, strict=True)
    ]
    columns = {
        name: Column(spec, [sequence.part(spec, rules) for sequence in sequences]) for name, spec in plan.specs.items()
    }
    at, rows = [sequence.at for sequence in sequences], [sequence.rows for sequence in sequences]
    return Batch(entries, at, rows, columns, rules.rank.layers, parted=rules.rank.cp_size > 1)


def _samples(spool: Spool, entries: Sequence[Entry], fields: Sequence[str], rules: Rules) -> list[Sample | None]:
    """Return what is recorded of each entry; None for those that failed."""
    refs = [entry.ref for entry in entries if not entry.failed]
    if not have_routing(refs):
        fields = [name for name in fields if name != ROUTED_EXPERTS]
    samples = iter(
        spool.read(
            refs,
            fields=fields,
            tokens=[[slice(*each) for each in rules.rank.ranges(ref.n_tokens)] for ref in refs],
            layers=rules.rank.layers,
            dtype="stored" if rules.narrow else "train",
            missing=0,
            verify=rules.verify,
        )
    )
    return [None if entry.failed else next(samples) for entry in entries]


def _sequence(entry: Entry, sample: Sample | None, covers: dict[str, Coverage], rules: Rules) -> _Sequence:
    ref, ranges = entry.ref, rules.rank.ranges(entry.ref.n_tokens)
    rows = at = _counted(ranges)
    if ref.units:
        starts = np.append(gaps.first_rows(ref), ref.n_rows)
        rows = _counted([(starts[first], starts[stop]) for first, stop in ranges])
    return _Sequence(ref, at, rows, sample, covers, token_versions(ref, rules.order))


def _counted(ranges: Sequence[tuple[int, int]]) -> NDArray[np.int64]:
    return np.concatenate([np.arange(*each, dtype=np.int64) for each in ranges] or [np.zeros(0, np.int64)])
