"""Memory that is used again: never while anything refers to it, and never without bound."""

from __future__ import annotations

import gc
import os
import signal
import threading

import numpy as np
import pytest

from spool.read.memory import SMALLEST_BYTES, Memory

N = SMALLEST_BYTES // 4
INT32 = np.dtype(np.int32)


def address(array):
    return array.__array_interface__["data"][0]


def test_small_arrays_are_plain():
    array = Memory(256 << 20).empty((3, 4), INT32)
    assert array.shape == (3, 4) and array.base is None


def test_memory_is_used_again_once_nothing_refers_to_it():
    memory = Memory(256 << 20)
    first = memory.empty((N, 1), INT32)
    assert type(first) is np.ndarray and first.flags.c_contiguous and first.flags.writeable
    at, view = address(first), first[10:20].reshape(-1)[::2]
    view[:] = 7
    del first
    gc.collect()
    other = memory.empty((N,), INT32)
    assert address(other) != at
    other[:] = 1
    assert view.tolist() == [7] * 5
    del view
    gc.collect()
    assert address(memory.empty((N,), INT32)) == at


@pytest.mark.parametrize("keep", [lambda a: a.data, lambda a: a.view(np.uint8)[5:], lambda a: np.asarray(a).T])
def test_whatever_is_made_of_an_array_keeps_its_memory(keep):
    memory = Memory(256 << 20)
    array = memory.empty((N, 2), INT32)
    at, kept = address(array), keep(array)
    del array
    gc.collect()
    assert address(memory.empty((N, 2), INT32)) != at
    del kept


def test_only_the_last_user_gives_memory_back():
    memory = Memory(256 << 20)
    array = memory.empty((N, 2), INT32)
    for view in (array.base[:4], array.base.view(), array.base.copy()):
        del view
    gc.collect()
    assert memory.idle_bytes == 0
    del array
    gc.collect()
    assert memory.idle_bytes == 2 * SMALLEST_BYTES


def test_a_torch_tensor_keeps_its_memory():
    import torch

    memory = Memory(256 << 20)
    array = memory.empty((N,), INT32)
    at, tensor = address(array), torch.from_numpy(array)[3:]
    tensor.fill_(5)
    del array
    gc.collect()
    other = memory.empty((N,), INT32)
    other[:] = 0
    assert address(other) != at and int(tensor.sum()) == 5 * (N - 3)


def test_what_is_kept_is_bounded_and_can_be_let_go_of():
    memory = Memory(idle_bytes=3 * SMALLEST_BYTES)
    arrays = [memory.empty((N,), INT32) for _ in range(10)]
    addresses = {address(array) for array in arrays}
    del arrays
    gc.collect()
    again = [memory.empty((N,), INT32) for _ in range(10)]
    assert sum(address(array) in addresses for array in again) >= 3
    assert memory.idle_bytes == 0
    del again
    gc.collect()
    assert memory.idle_bytes == 3 * SMALLEST_BYTES
    memory.clear()
    assert memory.idle_bytes == 0


def test_a_much_larger_block_is_not_wasted_on_a_small_array():
    memory = Memory(256 << 20)
    large = memory.empty((4 * N,), INT32)
    at = address(large)
    del large
    gc.collect()
    small = memory.empty((N,), INT32)
    assert address(small) != at


def test_many_threads_and_a_fork_never_share():
    memory, failures = Memory(256 << 20), []

    def work(number):
        for _ in range(200):
            array = memory.empty((N,), INT32)
            array[:8] = number
            if array[:8].tolist() != [number] * 8:
                failures.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    mine = memory.empty((N,), INT32)
    mine[:] = 3
    pid = os.fork()
    if pid == 0:
        mine[:] = 9
        os._exit(0)
    os.waitpid(pid, 0)
    assert int(mine.max()) == 3


def test_a_fork_while_another_thread_is_at_it_leaves_the_child_a_free_lock():
    memory = Memory(256 << 20)
    kept = memory.empty((N,), INT32)
    del kept
    gc.collect()
    with memory._lock:  # as a thread that the child does not have
        assert memory.empty((N,), INT32).nbytes == SMALLEST_BYTES, "nobody waits for it here either"
        pid = os.fork()
        if pid == 0:
            signal.alarm(10)
            fresh = memory.empty((N,), INT32)
            del fresh
            os._exit(memory.idle_bytes != SMALLEST_BYTES)
    assert os.waitpid(pid, 0)[1] == 0
