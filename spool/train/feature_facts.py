"""What every process must know of every other before features travel, as a few numbers; and whether they agree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import torch
import xxhash

from spool.errors import InputError, RankError
from spool.train.unit_plan import UnitPlan

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""What features may be of."""


class Facts(NamedTuple):
    """Of one process.

    Attributes:
        failed: 1 where it could not encode.
        plan: digest of its plan of units.
        accumulate: number of the dtype that it was told to sum gradients in; -1 where it was not.
        like_width: width that its backbone takes; -1 where nobody said.
        like_dtype: number of the dtype that its backbone takes; -1 where nobody said.
        width: of its features; -1 where it has none, and what follows too.
        dtype: number of their dtype.
        trainable: whether they require grad.
    """

    failed: int
    plan: int
    accumulate: int
    like_width: int
    like_dtype: int
    width: int = -1
    dtype: int = -1
    trainable: int = -1


def facts_of(units: UnitPlan, accumulate_dtype: Any, like: Any) -> Facts:
    """Return the facts of a process that has no features yet."""
    digest = xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(units)) >> 1
    accumulate = -1 if accumulate_dtype is None else DTYPES.index(accumulate_dtype)
    return Facts(0, digest, accumulate, *((-1, -1) if like is None else (like.shape[-1], DTYPES.index(like.dtype))))


def with_features(facts: Facts, outputs: Sequence[Any]) -> Facts:
    """Return the facts of a process with its features, if it has any.

    Raises:
        InputError: they are of a dtype that cannot travel.
    """
    if not outputs:
        return facts
    first = outputs[0]
    if first.dtype not in DTYPES:
        raise InputError(f"the encoder gives features of {first.dtype}; they must be of one of {DTYPES}")
    return facts._replace(width=first.shape[1], dtype=DTYPES.index(first.dtype), trainable=int(first.requires_grad))


def agreed(rows: Sequence[Sequence[int]], me: int) -> tuple[int, Any, bool]:
    """Return width, dtype and trainability of all features.

    Args:
        rows: the facts of each process.
        me: this one.

    Raises:
        RankError: one failed.
        InputError: they do not agree; says who, or in what.
    """
    found = [Facts(*row) for row in rows]
    failed = [rank for rank, facts in enumerate(found) if facts.failed]
    if failed:
        raise RankError(f"encoding failed on ranks {failed}: their errors say why", ranks=failed)
    other = [rank for rank, facts in enumerate(found) if facts[1:3] != found[me][1:3]]
    if other:
        raise InputError(
            f"ranks {other} have another plan of units or accumulate_dtype than this one, {me}: call plan_units with "
            "the same references and arguments on every rank, or send one plan to all",
            ranks=other,
        )
    given = {(facts.width, facts.dtype) for facts in found if facts.width >= 0}
    taken = {(facts.like_width, facts.like_dtype) for facts in found if facts.like_width >= 0}
    trainable = {bool(facts.trainable) for facts in found if facts.width >= 0}
    if len(given | taken) > 1 or len(trainable) > 1:
        mixed = ", on some ranks trained, on others frozen," if len(trainable) > 1 else ""
        raise InputError(
            f"encoder ranks give features {_named(given)}{mixed} and like= asks for {_named(taken)}: they must be "
            "alike on all ranks; cast in the encoder"
        )
    width, dtype = next(iter(given | taken), (0, DTYPES.index(torch.float32)))
    return width, DTYPES[dtype], trainable == {True}


def _named(kinds: set[tuple[int, int]]) -> str:
    return " or ".join(f"{width} wide of {DTYPES[dtype]}" for width, dtype in sorted(kinds)) or "anything"
