"""One encoder rank at work: its units in batches, each encoded once, and one backward for all of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from spool.errors import InputError, PayloadError
from spool.train.restoring.tensors import same_memory
from spool.train.units.index import IndexedUnit
from spool.train.units.plan import UnitPlan, UnitRun

Load = Callable[[Sequence[str]], Sequence[Any]]
Collate = Callable[[list[Any]], Any]


class Meter:
    """Counts the bytes of tensors that are held.

    Attributes:
        held_bytes: now.
        peak_bytes: the most there were.
    """

    def __init__(self) -> None:
        self.held_bytes = self.peak_bytes = 0

    def take(self, tensor: Any) -> Any:
        """Count a tensor from now on; return it."""
        self.held_bytes += tensor.nbytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        return tensor

    def drop(self, tensor: Any) -> None:
        """Count it no more."""
        self.held_bytes -= tensor.nbytes


class UnitEncoder:
    """The units of one process.

    Args:
        encoder: what encodes a batch: ``[rows of all its units, width]``, or one such tensor for each unit.
        units: the plan.
        process: this one.
        load: arrays for keys.
        collate: what the encoder gets for a list of arrays; None for a list of tensors on ``device``.
        max_rows: most rows of a batch; None for all units in one.
        recompute: keep no activations; each batch is loaded and encoded again in `backward`.
        device: where arrays go; None for memory.
        meter: counts outputs.

    Attributes:
        outputs: of each batch, with its graph.
        calls: of the encoder so far.
        loaded: units loaded so far.
        n_rows: of all units here.
    """

    def __init__(
        self, encoder: Callable[[Any], Any] | None, units: UnitPlan, process: int, *, load: Load,
        collate: Collate | None, max_rows: int | None, recompute: bool, device: Any, meter: Meter,
    ) -> None:  # fmt: skip
        numbers = units.units_of(process)
        self._units = [units.index.units[number] for number in numbers]
        begins = list(accumulate((unit.n_rows for unit in self._units), initial=0))
        self._begin = dict(zip(numbers, begins, strict=False))
        self._encoder, self._load, self._max_rows, self._recompute = encoder, load, max_rows, recompute
        self._collate = collate or (lambda arrays: [_tensor(array, device) for array in arrays])
        self._meter = meter
        self._ends: list[int] = []
        self.outputs: deque[Any] = deque()
        self.calls = self.loaded = 0
        self.n_rows = begins[-1]

    @property
    def n_units(self) -> int:
        """Units of this process."""
        return len(self._units)

    def encode(self) -> None:
        """Encode all units.

        Raises:
            InputError: this process has units and no encoder, or ``load`` gives another number of arrays.
            PayloadError: the encoder gives another number of rows than a unit has, or of another width; names it.
        """
        if self._units and self._encoder is None:
            raise InputError(
                f"this process is to encode {self.n_units} units and has no encoder: pass it, or name the processes "
                "that have it with plan_units(encoders=)"
            )
        for batch in batches_of(self._units, self._max_rows):
            out = checkpoint(self._run, batch, use_reentrant=False) if self._recompute else self._run(batch)
            self.outputs.append(self._meter.take(out))
            self._ends.append(len(out) + (self._ends[-1] if self._ends else 0))
        if len({(out.shape[1], out.dtype, out.device, out.requires_grad) for out in self.outputs}) > 1:
            raise PayloadError(
                f"the encoder gives features of different kinds: {sorted({_kind(out) for out in self.outputs})}; "
                "they must have one width and one dtype"
            )

    def rows(self, runs: Sequence[UnitRun]) -> Any:
        """Return the features of runs, one behind the other: a detached copy."""
        return torch.cat([self._run_of(run) for run in runs])

    def index(self, runs: Sequence[UnitRun]) -> Any:
        """Return int64: which of this process's rows the runs are."""
        return torch.from_numpy(ranges((self._begin[run.unit] + run.start, run.n_rows) for run in runs))

    def backward(self, gradient: Any) -> None:
        """Run backward, batch by batch, and let go of each one's graph.

        Args:
            gradient: ``[n_rows, width]`` of all units in order.
        """
        at = 0
        while self.outputs:
            out = self.outputs.popleft()
            torch.autograd.backward(out, gradient[at : at + len(out)].to(out))
            at += len(out)
            self._meter.drop(out)

    def release(self) -> None:
        """Let go of all outputs and their graphs."""
        while self.outputs:
            self._meter.drop(self.outputs.popleft())

    def _run_of(self, run: UnitRun) -> Any:
        start = self._begin[run.unit] + run.start
        number = int(np.searchsorted(self._ends, start, side="right"))
        out = self.outputs[number]
        at = start - (self._ends[number] - len(out))
        return out.detach()[at : at + run.n_rows]

    def _run(self, units: Sequence[IndexedUnit]) -> Any:
        keys = [unit.key for unit in units]
        found = self._load(keys)
        if isinstance(found, Mapping | str | bytes) or not isinstance(found, Iterable):
            what = "a mapping" if isinstance(found, Mapping) else type(found).__name__
            raise InputError(f"load() gave {what}: it must give a list of arrays, one for each key, in order")
        arrays = list(found)
        if len(arrays) != len(keys):
            raise InputError(
                f"load() gave {len(arrays)} arrays for {len(keys)} keys: it must give one for each, in order"
            )
        self.loaded += len(keys)
        return self._checked(self._call(arrays), units, arrays)

    def _call(self, arrays: list[Any]) -> Any:
        assert self._encoder is not None
        self.calls += 1
        return self._encoder(self._collate(arrays))

    def _checked(self, found: Any, units: Sequence[IndexedUnit], arrays: list[Any]) -> Any:
        if not isinstance(found, torch.Tensor | Sequence):
            raise PayloadError(f"the encoder gives {type(found).__name__}: it must give a tensor, or one for each unit")
        if not isinstance(found, torch.Tensor):
            return torch.cat(_each_checked(list(found), units))
        expected = sum(unit.n_rows for unit in units)
        if found.ndim == 2 and len(found) == expected:
            return found
        with torch.no_grad():  # which unit it is shows only where each is alone
            _each_checked([self._call([array]) for array in arrays], units)
        keys = ", ".join(unit.key for unit in units)
        raise PayloadError(
            f"the encoder gives {list(found.shape)} for the units {keys:.500}; it must give [{expected}, width], the "
            "rows of each behind those of the one before",
            expected=expected, got=list(found.shape),
        )  # fmt: skip


