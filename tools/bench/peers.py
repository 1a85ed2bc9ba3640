"""What Spool is measured against: TransferQueue, the bare disk, zarr-python, tensorstore."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from spool.stores.local import aligned_buffer

BLOCK_BYTES = 1 << 20


class TransferQueue:
    """TransferQueue's default backend, over Ray, in the same machine."""

    def __init__(self) -> None:
        import ray

        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        import transfer_queue

        self._tq = transfer_queue
        self._tq.init()
        self._n = 0

    def put(self, fields: dict[str, np.ndarray]) -> str:
        """Put one step; return its key."""
        import torch

        key = self._key()
        self._tq.kv_put(key=key, partition_id="bench", fields={k: torch.from_numpy(v) for k, v in fields.items()})
        return key

    def put_batch(self, steps: dict[str, np.ndarray]) -> list[str]:
        """Put steps of equal shape, stacked along axis 0, in one call; return their keys."""
        import torch
        from tensordict import TensorDict

        n = len(next(iter(steps.values())))
        keys = [self._key() for _ in range(n)]
        fields = TensorDict({k: torch.from_numpy(v) for k, v in steps.items()}, batch_size=n)
        self._tq.kv_batch_put(keys=keys, partition_id="bench", fields=fields)
        return keys

    def get(self, keys: list[str]) -> Any:
        """Get steps by key."""
        return self._tq.kv_batch_get(keys=keys, partition_id="bench")

    def clear(self, keys: list[str]) -> None:
        self._tq.kv_clear(keys=keys, partition_id="bench")

    def _key(self) -> str:
        self._n += 1
        return f"k{self._n}"

    def close(self) -> None:
        import ray

        self._tq.close()
        ray.shutdown()


def write_direct(path: str, n_bytes: int) -> None:
    """Write ``n_bytes`` to a new file by a bare loop of O_DIRECT writes of 1 MiB, then remove it."""
    block = aligned_buffer(BLOCK_BYTES)
    block[:] = b"\1" * BLOCK_BYTES
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_DIRECT)
    try:
        for offset in range(0, n_bytes, BLOCK_BYTES):
            os.pwrite(fd, block, offset)
    finally:
        os.close(fd)
        os.unlink(path)


class BareReader:
    """``preadv`` of known byte ranges and one numpy call to widen them: the least that a read can cost."""

    def __init__(self, ranges: list[Any], row_shape: tuple[int, ...], dtype: str) -> None:
        self._row_shape, self._dtype = row_shape, np.dtype(dtype)
        self._files = {found.file: os.open(found.file, os.O_RDONLY | os.O_DIRECT) for found in ranges}
        self._ranges = ranges
        self._buffer = aligned_buffer(max(found.length for found in ranges) + 8192)

    def read(self) -> list[np.ndarray]:
        out = []
        for found in self._ranges:
            start = found.offset & ~4095
            size = (found.offset + found.length - start + 4095) & ~4095
            os.preadv(self._files[found.file], [self._buffer[:size]], start)
            low = found.offset - start
            stored = np.frombuffer(self._buffer, self._dtype, found.length // self._dtype.itemsize, low)
            wide = np.empty(stored.size, np.int32)
            np.copyto(wide, stored)
            out.append(wide.reshape(-1, *self._row_shape))
        return out

    def close(self) -> None:
        for fd in self._files.values():
            os.close(fd)
