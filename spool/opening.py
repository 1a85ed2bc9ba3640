"""How a session is opened: its identity, rules and fields, checked."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from spool.arguments import integer, label, listed, mapping, one_of, optional
from spool.errors import ConfigError, InputError
from spool.formats.frames import encode_event
from spool.intake import json_facts
from spool.model.events import SessionOpened
from spool.model.fields import BUILT_IN, LOGPROBS, LOSS_MASK, ROUTED_EXPERTS, TOKEN_IDS, FieldSpec, Schema, expert_field
from spool.model.moe import MoEShape, as_shape


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
    one_of("prefer", prefer, ("first", "last"))
    if integer("trim", trim) < 0:
        raise InputError(f"trim must be at least 0, got {trim}", argument="trim", got=trim)
    facts = optional(_facts, "metadata", metadata) or {}
    opened = SessionOpened(
        session_id=label("session_id", session_id),
        at=time.time(),
        group_id=optional(label, "group_id", group_id),
        sample_index=optional(integer, "sample_index", sample_index),
        rollout_step=optional(integer, "rollout_step", rollout_step),
        source=optional(label, "source", source),
        prompt_id=optional(label, "prompt_id", prompt_id),
        split=optional(label, "split", split),
        attempt=optional(integer, "attempt", attempt) or 0,
        prefer=prefer,
        trim=trim,
        idle_s=idle_s,
        fields=_declared(experts, fields),
        metadata=json_facts(facts, f"metadata of session {session_id!r:.80}"),
    )
    encode_event(opened)
    return opened


def specs(name: str, given: object) -> list[FieldSpec]:
    """Return a list of field specs.

    Raises:
        InputError: it is something else.
    """
    return listed(name, given, FieldSpec, "a list of spool.FieldSpec(name=, dtype=, align=, ...)")


def _facts(name: str, value: object) -> Mapping[Any, Any]:
    return mapping(name, value, "a mapping of JSON-able facts")


def _declared(experts: MoEShape | str | None, fields: Sequence[FieldSpec]) -> tuple[FieldSpec, ...]:
    shape = as_shape(experts)
    own = {spec.name: spec for spec in fields}
    if own.keys() & (BUILT_IN - {ROUTED_EXPERTS}) or (shape is not None and ROUTED_EXPERTS in own):
        raise ConfigError(f"one of {sorted(own)} is defined by Spool already; give your field another name")
    if ROUTED_EXPERTS in own and own[ROUTED_EXPERTS].bound is None:
        raise ConfigError("a spec of routed_experts comes from spool.expert_field(shape, ...)")
    built_in = (TOKEN_IDS, LOGPROBS, LOSS_MASK, *((expert_field(shape),) if shape is not None else ()))
    return Schema.of(*built_in, *own.values()).fields
