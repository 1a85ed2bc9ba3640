"""Sessions, steps and segments as flat facts for output."""

from __future__ import annotations

from typing import Any

import msgspec

from spool.catalog import SessionRow
from spool.model.refs import Ref, SegmentRef, StepRef


def session_facts(row: SessionRow) -> dict[str, Any]:
    """Return a session's row as a flat mapping."""
    return dict(msgspec.structs.asdict(row))


def _common(ref: Ref) -> dict[str, Any]:
    return {
        "session_id": ref.session_id,
        "group_id": ref.group_id,
        "sample_index": ref.sample_index,
        "rollout_step": ref.rollout_step,
        "source": ref.source,
        "n_tokens": ref.n_tokens,
        "n_rows": ref.n_rows,
        "response_length": ref.response_length,
        "trainable_tokens": ref.trainable_tokens,
        "version_span": ref.version_span,
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
        "outcome": ref.outcome,
        "reward": ref.reward,
        "facts": ref.facts,
        "superseded": ref.superseded,
        "cut_tokens": ref.cut_tokens,
        **_common(ref),
    }
