"""A small vision-language model for the tests of encoding: its plain way, and the way with `encode_once`.

Importable by spawned processes. Everything is float64, so that both ways must agree to the last few bits.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from spool.model.refs import SegmentRef, Unit
from spool.train import Place

DIM, HIDDEN, PATCH = 6, 8, 5
torch.set_num_threads(1)


def segment(name, n_tokens, units=(), *, group=None, index=0):
    """A reference of n_tokens tokens with units (key, position, n_rows)."""
    return SegmentRef(
        spool_id="spool", session_id=name, group_id=group, sample_index=index, view="lineage", n_tokens=n_tokens,
        n_rows=n_tokens + sum(n - 1 for *_, n in units), units=tuple(Unit(*unit) for unit in units),
    )  # fmt: skip


class Store:
    """Arrays by key, each made of its key and rows; counts what is loaded."""

    def __init__(self, refs):
        self.loaded = []
        self._rows = {unit.key: unit.n_rows for ref in refs for unit in ref.units}

    def load(self, keys):
        self.loaded += keys
        return [self.array(key) for key in keys]

    def array(self, key):
        seed = int.from_bytes(key.encode(), "little") % 2**32
        return np.random.default_rng(seed).normal(size=(self._rows[key], PATCH))


class Encoder(torch.nn.Module):
    """Attends inside each unit, so that no row of a unit can be had without the others."""

    def __init__(self):
        super().__init__()
        made = torch.Generator().manual_seed(1)
        self.inner = torch.nn.Parameter(torch.randn(PATCH, HIDDEN, generator=made, dtype=torch.float64))
        self.outer = torch.nn.Parameter(torch.randn(HIDDEN, DIM, generator=made, dtype=torch.float64))
        self.calls = 0

    def forward(self, units):
        self.calls += 1
        return torch.cat([self.one(unit) for unit in units])

    def one(self, unit):
        hidden = torch.tanh(unit @ self.inner)
        return torch.softmax(hidden @ hidden.T, -1) @ hidden @ self.outer


class CopyToTensorRanks(torch.autograd.Function):
    """Megatron's entry to a column-parallel layer: nothing forward, all-reduce backward."""

    @staticmethod
    def forward(ctx, rows, group):
        ctx.group = group
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx, gradient):
        whole = gradient.contiguous().clone()
        dist.all_reduce(whole, group=ctx.group)
        return whole, None


class Backbone(torch.nn.Module):
    """Embeddings and one column-parallel layer, of which a TP rank has every tp-th column."""

    def __init__(self, tp=1, rank=0):
        super().__init__()
        made = torch.Generator().manual_seed(2)
        self.table = torch.nn.Parameter(torch.randn(40, DIM, generator=made, dtype=torch.float64))
        columns = torch.randn(DIM, 12, generator=made, dtype=torch.float64)
        self.columns = torch.nn.Parameter(columns[:, rank::tp].clone())

    def embed(self, share):
        return self.table[torch.from_numpy(share.position_ids() % 40)]

    def loss(self, rows, embeds, enter):
        """Of the real rows; its sum over CP and TP ranks is that of the whole."""
        return (torch.tanh(enter(embeds) @ self.columns)[rows] ** 2).sum()


def real_rows(share):
    return torch.cat(
        [torch.arange(piece.to, piece.to + piece.n_rows) for piece in share.pieces] or [torch.empty(0, dtype=int)]
    )


def plain(refs, planned, encoder):
    """Encode in every micro-batch, autograd through all; one process for all places. Return the backbone."""
    store, backbone = Store(refs), Backbone()
    mesh = planned.mesh
    for dp in range(mesh.dp):
        for cp in range(mesh.cp):
            for share in planned.rank(Place(dp=dp, cp=cp)).shares:
                embeds = backbone.embed(share).clone()
                for piece in share.pieces:
                    features = of_piece(piece, refs[piece.item], encoder, store)
                    for at, rows in features:
                        embeds = embeds.index_copy(0, torch.arange(at, at + len(rows)), rows)
                backbone.loss(real_rows(share), embeds, lambda rows: rows).backward()
    return backbone


def of_piece(piece, ref, encoder, store):
    """Row by row, as slowly and plainly as it goes: where each row of a unit in a piece goes, and its feature."""
    row = 0
    units = {unit.position: unit for unit in ref.units}
    for token in range(ref.n_tokens):
        unit = units.get(token)
        n = unit.n_rows if unit else 1
        inside = [i for i in range(n) if piece.row <= row + i < piece.row + piece.n_rows]
        if unit and inside:
            (features,) = [encoder([torch.from_numpy(store.array(unit.key))])]
            yield piece.to + row + inside[0] - piece.row, features[inside[0] : inside[-1] + 1]
        row += n


def train(once, planned, place, backbone, enter=lambda rows: rows):
    """All micro-batches of a rank: the loop of a user."""
    for micro, share in enumerate(planned.rank(place).shares):
        embeds = backbone.embed(share)
        embeds = embeds.index_copy(0, once.rows(micro), once.features(micro))
        backbone.loss(real_rows(share), embeds, enter).backward()


def assert_close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
