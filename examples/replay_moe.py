"""Train a small MoE with routing replay from a spool, and show that the replayed routing is the one that is used.

``python examples/replay_moe.py [FOLDER]`` needs ``spool-store[torch]``, a CPU, and a few seconds. It

1. lets a tiny mixture-of-experts model generate answers, and records tokens, logprobs and its own routing of each step;
2. trains the model on the recorded run: every layer takes the experts that the spool says, and only the weights
   between them come from its router;
3. compares losses: with the replayed routing the loss is that of the routing the model had, bit for bit; with the
   routing of the trained model, or any other, it is not.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from itertools import chain, islice, pairwise, repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import spool
from spool.train.replay.dataset import Batch, SegmentDataset

SHAPE = spool.MoEShape(num_layers=2, num_experts=8, topk=2)
VOCABULARY, WIDTH, PROMPT, ANSWER, TURNS = 64, 32, 12, 8, 2


class MoELayer(nn.Module):
    """A token's experts are the best of its router, or those it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.GRUCell(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, SHAPE.num_experts, bias=False)
        self.up = nn.Parameter(torch.randn(SHAPE.num_experts, WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, hidden: Tensor, routing: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return ``hidden`` float32 [T, WIDTH] after the layer, and the experts of each token, int64 [T, topk]."""
        scores = self.router(hidden)
        chosen = scores.topk(SHAPE.topk).indices if routing is None else routing
        weights = scores.gather(1, chosen).softmax(1)
        outputs = torch.einsum("tw,tkwv->tkv", hidden, self.up[chosen]).tanh()
        return hidden + (weights.unsqueeze(2) * outputs).sum(1), chosen


class TinyMoE(nn.Module):
    """A language model of recurrent mixing and MoE layers: causal, so a prefix never depends on what follows."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(MoELayer() for _ in range(SHAPE.num_layers))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, routing: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return logits float32 [T, VOCABULARY] and routing int64 [T, layers, topk] of one sequence, int64 [T]."""
        hidden, chosen = self.embed(tokens), []
        for number, layer in enumerate(self.layers):
            state, mixed = hidden.new_zeros(1, WIDTH), []
            for row in hidden:
                state = layer.mix(row.unsqueeze(0), state)
                mixed.append(state)
            hidden, experts = layer(torch.cat(mixed), None if routing is None else routing[:, number])
            chosen.append(experts)
        return self.head(hidden), torch.stack(chosen, 1)


@torch.no_grad()
def record(model: TinyMoE, sp: spool.Spool, n_sessions: int) -> dict[str, Tensor]:
    """Let the model answer, turn after turn, and record each step with its routing.

    Returns:
        By session id the routing it had, int64 [T - 1, layers, topk], kept aside to be compared with.
    """
    rng, had = np.random.default_rng(0), {}
    for number in range(n_sessions):
        tokens, known = rng.integers(0, VOCABULARY, PROMPT).tolist(), torch.empty(0, 2, 2, dtype=torch.int64)
        with sp.session(f"rollout-{number}", group_id=f"p{number // 4}", experts=SHAPE) as session:
            for _ in range(TURNS):
                prompt, logprobs = list(tokens), list[float]()
                for _ in range(ANSWER):
                    logits, _ = model(torch.tensor(tokens))
                    token = int(torch.multinomial(logits[-1].softmax(0), 1))
                    logprobs.append(float(logits[-1].log_softmax(0)[token]))
                    tokens.append(token)
                routing = model(torch.tensor(tokens))[1][len(known) : -1]
                session.append(
                    prompt_token_ids=prompt,
                    response_token_ids=tokens[len(prompt) :],
                    logprobs=logprobs,
                    routed_experts=routing.numpy().astype(np.int32),
                    routed_experts_start=len(known),
                    weight_version="0",
                )
                known = torch.cat([known, routing])
                tokens += rng.integers(0, VOCABULARY, 3).tolist()
            session.finalize(outcome="completed")
        sp.annotate(f"rollout-{number}", reward=float(number % 2))
        had[f"rollout-{number}"] = known
    return had


def loss_of(model: TinyMoE, batch: Batch, routing: Tensor | None) -> Tensor:
    """Return the mean loss of a packed batch over the tokens that are trained.

    Args:
        model: the model.
        batch: of a `SegmentDataset`.
        routing: int64 [rows, layers, topk] for the rows of the batch; the model's own where None.
    """
    losses = []
    for start, stop in pairwise(batch["cu_seqlens"].tolist()):
        tokens, mask = batch["token_ids"][start:stop].long(), batch["loss_mask"][start + 1 : stop].bool()
        logits, _ = model(tokens[:-1], None if routing is None else routing[start : stop - 1])
        losses.append(F.cross_entropy(logits, tokens[1:], reduction="none")[mask])
    return torch.cat(losses).mean()


@dataclass(frozen=True)
class Result:
    """Losses by step: with replay, with the routing kept in memory, with the model's own, with another."""

    replayed: list[float]
    original: list[float]
    own: list[float]
    other: list[float]


def train(dataset: SegmentDataset, model: TinyMoE, had: dict[str, Tensor], n_steps: int) -> Result:
    """Train with replayed routing; compare the loss of each step with that of other routings."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    batches, result = dataset.batches(max_tokens=120), Result([], [], [], [])
    for batch in islice(chain.from_iterable(repeat(batches)), n_steps):
        original = torch.cat([F.pad(had[ref.session_id].long(), (0, 0, 0, 0, 0, 1)) for ref in batch.refs])
        loss = loss_of(model, batch, batch["routed_experts"].long())
        with torch.no_grad():
            result.replayed.append(loss.item())
            result.original.append(loss_of(model, batch, original).item())
            result.own.append(loss_of(model, batch, None).item())
            result.other.append(loss_of(model, batch, (original + 1) % SHAPE.num_experts).item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return result


def main(folder: str, n_sessions: int = 8, n_steps: int = 8) -> Result:
    """Record, train, print a table; return the losses.

    Raises:
        AssertionError: the replayed routing is not the recorded one.
    """
    model = TinyMoE(seed=0)
    with spool.open(folder) as sp:
        had = record(model, sp, n_sessions)
    options: dict[str, Any] = {"fields": ["token_ids", "loss_mask", "routed_experts"], "order": "shuffled", "seed": 7}
    with SegmentDataset(folder, where="outcome = 'completed' and reward > 0.5", **options) as dataset:
        result = train(dataset, model, had, n_steps)
        print(f"{len(dataset)} of {n_sessions} sessions have a reward; their references take {dataset.n_bytes} B")
    print("step   replayed   original   own        other")
    for step, losses in enumerate(zip(result.replayed, result.original, result.own, result.other, strict=True)):
        print(f"{step:4}   " + "   ".join(f"{loss:.6f}" for loss in losses))
    assert result.replayed == result.original, "the spool gave another routing than the model had"
    assert all(a != b for a, b in zip(result.replayed, result.other, strict=True)), "the routing was not used"
    assert result.replayed[-1] != result.own[-1], "training moved no router"
    print("the loss with replay is that of the original routing, bit for bit, and no other routing gives it")
    return result


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="spool-replay-"))
