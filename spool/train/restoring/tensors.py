"""From numpy arrays to what a trainer takes: narrow bytes travel to the device, and are widened there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from spool.arguments import one_of, refused
from spool.errors import InputError
from spool.model.fields import numpy_dtype

if TYPE_CHECKING:
    from numpy.typing import NDArray

Framework = Literal["numpy", "torch"]
Convert = Callable[["NDArray[Any]", str], Any]
"""Makes a fresh or owned array one of a named dtype, on the device."""


def converter(framework: object, device: Any) -> Convert:
    """Return what makes arrays those of a framework.

    Raises:
        InputError: it is unknown or not installed, or numpy is to be on a device.
    """
    one_of("framework", framework, get_args(Framework))
    if framework == "numpy":
        if device is not None:
            raise refused("device", "None where framework='numpy'", device)
        return _as_numpy
    torch = import_torch()
    try:
        place = torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError) as error:
        raise refused("device", "a device that torch knows, as 'cuda:0'", device) from error
    return lambda array, dtype: tensor(array, dtype, place)


def import_torch() -> Any:
    """Return the module torch.

    Raises:
        InputError: it is not installed.
    """
    try:
        import torch
    except ImportError as error:
        raise InputError(
            "framework='torch' needs torch: pip install 'spool-store[torch]', or framework='numpy'"
        ) from error
    return torch


def _as_numpy(array: NDArray[Any], dtype: str) -> NDArray[Any]:
    return np.ascontiguousarray(array.astype(numpy_dtype(dtype), copy=False))


def tensor(array: NDArray[Any], dtype: str, device: Any) -> Any:
    """Return a contiguous tensor on ``device``: the bytes of ``array`` are copied there as they are, then widened.

    Args:
        array: writable; a tensor on the CPU of the same dtype shares its memory.
        dtype: name of the dtype to widen to, one that holds every value.
        device: of torch.
    """
    return same_memory(np.ascontiguousarray(array)).to(device).to(getattr(import_torch(), dtype))


def same_memory(array: NDArray[Any]) -> Any:
    """Return the tensor on the CPU that shares the memory of a writable array; bfloat16 of ml_dtypes is torch's."""
    torch = import_torch()
    if array.dtype == numpy_dtype("bfloat16"):
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def jagged(values: Any, offsets: Sequence[int]) -> Any:
    """Return sequences of any length as torch's nested tensor of jagged layout, without a copy.

    Args:
        values: tensor ``[sum of lengths, ...]``.
        offsets: where each begins, and where the last ends.
    """
    torch = import_torch()
    return torch.nested.nested_tensor_from_jagged(values, torch.as_tensor(offsets, device=values.device))
