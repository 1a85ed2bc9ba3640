"""Message lists as deltas: a step keeps only what its parent's list does not start with.

Messages are JSON texts here. A step keeps a running digest after each message of its own, so finding how much of the
parent's list a new list starts with reads no message again, and a chain of n steps holds n deltas, not n lists.
"""

from __future__ import annotations

from collections.abc import Sequence

import xxhash
from msgspec import Struct


class MessageTail(Struct, frozen=True):
    """The messages of one step as its session remembers them.

    Attributes:
        inherited: how many messages come from the parent's list.
        parent: whose list that is; None with ``inherited == 0``.
        digests: running digest after each message of this step's own, 16 bytes each.
    """

    inherited: int
    parent: MessageTail | None
    digests: tuple[bytes, ...]

    @property
    def count(self) -> int:
        """Length of the full list."""
        return self.inherited + len(self.digests)

    def digest_at(self, count: int) -> bytes:
        """Return the running digest after the first ``count`` messages of the full list."""
        tail = self
        while count <= tail.inherited and tail.parent is not None:
            tail = tail.parent
        return tail.digests[count - tail.inherited - 1] if count > tail.inherited else b""


EMPTY = MessageTail(0, None, ())


def extend(parent: MessageTail | None, messages: Sequence[bytes]) -> MessageTail:
    """Return the tail of a step whose full list is ``messages``, under ``parent``.

    Args:
        parent: the parent step's tail; None where a chain begins.
        messages: the full list, one JSON text a message.
    """
    digests, running = [], b""
    for message in messages:
        running = xxhash.xxh3_128_digest(running + message)
        digests.append(running)
    inherited = 0
    if parent is not None:
        inherited = min(parent.count, len(digests))
        while inherited and parent.digest_at(inherited) != digests[inherited - 1]:
            inherited -= 1
    return MessageTail(inherited, parent if inherited else None, tuple(digests[inherited:]))


def resume(parent: MessageTail | None, inherited: int, own: Sequence[bytes]) -> MessageTail:
    """Return the tail of a step read back from its record: ``inherited`` messages of ``parent``, then ``own``."""
    running = parent.digest_at(inherited) if parent is not None and inherited else b""
    digests = []
    for message in own:
        running = xxhash.xxh3_128_digest(running + message)
        digests.append(running)
    return MessageTail(inherited, parent if inherited else None, tuple(digests))
