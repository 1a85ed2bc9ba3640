"""What every store of a cold root must do, as tests to inherit: needs pytest.

::

    class TestMyStore(ObjectsConformance):
        @pytest.fixture
        def open_store(self):
            return lambda: MyStore(...)      # each call another handle of the same, at first empty, root
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from spool.errors import InputError, IntegrityError, NotFoundError
from spool.stores.objects import PIECE_BYTES, ObjectInfo, Objects

Open = Callable[[], Objects]


class ObjectsConformance:
    """Tests of `spool.stores.objects.Objects`."""

    @pytest.fixture
    def open_store(self) -> Open:
        """Return what opens the store under test."""
        raise NotImplementedError

    @pytest.fixture
    def store(self, open_store: Open) -> Iterator[Objects]:
        """An open, empty store."""
        store = open_store()
        yield store
        store.close()

    @pytest.mark.parametrize("size", [0, 1, 65_537, PIECE_BYTES, 2 * PIECE_BYTES + 3])
    def test_what_was_put_is_read_back(self, store: Objects, open_store: Open, size: int) -> None:
        """Whole and in part, by whoever looks."""
        data = random.Random(size).randbytes(size)  # noqa: S311
        store.put("a/b/c", data)
        other = open_store()
        for reader in (store, other):
            assert reader.get("a/b/c") == data
            info = reader.info("a/b/c")
            assert info is not None
            assert (info.key, info.size) == ("a/b/c", size)
            assert abs(info.modified - time.time()) < 600
            ranges = [(size // 3, size // 2), (max(size - 1, 0), size), (0, size), (size, size)]
            got = reader.get_ranges([("a/b/c", *one) for one in ranges])
            assert got == [data[slice(*one)] for one in ranges]
        other.close()

    def test_buffers_can_be_put(self, store: Objects) -> None:
        """Bytes, a bytearray and a view of either."""
        for data in (b"abc", bytearray(b"abc"), memoryview(b"xabcx")[1:4], memoryview(bytearray(b"abc"))):
            store.put("k", data)
            assert store.get("k") == b"abc"

    def test_an_object_is_created_once(self, store: Objects) -> None:
        """What is there is left alone, where the store can; whether it can is tried out, and leaves nothing behind."""
        exclusive = store.creates_exclusively()
        assert store.list("") == []
        assert store.create("made/k", b"first")
        assert store.get("made/k") == b"first"
        assert store.create("made/k", b"second") != exclusive
        assert store.get("made/k") == (b"first" if exclusive else b"second")

    def test_absent_objects(self, store: Objects) -> None:
        """They are said to be absent, and deleting them is fine."""
        store.put("there/x", b"x")
        for key in ("nothing", "there", "there/x/y", "nothing/at/all"):
            assert store.info(key) is None
            with pytest.raises(NotFoundError, match=key):
                store.get(key)
            with pytest.raises(NotFoundError, match=key):
                store.get_range(key, 0, 1)
        store.delete(["nothing", "there", "nothing/at/all"])
        assert store.get("there/x") == b"x"

    def test_ranges_are_exact(self, store: Objects) -> None:
        """A range is all there, or an error that says what is missing; an empty one is empty, even of nothing."""
        store.put("k", bytes(range(20)))
        store.put("empty", b"")
        assert store.get_ranges([("k", 10, 20), ("k", 0, 1), ("k", 5, 5), ("empty", 0, 0), ("nothing", 7, 7)]) == [
            bytes(range(10, 20)), b"\0", b"", b"", b"",
        ]  # fmt: skip
        for key, start, stop, got in (("k", 15, 25, 5), ("k", 20, 21, 0), ("k", 40, 50, 0), ("empty", 0, 3, 0)):
            with pytest.raises(IntegrityError, match=key) as caught:
                store.get_range(key, start, stop)
            details = caught.value.details
            assert (details["key"], details["range"]) == (key, [start, stop])
            assert (details["got"], details["expected"]) == (got, stop - start)
        for start, stop in ((5, 4), (-1, 3)):
            with pytest.raises(InputError):
                store.get_range("k", start, stop)

    def test_many_ranges_come_in_order(self, store: Objects) -> None:
        """More ranges than there are connections; an error among them is raised."""
        data = random.Random(1).randbytes(5000)  # noqa: S311
        store.put("k", data)
        wanted = [("k", i * 7 % 4000, i * 7 % 4000 + i) for i in range(200)]
        assert store.get_ranges(wanted) == [data[start:stop] for _, start, stop in wanted]
        assert store.get_ranges([]) == []
        with pytest.raises(NotFoundError, match="nothing"):
            store.get_ranges([*wanted[:50], ("nothing", 0, 9), *wanted[50:]])

    def test_a_put_replaces_the_whole_object(self, store: Objects) -> None:
        """A reader sees one version or the other, never a mixture or a part."""
        versions = [bytes([i]) * (1000 + 500 * i) for i in range(4)]
        store.put("k", versions[0])
        done = threading.Event()

        def read() -> int:
            n = 0
            while not done.is_set():
                assert store.get("k") in versions
                n += 1
            return n

        with ThreadPoolExecutor(2) as pool:
            readers = [pool.submit(read) for _ in range(2)]
            try:
                for version in versions * 5:
                    store.put("k", version)
            finally:
                done.set()
            assert all(reader.result() > 0 for reader in readers)
        assert store.get("k") == versions[-1]

    def test_a_listing_is_what_is_there_now(self, store: Objects, open_store: Open) -> None:
        """Sorted, by prefix of the key, and never from a cache of what was there before."""
        other = open_store()
        assert other.list("") == other.list("m/") == other.list("m/x") == []
        keys = ["m/1-a", "m/1-b", "m/2-a", "m/sub/deep/x", "m.json", "n/1"]
        for n, key in enumerate(keys):
            store.put(key, b"x" * n)
            assert [info.key for info in other.list("")] == sorted(keys[: n + 1])
        assert [info[:2] for info in other.list("m/1")] == [("m/1-a", 0), ("m/1-b", 1)]
        assert [info.key for info in other.list("m/")] == ["m/1-a", "m/1-b", "m/2-a", "m/sub/deep/x"]
        assert [info.key for info in other.list("m/sub/deep")] == ["m/sub/deep/x"]
        assert [info.key for info in other.list("m")] == sorted(keys[:-1])
        assert other.list("zz/") == []
        assert all(isinstance(info, ObjectInfo) and time.time() - info.modified < 600 for info in other.list(""))
        store.delete(["m/1-a", "m/sub/deep/x"])
        assert [info.key for info in other.list("m/")] == ["m/1-b", "m/2-a"]
        other.close()

    def test_deleted_objects_are_gone(self, store: Objects) -> None:
        """Many at once, absent ones among them; the keys can be used again."""
        keys = [f"d/{i % 3}/{i}" for i in range(30)]
        for key in keys:
            store.put(key, key.encode())
        store.delete(iter([*keys[:20], "d/never"]))
        assert [info.key for info in store.list("d/")] == sorted(keys[20:])
        store.delete(keys)
        assert store.list("") == []
        store.put(keys[0], b"again")
        assert store.get(keys[0]) == b"again"
        store.delete([])

    def test_bad_keys_are_refused(self, store: Objects) -> None:
        """Before anything is asked of the store."""
        store.put("a", b"x")
        for key in ("", "/a", "a/", "a//b", "../a", "a/../b", "./a", ".hidden", "a/.b", "a\\b", "a\0b"):
            calls: tuple[Callable[[str], object], ...] = (
                lambda key: store.put(key, b"x"), store.get, lambda key: store.get_range(key, 0, 1), store.info,
                lambda key: store.delete(["a", key]),
            )  # fmt: skip
            for call in calls:
                with pytest.raises(InputError, match="key"):
                    call(key)
        assert store.get("a") == b"x"

    def test_many_threads_at_once(self, store: Objects) -> None:
        """Each sees its own objects whole."""

        def work(i: int) -> None:
            data = bytes([i]) * (1000 + i)
            for n in range(5):
                store.put(f"t{i}/{n}", data)
                assert store.get(f"t{i}/{n}") == data
                assert store.get_ranges([(f"t{i}/{n}", 1, 5), (f"t{i}/{n}", 0, 1000 + i)]) == [data[1:5], data]
            assert [info.size for info in store.list(f"t{i}/")] == [1000 + i] * 5
            store.delete([f"t{i}/0"])

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))
        assert len(store.list("")) == 32

    def test_puts_and_deletes_under_one_prefix_do_not_meet(self, store: Objects) -> None:
        """The last object of a prefix goes while the next one comes."""

        def work(i: int) -> None:
            for _ in range(15):
                store.put(f"one/place/{i}", b"x")
                assert store.get(f"one/place/{i}") == b"x"
                store.delete([f"one/place/{i}"])

        with ThreadPoolExecutor(3) as pool:
            list(pool.map(work, range(3)))
        assert store.list("") == []

    def test_a_closed_store_opens_again(self, store: Objects) -> None:
        """`close` lets connections go, nothing else; twice is fine."""
        store.put("k", b"x")
        store.close()
        store.close()
        assert store.get_ranges([("k", 0, 1)] * 3) == [b"x"] * 3

    def test_nothing_is_left_of_puts_that_ended(self, store: Objects) -> None:
        """There is nothing to sweep after good puts."""
        store.put("k", bytes(PIECE_BYTES + 1))
        assert store.abort_stale_uploads(0) == 0
        assert store.get("k") == bytes(PIECE_BYTES + 1)
