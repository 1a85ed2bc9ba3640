"""From mapped memory to what a rank computes with: as it is, as tensors, or on a device, by way of pinned memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray

from spool.arguments import refused
from spool.train.restoring.tensors import Framework, converter, import_torch, same_memory

Arrays = dict[str, "NDArray[Any]"]
Stage = Callable[[Arrays], Callable[[], dict[str, Any]]]
"""Called on the feed's thread; what it returns is called on the consumer's, and gives the arrays."""


def stager(framework: Framework, device: Any) -> Stage:
    """Return how the arrays of a micro-batch are brought to where they are computed with.

    Raises:
        InputError: the framework is unknown or not installed, or there is no such device.
    """
    converter(framework, device)  # refuses what is none
    if framework == "numpy":
        return lambda arrays: lambda: dict(arrays)
    torch = import_torch()
    place = torch.device("cpu" if device is None else device)
    try:
        torch.empty(1, device=place)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise refused("device", f"one that this torch can use ({error})", device) from error
    if place.type == "cpu":
        return lambda arrays: lambda: {name: same_memory(array) for name, array in arrays.items()}
    return _to_cuda(torch, place) if place.type == "cuda" else _to_device(place)


def _to_device(place: Any) -> Stage:
    def stage(arrays: Arrays) -> Callable[[], dict[str, Any]]:
        moved = {name: same_memory(array).to(place) for name, array in arrays.items()}
        return lambda: moved

    return stage


def _to_cuda(torch: Any, place: Any) -> Stage:
    """Copy on a stream of its own, while others compute; the consumer's stream waits for the copy, and nobody else."""
    stream = torch.cuda.Stream(place)

    def stage(arrays: Arrays) -> Callable[[], dict[str, Any]]:
        with torch.cuda.stream(stream):
            moved = {
                name: same_memory(array).pin_memory().to(place, non_blocking=True) for name, array in arrays.items()
            }
            copied = stream.record_event()

        def take() -> dict[str, Any]:
            current = torch.cuda.current_stream(place)
            current.wait_event(copied)
            for tensor in moved.values():
                tensor.record_stream(current)
            return moved

        return take

    return stage
