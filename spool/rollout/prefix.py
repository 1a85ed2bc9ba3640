"""Recognising token prefixes by running digests, so that a session keeps no tokens.

Tokens are hashed in blocks of 256. The digest at a multiple of 256 is the xxh3-128 of the digest one block before it,
the block's tokens (int32, little-endian) and the multimodal units at them; the digest anywhere else is that of the last
whole block, the tokens behind it and their units. So any length of a sequence that was hashed once is tested in one
short hash, and two images behind the same placeholder token differ.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import xxhash

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from spool.model.events import StepCommitted
    from spool.model.refs import Unit

BLOCK = 256
DIGEST_BYTES = 16

_PROMPT = -1


class Digests:
    """The running digests of one sequence of tokens; costs one hash of it, and keeps a view of ``tokens``."""

    def __init__(self, tokens: NDArray[np.int32], units: Sequence[Unit] = ()) -> None:
        """Hash ``tokens`` (int32 [n]).

        Args:
            tokens: the token ids.
            units: multimodal units, ascending positions.
        """
        self.n_tokens = len(tokens)
        self._data = np.ascontiguousarray(tokens, dtype="<i4").view(np.uint8).data
        self._units = units
        self._positions = [unit.position for unit in units]
        self._memo: dict[int, bytes] = {}
        self.blocks: list[bytes] = [b""]
        """Digests at 0, 256, 512, ..."""
        for start in range(0, self.n_tokens - BLOCK + 1, BLOCK):
            self.blocks.append(self._digest(start, start + BLOCK))

    def _digest(self, start: int, stop: int) -> bytes:
        running = xxhash.xxh3_128(self.blocks[start // BLOCK])
        running.update(self._data[4 * start : 4 * stop])
        if self._units:
            low, high = bisect_left(self._positions, start), bisect_left(self._positions, stop)
            running.update(b"".join(map(_encoded, self._units[low:high])))
        return running.digest()

    def at(self, n_tokens: int) -> bytes:
        """Return the digest of the first ``n_tokens`` tokens."""
        block, rest = divmod(n_tokens, BLOCK)
        if not rest:
            return self.blocks[block]
        digest = self._memo.get(n_tokens)
        if digest is None:
            digest = self._memo[n_tokens] = self._digest(block * BLOCK, n_tokens)
        return digest

    def blocks_after(self, base: int) -> bytes:
        """Return the digests at the multiples of 256 behind ``base``, one after the other."""
        return b"".join(self.blocks[base // BLOCK + 1 :])

    def ends(self, shortest: int) -> bytes:
        """Return the digests at all tokens, one less, ... down to ``shortest`` (at least 1), one after the other."""
        return b"".join(self.at(n) for n in range(self.n_tokens, max(shortest, 1) - 1, -1))

    def compare(self, known: Iterable[tuple[int, bytes]], limit: int) -> tuple[int, int | None]:
        """Compare the first ``limit`` tokens with those of which ``known`` has digests.

        Returns:
            The longest length at which both are known to be equal, and the shortest at which they are known to differ.
        """
        same, other = 0, None
        for n_tokens, digest in known:
            if n_tokens > limit:
                continue
            if self.at(n_tokens) == digest:
                same = max(same, n_tokens)
            else:
                other = n_tokens if other is None else min(other, n_tokens)
        return same, other


def _encoded(unit: Unit) -> bytes:
    key = unit.key.encode(errors="surrogatepass")
    return struct.pack("<qqq", unit.position, unit.n_rows, len(key)) + key


def block_digest(event: StepCommitted, anchor: bytes, n_tokens: int) -> bytes:
    """Return the digest at the last multiple of 256 up to ``n_tokens``, which is at least the step's ``base``.

    Args:
        event: the step.
        anchor: the digest at the last multiple of 256 up to its ``base``.
        n_tokens: a length of its chain.
    """
    nth = n_tokens // BLOCK - event.base // BLOCK
    return event.block_hashes[(nth - 1) * DIGEST_BYTES : nth * DIGEST_BYTES] if nth else anchor


def known_digests(event: StepCommitted) -> Iterator[tuple[int, bytes]]:
    """Yield (length, digest) of every length behind its ``base`` at which the step's chain was hashed."""
    for n_tokens, digest in zip(_block_ends(event), _split(event.block_hashes), strict=True):
        yield n_tokens, digest
    for n_tokens, digest, _ in _points(event):
        yield n_tokens, digest


def ends(event: StepCommitted) -> Iterator[tuple[int, bytes]]:
    """Yield (length, digest) of the ends of the step's chain, the whole one first, then trimmed ones."""
    for n_tokens, digest, trimmed in _points(event):
        if trimmed != _PROMPT:
            yield n_tokens, digest


