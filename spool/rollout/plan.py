"""What an append is going to do: which rows are written, and which exist already."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct

from spool.errors import InputError
from spool.model.fields import Align, FieldSpec
from spool.model.refs import Extent, Unit
from spool.rollout.coverage import (
    EMPTY,
    Cover,
    Range,
    arrays,
    cut,
    cut_ranges,
    normalized,
    subtract,
    subtract_ranges,
)


class AppendPlan(Struct, frozen=True):
    """What committing a step takes; most of it goes into its `StepCommitted` as it is.

    Attributes:
        index: order in the session.
        step_id: the caller's id, or ``#`` and ``index``.
        parent: index of the step whose chain this one extends, or None.
        base: tokens taken over from the parent's chain.
        n_prompt: tokens of the prompt.
        n_tokens: tokens of prompt and response.
        n_rows: rows of the forward they expand to.
        units: multimodal units that the parent's chain does not have.
        block_hashes, prompt_hash, end_hashes: as in `StepCommitted`.
        donor: the step whose chain gives ``shared``: it has the longest known prefix of the prompt in common. That is
            the parent where no other step shares more than ``base`` tokens.
        n_shared: tokens of that prefix.
        store: by field, the positions to be written, ascending; fields with nothing to write are left out. Positions
            are tokens (token and response fields), rows of the forward, or 0 (step).
        shared: by stored array, existing rows behind the parent's that the step refers to; never in ``store``.
    """

    index: int
    step_id: str
    parent: int | None
    base: int
    n_prompt: int
    n_tokens: int
    n_rows: int
    units: tuple[Unit, ...]
    block_hashes: bytes
    prompt_hash: bytes
    end_hashes: bytes
    donor: int | None
    n_shared: int
    store: dict[str, tuple[Range, ...]]
    shared: dict[str, tuple[Extent, ...]]


class Lengths(NamedTuple):
    """Tokens of a step's parts, and the rows that the forward over them leaves (one less than they expand to)."""

    base: int
    shared: int
    prompt: int
    tokens: int
    base_rows: int
    shared_rows: int
    rows: int

    def limits(self, align: Align) -> tuple[int, int]:
        """Return the half-open range of positions that rows of a field may have."""
        match align:
            case "token":
                return 0, self.tokens
            case "response":
                return self.prompt, self.tokens
            case "forward":
                return 0, self.rows
            case "step":
                return 0, 1


FieldPlan = tuple[tuple[Range, ...], Cover]
"""`AppendPlan.store` and ``shared`` of one field."""


def plan_fields(
    fields: Sequence[FieldSpec],
    given: Mapping[str, Iterable[Range]],
    lengths: Lengths,
    *,
    prefer: str,
    chain: Mapping[str, Cover],
    donor: Mapping[str, Cover],
) -> tuple[dict[str, tuple[Range, ...]], dict[str, tuple[Extent, ...]]]:
    """Return `AppendPlan.store` and ``shared``: what of each field is written, and what is there already.

    Args:
        fields: of the session.
        given: by field, the positions that the caller sent.
        lengths: of the step.
        prefer: ``first`` or ``last``.
        chain: by field, what the parent's chain holds.
        donor: by field, what the chain that shares ``lengths.shared`` tokens holds.

    Raises:
        InputError: a field is unknown, or rows were given that the step does not have.
    """
    store: dict[str, tuple[Range, ...]] = {}
    shared: dict[str, tuple[Extent, ...]] = {}
    for spec in fields:
        name = spec.name
        sent, have, lent = normalized(given.get(name, ())), chain.get(name, EMPTY), donor.get(name, EMPTY)
        if sent:
            _check_given(spec, sent, lengths)
        if have.extents or lent.extents:
            sent, there = _plan_field(spec, sent, have, lent, lengths, prefer)
            shared |= arrays(spec, there)
        if sent:
            store[name] = sent
    if unknown := given.keys() - {spec.name for spec in fields}:
        known = sorted(spec.name for spec in fields)
        raise InputError(f"fields {sorted(unknown)} are not among the session's: {known}", fields=sorted(unknown))
    return store, shared


def _check_given(spec: FieldSpec, sent: tuple[Range, ...], lengths: Lengths) -> None:
    start, stop = lengths.limits(spec.align)
    if sent[0].position < start or sent[-1].stop > stop:
        raise InputError(
            f"field {spec.name!r} ({spec.align}): rows [{sent[0].position}, {sent[-1].stop}) were given, "
            f"but the step has [{start}, {stop})",
            field=spec.name,
            expected=[start, stop],
            got=[sent[0].position, sent[-1].stop],
        )


def _plan_field(
    spec: FieldSpec, sent: tuple[Range, ...], have: Cover, lent: Cover, lengths: Lengths, prefer: str
) -> FieldPlan:
    match spec.align:
        case "token":
            return _plan_tokens(sent, have, lent, lengths)
        case "forward":
            return _plan_forward(sent, have, lent, lengths, prefer)
        case _:
            return sent, EMPTY


def _plan_tokens(sent: tuple[Range, ...], have: Cover, lent: Cover, lengths: Lengths) -> FieldPlan:
    held = cut_ranges(have.ranges, 0, lengths.base)
    shared = cut(lent, lengths.base, lengths.shared)
    return subtract_ranges(subtract_ranges(sent, held), shared.ranges), shared


def _plan_forward(sent: tuple[Range, ...], have: Cover, lent: Cover, lengths: Lengths, prefer: str) -> FieldPlan:
    """Plan a field of forward rows.

    The forward over the last token of what a step takes over is the one that begins what is new: its row is the step's
    own where it was sent. Where it was not (say the engine was asked for the rows behind a chain that then lost trimmed
    tokens), another chain's row of the same tokens is better than a gap.
    """
    held = cut_ranges(have.ranges, 0, lengths.base_rows)
    usable = cut(lent, lengths.base_rows, min(lengths.shared_rows + 1, lengths.rows))
    if prefer == "last":
        return sent, subtract(usable, sent)
    settled = cut_ranges(usable.ranges, 0, lengths.shared_rows)
    store = subtract_ranges(subtract_ranges(sent, held), settled)
    return store, subtract(usable, store)
