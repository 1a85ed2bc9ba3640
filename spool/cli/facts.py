"""Sessions, steps and segments as flat facts, and the columns they are shown in."""

from __future__ import annotations

from typing import Any

import msgspec

from spool.catalog import SessionRow
from spool.cli.output import Column
from spool.model.refs import Ref, SegmentRef, StepRef

SESSION_COLUMNS = (
    Column("session_id", "SESSION"),
    Column("state", "STATE"),
    Column("outcome", "OUTCOME"),
    Column("reward", "REWARD", "number"),
    Column("n_steps", "STEPS", "count"),
    Column("n_tokens", "TOKENS", "count"),
    Column("n_segments", "SEGMENTS", "count"),
    Column("source", "SOURCE"),
    Column("group_id", "GROUP"),
    Column("sample_index", "SAMPLE", "number"),
    Column("rollout_step", "ROLLOUT", "number"),
)
STEP_COLUMNS = (
    Column("id"),
    Column("index", "STEP", "number"),
    Column("parent", "PARENT", "number"),
    Column("n_prompt", "PROMPT", "count"),
    Column("response_length", "RESPONSE", "count"),
    Column("n_tokens", "TOKENS", "count"),
    Column("version", "VERSION"),
    Column("finish_reason", "FINISH"),
    Column("step_id"),
    Column("fields"),
)
SEGMENT_COLUMNS = (
    Column("id", "SEGMENT"),
    Column("n_tokens", "TOKENS", "count"),
    Column("response_length", "RESPONSE", "count"),
    Column("trainable_tokens", "TRAINED", "count"),
    Column("reward", "REWARD", "number"),
    Column("outcome", "OUTCOME"),
    Column("n_steps", "STEPS", "count"),
    Column("version", "VERSION"),
    Column("finish_reason", "FINISH"),
)


def session_facts(row: SessionRow) -> dict[str, Any]:
    """Return a session's row as a flat mapping."""
    facts = msgspec.structs.asdict(row)
    late, metadata = facts.pop("facts"), facts.pop("metadata")
    return {
        "session_id": row.session_id,
        "state": facts.pop("state"),
        "outcome": row.outcome,
        "reward": row.reward,
        **facts,
        "facts": late,
        "metadata": metadata,
    }


def _common(ref: Ref) -> dict[str, Any]:
    span = ref.version_span
    return {
        "session_id": ref.session_id,
        "group_id": ref.group_id,
        "sample_index": ref.sample_index,
        "rollout_step": ref.rollout_step,
        "source": ref.source,
        "n_tokens": ref.n_tokens,
        "n_rows": ref.n_rows,
        "n_prompt": ref.response_start,
        "response_length": ref.response_length,
        "trainable_tokens": ref.trainable_tokens,
        "version_span": span,
        "version": None if span is None else span[0] if span[0] == span[1] else f"{span[0]}..{span[1]}",
        "finish_reason": ref.finish_reason,
        "n_nonfinite": ref.n_nonfinite,
        "fields": sorted(ref.extents),
        "n_extents": sum(map(len, ref.extents.values())),
    }


def step_facts(ref: StepRef) -> dict[str, Any]:
    """Return a step's reference as a flat mapping."""
    return {"id": ref.id, "step_id": ref.step_id, "index": ref.index, "parent": ref.parent, **_common(ref)}


def segment_facts(ref: SegmentRef) -> dict[str, Any]:
    """Return a segment's reference as a flat mapping."""
    return {
        "id": ref.id,
        "view": ref.view,
        "index": ref.index,
        "count": ref.count,
        "steps": list(ref.steps),
        "n_steps": len(ref.steps),
        "outcome": ref.outcome,
        "reward": ref.reward,
        "facts": ref.facts,
        "superseded": ref.superseded,
        "cut_tokens": ref.cut_tokens,
        **_common(ref),
    }
