"""Running digests and the index of prefixes, against comparing tokens."""

from __future__ import annotations

import time

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from spool.model.events import StepCommitted
from spool.model.refs import Unit
from spool.rollout import prefix
from spool.rollout.prefix import BLOCK, Digests, Match, PrefixIndex, block_digest, digests_fit, known_digests


def everyone(_step):
    return True


def tokens(n, first=0):
    return np.arange(first, first + n, dtype=np.int32)


def event(index, sequence, n_prompt, *, base=0, trim=0, units=()):
    digests = Digests(sequence, units)
    return StepCommitted(
        "s", index, str(index), 0.0, None, base, n_prompt, len(sequence), len(sequence), {},
        block_hashes=digests.blocks_after(base), prompt_hash=digests.at(n_prompt),
        end_hashes=digests.ends(max(n_prompt, len(sequence) - trim)),
    )  # fmt: skip


def test_the_digest_is_the_chain_of_block_hashes_that_the_format_says():
    sequence = tokens(600)
    raw = sequence.astype("<i4").tobytes()
    first = xxhash.xxh3_128_digest(raw[:1024])
    second = xxhash.xxh3_128_digest(first + raw[1024:2048])
    digests = Digests(sequence)
    assert digests.blocks == [b"", first, second]
    assert (digests.at(0), digests.at(256), digests.at(512)) == (b"", first, second)
    assert digests.at(600) == xxhash.xxh3_128_digest(second + raw[2048:])
    assert digests.at(100) == xxhash.xxh3_128_digest(raw[:400])
    assert digests.blocks_after(255) == first + second
    assert digests.blocks_after(256) == second
    assert digests.ends(598) == digests.at(600) + digests.at(599) + digests.at(598)


placed = st.lists(st.tuples(st.integers(0, 11), st.sampled_from("kl"), st.integers(1, 2)), max_size=2)


@settings(max_examples=100, deadline=None)
@given(
    a=st.lists(st.integers(1, 2), max_size=12), b=st.lists(st.integers(1, 2), max_size=12),
    units=st.tuples(placed, placed),
)  # fmt: skip
def test_digests_are_equal_where_tokens_and_units_are(small_blocks, a, b, units):
    def made(ids, where):
        kept = {position: Unit(key, position, n) for position, key, n in where if position < len(ids)}
        return Digests(np.array(ids, np.int32), [kept[p] for p in sorted(kept)]), kept

    (one, kept_a), (other, kept_b) = made(a, units[0]), made(b, units[1])
    for n in range(min(len(a), len(b)) + 1):
        same = a[:n] == b[:n] and all(kept_a.get(p) == kept_b.get(p) for p in range(n))
        assert (one.at(n) == other.at(n)) == same


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(prefix, "BLOCK", 4)


def test_an_array_of_any_layout_has_the_digests_of_its_values():
    whole = tokens(2000)
    strided = np.repeat(whole, 2)[::2]
    assert Digests(strided).at(1999) == Digests(whole).at(1999)
    assert Digests(tokens(0)).at(0) == b""


@pytest.mark.parametrize("n", [1, 255, 256, 257, 512, 700])
def test_ends_are_found_at_every_side_of_a_block(n):
    index = PrefixIndex()
    index.add(event(0, tokens(n), n - 1, trim=1), b"")
    assert index.longest_end(Digests(tokens(n + 5)), n + 5, everyone) == Match(0, n)
    assert index.longest_end(Digests(tokens(n)), n, everyone) == Match(0, n)
    trimmed = index.longest_end(Digests(np.append(tokens(n - 1), tokens(3, 9000))), n + 2, everyone)
    assert trimmed == (Match(0, n - 1) if n > 1 else None)
    assert index.longest_end(Digests(tokens(n + 5)), max(n - 2, 0), everyone) is None
    assert index.longest_end(Digests(tokens(n + 5, 1)), n + 5, everyone) is None