def digests_fit(event: StepCommitted) -> bool:
    """Tell whether the step has as many digests as its lengths ask for."""
    n_ends, rest = divmod(len(event.end_hashes), DIGEST_BYTES)
    return (
        len(event.block_hashes) == len(_block_ends(event)) * DIGEST_BYTES
        and not rest
        and min(event.n_tokens, 1) <= n_ends <= event.n_tokens - event.n_prompt + 1
    )


def _block_ends(event: StepCommitted) -> range:
    return range((event.base // BLOCK + 1) * BLOCK, event.n_tokens + 1, BLOCK)


def _split(digests: bytes) -> list[bytes]:
    return [digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES)]


def _points(event: StepCommitted) -> Iterator[tuple[int, bytes, int]]:
    """Yield (length, digest, tokens trimmed) of the step's ends, and of its prompt with ``_PROMPT``."""
    if event.n_prompt:
        yield event.n_prompt, event.prompt_hash, _PROMPT
    for trimmed, digest in enumerate(_split(event.end_hashes)):
        yield event.n_tokens - trimmed, digest, trimmed


class Match(NamedTuple):
    """A step whose chain begins with the same ``n_tokens`` tokens."""

    step: int
    n_tokens: int


class PrefixIndex:
    """Finds the steps of a session whose chains begin like a given prompt.

    Lengths that are no multiple of 256 are filed under the digest of the whole blocks before them: of these, only the
    ones whose blocks are the prompt's own are ever hashed.
    """

    def __init__(self) -> None:
        self._blocks: dict[bytes, list[int]] = {}
        self._points: dict[bytes, dict[int, dict[bytes, list[tuple[int, int]]]]] = {}

    def add(self, event: StepCommitted, anchor: bytes) -> None:
        """File a step; ``anchor`` as in `block_digest`."""
        for digest in _split(event.block_hashes):
            self._blocks.setdefault(digest, []).append(event.index)
        for n_tokens, digest, trimmed in _points(event):
            lengths = self._points.setdefault(block_digest(event, anchor, n_tokens), {})
            lengths.setdefault(n_tokens, {}).setdefault(digest, []).append((event.index, trimmed))

    def remove(self, event: StepCommitted, anchor: bytes) -> None:
        """Forget a step that was filed with the same ``anchor``."""
        for digest in _split(event.block_hashes):
            steps = self._blocks[digest]
            steps.remove(event.index)
            if not steps:
                del self._blocks[digest]
        for n_tokens, digest, trimmed in _points(event):
            bucket = block_digest(event, anchor, n_tokens)
            lengths = self._points[bucket]
            lengths[n_tokens][digest].remove((event.index, trimmed))
            if not lengths[n_tokens][digest]:
                del lengths[n_tokens][digest]
            if not lengths[n_tokens]:
                del lengths[n_tokens]
            if not lengths:
                del self._points[bucket]

    def longest_end(self, digests: Digests, limit: int, visible: Callable[[int], bool]) -> Match | None:
        """Return the step with the longest end, trimmed or not, that the first ``limit`` tokens start with.

        Among equal lengths an end that is not trimmed comes first, then the latest step.
        """
        for block in self._known_blocks(digests, limit):
            for n_tokens, points in self._candidates(digests, block, limit):
                ends = [(trimmed == 0, step) for step, trimmed in points if trimmed != _PROMPT and visible(step)]
                if ends:
                    return Match(max(ends)[1], n_tokens)
        return None

    def longest_shared(self, digests: Digests, limit: int, visible: Callable[[int], bool]) -> Match | None:
        """Return the latest step that shares the longest known prefix of the first ``limit`` tokens."""
        for block in self._known_blocks(digests, limit):
            boundary = block * BLOCK
            steps: list[int] = []
            for n_tokens, points in self._candidates(digests, block, limit):
                steps = [step for step, _ in points if visible(step)]
                if steps and n_tokens > boundary:
                    return Match(max(steps), n_tokens)
            steps += (step for step in self._blocks.get(digests.blocks[block], ()) if visible(step))
            if steps:
                return Match(max(steps), boundary)
        return None

    def _known_blocks(self, digests: Digests, limit: int) -> range:
        """Return the numbers of whole blocks that some chain shares with the tokens, descending."""
        block = limit // BLOCK
        while block and digests.blocks[block] not in self._blocks:
            block -= 1
        return range(block, -1, -1)

    def _candidates(self, digests: Digests, block: int, limit: int) -> Iterator[tuple[int, Sequence[tuple[int, int]]]]:
        lengths = self._points.get(digests.blocks[block], {})
        for n_tokens in sorted((n for n in lengths if n <= limit), reverse=True):
            points = lengths[n_tokens].get(digests.at(n_tokens))
            if points:
                yield n_tokens, points
