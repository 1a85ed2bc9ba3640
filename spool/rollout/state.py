"""The state of one session, folded from events: where a new step belongs, and what each step holds."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import count
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spool.errors import IntegrityError, SessionStateError, StepConflictError
from spool.formats.masks import cleared_before
from spool.model.events import (
    Event,
    SessionDiscarded,
    SessionFinalized,
    SessionOpened,
    Single,
    StepCommitted,
    StepDiscarded,
    parts,
)
from spool.model.fields import FieldSpec
from spool.model.refs import Extent, Span, StepRef, Unit
from spool.model.rows import check_units, forward_rows, row_at
from spool.rollout.chains import ROOT, Chain, Chains
from spool.rollout.coverage import EMPTY, Range, arrays, cover
from spool.rollout.plan import AppendPlan, Lengths, plan_fields
from spool.rollout.prefix import Digests
from spool.rollout.tree import StepTree

__all__ = ["AppendPlan", "Chain", "Range", "SessionState"]

_IDENTITY = ("session_id", "group_id", "sample_index", "rollout_step", "source", "prompt_id", "split", "attempt")
_FOLDED = (SessionOpened, StepCommitted, StepDiscarded, SessionFinalized, SessionDiscarded)


class SessionState:
    """What a session is at the moment. Whoever holds one serialises the calls on it.

    Steps of an open transaction are seen only by calls that name it; with ``transaction=None`` a call sees what is
    committed.

    Attributes:
        spool_id: the spool.
        opened: how the session was opened, the first time.
        fields: specs of its fields, every stored one among them.
        roots: hints for references.
        identity: what every reference repeats of the session, by name of `spool.model.refs.Ref`'s attribute.
        finalized: how it ended, or None.
        discarded: how it was withdrawn, or None.
    """

    def __init__(self, spool_id: str, opened: SessionOpened, roots: Sequence[str] = ()) -> None:
        self.spool_id = spool_id
        self.opened = opened
        self.roots = tuple(roots)
        self.identity: Mapping[str, Any] = {
            "spool_id": spool_id,
            "roots": self.roots,
            **{name: getattr(opened, name) for name in _IDENTITY},
        }
        self.finalized: SessionFinalized | None = None
        self.discarded: SessionDiscarded | None = None
        self._tree = StepTree(opened.session_id)
        self._chains = Chains(self._tree)
        self._set_fields(opened.fields)

    def _set_fields(self, fields: tuple[FieldSpec, ...]) -> None:
        self.fields = fields
        self._arrays = frozenset(array.name for spec in fields for array in spec.arrays)

    @classmethod
    def from_events(cls, spool_id: str, events: Iterable[Event], roots: Sequence[str] = ()) -> SessionState:
        """Fold the events of one session, in any order; kinds that are no part of its state are passed over.

        Raises:
            IntegrityError: no event opens the session; a step's parent is missing or not earlier; an index or id occurs
                twice; a discarded step is missing; a step or an opening belongs to another session.
        """
        kinds: dict[type[Single], list[Any]] = {kind: [] for kind in _FOLDED}
        for event in (part for record in events for part in parts(record)):
            if type(event) in kinds:
                kinds[type(event)].append(event)
        opened = sorted(kinds[SessionOpened], key=lambda event: (event.resumed, event.at))
        if not opened:
            raise IntegrityError("no event opens the session; restore the packs with its first events", spool=spool_id)
        state = cls(spool_id, opened[0], roots)
        for event in opened[1:]:
            state.resume(event)
        state._replay_steps(kinds[StepCommitted], {event.index for event in kinds[StepDiscarded]})
        for event in kinds[SessionFinalized]:
            state.finalize(event)
        for event in kinds[SessionDiscarded]:
            state.abandon(event)
        return state

    def _replay_steps(self, events: list[StepCommitted], discarded: set[int]) -> None:
        # What was discarded is left out at once: its id may have been used again.
        if missing := discarded - {event.index for event in events}:
            raise IntegrityError(
                f"session {self.session_id!r}: steps {sorted(missing)} were discarded, but are missing",
                session=self.session_id,
                missing=sorted(missing),
            )
        for event in sorted(events, key=lambda event: event.index):
            if event.index in discarded:
                self._tree.skip(event.index)
            else:
                self.commit(event)

    @property
    def session_id(self) -> str:
        """The session's id."""
        return self.opened.session_id

    @property
    def ended(self) -> bool:
        """It is finalised or withdrawn."""
        return self.discarded is not None or self.finalized is not None

    @property
    def next_index(self) -> int:
        """Index of the next step: never one that was used, not even by a step that was rolled back."""
        return self._tree.next_index

    @property
    def steps(self) -> Mapping[int, StepCommitted]:
        """All steps by index, those of open transactions too; a view, in no order."""
        return MappingProxyType(self._tree.events)

    def visible(self, transaction: Hashable | None = None) -> list[int]:
        """Return the indexes of the steps that are seen, ascending."""
        return self._tree.visible(transaction)

    def is_pending(self, index: int) -> bool:
        """Tell whether a step belongs to an open transaction."""
        return self._tree.is_pending(index)

    def find(self, step_id: str, transaction: Hashable | None = None) -> StepCommitted | None:
        """Return the step of this id, or None."""
        index = self._tree.find(step_id, transaction)
        return None if index is None else self._tree.events[index]

    def resolve(self, key: str | int, transaction: Hashable | None = None) -> int:
        """Return the index of the step with this index (int) or id (str).

        Raises:
            NotFoundError: there is none.
        """
        return self._tree.resolve(key, transaction)

    def path(self, index: int) -> list[StepCommitted]:
        """Return the steps from the root to this one."""
        return [self._tree.events[step] for step in self._tree.path(index)]

    def chain(self, index: int) -> Chain:
        """Return what the path from the root to this step holds."""
        return self._chains.of(index, self.fields)

    def ref(self, index: int) -> StepRef:
        """Return the reference of a step: its whole prompt and response, and of response fields its own response only.

        Raises:
            KeyError: there is no such step.
        """
        event = self._tree.events[index]
        chain = self.chain(index) if event.n_tokens else ROOT
        spans = (Span(index, event.n_prompt, event.n_tokens),) if event.n_tokens > event.n_prompt else ()
        return StepRef(
            **self.identity,
            step_id=event.step_id,
            index=index,
            parent=event.parent,
            n_tokens=event.n_tokens,
            n_rows=event.n_rows,
            response_start=event.n_prompt,
            spans=self.with_cleared(spans) if event.cleared else spans,
            versions=event.versions,
            finish_reason=event.finish_reason,
            extents=self._step_extents(event, chain),
            units=chain.units,
            n_nonfinite=event.n_nonfinite,
        )

    def with_cleared(self, spans: Iterable[Span]) -> tuple[Span, ...]:
        """Return spans of this session's steps with the number of tokens in them that loss masks cleared."""
        return tuple([self._with_cleared(span, self._tree.events[span.step]) for span in spans])

    def _with_cleared(self, span: Span, event: StepCommitted) -> Span:
        if not event.cleared:
            return span
        before = cleared_before(event.cleared, event.n_tokens - event.n_prompt)
        n_cleared = int(before[span.stop - event.n_prompt] - before[span.start - event.n_prompt])
        return Span(span.step, span.start, span.stop, span.trained, n_cleared)

    def _step_extents(self, event: StepCommitted, chain: Chain) -> dict[str, tuple[Extent, ...]]:
        found: dict[str, tuple[Extent, ...]] = {}
        for spec in self.fields:
            own_only = spec.align in ("response", "step")
            found |= arrays(spec, cover(spec, event.extents) if own_only else chain.covers.get(spec.name, EMPTY))
        return found

    def plan(
        self,
        prompt: NDArray[np.int32],
        response: NDArray[np.int32],
        *,
        given: Mapping[str, Iterable[Range]],
        parent: str | int | None = None,
        units: Sequence[Unit] = (),
        step_id: str | None = None,
        transaction: Hashable | None = None,
    ) -> AppendPlan:
        """Decide where a step belongs and what of it is written. Changes nothing.

        Args:
            prompt: int32 [p], as the engine got it.
            response: int32 [r].
            given: by field, positions of what was sent: tokens (token fields), tokens from ``p`` on (response), rows of
                the forward (forward; sent again or not, overlapping or not), 0 (step).
            parent: id or index of the step to extend; found by the prompt where None.
            units: all multimodal units of prompt and response.
            step_id: the caller's id; ``#`` and the index where None.
            transaction: the open transaction that the step is to belong to.

        Raises:
            SessionStateError: the session has ended.
            StepConflictError: the id is in use; `find` tells by which step.
            NotFoundError: there is no step ``parent``.
            InputError: the prompt does not start with the chain of ``parent``, or rows or units do not fit the tokens.
        """
        self.check_open()
        if step_id is None:
            step_id = self._free_id(transaction)
        else:
            self._check_free(step_id, transaction)
        n_prompt, n_tokens = len(prompt), len(prompt) + len(response)
        units = check_units(units, n_tokens)
        digests = Digests(np.concatenate((prompt, response)), units)
        above, base = self._tree.parent_of(digests, n_prompt, parent, transaction)
        donor, n_shared = self._tree.donor_of(digests, n_prompt, transaction, base) or (above, base)
        lengths = Lengths(
            base=base,
            shared=n_shared,
            prompt=n_prompt,
            tokens=n_tokens,
            base_rows=forward_rows(units, base),
            shared_rows=forward_rows(units, n_shared),
            rows=forward_rows(units, n_tokens),
        )
        store, shared = plan_fields(
            self.fields,
            given,
            lengths,
            prefer=self.opened.prefer,
            chain=ROOT.covers if above is None else self.chain(above).covers,
            donor=ROOT.covers if donor is None else self.chain(donor).covers,
        )
        return AppendPlan(
            index=self.next_index,
            step_id=step_id,
            parent=above,
            base=base,
            n_prompt=n_prompt,
            n_tokens=n_tokens,
            n_rows=row_at(units, n_tokens),
            units=tuple(unit for unit in units if unit.position >= base),
            block_hashes=digests.blocks_after(base),
            prompt_hash=digests.at(n_prompt),
            end_hashes=digests.ends(max(n_prompt, n_tokens - self.opened.trim)),
            donor=donor,
            n_shared=n_shared,
            store=store,
            shared=shared,
        )

    def check_open(self) -> None:
        """Check that the session goes on.

        Raises:
            SessionStateError: it has ended.
        """
        if self.discarded is not None:
            raise SessionStateError(
                f"session {self.session_id!r} was discarded; open another one",
                session=self.session_id,
                kind="discarded",
            )
        if self.finalized is not None:
            raise SessionStateError(
                f"session {self.session_id!r} is finalised as {self.finalized.outcome} and takes no more; open another",
                session=self.session_id,
                kind="finalized",
                outcome=self.finalized.outcome,
            )

    def _free_id(self, transaction: Hashable | None) -> str:
        """Return an id for the next step that no caller has given."""
        plain = step_id = f"#{self.next_index}"
        for n in count(1):
            if self._tree.holder(step_id, transaction) is None:
                break
            step_id = f"{plain}.{n}"
        return step_id

    def _check_free(self, step_id: str, transaction: Hashable | None) -> None:
        index = self._tree.holder(step_id, transaction)
        if index is not None:
            raise StepConflictError(
                f"session {self.session_id!r}: the step id {step_id!r} is taken by the step with index {index}; "
                "choose another",
                session=self.session_id,
                step=step_id,
                index=index,
            )

    def commit(self, event: StepCommitted, transaction: Hashable | None = None) -> None:
        """Add a step.

        Args:
            event: made from a plan of this state, or read from a log.
            transaction: hides the step from others until it is settled.

        Raises:
            IntegrityError: the step does not fit what is there; nothing was changed.
        """
        if not self._arrays.issuperset(event.extents):
            foreign = sorted(event.extents.keys() - self._arrays)
            raise IntegrityError(
                f"session {self.session_id!r}: step {event.step_id!r} has rows of {foreign}, which are "
                "no arrays of the session's fields",
                session=self.session_id,
                step=event.step_id,
                index=event.index,
            )
        self._tree.commit(event, transaction)

    def check_discard(self, index: int, transaction: Hashable | None = None) -> None:
        """Check that a step can be withdrawn.

        Raises:
            NotFoundError: there is no such step.
            SessionStateError: the session has ended, or other steps extend this one.
        """
        self.check_open()
        self._tree.check_leaf(index, transaction)

    def discard(self, event: StepDiscarded, transaction: Hashable | None = None) -> None:
        """Withdraw a leaf step; its id is free again, its index is not. Raises what `check_discard` does.

        Inside a transaction nobody sees the step any more, and a rollback gives it back.
        """
        self.check_discard(event.index, transaction)
        self._tree.discard(event.index, transaction)
        if transaction is None:
            self._chains.forget([event.index])

    def skip_to(self, index: int) -> None:
        """Give out no index below ``index``."""
        self._tree.next_index = max(self._tree.next_index, index)

    def rollback(self, transaction: Hashable) -> None:
        """Take back what an open transaction adds, and give back what it discards."""
        gone = self._tree.added_by(transaction)
        self._tree.rollback(transaction)
        self._chains.forget(gone)

    def settle(self, transaction: Hashable) -> None:
        """Make what an open transaction adds and discards so for all."""
        self._chains.forget(self._tree.settle(transaction))

    def resume(self, opened: SessionOpened) -> None:
        """Take the session up again: fields that it did not have so far are added, all else stays.

        Raises:
            IntegrityError: the event is another session's, or a field of it has another spec here.
        """
        known = {spec.name: spec for spec in self.fields}
        other = [spec.name for spec in opened.fields if known.get(spec.name, spec) != spec]
        if opened.session_id != self.session_id or other:
            raise IntegrityError(
                f"session {opened.session_id!r} was resumed as {self.session_id!r}, with other specs for {other}",
                session=self.session_id,
                got=opened.session_id,
                fields=other,
            )
        self._set_fields((*self.fields, *(spec for spec in opened.fields if spec.name not in known)))

    def finalize(self, event: SessionFinalized) -> None:
        """End the session; the first time counts."""
        if self.finalized is None:
            self.finalized = event

    def abandon(self, event: SessionDiscarded) -> None:
        """Withdraw the session, alive or finalised."""
        self.discarded = event
