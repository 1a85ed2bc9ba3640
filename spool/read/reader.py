"""Reading by reference: any fields, tokens and layers of one or many references, in one plan and one pass."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np

from spool.arguments import one_of
from spool.errors import AbsentError, InputError, IntegrityError, SpoolError
from spool.formats.shard import group_key, parse_group
from spool.model.fields import ROUTED_EXPERTS, FieldSpec, Layout, Schema
from spool.model.rows import MOST
from spool.read import inline
from spool.read.assemble import Array, Missing, Target, check_missing, check_out, fill, span_mask
from spool.read.columns import LateColumn, MaskColumn, RaggedColumn
from spool.read.fetch import Batch, Verify, Workers, execute, lost
from spool.read.lookup import MASK, Lookup, Selection, extents_of, names_of
from spool.read.memory import Memory
from spool.read.sample import ByteRange, Coverage, Sample
from spool.read.select import Range, Run, Tokens, cover, layer_range, plain_range, token_ranges
from spool.read.sound import check_extents, check_reference
from spool.read.streams import Dtype, FieldView, Source, Streams

if TYPE_CHECKING:
    from collections.abc import Callable

    from spool.model.refs import Ref
    from spool.read.tier import Tier

__all__ = ["ByteRange", "DtypeChoice", "Reader"]

log = logging.getLogger("spool.read")

DtypeChoice = Literal["train", "stored"]
Out = Mapping[str, Array]

_DTYPES, _VERIFY = get_args(DtypeChoice), get_args(Verify)


class Reader:
    """Reads references from a tier. Thread-safe, and usable after a fork.

    Args:
        tiers: where to look, one after the other; closed with the reader.
        threads: threads that share a large read; twice the CPUs, at most 8, where None.
        reuse_bytes: memory of large results that are gone, kept for those to come.
    """

    def __init__(self, tiers: Sequence[Tier], *, threads: int | None = None, reuse_bytes: int = 0) -> None:
        self._tiers = tiers
        self._streams = Streams(self._group)
        self._workers = Workers(threads)
        self._memory = Memory(reuse_bytes)

    def close(self) -> None:
        """Let go of threads and files."""
        self._workers.close()
        self._memory.clear()
        for tier in self._tiers:
            tier.close()

    def read(
        self,
        refs: Sequence[Ref],
        *,
        fields: Sequence[str] | None = None,
        tokens: Sequence[Tokens] | None = None,
        layers: slice | None = None,
        dtype: DtypeChoice = "train",
        out: Sequence[Out | None] | None = None,
        missing: Missing = "error",
        verify: Verify = "whole",
        seen: Callable[[Batch], object] | None = None,
        late: Mapping[str, FieldSpec] | None = None,
    ) -> list[Sample]:
        """Read exactly the rows asked for, each byte once, however many references share it.

        Args:
            refs: references into this tier's spool.
            fields: names; where None, all that a reference has, and ``loss_mask``, which every reference has.
            tokens: for each reference None, a slice, or slices to be concatenated in their order. ``response`` fields
                have the tokens of theirs that lie in the response region, ``forward`` fields the rows that theirs
                expand to but for the reference's last, ``step`` fields all their rows.
            layers: absolute layers, for fields that have layers.
            dtype: ``train``, or ``stored``; layers are absolute in both.
            out: for each reference arrays to fill by field, of the shape that would be returned and a dtype that
                holds the stored one; not for ragged fields.
            missing: ``error``, or the integer that stands for rows that were never sent (ragged: empty rows).
            verify: ``whole``: extents that are read whole are checked; ``always``: partial reads are widened to the
                extent and checked too; ``never``.
            seen: called with what was brought, once or twice.
            late: what fields are of which no reference has a row, so that no stream says it.

        Returns:
            A sample for each reference: fresh, writable, C-contiguous arrays that share no memory.

        Raises:
            InputError: an argument is wrong; nothing was read.
            GapError: rows were never sent.
            NotFoundError: a field was never sent.
            IntegrityError: bytes are missing, short or altered.
            StorageError: the tier failed.
        """
        one_of("dtype", dtype, _DTYPES)
        one_of("verify", verify, _VERIFY)
        if layers is not None:
            plain_range(layers, 0, what="layers")
        if not isinstance(missing, str) or missing != "error":  # arrays compare entry by entry
            missing = check_missing(missing, np.dtype(np.float64), field="any field")
        call = _Call(Lookup(self._streams, refs, late), Batch(verify), layers, dtype, missing, self._memory, [])
        each = zip(refs, _one_each("tokens", tokens, refs), _one_each("out", out, refs), strict=True)
        samples = [Sample(ref, call.columns(ref, fields, slices, arrays)) for ref, slices, arrays in each]
        execute(call.batch, self._tiers, self._workers)
        if seen is not None:
            seen(call.batch)
        if call.late:
            self._finish(call, verify, seen)
        return samples

    def _finish(self, call: _Call, verify: Verify, seen: Callable[[Batch], object] | None) -> None:
        ragged = [column for column, *_ in call.late if isinstance(column, RaggedColumn)]
        if ragged:
            batch = Batch(verify)
            for column in ragged:
                column.want_values(batch, call.target)
            execute(batch, self._tiers, self._workers)
            if seen is not None:
                seen(batch)
        for late, columns, name in call.late:
            columns[name] = late.finish()

    def select(self, ref: Ref, name: str, *, late: Mapping[str, FieldSpec] | None = None) -> Selection | None:
        """Return what a field of a reference is, which rows there are and which were never sent; None for nothing."""
        return Lookup(self._streams, [ref], late).select(ref, name, [(0, ref.n_tokens)], sparse=True)

    def coverage(
        self,
        refs: Sequence[Ref],
        fields: Sequence[str] | None = None,
        *,
        late: Mapping[str, FieldSpec] | None = None,
    ) -> list[dict[str, Coverage]]:
        """Return for each reference what its fields are and which of their positions were never sent.

        Args:
            refs: references into this tier's spool; they help each other out with specs.
            fields: names; all that each reference has where None. The loss mask, of which nothing is ever missing, is
                left out.
            late: as in `read`.

        Raises:
            NotFoundError: no one knows a field.
            IntegrityError: a reference is damaged.
        """
        lookup = Lookup(self._streams, refs, late)
        return [lookup.coverage(ref, [name for name in names_of(ref, fields) if name != MASK]) for ref in refs]

    def schema(self, stream: str) -> Schema:
        """Return the fields of a stream."""
        return self._group(stream)[0]

    def locate(
        self,
        ref: Ref,
        *,
        fields: Sequence[str] | None = None,
        tokens: Tokens = None,
        layers: slice | None = None,
        late: Mapping[str, FieldSpec] | None = None,
    ) -> list[ByteRange]:
        """Return where the asked rows lie at this moment, field by field, in the order of their positions.

        Rows that were never sent are left out, and so is what a reference carries inline. A row holds all stored
        layers, so ``layers`` makes no range smaller here. For a ragged field the end offsets come first, then
        the values; finding these reads the offsets.

        Raises:
            InputError: an argument is wrong.
            NotFoundError: a field was never sent.
            IntegrityError: bytes are missing.
        """
        check_reference(ref)
        lookup, found = Lookup(self._streams, [ref], late), []
        ranges = token_ranges(tokens, ref.n_tokens)
        if layers is not None:
            plain_range(layers, 0, what="layers")
        for name in names_of(ref, fields):
            if not extents_of(ref, name) and (name == MASK or name in ref.inline):
                continue
            selection = lookup.select(ref, name, ranges, sparse=bool(extents_of(ref, name)))
            if selection is not None:
                found += self._stored_runs(ref, name, selection)
        return [part for source, run in found for part in self._ranges(source, run)]

    def _ranges(self, source: Source, run: Run) -> list[ByteRange]:
        for tier in self._tiers:
            ranges = tier.locate(source, run)
            if ranges is not None:
                return ranges
        raise lost(source, run.row, run.n, self._tiers)

    def _group(self, stream: str) -> tuple[Schema, Layout]:
        """Return the fields and the layout of a stream, from the first tier whose document of it is sound."""
        key, damage = group_key(stream), list[IntegrityError]()
        for tier in self._tiers:
            try:
                data = tier.read(key)
                if data is None:
                    continue
                found = parse_group(data, tier.path(key))
            except IntegrityError as error:
                damage.append(error)
            except SpoolError as error:
                if damage:
                    raise damage[0] from error
                raise
            else:
                for before in damage:
                    log.warning("%s; this read went on with %s", before, tier.path(key))
                return found
        if damage:
            raise damage[0]
        for tier in self._tiers:
            tier.check()
        raise AbsentError(
            f"{' and '.join(tier.path(key) for tier in self._tiers)} is not there: the stream was recorded on another "
            "node and not published, or is lost; publish it there, or name its root in SPOOL_ROOTS",
            file=self._tiers[0].path(key),
        )

    def _stored_runs(self, ref: Ref, name: str, selection: Selection) -> list[tuple[Source, Run]]:
        view = selection.view
        if not view.spec.ragged:
            return [(view.values[run.extent.stream], run) for run in selection.runs]
        batch = Batch("never")
        column = _ragged(ref, name, _without_gaps(selection), batch)
        execute(batch, self._tiers, self._workers)
        values = [(view.values[run.extent.stream], run) for run in column.value_runs()]
        return [*((view.offsets[run.extent.stream], run) for run in column.end_runs()), *values]


class _Call(NamedTuple):
    """One read: how its columns come to be.

    Attributes:
        late: columns that are finished once the batch is read, with where the arrays they become belong.
    """

    lookup: Lookup
    batch: Batch
    layers: slice | None
    dtype: DtypeChoice
    missing: Missing
    memory: Memory
    late: list[tuple[LateColumn, dict[str, Any], str]]

    def columns(self, ref: Ref, fields: Sequence[str] | None, tokens: Tokens, out: Out | None) -> dict[str, Any]:
        """Return the arrays of a reference, some of them late; what they need is in the batch."""
        check_reference(ref)
        ranges = token_ranges(tokens, ref.n_tokens)
        names = names_of(ref, fields)
        unknown = out.keys() - names if out else None
        if unknown:
            raise InputError(f"out= has {sorted(unknown)}, but the fields read are {names}", fields=sorted(unknown))
        columns: dict[str, Any] = {}
        # all that is wrong is refused before room is made for any of it
        chosen = {name: self._select(ref, name, ranges) for name in names}
        for name in names:
            column = self._column(ref, name, chosen[name], ranges, out.get(name) if out else None)
            if isinstance(column, LateColumn):
                self.late.append((column, columns, name))
            if column is not None:
                columns[name] = column
        return columns

    def _select(self, ref: Ref, name: str, ranges: list[Range]) -> Selection | None:
        if name in ref.inline:
            return None
        if name != MASK:
            return self.lookup.select(ref, name, ranges, sparse=self.missing != "error")
        if extents := extents_of(ref, MASK):
            check_extents(ref, MASK, extents, MOST)
        return None

    def _column(
        self, ref: Ref, name: str, selection: Selection | None, ranges: list[Range], out: Array | None
    ) -> Array | LateColumn | None:
        if name in ref.inline:
            return self._inline(ref, name, ranges, out)
        if name == MASK:
            return self._mask(ref, ranges, out)
        if selection is None:
            return None
        if selection.view.spec.ragged:
            if out is not None:
                raise InputError(
                    f"out= cannot take {name}: it is ragged, its size is known only when it is read", field=name
                )
            return _ragged(ref, name, selection, self.batch)
        target = self.target(selection.view, selection.n, out)
        if selection.blanks:
            fill(target.array, selection.blanks, 0)
        if selection.gaps:
            fill(target.array, selection.gaps, check_missing(self.missing, target.array.dtype, field=name))
        self.batch.want(selection.view.values, selection.runs, target)
        return target.array

    def target(self, view: FieldView, n: int, out: Array | None = None) -> Target:
        """Return what takes ``n`` rows of a field: ``out``, if it is fit for them, or a new array."""
        shape, layers = (n, *view.spec.row_shape), None
        if self.layers is not None and view.spec.num_layers is not None:
            start, stop = layer_range(self.layers, view.spec.num_layers, field=view.spec.name)
            shape = (n, stop - start, *shape[2:])
            layers = None if stop - start == view.spec.num_layers else slice(start, stop)
        if out is None:
            return Target(self.memory.empty(shape, self._dtype(view)), layers)
        check_out(out, shape, view.stored, field=view.spec.name)
        return Target(out, layers)

    def _dtype(self, view: FieldView) -> Dtype:
        return view.train if self.dtype == "train" else view.stored

    def _mask(self, ref: Ref, ranges: list[Range], out: Array | None) -> MaskColumn:
        extents = extents_of(ref, MASK)
        runs, _, n = cover(extents, ranges)
        if out is not None:
            check_out(out, (n,), np.dtype(np.uint8), field=MASK)
        view = self.lookup.view(ref, MASK) if runs else None
        return MaskColumn(span_mask(ref.spans, ranges, n), view, runs, self.batch, out)

    def _inline(self, ref: Ref, name: str, ranges: list[Range], out: Array | None) -> Array:
        as_carried = name in inline.ALIGN and self.dtype == "train" and out is None
        view = None if as_carried else self.lookup.view(ref, name)
        rows = inline.rows(ref, name, view.spec.align if view else None, ranges)
        layered = name == ROUTED_EXPERTS or (view is not None and view.spec.num_layers is not None)
        if self.layers is not None and layered:
            start, stop = layer_range(self.layers, rows.shape[1], field=name)
            rows = rows[:, start:stop]
        if out is None:
            return np.array(rows, self._dtype(view) if view else rows.dtype, order="C")
        check_out(out, rows.shape, view.stored if view else rows.dtype, field=name)
        np.copyto(out, rows, casting="unsafe")
        return out


def _ragged(ref: Ref, name: str, selection: Selection, batch: Batch) -> RaggedColumn:
    return RaggedColumn(selection.view, selection.runs, selection.n, ref.extents.get(f"{name}.values", ()), batch)


def _without_gaps(selection: Selection) -> Selection:
    runs, n = [], 0
    for run in selection.runs:
        runs.append(run._replace(to=n))
        n += run.n
    return selection._replace(runs=runs, n=n)


def _one_each(what: str, given: Sequence[Any] | None, refs: Sequence[Ref]) -> Sequence[Any]:
    if given is None:
        return [None] * len(refs)
    if isinstance(given, (slice, Mapping)) or len(given) != len(refs):
        raise InputError(f"{what}= must be a list with one entry for each of the {len(refs)} references")
    return given
