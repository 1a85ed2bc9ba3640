"""Spool: the trajectory store for agentic RL on large MoE models.

`open` a spool, start a `Session`, append steps, finalise to `SegmentRef`; read exactly the rows you need by reference.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spool.errors import (
        CapacityError,
        ConfigError,
        GapError,
        InputError,
        IntegrityError,
        LockedError,
        NotFoundError,
        PayloadError,
        RankError,
        ReleasedError,
        ReplacedError,
        SessionStateError,
        SpoolError,
        StepConflictError,
        StorageError,
    )
    from spool.formats.arrays import Ragged
    from spool.formats.experts import Chunk
    from spool.handle import Spool, open  # noqa: A004
    from spool.model.fields import FieldSpec, expert_field
    from spool.model.moe import MoEShape, models
    from spool.model.refs import Ref, SegmentRef, StepRef, ref_from_json
    from spool.read.sample import Sample
    from spool.session import Session

__version__ = "0.1.0"

_HOME = {
    **dict.fromkeys(
        ("CapacityError", "ConfigError", "GapError", "InputError", "IntegrityError", "LockedError", "NotFoundError",
         "PayloadError", "RankError", "ReleasedError", "ReplacedError", "SessionStateError", "SpoolError",
         "StepConflictError", "StorageError"),
        "spool.errors",
    ),
    **dict.fromkeys(("Spool", "open"), "spool.handle"),
    **dict.fromkeys(("FieldSpec", "expert_field"), "spool.model.fields"),
    **dict.fromkeys(("MoEShape", "models"), "spool.model.moe"),
    **dict.fromkeys(("Ref", "SegmentRef", "StepRef", "ref_from_json"), "spool.model.refs"),
    "Chunk": "spool.formats.experts",
    "Ragged": "spool.formats.arrays",
    "Sample": "spool.read.sample",
    "Session": "spool.session",
}  # fmt: skip

_PACKAGES = frozenset({"engines", "importers", "testing", "train"})

__all__ = [
    "CapacityError",
    "Chunk",
    "ConfigError",
    "FieldSpec",
    "GapError",
    "InputError",
    "IntegrityError",
    "LockedError",
    "MoEShape",
    "NotFoundError",
    "PayloadError",
    "Ragged",
    "RankError",
    "Ref",
    "ReleasedError",
    "ReplacedError",
    "Sample",
    "SegmentRef",
    "Session",
    "SessionStateError",
    "Spool",
    "SpoolError",
    "StepConflictError",
    "StepRef",
    "StorageError",
    "expert_field",
    "models",
    "open",
    "ref_from_json",
]


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"spool.{name}")
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'spool' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_PACKAGES, *(name for name in globals() if name.startswith("__"))})
