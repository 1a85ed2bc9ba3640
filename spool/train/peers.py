"""What the processes of a trainer tell each other: a few numbers of each, and rows between pairs. Bounded in time.

Point-to-point sends and receives, so that it works with gloo as with NCCL, and only what is needed travels.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from spool.errors import InputError, RankError


class Peers:
    """The processes of a group; of one process alone, which then needs no group.

    Attributes:
        me: number of this process in the group.
        size: processes of the group.
        device: where tensors lie that travel.
        sent_bytes: so far, to other processes.
        received_bytes: so far, from other processes.
    """

    def __init__(self, group: Any, *, alone: bool, n_needed: int, timeout_s: float) -> None:
        self._group: Any = None if alone else _joined(group, n_needed)
        self._timeout_s = timeout_s
        self.me = 0 if alone else dist.get_rank(self._group)
        self.size = 1 if alone else dist.get_world_size(self._group)
        self.device = torch.device("cpu") if alone else _device(self._group)
        self.sent_bytes = self.received_bytes = 0

    def gather(self, mine: Sequence[int]) -> list[list[int]]:
        """Return the numbers of every process, by process; all of them call this with as many.

        Raises:
            RankError: one did not answer in time, or its connection broke.
        """
        if self.size == 1:
            return [list(mine)]
        row = torch.tensor(mine, dtype=torch.int64, device=self.device)
        rows = [torch.empty_like(row) for _ in range(self.size)]
        with self._named("all ranks to say that they are ready"):
            self._wait([dist.all_gather(rows, row, group=self._group, async_op=True)])
        return [found.tolist() for found in rows]

    def exchange(self, sends: Mapping[int, Any], receives: Mapping[int, Any]) -> None:
        """Send tensors to other processes, and fill those that they send; at most one for each pair and direction.

        Args:
            sends: by process, contiguous, on `device`.
            receives: by process, contiguous, on `device`, of the size that is sent there.

        Raises:
            RankError: one did not answer in time, or its connection broke.
        """
        ops = [self._op(dist.isend, tensor, peer) for peer, tensor in sorted(sends.items())]
        ops += [self._op(dist.irecv, tensor, peer) for peer, tensor in sorted(receives.items())]
        if not ops:
            return
        with self._named(f"ranks {sorted({*sends, *receives})} to take or send features or gradients"):
            self._wait(dist.batch_isend_irecv(ops))
        self.sent_bytes += sum(tensor.nbytes for tensor in sends.values())
        self.received_bytes += sum(tensor.nbytes for tensor in receives.values())

    def _op(self, op: Any, tensor: Any, peer: int) -> Any:
        return dist.P2POp(op, tensor, dist.get_global_rank(self._group, peer), self._group)

    def _wait(self, works: Sequence[Any]) -> None:
        deadline = time.monotonic() + self._timeout_s
        for work in works:
            work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RankError(
                f"rank {self.me} of {self.size} waited up to {self._timeout_s:g} s for {what}: {error}. One of them "
                "died, or is slower than that: look at its log, and restart the job or raise timeout_s",
                rank=self.me,
            ) from error


def _joined(group: Any, n_needed: int) -> Any:
    if not dist.is_available() or not dist.is_initialized():
        raise InputError(
            f"this plan is for {n_needed} processes: call torch.distributed.init_process_group before, or plan with "
            "Mesh() and encoders=1 for one process"
        )
    found = dist.group.WORLD if group is None else group
    if dist.get_rank(found) < 0:
        raise InputError("this process is not in group=: call encode_once in the processes of the group only")
    size = dist.get_world_size(found)
    if size < n_needed:
        raise InputError(
            f"this plan names process {n_needed - 1}, but the group has {size} processes: start that many, or name "
            "others with encoders= and backbone=",
            needed=n_needed, got=size,
        )  # fmt: skip
    return found


def _device(group: Any) -> Any:
    """Return where tensors must lie for a group: NCCL sends from the current GPU only, gloo from memory only."""
    nccl = "nccl" in str(dist.get_backend(group)) and torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
