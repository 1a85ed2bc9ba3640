"""Batches as torch's DataLoader knows them; the one module of replay that needs torch to be imported."""

from __future__ import annotations

from typing import Any

from torch.utils.data import IterableDataset

from spool.train.stream import Batches


class TorchBatches(Batches, IterableDataset[Any]):
    """`Batches` of tensors, for ``DataLoader(batches, batch_size=None)``."""