def test_the_shared_prefix_is_a_block_boundary_or_a_known_end():
    index = PrefixIndex()
    index.add(event(0, tokens(1000), 900), b"")
    for n, expected in ((1000, 1000), (999, 900), (900, 900), (899, 768), (256, 256), (255, None)):
        found = index.longest_shared(Digests(np.append(tokens(n), tokens(400, 5000))), n + 400, everyone)
        assert found == (Match(0, expected) if expected else None)
    index.add(event(1, tokens(300), 290), b"")
    assert index.longest_shared(Digests(tokens(280)), 280, everyone) == Match(1, 256)
    assert index.longest_shared(Digests(tokens(280)), 280, lambda step: step == 0) == Match(0, 256)


def test_of_equal_shared_prefixes_the_latest_step_counts_whether_it_ends_there_or_goes_on():
    index = PrefixIndex()
    index.add(event(0, tokens(256), 256), b"")
    index.add(event(1, tokens(300), 290), b"")
    prompt = Digests(np.append(tokens(256), tokens(9, 5000)))
    assert index.longest_shared(prompt, 265, everyone) == Match(1, 256)
    assert index.longest_end(prompt, 265, everyone) == Match(0, 256)


def test_a_step_knows_only_what_lies_behind_its_base():
    whole = event(0, tokens(600), 590)
    child = event(1, tokens(1200), 1100, base=600)
    assert len(child.block_hashes) == 2 * 16
    assert [n for n, _ in known_digests(child)] == [768, 1024, 1100, 1200]
    anchor = block_digest(whole, b"", 600)
    assert anchor == Digests(tokens(600)).at(512)
    assert block_digest(child, anchor, 600) == anchor
    assert block_digest(child, anchor, 1030) == Digests(tokens(1200)).at(1024)
    index = PrefixIndex()
    index.add(whole, b"")
    index.add(child, anchor)
    assert index.longest_end(Digests(tokens(1300)), 1300, everyone) == Match(1, 1200)
    index.remove(child, anchor)
    assert index.longest_end(Digests(tokens(1300)), 1300, everyone) == Match(0, 600)
    index.remove(whole, b"")
    assert index.longest_end(Digests(tokens(1300)), 1300, everyone) is None
    assert index.longest_shared(Digests(tokens(1300)), 1300, everyone) is None


def test_events_with_other_numbers_of_digests_are_recognised():
    good = event(0, tokens(600), 590, trim=2)
    assert digests_fit(good)
    for change in ({"n_tokens": 900}, {"base": 300}, {"end_hashes": b""}, {"end_hashes": b"x" * 17}, {"n_prompt": 599}):
        values = {name: getattr(good, name) for name in good.__struct_fields__} | change
        assert not digests_fit(StepCommitted(**values))


def test_compare_brackets_the_first_difference():
    digests = Digests(np.append(tokens(300), tokens(700, 5000)))
    known = list(known_digests(event(0, tokens(1000), 290)))
    assert digests.compare(known, 1000) == (290, 512)
    assert digests.compare(known, 400) == (290, None)
    assert digests.compare(known, 200) == (0, None)


def test_a_prompt_of_256k_tokens_is_matched_in_the_time_of_its_hash():
    long = tokens(262_144)
    index = PrefixIndex()
    index.add(event(0, long[:262_000], 261_000), b"")
    for i in range(1, 200):
        index.add(event(i, np.append(long[: 1000 * i], tokens(50, 10**6 * i)), 1000 * i + 3), b"")
    prompt = np.append(long[:262_000], tokens(100, 10**9)).astype(np.int32)

    def match():
        digests = Digests(prompt)
        assert index.longest_end(digests, len(prompt), everyone) == Match(0, 262_000)
        assert index.longest_shared(digests, len(prompt), everyone) == Match(0, 262_000)

    raw = prompt.tobytes()

    def hashing():
        for at in range(0, len(raw), 4 * BLOCK):
            xxhash.xxh3_128_digest(raw[at : at + 4 * BLOCK])

    assert best(match) < 8 * best(hashing)


def best(call, n=15):
    times = []
    for _ in range(n):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)
