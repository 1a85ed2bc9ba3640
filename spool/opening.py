"""How a session is opened: its identity, rules and fields, checked."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from spool.errors import ConfigError, InputError
from spool.formats.frames import encode_event
from spool.model.events import SessionOpened
from spool.model.fields import BUILT_IN, LOGPROBS, LOSS_MASK, ROUTED_EXPERTS, TOKEN_IDS, FieldSpec, Schema, expert_field
from spool.model.moe import MoEShape, models

MAX_TEXT_BYTES = 1024


def opening(
    session_id: str,
    *,
    group_id: str | None,
    sample_index: int | None,
    rollout_step: int | None,
    source: str | None,
    prompt_id: str | None,
    split: str | None,
    attempt: int,
    experts: MoEShape | str | None,
    fields: Sequence[FieldSpec],
    prefer: str,
    trim: int,
    idle_s: float | None,
    metadata: Mapping[str, Any] | None,
) -> SessionOpened:
    """Return the event that opens a session; see `Spool.session` for the arguments.

    Raises:
        InputError: an argument does not fit.
        ConfigError: a field cannot be declared so.
    """
    if prefer not in ("first", "last") or not isinstance(trim, int) or isinstance(trim, bool) or trim < 0:
        raise InputError(f'prefer must be "first" or "last" and trim at least 0, got {prefer!r}, {trim!r}')
    opened = SessionOpened(
        session_id=text("session_id", session_id),
        at=time.time(),
        group_id=_optional_text("group_id", group_id),
        sample_index=_number("sample_index", sample_index),
        rollout_step=_number("rollout_step", rollout_step),
        source=_optional_text("source", source),
        prompt_id=_optional_text("prompt_id", prompt_id),
        split=_optional_text("split", split),
        attempt=_number("attempt", attempt) or 0,
        prefer=prefer,
        trim=trim,
        idle_s=idle_s,
        fields=_declared(experts, fields),
        metadata=dict(metadata or {}),
    )
    encode_event(opened)
    return opened


def _declared(experts: MoEShape | str | None, fields: Sequence[FieldSpec]) -> tuple[FieldSpec, ...]:
    if isinstance(experts, str):
        experts = models[experts]
    if experts is not None and not isinstance(experts, MoEShape):
        raise InputError(f"experts must be a spool.MoEShape or a name in spool.models, got {experts!r}")
    for spec in fields:
        if not isinstance(spec, FieldSpec):
            raise InputError(f"fields must be spool.FieldSpec(name=, dtype=, align=, ...) each, got {spec!r}")
    own = {spec.name: spec for spec in fields}
    if own.keys() & (BUILT_IN - {ROUTED_EXPERTS}) or (experts is not None and ROUTED_EXPERTS in own):
        raise ConfigError(f"one of {sorted(own)} is defined by Spool already; give your field another name")
    if ROUTED_EXPERTS in own and own[ROUTED_EXPERTS].bound is None:
        raise ConfigError("a spec of routed_experts comes from spool.expert_field(shape, ...)")
    built_in = (TOKEN_IDS, LOGPROBS, LOSS_MASK, *((expert_field(experts),) if experts is not None else ()))
    return Schema.of(*built_in, *own.values()).fields


def text(name: str, value: str) -> str:
    """Return ``value`` if it can name something: 1 to 1,024 bytes of UTF-8."""
    if not isinstance(value, str):
        raise InputError(f"{name} must be text, got {type(value).__name__}", got=repr(value))
    try:
        size = len(value.encode())
    except UnicodeEncodeError as error:
        raise InputError(
            f"{name} {value!r} holds a lone surrogate, which no file or index can hold: {error}"
        ) from error
    if not 0 < size <= MAX_TEXT_BYTES:
        raise InputError(f"{name} must be 1 to {MAX_TEXT_BYTES} bytes long, got {size}", got=size)
    return value


def _optional_text(name: str, value: str | None) -> str | None:
    return None if value is None else text(name, value)


def _number(name: str, value: int | None) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise InputError(f"{name} must be an integer, got {value!r}", got=repr(value))
    return value
