"""The forms in which trainers take a batch: what they call a field, its dtype, and how sequences are put together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from spool.errors import InputError
from spool.formats.arrays import Ragged
from spool.model.fields import ROUTED_EXPERTS, FieldSpec, numpy_dtype
from spool.train.restoring.gaps import consecutive, has_experts
from spool.train.restoring.routed import check_whole
from spool.train.restoring.tensors import jagged

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from spool.model.refs import Ref
    from spool.train.restoring.entries import Entry
    from spool.train.restoring.tensors import Convert, Framework

Layout = Literal["slime", "miles", "verl", "nested", "packed"]
Joined = Literal["lists", "jagged", "packed"]

VERSIONS = FieldSpec(name="weight_versions", dtype="int64", align="token")
STALENESS = FieldSpec(name="staleness", dtype="int64", align="token")

_REGION = frozenset({"loss_mask", VERSIONS.name, STALENESS.name})


class Form(NamedTuple):
    """What a trainer takes.

    Attributes:
        joined: ``lists``: an array a sequence. ``jagged``: torch's nested tensors, with numpy lists. ``packed``: one
            array for all, rows of tokens aligned.
        names: what fields are called there; the others keep their names.
        dtypes: dtypes that are not those of the field's spec.
        region: fields of all tokens of which only those of the response region are given.
        lacking: what stands for missing expert ids: consecutive ones, or -1 in the whole row.
        narrow: routing is in a narrow dtype there, too.
    """

    joined: Joined
    names: Mapping[str, str] = {}
    dtypes: Mapping[str, str] = {"token_ids": "int64"}
    region: frozenset[str] = frozenset()
    lacking: Literal["consecutive", "minus one"] = "consecutive"
    narrow: bool = False

    def reads_narrow(self, framework: Framework) -> bool:
        """Return whether rows are best read as they are stored: they are widened when they are put together."""
        return self.narrow or self.joined == "packed" or (self.joined == "jagged" and framework == "torch")


_SLIME = Form(
    "lists",
    {
        "token_ids": "tokens", "loss_mask": "loss_masks", "logprobs": "rollout_log_probs",
        "routed_experts": "rollout_routed_experts",
    },
    {"token_ids": "int64", "loss_mask": "int32"},
    _REGION,
)  # fmt: skip

FORMS: dict[str, Form] = {
    "slime": _SLIME,
    "miles": _SLIME._replace(names={**_SLIME.names, "indexer_topk": "rollout_indexer_topk"}, lacking="minus one"),
    "verl": Form(
        "jagged",
        {"token_ids": "input_ids", "loss_mask": "response_mask", "logprobs": "rollout_log_probs"},
        {"token_ids": "int64", "loss_mask": "int64"},
        _REGION,
        narrow=True,
    ),
    "nested": Form("jagged"),
    "packed": Form("packed"),
}


class Column(NamedTuple):
    """One field of a batch.

    Attributes:
        spec: of the field.
        parts: its rows of each sequence; arrays that nobody else has.
    """

    spec: FieldSpec
    parts: Sequence[NDArray[Any] | Ragged]


class Batch(NamedTuple):
    """What was read, before it takes a trainer's form.

    Attributes:
        entries: the places.
        positions: token positions of each sequence that this rank has, int64.
        rows: positions of the forward that these expand to, the last one of a sequence included, int64.
        columns: by field.
        layers: absolute layers of fields that have layers; all for None.
        parted: whether a sequence is shared with other ranks.
    """

    entries: Sequence[Entry]
    positions: Sequence[NDArray[np.int64]]
    rows: Sequence[NDArray[np.int64]]
    columns: Mapping[str, Column]
    layers: slice | None
    parted: bool


def formed(batch: Batch, layout: Layout, convert: Convert, *, as_torch: bool) -> dict[str, Any]:
    """Return a batch as a trainer takes it; the arrays of ``batch`` are used up."""
    form = FORMS[layout]
    refs = [entry.ref for entry in batch.entries]
    made: dict[str, Any] = {"kept": [entry.number for entry in batch.entries]}
    if form.joined == "packed":
        return {**made, **_packed(batch, form, convert)}
    made |= {"total_lengths": [ref.n_tokens for ref in refs], "response_lengths": [ref.response_length for ref in refs]}
    if layout in ("slime", "miles"):
        made |= _facts(batch.entries)
    join = _jagged if form.joined == "jagged" and as_torch else _list
    if layout == "verl":
        made |= _verl(batch, convert, join)
    for name, column in batch.columns.items():
        parts = list(column.parts)
        if layout == "slime" and has_experts(column.spec):
            for part in parts:
                check_whole(name, column.spec.missing, part, otherwise="restore them for layout='miles'")
        if name in form.region:
            parts = [part[at >= ref.response_start] for part, at, ref in zip(parts, batch.positions, refs, strict=True)]
        made[form.names.get(name, name)] = join(parts, _dtype(column.spec, form), convert)
    return made


def _dtype(spec: FieldSpec, form: Form) -> str:
    if form.narrow and spec.name == ROUTED_EXPERTS:
        small = spec.bound is not None and spec.bound <= 256 and spec.missing is None
        wide = spec.bound is None or spec.bound > 1 << 15
        return "uint8" if small else "int32" if wide else "int16"
    return form.dtypes.get(spec.name) or spec.train_dtype or spec.dtype


def _facts(entries: Iterable[Entry]) -> dict[str, Any]:
    """Return what references say of their samples, as far as all of them do."""
    refs = [entry.ref for entry in entries]
    cut = ("truncated", "context_overflow")
    made: dict[str, Any] = {
        "truncated": [int(getattr(ref, "outcome", None) in cut or ref.finish_reason == "length") for ref in refs]
    }
    if all(ref.sample_index is not None for ref in refs):
        made["sample_indices"] = [ref.sample_index for ref in refs]
    rewards = [0.0 if entry.failed else getattr(entry.ref, "reward", None) for entry in entries]
    if all(reward is not None for reward in rewards):
        made |= {"rewards": rewards, "raw_reward": list(rewards)}
    return made


Join = Callable[[Sequence[Any], str, "Convert"], Any]


def _list(parts: Sequence[NDArray[Any] | Ragged], dtype: str, convert: Convert) -> list[Any]:
    return [_converted(part, dtype, convert) for part in parts]


def _converted(part: NDArray[Any] | Ragged, dtype: str, convert: Convert) -> Any:
    if isinstance(part, Ragged):
        return Ragged(convert(part.values, dtype), convert(part.offsets, "int64"))
    return convert(part, dtype)


def _jagged(parts: Sequence[Any], dtype: str, convert: Convert) -> Any:
    if not parts or isinstance(parts[0], Ragged):
        return _list(parts, dtype, convert)
    return jagged(convert(np.concatenate(parts), dtype), offsets_of(map(len, parts)))


def offsets_of(lengths: Iterable[int]) -> list[int]:
    """Return where runs of these lengths begin, one after the other, and where the last ends."""
    return [0, *accumulate(lengths)]


def _verl(batch: Batch, convert: Convert, join: Join) -> dict[str, Any]:
    """Return what verl has beside the fields: prompt and response apart, positions, and a mask of ones."""
    made = {
        "position_ids": join([at.copy() for at in batch.positions], "int64", convert),
        "attention_mask": join([np.ones(len(at), np.int64) for at in batch.positions], "int64", convert),
    }
    if "token_ids" in batch.columns:
        tokens = batch.columns["token_ids"].parts
        starts = [at < entry.ref.response_start for at, entry in zip(batch.positions, batch.entries, strict=True)]
        made["prompts"] = join([part[asked] for part, asked in zip(tokens, starts, strict=True)], "int64", convert)
        made["responses"] = join([part[~asked] for part, asked in zip(tokens, starts, strict=True)], "int64", convert)
    return made


# -- packed ------------------------------------------------------------------------------------------------------------


def _packed(batch: Batch, form: Form, convert: Convert) -> dict[str, Any]:
    lengths = [len(at) for at in batch.positions]
    starts = offsets_of(lengths)
    made: dict[str, Any] = {
        "cu_seqlens": convert(np.array(starts, np.int32), "int32"),
        "cu_rows": convert(np.array(offsets_of(map(len, batch.rows)), np.int32), "int32"),
        "max_seqlen": max(lengths, default=0),
        "position_ids": convert(_joined(batch.positions, np.dtype(np.int64)), "int64"),
        "response_starts": [entry.ref.response_start for entry in batch.entries],
    }
    for name, column in batch.columns.items():
        dtype = "int64" if column.spec.positions else _dtype(column.spec, form)
        rebased = _rebased(column, starts, batch)
        if rebased and isinstance(rebased[0], Ragged):
            made[name] = _converted(_one_ragged(rebased), dtype, convert)
        else:
            made[name] = convert(_joined(_aligned(column.spec, rebased, batch), np.dtype(np.uint8)), dtype)
        if column.spec.align == "step":
            made["cu_steps"] = convert(np.array(offsets_of(map(_n_rows, column.parts)), np.int32), "int32")
    return made


def _joined(parts: Sequence[Any], empty: np.dtype[Any]) -> NDArray[Any]:
    return np.concatenate(parts) if parts else np.zeros(0, empty)


def _n_rows(part: NDArray[Any] | Ragged) -> int:
    return len(part.offsets) - 1 if isinstance(part, Ragged) else len(part)


def _rebased(column: Column, starts: Sequence[int], batch: Batch) -> Sequence[Any]:
    """Return the parts, token positions in them counted from the beginning of the batch."""
    if not column.spec.positions:
        return column.parts
    if batch.parted:
        raise InputError(
            f"{column.spec.name} holds token positions, which have no place where a rank has a part of the sequence; "
            "leave it out (fields=), or take layout='nested'",
            field=column.spec.name,
        )
    return [_moved(part, start) for part, start in zip(column.parts, starts, strict=False)]


def _moved(part: NDArray[Any] | Ragged, start: int) -> NDArray[Any] | Ragged:
    if isinstance(part, Ragged):
        return Ragged(np.where(part.values < 0, part.values, part.values + np.int64(start)), part.offsets)
    return np.where(part < 0, part, part + np.int64(start))


def _one_ragged(parts: Sequence[Ragged]) -> Ragged:
    values = np.concatenate([part.values for part in parts])
    lengths = np.concatenate([np.diff(part.offsets) for part in parts])
    return Ragged(values, np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]))


def _aligned(spec: FieldSpec, parts: Sequence[Any], batch: Batch) -> list[NDArray[Any]]:
    """Return a row for each token, or each row of the forward, of fields that do not have it."""
    if spec.align == "response":
        places = zip(parts, batch.positions, batch.entries, strict=True)
        return [_over_tokens(part, at, entry.ref) for part, at, entry in places]
    if spec.align == "forward":
        return [
            piece
            for part, rows, entry in zip(parts, batch.rows, batch.entries, strict=True)
            for piece in _with_last(spec, part, rows, entry.ref, batch.layers)
        ]
    return list(parts)


def _over_tokens(part: NDArray[Any], at: NDArray[np.int64], ref: Ref) -> NDArray[Any]:
    whole = np.zeros((len(at), *part.shape[1:]), part.dtype)
    whole[at >= ref.response_start] = part
    return whole


def _with_last(
    spec: FieldSpec, part: NDArray[Any], rows: NDArray[np.int64], ref: Ref, layers: slice | None
) -> list[NDArray[Any]]:
    """Return the rows of the forward and one for the last token, which no forward was over, where it stands."""
    (places,) = np.nonzero(rows == ref.n_rows - 1)
    if not len(places):
        return [part]
    last = np.zeros((1, *part.shape[1:]), part.dtype)
    if has_experts(spec):  # of the batch: this part's own dtype may not hold them
        last = consecutive(spec, rows[places[:1]], layers).astype(numpy_dtype(spec.dtype))
    return [part[: places[0]], last, part[places[0] :]]