def batches_of(units: Sequence[IndexedUnit], max_rows: int | None) -> Iterator[list[IndexedUnit]]:
    """Yield units in batches of at most ``max_rows`` rows, in order; one with more rows is alone."""
    batch: list[IndexedUnit] = []
    size = 0
    for unit in units:
        if batch and max_rows is not None and size + unit.n_rows > max_rows:
            yield batch
            batch, size = [], 0
        batch.append(unit)
        size += unit.n_rows
    if batch:
        yield batch


def ranges(parts: Iterator[tuple[int, int]]) -> np.ndarray:
    """Return int64: the numbers from each ``(start, n)``, one part behind the other."""
    found = [np.arange(start, start + n) for start, n in parts]
    return np.concatenate(found) if found else np.zeros(0, np.int64)


def _each_checked(found: list[Any], units: Sequence[IndexedUnit]) -> list[Any]:
    if len(found) != len(units):
        raise PayloadError(f"the encoder gives {len(found)} tensors for {len(units)} units: it must give one for each")
    for part, unit in zip(found, units, strict=True):
        if part.ndim != 2 or len(part) != unit.n_rows:
            raise PayloadError(
                f"the encoder gives {list(part.shape)} for unit {unit.key!r}, which stands for {unit.n_rows} rows in "
                f"its references: it must give [{unit.n_rows}, width]; process it as it was for the rollout",
                unit=unit.key, expected=unit.n_rows, got=list(part.shape),
            )  # fmt: skip
    return found


def _kind(out: Any) -> str:
    grad = "with" if out.requires_grad else "without"
    return f"width {out.shape[1]}, {out.dtype} on {out.device}, {grad} gradient"


def _tensor(array: Any, device: Any) -> Any:
    if isinstance(array, torch.Tensor):
        return array.to(device)
    if not isinstance(array, np.ndarray | np.generic):
        raise InputError(f"load() gave {type(array).__name__} for a key: it must give numpy arrays or tensors")
    native = np.asarray(array, array.dtype.newbyteorder("="))
    return same_memory(np.require(native, requirements=["C", "W"])).to(device)
