"""The tree of a session's steps: what extends what, who may see it, and whose tokens begin like a prompt's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from spool.errors import InputError, IntegrityError, NotFoundError, SessionStateError
from spool.rollout.prefix import PrefixIndex, block_digest, digests_fit, ends, known_digests

if TYPE_CHECKING:
    from collections.abc import Hashable

    from spool.model.events import StepCommitted
    from spool.rollout.prefix import Digests, Match


@dataclass(slots=True)
class _Node:
    """What the tree knows of a step beside its event.

    Attributes:
        depth: number of its ancestors.
        carrier: the step whose tokens its chain ends with: itself, or for a step without tokens the nearest ancestor
            that has some.
        anchor: the digest at the last multiple of 256 up to its base.
        added_by: the open transaction that it belongs to.
        withdrawn_by: the open transaction that discards it.
    """

    depth: int
    carrier: int | None
    anchor: bytes
    added_by: Hashable | None
    withdrawn_by: Hashable | None = None
    children: list[int] = field(default_factory=list)


class StepTree:
    """Steps of one session, committed or in open transactions.

    What an open transaction adds is seen only by calls that name it, what it discards by nobody; with
    ``transaction=None`` a call sees what is committed.

    Attributes:
        session_id: the session.
        events: all steps by index.
        next_index: index of the next step: never one that was used, not even by a step that was rolled back, since late
            facts are filed under it.
    """

    def __init__(self, session_id: str) -> None:
        self.session_id = session_id
        self.events: dict[int, StepCommitted] = {}
        self.next_index = 0
        self._nodes: dict[int, _Node] = {}
        self._ids: dict[str, int] = {}
        self._prefixes = PrefixIndex()

    def visible(self, transaction: Hashable | None = None) -> list[int]:
        """Return the indexes of the steps that are seen, ascending."""
        return [index for index in sorted(self._nodes) if self._sees(index, transaction)]

    def _sees(self, index: int, transaction: Hashable | None) -> bool:
        node = self._nodes[index]
        return node.withdrawn_by is None and (node.added_by is None or node.added_by == transaction)

    def is_pending(self, index: int) -> bool:
        """Tell whether a step belongs to an open transaction."""
        node = self._nodes.get(index)
        return node is not None and node.added_by is not None

    def find(self, step_id: str, transaction: Hashable | None = None) -> int | None:
        """Return the index of the step with this id."""
        index = self._ids.get(step_id)
        return index if index is not None and self._sees(index, transaction) else None

    def holder(self, step_id: str, transaction: Hashable | None = None) -> int | None:
        """Return the index of the step for which this id is taken, seen or not."""
        index = self._ids.get(step_id)
        if index is None or (transaction is not None and self._nodes[index].withdrawn_by == transaction):
            return None
        return index

    def resolve(self, key: str | int, transaction: Hashable | None = None) -> int:
        """Return the index of the step with this index (int) or id (str).

        Raises:
            NotFoundError: there is none.
        """
        index = self._ids.get(key) if isinstance(key, str) else key
        if index is None or index not in self._nodes or not self._sees(index, transaction):
            raise NotFoundError(f"session {self.session_id!r} has no step {key!r}", session=self.session_id, step=key)
        return index

    def is_branch(self, index: int) -> bool:
        """Tell whether more than one step extends this one."""
        return len(self._nodes[index].children) > 1

    def depth(self, index: int) -> int:
        """Return the number of ancestors."""
        return self._nodes[index].depth

    def path(self, index: int) -> list[int]:
        """Return the indexes from the root to this step."""
        path = [index]
        while (above := self.events[path[-1]].parent) is not None:
            path.append(above)
        return path[::-1]

    def parent_of(
        self, digests: Digests, n_prompt: int, named: str | int | None, transaction: Hashable | None
    ) -> tuple[int | None, int]:
        """Return the step that a prompt extends, and how many tokens of its chain.

        Args:
            digests: of the prompt and what follows it.
            n_prompt: tokens of the prompt.
            named: id or index of the parent; the longest chain, trimmed or not, that the prompt starts with where None.
            transaction: whose steps count too.

        Raises:
            NotFoundError: there is no step ``named``.
            InputError: the prompt does not start with its chain.
        """
        if named is not None:
            parent = self.resolve(named, transaction)
            return parent, self._extended(parent, digests, n_prompt)
        match = self._prefixes.longest_end(digests, n_prompt, lambda step: self._sees(step, transaction))
        return (match.step, match.n_tokens) if match else (None, 0)

    def donor_of(self, digests: Digests, n_prompt: int, transaction: Hashable | None, base: int) -> Match | None:
        """Return the latest step that shares the longest known prefix of a prompt, if that is longer than ``base``."""
        match = self._prefixes.longest_shared(digests, n_prompt, lambda step: self._sees(step, transaction))
        return match if match and match.n_tokens > base else None

    def _extended(self, parent: int, digests: Digests, n_prompt: int) -> int:
        carrier = self._nodes[parent].carrier
        if carrier is None or not digests.n_tokens:
            return 0
        event = self.events[carrier]
        for n_tokens, digest in ends(event):
            if n_tokens <= n_prompt and digests.at(n_tokens) == digest:
                return n_tokens
        known = (pair for step in self.path(carrier) for pair in known_digests(self.events[step]))
        same, other = digests.compare(known, n_prompt)
        where = "it is shorter than that" if other is None else f"they part between tokens {same} and {other}"
        raise InputError(
            f"session {self.session_id!r}: the prompt of {n_prompt} tokens does not start with the {event.n_tokens} of "
            f"step {self.events[parent].step_id!r}: {where}. Name another parent, or none to let the prompt decide",
            session=self.session_id,
            parent=self.events[parent].step_id,
            chain_tokens=event.n_tokens,
            prompt_tokens=n_prompt,
            same_tokens=same,
            differ_before=other,
        )

    def commit(self, event: StepCommitted, transaction: Hashable | None = None) -> None:
        """Add a step.

        Raises:
            IntegrityError: the step does not fit what is there; nothing was changed.
        """
        parent = None if event.parent is None else self._nodes.get(event.parent)
        carrier = None if parent is None else parent.carrier
        above = None if carrier is None else self.events[carrier]
        if wrong := self._conflict(event, transaction) or _misfit(event, above):
            raise IntegrityError(
                f"session {self.session_id!r}: step {event.step_id!r} (index {event.index}) {wrong}",
                session=event.session_id,
                step=event.step_id,
                index=event.index,
                parent=event.parent,
            )
        anchor = b""
        if carrier is not None and event.n_tokens:
            anchor = block_digest(self.events[carrier], self._nodes[carrier].anchor, event.base)
        if event.n_tokens:
            carrier = event.index
        self._nodes[event.index] = _Node(parent.depth + 1 if parent else 0, carrier, anchor, transaction)
        self.events[event.index] = event
        self._ids[event.step_id] = event.index
        if parent is not None:
            parent.children.append(event.index)
        self._prefixes.add(event, anchor)
        self.next_index = max(self.next_index, event.index + 1)

    def _conflict(self, event: StepCommitted, transaction: Hashable | None) -> str | None:
        if event.session_id != self.session_id:
            return f"belongs to session {event.session_id!r}"
        if event.index < 0 or event.index in self._nodes:
            return "has an index that is negative or in use"
        if (holder := self.holder(event.step_id, transaction)) is not None:
            return f"has the id of the step with index {holder}"
        if event.parent is not None and event.parent >= event.index:
            return f"names parent {event.parent}, which is not earlier"
        if event.parent is not None and event.parent not in self._nodes:
            return f"names parent {event.parent}, which is missing"
        return None

    def skip(self, index: int) -> None:
        """Never give out the index of a step that was logged and is gone."""
        self.next_index = max(self.next_index, index + 1)

    def check_leaf(self, index: int, transaction: Hashable | None = None) -> None:
        """Check that nothing extends a step; what the transaction discards does not count.

        Raises:
            NotFoundError: there is no such step.
            SessionStateError: other steps extend it.
        """
        children = sorted(self._nodes[self.resolve(index, transaction)].children)
        if transaction is not None:
            children = [child for child in children if self._nodes[child].withdrawn_by != transaction]
        if children:
            raise SessionStateError(
                f"session {self.session_id!r}: step {index} is extended by steps {children}; discard those first",
                session=self.session_id,
                index=index,
                children=children,
                kind="inner_step",
            )

    def discard(self, index: int, transaction: Hashable | None = None) -> None:
        """Withdraw a leaf; its id is free again, its index is not. In a transaction, for good once that settles."""
        self.check_leaf(index, transaction)
        if transaction is None:
            self._drop(index)
        else:
            node = self._nodes[index]
            node.withdrawn_by = transaction
            self._prefixes.remove(self.events[index], node.anchor)

    def _drop(self, index: int) -> None:
        node, event = self._nodes.pop(index), self.events.pop(index)
        if self._ids.get(event.step_id) == index:
            del self._ids[event.step_id]
        if event.parent is not None:
            self._nodes[event.parent].children.remove(index)
        if node.withdrawn_by is None:
            self._prefixes.remove(event, node.anchor)

    def added_by(self, transaction: Hashable) -> list[int]:
        """Return the indexes of the steps that an open transaction adds, ascending."""
        assert transaction is not None
        return sorted(index for index, node in self._nodes.items() if node.added_by == transaction)

    def _withdrawn_by(self, transaction: Hashable) -> list[int]:
        assert transaction is not None
        return sorted(index for index, node in self._nodes.items() if node.withdrawn_by == transaction)

    def rollback(self, transaction: Hashable) -> None:
        """Take back what an open transaction adds, and give back what it discards."""
        for index in reversed(self.added_by(transaction)):
            self._drop(index)
        for index in self._withdrawn_by(transaction):
            node, event = self._nodes[index], self.events[index]
            node.withdrawn_by = None
            self._ids[event.step_id] = index
            self._prefixes.add(event, node.anchor)

    def settle(self, transaction: Hashable) -> list[int]:
        """Show to all what an open transaction adds, and drop what it discards; returns the indexes of the latter."""
        for index in self.added_by(transaction):
            self._nodes[index].added_by = None
        gone = self._withdrawn_by(transaction)
        for index in reversed(gone):
            self._drop(index)
        return gone


def _misfit(event: StepCommitted, above: StepCommitted | None) -> str | None:
    """Say what is wrong with an event's lengths below the chain that ends with the step ``above``."""
    low, high = (above.n_prompt, above.n_tokens) if above and event.n_tokens else (0, 0)
    if not low <= event.base <= high or not event.base <= event.n_prompt <= event.n_tokens:
        return f"takes {event.base} tokens of a chain of {high} for its {event.n_prompt} of {event.n_tokens}"
    return None if digests_fit(event) else "has digests that do not belong to its lengths"
