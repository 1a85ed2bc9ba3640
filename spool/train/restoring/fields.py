"""What the fields of a batch are, as its references and their streams say, and what of them is missing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spool.arguments import instance
from spool.errors import InputError
from spool.model.fields import ROUTED_EXPERTS, FieldSpec, expert_field
from spool.model.moe import MoEShape, models
from spool.read.sample import Coverage

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from spool.handle import Spool
    from spool.model.refs import Ref


def expert_spec(experts: object) -> FieldSpec | None:
    """Return the spec of the routing that ``experts`` names; None for None.

    Raises:
        InputError: it is no shape.
        NotFoundError: no model is called like that.
    """
    if experts is None:
        return None
    shape = models[experts] if isinstance(experts, str) else experts
    return expert_field(instance("experts", shape, MoEShape, "a MoEShape or the name of a model"))


def covers_of(
    spool: Spool, refs: Sequence[Ref], names: Sequence[str], experts: FieldSpec | None
) -> list[dict[str, Coverage]]:
    """Return what of each reference's fields was never sent; of routing, ``experts`` says what it is if nobody else.

    Raises:
        NotFoundError: nobody knows a field.
    """
    told = experts is not None and ROUTED_EXPERTS in names and not have_routing(refs)
    found = spool.coverage(refs, [name for name in names if not (told and name == ROUTED_EXPERTS)])
    if told and experts is not None:
        for ref, covers in zip(refs, found, strict=True):
            covers[ROUTED_EXPERTS] = Coverage(experts, ((0, ref.n_rows - 1),) if ref.n_rows > 1 else ())
    return found


def agreed(specs: Iterable[FieldSpec]) -> FieldSpec | None:
    """Return what a field of several references is: of specs that are alike that which has the most ids.

    Raises:
        InputError: no array holds the rows of all.
    """
    chosen: FieldSpec | None = None
    for spec in specs:
        if chosen is None:
            chosen = spec
        elif _form(spec) != _form(chosen):
            raise InputError(
                f"{spec.name} is {_form(spec)} in one reference and {_form(chosen)} in another; restore them apart",
                field=spec.name,
            )
        elif (spec.bound or 0, spec.missing is not None) > (chosen.bound or 0, chosen.missing is not None):
            chosen = spec
    return chosen


def _form(spec: FieldSpec) -> tuple[object, ...]:
    return spec.align, spec.ragged, spec.row_shape, spec.train_dtype or spec.dtype


def have_routing(refs: Iterable[Ref]) -> bool:
    """Return whether any of the references has rows of routing."""
    return any(ROUTED_EXPERTS in ref.extents or ROUTED_EXPERTS in ref.inline for ref in refs)
