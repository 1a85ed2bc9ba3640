"""One session: its facts, its tree, and the segments of a view."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from spool.catalog import SessionRow
from spool.look.references import of_view
from spool.look.tree import StepLook, TreeRow, step_looks, superseded_steps, tree_rows
from spool.model.refs import SegmentRef
from spool.rollout.views import View

if TYPE_CHECKING:
    from spool.handle import Spool


class SegmentLook(Struct, frozen=True, kw_only=True, gc=False):
    """What is shown of a segment in a list.

    Attributes:
        ref: the segment.
        index: number in its view.
        n_steps, n_tokens, n_response, n_trained: counts.
        cut_tokens: tokens that the view cut off behind it.
        versions: oldest and newest weight version.
        finish_reason, reward: as in its reference.
        last_step: index of its last step; None where it has none.
    """

    ref: SegmentRef
    index: int
    n_steps: int
    n_tokens: int
    n_response: int
    n_trained: int
    cut_tokens: int
    versions: tuple[str, str] | None
    finish_reason: str | None
    reward: float | None
    last_step: int | None


class SessionView(Struct, frozen=True, kw_only=True):
    """A session as a view shows it.

    Attributes:
        row: its facts.
        view: the view.
        rows: its tree.
        segments: of the view; those that it was finalised with where it was finalised with that view.
        is_final: whether they are those.
    """

    row: SessionRow
    view: View
    rows: tuple[TreeRow, ...]
    segments: tuple[SegmentLook, ...]
    is_final: bool

    @property
    def steps(self) -> dict[int, StepLook]:
        """The steps by index."""
        return {row.step.index: row.step for row in self.rows}


def look_at(sp: Spool, session_id: str, view: View | None = None) -> SessionView:
    """Return a session as a view shows it, a discarded one too; no payload is read.

    Args:
        sp: the spool.
        session_id: the session.
        view: the view; the one it was finalised with, or ``lineage``, where None.

    Raises:
        NotFoundError: it is not recorded.
        ReleasedError: it was deleted, or a part of it.
    """
    from spool.errors import NotFoundError

    row = sp.find_session(session_id)
    if row is None:
        raise NotFoundError(f"no session {session_id!r} is recorded", session_id=session_id)
    if view is None:
        view = "timeline" if row.view == "timeline" else "lineage"
    steps = step_looks(sp.steps(session_id, discarded=True))
    whole = sp.view(session_id, "lineage", discarded=True, superseded="keep", gaps="keep", trailing="keep")
    segments, is_final = of_view(sp, session_id, view, discarded=True)
    return SessionView(
        row=row,
        view=view,
        rows=tuple(tree_rows(steps, segments, superseded_steps(whole))),
        segments=tuple(_segment_look(ref) for ref in segments),
        is_final=is_final,
    )


def _segment_look(ref: SegmentRef) -> SegmentLook:
    return SegmentLook(
        ref=ref,
        index=ref.index,
        n_steps=len(ref.steps),
        n_tokens=ref.n_tokens,
        n_response=ref.response_length,
        n_trained=ref.trainable_tokens,
        cut_tokens=ref.cut_tokens,
        versions=ref.version_span,
        finish_reason=ref.finish_reason,
        reward=ref.reward,
        last_step=ref.steps[-1] if ref.steps else None,
    )
