"""What an append is going to do: which rows are written, and which exist already."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from msgspec import Struct

from spool.errors import InputError
from spool.model.fields import FieldSpec
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
        dropped: by forward field, given rows that are not written because the same rows are there already.
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
    dropped: dict[str, tuple[Range, ...]]


class Lengths(NamedTuple):
    """Tokens of a step's parts, and the rows that the forward over them leaves (one less than they expand to)."""

    base: int
    shared: int
    prompt: int
    tokens: int
    base_rows: int
    shared_rows: int
    rows: int


class FieldPlan(NamedTuple):
    """`AppendPlan.store`, ``shared`` and ``dropped`` of one field."""

    store: tuple[Range, ...] = ()
    shared: Cover = EMPTY
    dropped: tuple[Range, ...] = ()


_NOTHING = FieldPlan()


def plan_fields(
    fields: Iterable[FieldSpec],
    given: Mapping[str, Iterable[tuple[int, int]]],
    lengths: Lengths,
    *,
    prefer: str,
    chain: Mapping[str, Cover],
    donor: Mapping[str, Cover],
) -> dict[str, FieldPlan]:
    """Decide for every field what is written and what is shared.

    Args:
        fields: of the session.
        given: by field, (position, n) of what the caller sent.
        lengths: of the step.
        prefer: ``first`` or ``last``.
        chain: by field, what the parent's chain holds.
        donor: by field, what the chain that shares ``lengths.shared`` tokens holds.

    Raises:
        InputError: a field is unknown, or rows were given that the step does not have.
    """
    plans = {}
    for spec in fields:
        sent = normalized(given.get(spec.name, ()))
        have, lent = chain.get(spec.name, EMPTY), donor.get(spec.name, EMPTY)
        if not sent and not lent.extents:
            plans[spec.name] = _NOTHING
            continue
        _check_given(spec, sent, lengths)
        match spec.align:
            case "token":
                plans[spec.name] = _plan_tokens(sent, have, lent, lengths)
            case "forward":
                plans[spec.name] = _plan_forward(sent, have, lent, lengths, prefer)
            case _:
                plans[spec.name] = FieldPlan(sent)
    if unknown := given.keys() - plans.keys():
        raise InputError(
            f"fields {sorted(unknown)} are not among the session's: {sorted(plans)}", fields=sorted(unknown)
        )
    return plans


def shared_arrays(fields: Iterable[FieldSpec], plans: Mapping[str, FieldPlan]) -> dict[str, tuple[Extent, ...]]:
    """Return what is shared by stored array's name."""
    shared: dict[str, tuple[Extent, ...]] = {}
    for spec in fields:
        if plans[spec.name].shared.extents:
            shared |= arrays(spec, plans[spec.name].shared)
    return shared


def _check_given(spec: FieldSpec, sent: tuple[Range, ...], lengths: Lengths) -> None:
    start, stop = {
        "token": (0, lengths.tokens),
        "response": (lengths.prompt, lengths.tokens),
        "forward": (0, lengths.rows),
        "step": (0, 1),
    }[spec.align]
    if sent and (sent[0].position < start or sent[-1].stop > stop):
        raise InputError(
            f"field {spec.name!r} ({spec.align}): rows [{sent[0].position}, {sent[-1].stop}) were given, "
            f"but the step has [{start}, {stop})",
            field=spec.name,
            expected=[start, stop],
            got=[sent[0].position, sent[-1].stop],
        )


def _plan_tokens(sent: tuple[Range, ...], have: Cover, lent: Cover, lengths: Lengths) -> FieldPlan:
    held = cut_ranges(have.ranges, 0, lengths.base)
    shared = cut(lent, lengths.base, lengths.shared)
    return FieldPlan(subtract_ranges(subtract_ranges(sent, held), shared.ranges), shared)


def _plan_forward(sent: tuple[Range, ...], have: Cover, lent: Cover, lengths: Lengths, prefer: str) -> FieldPlan:
    """Plan a field of forward rows.

    The forward over the last token of what a step takes over is the one that begins what is new: its row is the step's
    own where it was sent. Where it was not (say the engine was asked for the rows behind a chain that then lost trimmed
    tokens), another chain's row of the same tokens is better than a gap.
    """
    held = cut_ranges(have.ranges, 0, lengths.base_rows)
    usable = cut(lent, lengths.base_rows, min(lengths.shared_rows + 1, lengths.rows))
    if prefer == "last":
        return FieldPlan(sent, subtract(usable, sent))
    settled = cut_ranges(usable.ranges, 0, lengths.shared_rows)
    store = subtract_ranges(subtract_ranges(sent, held), settled)
    return FieldPlan(store, subtract(usable, store), subtract_ranges(sent, store))
