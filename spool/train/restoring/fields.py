"""What the fields of a batch are, as its references and their streams say, and what of them is missing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spool.errors import InputError
from spool.model.fields import ROUTED_EXPERTS, FieldSpec, expert_field
from spool.model.moe import as_shape
from spool.read.sample import Coverage
from spool.read.sound import name_of

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
    shape = as_shape(experts)
    return None if shape is None else expert_field(shape)


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


def agreed(found: Iterable[tuple[Ref, FieldSpec]], *, packed: bool) -> FieldSpec | None:
    """Return what a field of several references is: of specs that are alike that which has the most ids.

    Args:
        found: each reference, and what the field is there.
        packed: one array takes all, in which token positions are rebased.

    Raises:
        InputError: no array holds the rows of all, or they are positions in some only; names two of the references.
    """
    chosen: tuple[Ref, FieldSpec] | None = None
    for ref, spec in found:
        if chosen is None:
            chosen = ref, spec
        elif (mine := _form(spec, packed=packed)) != (theirs := _form(chosen[1], packed=packed)):
            raise InputError(
                f"{spec.name} has {_differing(theirs, mine)} in {name_of(chosen[0])} and {_differing(mine, theirs)} in "
                f"{name_of(ref)}: put them in batches of their own (filter with where=), or leave it out (fields=)",
                field=spec.name, refs=[name_of(chosen[0]), name_of(ref)],
            )  # fmt: skip
        elif _n_ids(spec) > _n_ids(chosen[1]):
            chosen = ref, spec
    return None if chosen is None else chosen[1]


def _form(spec: FieldSpec, *, packed: bool) -> dict[str, object]:
    """Return what has to be the same in all references, by what errors call it."""
    form: dict[str, object] = {
        "align": spec.align, "ragged": spec.ragged, "rows of": spec.row_shape, "dtype": spec.train_dtype or spec.dtype,
    }  # fmt: skip
    return {**form, "positions": spec.positions} if packed else form


def _differing(form: dict[str, object], other: dict[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in form.items() if value != other[name])


def _n_ids(spec: FieldSpec) -> tuple[int, bool]:
    return spec.bound or 0, spec.missing is not None


def have_routing(refs: Iterable[Ref]) -> bool:
    """Return whether any of the references has rows of routing."""
    return any(ROUTED_EXPERTS in ref.extents or ROUTED_EXPERTS in ref.inline for ref in refs)
