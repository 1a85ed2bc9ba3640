"""Multimodal units: each encoded once a mini-batch, against encoding them in every micro-batch that uses them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from spool.model.refs import SegmentRef, Unit
from spool.train import EncodeOnce, EncodeStats, Mesh, encode_once, plan, plan_units
from tools.bench.harness import Row, pairs, resident_bytes

N_UNITS, N_USES, N_ROWS = 8, 8, 256
WIDTH, HIDDEN, PATCH, N_TEXT = 128, 512, 588, 64


class Encoder(torch.nn.Module):
    """Four layers; knows how many units it encoded and, where ``weighing``, the most memory that it saw."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [PATCH, HIDDEN, HIDDEN, HIDDEN, WIDTH]
        self.layers = torch.nn.ModuleList(map(torch.nn.Linear, sizes, sizes[1:]))
        self.n_units = self.peak_bytes = 0
        self.weighing = False

    def forward(self, units: list[Any]) -> Any:
        self.n_units += len(units)
        rows = torch.cat(units)
        for layer in self.layers:
            rows = torch.nn.functional.gelu(layer(rows))
            if self.weighing:
                self.peak_bytes = max(self.peak_bytes, _in_use())
        return rows


def encoding(*, runs: int) -> Iterator[Row]:
    """On one thread, so that what else the machine does weighs alike on both ways."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield from _encoding(runs)
    finally:
        torch.set_num_threads(n_threads)


def _encoding(runs: int) -> Iterator[Row]:
    """Groups of eight rollouts from one image each, in eight micro-batches."""
    torch.manual_seed(0)
    refs = [_segment(number // N_USES, number) for number in range(N_UNITS * N_USES)]
    planned = plan(refs, Mesh(), n_micro=N_USES)
    units = plan_units(refs, planned)
    arrays = {unit.key: torch.randn(N_ROWS, PATCH) for unit in units.index.units}
    shares, needs = planned.rank(0).shares, units.needs(0)
    encoder, backbone = Encoder(), torch.nn.Linear(WIDTH, WIDTH)

    def load(keys: Any) -> list[Any]:
        return [arrays[key] for key in keys]

    def train(micro: int, rows: Any, features: Any) -> None:
        embeds = torch.zeros(shares[micro].n_rows, WIDTH).index_copy(0, rows, features)
        (backbone(embeds) ** 2).mean().backward()

    def plain() -> None:
        for micro, needed in enumerate(needs):
            unique = sorted({rows.unit for rows in needed})
            parts = encoder(load(units.index.units[unit].key for unit in unique)).split(N_ROWS)
            by_unit = dict(zip(unique, parts, strict=True))
            where = np.concatenate([np.arange(rows.to, rows.to + N_ROWS) for rows in needed])
            train(micro, torch.from_numpy(where), torch.cat([by_unit[rows.unit] for rows in needed]))

    def ours(**options: Any) -> EncodeStats:
        once: EncodeOnce = encode_once(encoder, units, load=load, **options)
        for micro in range(len(shares)):
            train(micro, once.rows(micro), once.features(micro))
        once.backward()
        return once.stats

    encoded, counted = _counted(encoder, plain), _counted(encoder, ours)
    yield Row("encode_once_units", f"{counted} units encoded", f"{encoded} in every micro-batch", encoded / counted, 4)
    mine, theirs, ratio = pairs(ours, plain, runs=runs)
    yield Row("encode_once_vs_plain", f"{mine * 1e3:.0f} ms a mini-batch", f"{theirs * 1e3:.0f} ms", ratio, 2)
    recomputing = {"recompute": True, "max_rows": 2 * N_ROWS}
    mine, theirs, ratio = pairs(lambda: ours(**recomputing), plain, runs=runs)
    yield Row(
        "encode_once_recompute_vs_plain", f"{mine * 1e3:.0f} ms a mini-batch", f"{theirs * 1e3:.0f} ms", ratio, 1.5
    )
    held, rows_bytes = ours().peak_bytes, units.index.n_rows * WIDTH * 4
    yield Row(
        "encode_once_held", f"{held / 1e6:.1f} MB held at most", f"{rows_bytes / 1e6:.1f} MB of unique features, three "
        "times", held / rows_bytes, 3, at_least=False,
    )  # fmt: skip
    kept, again = _growth(encoder, ours), _growth(encoder, lambda: ours(**recomputing))
    yield Row(
        "encode_once_recompute_memory", f"{again / 1e6:.0f} MB of activations", f"{kept / 1e6:.0f} MB kept",
        again / kept, 0.5, at_least=False,
    )  # fmt: skip


def _segment(image: int, number: int) -> SegmentRef:
    return SegmentRef(
        spool_id="bench", session_id=f"s{number}", group_id=f"p{image}", view="lineage", n_tokens=N_TEXT,
        n_rows=N_TEXT + N_ROWS - 1, units=(Unit(f"image-{image}", 4, N_ROWS),),
    )  # fmt: skip


def _counted(encoder: Encoder, work: Any) -> int:
    encoder.n_units = 0
    work()
    return encoder.n_units


def _growth(encoder: Encoder, work: Any) -> int:
    before, encoder.peak_bytes, encoder.weighing = _in_use(), 0, True
    work()
    encoder.weighing = False
    return encoder.peak_bytes - before


def _in_use() -> int:
    ctypes.CDLL(None).malloc_trim(0)  # what others freed is in the heap still, and would be counted
    return resident_bytes()
