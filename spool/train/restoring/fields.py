"""What the fields of a batch are, as its references and their streams say, and what of them is missing."""

from __future__ import annotations

from contextlib import suppress
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from spool.errors import ConfigError, InputError
from spool.model.fields import ROUTED_EXPERTS, FieldSpec, expert_field, numpy_dtype
from spool.model.moe import as_shape
from spool.read.sample import Coverage
from spool.read.sound import name_of
from spool.read.streams import holds

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
    """Return what a field of several references is: a spec that holds the values of each.

    That is in a dtype for all, with the most ids, a mark for missing entries if any has one, and the layers of each.

    Args:
        found: each reference, and what the field is there.
        packed: one array takes all, in which token positions are rebased.

    Raises:
        InputError: no array holds the rows of all, or they are positions in some only; names two of the references.
    """
    kinds: list[tuple[Ref, FieldSpec]] = []
    for ref, spec in found:
        if all(spec != other for _, other in kinds):
            kinds.append((ref, spec))
    for one, other in combinations(kinds, 2):
        _check_alike(one, other, packed=packed)
    return _merged(kinds) if kinds else None


def _check_alike(one: tuple[Ref, FieldSpec], other: tuple[Ref, FieldSpec], *, packed: bool) -> None:
    theirs, mine = _form(one[1], other[1], packed=packed), _form(other[1], one[1], packed=packed)
    if mine != theirs:
        raise _unlike(one, _differing(theirs, mine), other, _differing(mine, theirs))


def _unlike(one: tuple[Ref, FieldSpec], its: str, other: tuple[Ref, FieldSpec], others: str) -> InputError:
    spec, refs = one[1], [name_of(one[0]), name_of(other[0])]
    return InputError(
        f"{spec.name} has {its} in {refs[0]} and {others} in {refs[1]}: put them in batches of their own (filter with "
        "where=), or leave it out (fields=)",
        field=spec.name, refs=refs,
    )  # fmt: skip


def _form(spec: FieldSpec, other: FieldSpec, *, packed: bool) -> dict[str, object]:
    """Return what has to be the same in two references, by what errors call it."""
    form: dict[str, object] = {
        "align": spec.align, "ragged": spec.ragged, "rows of": spec.row_shape,
        "layers": spec.num_layers is not None, "dtype": _trained(spec),
    }  # fmt: skip
    if None not in (spec.missing, other.missing):
        form["missing"] = spec.missing
    return {**form, "positions": spec.positions} if packed else form


def _differing(form: dict[str, object], other: dict[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in form.items() if value != other[name])


def _merged(kinds: Sequence[tuple[Ref, FieldSpec]]) -> FieldSpec:
    """Return a spec whose rows hold those of all, which are alike, in the narrowest dtype that does."""
    specs = [spec for _, spec in kinds]
    layers, shape = None, specs[0].row_shape
    if all(spec.layers is not None for spec in specs):
        layers = tuple(sorted({layer for spec in specs for layer in spec.layers or ()}))
        shape = (len(layers), *shape[1:])
    bounds = [spec.bound for spec in specs if spec.bound is not None]
    stored, train = [numpy_dtype(spec.dtype) for spec in specs], _trained(specs[0])
    wide = [numpy_dtype(train)]
    with suppress(TypeError):
        wide.insert(0, np.result_type(*sorted(set(stored), key=str)))
    for dtype in wide:
        if all(holds(dtype, narrow) for narrow in stored):
            with suppress(ConfigError):  # it is not trained as it would have to be
                return replace(
                    specs[0],
                    dtype=dtype.name,
                    shape=shape,
                    layers=layers,
                    bound=max(bounds) if len(bounds) == len(specs) and dtype.kind in "iu" else None,
                    missing=next((spec.missing for spec in specs if spec.missing is not None), None),
                    train_dtype=train,
                )
    other = next(kind for kind in kinds if kind[1].dtype != specs[0].dtype)
    raise _unlike(kinds[0], f"stored dtype {specs[0].dtype}", other, f"stored dtype {other[1].dtype}")


def _trained(spec: FieldSpec) -> str:
    return spec.train_dtype or spec.dtype


def have_routing(refs: Iterable[Ref]) -> bool:
    """Return whether any of the references has rows of routing."""
    return any(ROUTED_EXPERTS in ref.extents or ROUTED_EXPERTS in ref.inline for ref in refs)
