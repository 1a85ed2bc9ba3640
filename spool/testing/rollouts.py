"""A synthetic MoE rollout workload: seeded, endless in variety, and with what must be read back.

Groups of sessions take turns as an agent does: prompts that extend the chain, two continuations of one step, a request
sent again, a context that is summarised. Routing has distinct experts in a row, some more popular than others, and
half of a row's experts tend to stay for a few tokens, layer by layer. A row never changes for the same tokens of
a session, so a shared prefix has one routing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from spool.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from spool.model.moe import MoEShape

Kind = Literal["start", "extend", "branch", "retry", "rewrite"]
"""How a step relates to the one before it in its session."""

_FAMILIES, _VARIANTS = 256, 16
_VOCABULARY = 150_000
_TEXT = (
    "the",
    "tool",
    "wrote",
    "its",
    "output",
    "and",
    "agent",
    "looked",
    "at",
    "next",
    "file",
    "before",
    "it",
    "went",
)


@dataclass(frozen=True, slots=True, eq=False)
class SyntheticStep:
    """One step to append, and what reading it must give.

    Attributes:
        session: keywords of ``sp.session`` (all but ``experts``), the same for each step of a session.
        append: keywords of ``session.append``. Its arrays may be views of those in ``expected``: do not write to them.
        expected: ``token_ids`` int32 [T], ``loss_mask`` uint8 [T], ``logprobs`` float32 [response], ``routed_experts``
            int32 [T-1, num_layers, topk]: the whole step as ``sp.read`` returns it.
        kind: how the step came about.
        index: order in its session, from 0.
        parent: index of the step whose chain it extends; None where a chain begins.
        last: it is the last of its session: finalise now.
    """

    session: dict[str, Any]
    append: dict[str, Any]
    expected: dict[str, NDArray[Any]]
    kind: Kind
    index: int
    parent: int | None
    last: bool

    @property
    def n_bytes(self) -> int:
        """Bytes of the whole step as a trainer reads it."""
        return sum(array.nbytes for array in self.expected.values())


class Router:
    """Draws routing rows of one model, vectorised over tokens and layers."""

    def __init__(self, shape: MoEShape, *, seed: int = 0) -> None:
        rng = np.random.default_rng([seed, shape.num_layers, shape.num_experts, shape.topk])
        n_stored, n_experts, topk = shape.stored_layers, shape.num_experts, shape.topk
        self.shape = shape
        self._layers = np.arange(shape.num_layers) if shape.moe_layers is None else np.array(shape.moe_layers)
        self._names = rng.permuted(np.tile(np.arange(n_experts, dtype=np.int32), (n_stored, 1)), axis=1)
        self._offsets = _patterns(rng, n_experts, topk)
        self._base = (np.arange(n_stored, dtype=np.int32) * n_experts)[:, None]

    def rows(self, rng: np.random.Generator, n: int) -> NDArray[np.int32]:
        """Return ``n`` fresh rows: int32 [n, num_layers, topk], dense layers 0, distinct experts in a row."""
        n_stored, n_experts = len(self._names), self.shape.num_experts
        out = np.zeros((n, self.shape.num_layers, self.shape.topk), np.int32)
        if n == 0:
            return out
        noise = np.frombuffer(rng.bytes(n * n_stored * 8), np.uint16).reshape(4, n, n_stored)
        centre = (noise[0].astype(np.float32) / 65536) ** 2 * n_experts
        # A layer keeps its family of experts until a change; the variant, half of the row, is drawn for each token.
        changes = np.where(noise[1] < 26000, np.arange(n, dtype=np.int32)[:, None], 0)
        held = np.maximum.accumulate(changes, axis=0)
        family = np.take_along_axis(noise[2] % _FAMILIES, held, axis=0)
        anchor = np.take_along_axis(centre.astype(np.int32), held, axis=0)
        ids = self._offsets[family.astype(np.intp) * _VARIANTS + noise[3] % _VARIANTS]
        ids += anchor[:, :, None]
        ids -= np.where(ids >= n_experts, np.int32(n_experts), np.int32(0))
        ids += self._base
        named: NDArray[np.int32] = self._names.ravel()[ids]
        if self.shape.moe_layers is None:
            return named
        out[:, self._layers] = named
        return out


def _patterns(rng: np.random.Generator, n_experts: int, topk: int) -> NDArray[np.int32]:
    """Return int32 [families * variants, topk] of distinct ids; the variants of a family share half of their ids."""
    kept = (topk + 1) // 2
    order = np.argsort(rng.random((_FAMILIES, n_experts)), axis=1).astype(np.int32)
    fresh = topk - kept
    turn = (np.arange(_VARIANTS)[:, None] * fresh + np.arange(fresh)) % (n_experts - kept)
    shared = np.repeat(order[:, None, :kept], _VARIANTS, axis=1)
    rows = np.concatenate([shared, order[:, kept + turn]], axis=2)
    columns = np.argsort(rng.random(rows.shape), axis=2)
    return np.take_along_axis(rows, columns, axis=2).reshape(-1, topk)


@dataclass(frozen=True, slots=True)
class _Node:
    """A step that was generated: its whole tokens and routing, and the messages after it."""

    tokens: NDArray[np.int32]
    routing: NDArray[np.int32]
    n_prompt: int
    parent: int | None
    prompt_messages: list[dict[str, Any]]
    messages: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class _Request:
    """A prompt about to be answered, and the rows of it that are known already."""

    kind: Kind
    prompt: NDArray[np.int32]
    known: NDArray[np.int32]
    parent: int | None
    base: int
    messages: list[dict[str, Any]]


def rollouts(
    shape: MoEShape,
    *,
    groups: int = 4,
    samples: int = 4,
    turns: int = 6,
    seed: int = 0,
    prompt_tokens: int = 600,
    observation_tokens: int = 200,
    response_tokens: int = 150,
    rollout_step: int = 0,
    source: str = "synthetic",
) -> Iterator[SyntheticStep]:
    """Yield the steps of ``groups * samples`` sessions of ``turns`` steps each.

    The sessions of a group take turns, so that several are open at once; the groups follow each other. Equal
    arguments yield equal steps. Nothing is kept but the sessions of the current group.

    Args:
        shape: the model whose routing is drawn.
        groups: prompts, each sampled by one group of sessions.
        samples: sessions a group.
        turns: steps a session; from the second on, about one in four branches, retries or rewrites.
        seed: of everything.
        prompt_tokens: length of the first prompt.
        observation_tokens: mean length of what the environment adds a turn.
        response_tokens: mean length of a response; none is empty.
        rollout_step: named in every session; also the first weight version.
        source: named in every session.

    Raises:
        InputError: a count is negative, or there are no turns or no prompt tokens.
    """
    if min(groups, samples, observation_tokens, response_tokens) < 0 or min(turns, prompt_tokens) < 1:
        raise InputError("rollouts: counts must not be negative, turns and prompt_tokens at least 1")
    router = Router(shape, seed=seed)
    lengths = (observation_tokens, response_tokens)
    for group in range(groups):
        first = np.random.default_rng([seed, group]).integers(3, _VOCABULARY, prompt_tokens, dtype=np.int32)
        sessions = [
            _Session(
                router, first, lengths, (seed, group, sample), _identity(group, sample, rollout_step, source, seed)
            )
            for sample in range(samples)
        ]
        for turn in range(turns):
            for session in sessions:
                yield session.step(last=turn == turns - 1)


def _identity(group: int, sample: int, rollout_step: int, source: str, seed: int) -> dict[str, Any]:
    prompt = f"{source}-{seed}-{group}"
    return {
        "session_id": f"{prompt}-{rollout_step}-{sample}",
        "group_id": f"{prompt}@{rollout_step}",
        "prompt_id": prompt,
        "sample_index": sample,
        "rollout_step": rollout_step,
        "source": source,
    }


class _Session:
    """The generator of one session's steps."""

    def __init__(
        self,
        router: Router,
        first: NDArray[np.int32],
        lengths: tuple[int, int],
        seed: tuple[int, int, int],
        identity: dict[str, Any],
    ) -> None:
        self._router = router
        self._first = first
        self._observation, self._response = lengths
        self._rng = np.random.default_rng(seed)
        self._identity = identity
        self._nodes: list[_Node] = []
        self._leaf = -1

    def step(self, *, last: bool) -> SyntheticStep:
        """Return the next step."""
        rng, request = self._rng, self._request()
        n_prompt, n_known = len(request.prompt), len(request.known)
        response = self._tokens(max(self._length(self._response), 1))
        tokens = np.concatenate([request.prompt, response])
        n_rows = max(len(tokens) - 1, 0)
        fresh = self._router.rows(rng, max(n_rows - n_known, 0))
        routing = np.concatenate([request.known, fresh])[:n_rows]
        answer = {"role": "assistant", "content": self._text(12)}
        node = _Node(tokens, routing, n_prompt, request.parent, request.messages, [*request.messages, answer])
        index = len(self._nodes)
        self._nodes.append(node)
        self._leaf = index
        append, expected = self._keywords(request, node, response)
        return SyntheticStep(self._identity, append, expected, request.kind, index, request.parent, last)

    def _request(self) -> _Request:
        if not self._nodes:
            messages = [{"role": "system", "content": self._text(30)}, {"role": "user", "content": self._text(60)}]
            return _Request("start", self._first, self._router.rows(self._rng, 0), None, 0, messages)
        drawn = self._rng.random()
        leaf = self._nodes[self._leaf]
        if drawn < 0.08:
            return self._repeat(leaf)
        if drawn < 0.16 and leaf.parent is not None:
            return self._extend("branch", leaf.parent)
        if drawn < 0.24:
            return self._rewrite()
        return self._extend("extend", self._leaf)

    def _extend(self, kind: Kind, parent: int) -> _Request:
        node = self._nodes[parent]
        prompt = np.concatenate([node.tokens, self._tokens(self._length(self._observation))])
        messages = [*node.messages, {"role": "tool", "tool_call_id": f"call-{parent}", "content": self._text(40)}]
        return _Request(kind, prompt, node.routing, parent, len(node.tokens), messages)

    def _repeat(self, node: _Node) -> _Request:
        prompt = node.tokens[: node.n_prompt]
        base = 0 if node.parent is None else len(self._nodes[node.parent].tokens)
        return _Request("retry", prompt, node.routing[: node.n_prompt], node.parent, base, node.prompt_messages)

    def _rewrite(self) -> _Request:
        kept = max(len(self._first) // 2, 1)
        prompt = np.concatenate([self._first[:kept], self._tokens(max(self._length(self._observation), 1))])
        messages = [self._nodes[0].messages[0], {"role": "user", "content": "summary: " + self._text(40)}]
        return _Request("rewrite", prompt, self._nodes[0].routing[:kept], None, 0, messages)

    def _keywords(
        self, request: _Request, node: _Node, response: NDArray[np.int32]
    ) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        rng, n_response = self._rng, len(response)
        logprobs = -rng.standard_exponential(n_response, np.float32)
        trained = np.ones(n_response, np.uint8)
        append: dict[str, Any] = {
            "prompt_token_ids": request.prompt,
            "response_token_ids": response,
            "logprobs": logprobs,
            "routed_experts": node.routing,
            "messages": node.messages,
            "weight_version": self._version(n_response),
            "finish_reason": ("stop", "tool_calls", "tool_calls", "length")[int(rng.integers(4))],
        }
        if request.base > 1 and rng.random() < 0.7:
            append["routed_experts_start"] = request.base - 1
            append["routed_experts"] = node.routing[request.base - 1 :]
        if rng.random() < 0.2:
            trained[: n_response // 4] = 0
            append["loss_mask"] = trained
        mask = np.concatenate([np.zeros(node.n_prompt, np.uint8), trained])
        return append, {
            "token_ids": node.tokens,
            "loss_mask": mask,
            "logprobs": logprobs,
            "routed_experts": node.routing,
        }

    def _version(self, n_response: int) -> str | list[tuple[str, int, int]]:
        version = self._identity["rollout_step"] + len(self._nodes) // 4
        if n_response < 2 or self._rng.random() > 0.1:
            return str(version)
        half = n_response // 2
        return [(str(version), 0, half), (str(version + 1), half, n_response)]

    def _length(self, mean: int) -> int:
        return int(self._rng.integers(mean // 2, mean + mean // 2 + 1))

    def _tokens(self, n: int) -> NDArray[np.int32]:
        return self._rng.integers(3, _VOCABULARY, n, dtype=np.int32)

    def _text(self, n_words: int) -> str:
        return " ".join(_TEXT[int(i)] for i in self._rng.integers(0, len(_TEXT), n_words))
