"""Sessions in an order, a page at a time: what is shown of them against what is recorded."""

from __future__ import annotations

import math
import statistics

import pytest
from kit import add, counting, session
from tiers import record

import spool
from spool.errors import InputError

ORDERS = ["number", "session_id", "group_id", "n_branches", "stored_bytes", "first_version", "last_version", "tier",
          "n_released", "reward", "n_tokens", "opened_at", "outcome", "attempt", "state"]  # fmt: skip


def tree(sp, session_id="tree"):
    """Record a step, a continuation of it, a branch beside that, a chain of its own, and a step that is withdrawn."""
    s = session(sp, session_id)
    first = add(s, counting(5), [1, 2, 3], weight_version="9")
    chain = [*counting(5), 1, 2, 3]
    add(s, [*chain, 4], [5, 6], weight_version="10")
    add(s, [*chain, 7], [8], weight_version="11", parent=first.step_id)
    add(s, counting(9, 5000), [1], weight_version="10")
    gone = add(s, [*chain, 9], [9], weight_version="12", parent=first.step_id)
    s.discard(gone.step_id)
    return s


def leaves(steps):
    return len(steps) - len({step.parent for step in steps} - {None})


def own_bytes(sp, session_id, row_bytes):
    """Bytes of the rows that steps add: of the last extents of each, as many as its own rows."""
    found = 0
    seen = set()
    for step in sp.steps(session_id):
        for name, extents in step.extents.items():
            for extent in extents:
                for row in range(extent.row, extent.row + extent.n):
                    if (name, extent.stream, row) not in seen:
                        seen.add((name, extent.stream, row))
                        found += row_bytes[name]
    return found


def test_what_is_shown_of_a_tree(sp):
    s = tree(sp)
    [row] = sp.listing().rows(0, 10)
    assert row.n_branches == leaves(sp.steps("tree")) == 3
    assert (row.first_version, row.last_version) == (9, 11)
    assert row.stored_bytes == own_bytes(sp, "tree", {"token_ids": 4, "logprobs": 4, "routed_experts": 2 * 2})
    assert (row.tier, row.n_released, row.state) == ("hot", 0, "open")
    segments = s.finalize(outcome="completed")
    sp.release(segments[:2])
    [row] = sp.listing().rows(0, 10)
    assert (row.n_segments, row.n_released) == (3, 2)


@pytest.mark.parametrize(
    ("versions", "span"), [(["b", "a", "c"], ("b", "c")), (["7", "x", "10"], ("7", "10")), ([None, None], (None, None))]
)
def test_versions_that_are_no_numbers_go_by_appearance(sp, versions, span):
    s = session(sp)
    prompt = counting(4)
    for version in versions:
        add(s, prompt, [1, 2], weight_version=version)
        prompt = [*prompt, 1, 2, 3]
    [row] = sp.listing().rows(0, 1)
    assert (str(row.first_version), str(row.last_version)) == tuple(map(str, span))


def test_every_order_is_that_of_the_rows(sp):
    for n in range(25):
        record(
            sp, f"s{n * 7 % 25:02}", n_steps=1 + n % 3, n_prompt=3, n_response=2 + n % 4, final=n % 4 != 0,
            group_id=f"g{n % 5}" if n % 6 else None, attempt=n % 2,
        )  # fmt: skip
        if n % 3:
            sp.annotate(f"s{n * 7 % 25:02}", reward=(n % 7) / 4)
    sp.discard("s03")
    for order in ORDERS:
        for descending in (False, True):
            listing = sp.listing(order=[("-" if descending else "") + order, "session_id"])
            rows = listing.rows(0, len(listing))
            assert len(rows) == 25

            def key(row, order=order):
                value = getattr(row, order)
                return (value is not None, value if value is not None else 0)

            keys = list(map(key, rows))
            assert keys == sorted(keys, reverse=descending), order
            assert [row.session_id for row in rows[5:9]] == [row.session_id for row in listing.rows(5, 9)]
    assert len(sp.listing(discarded=False)) == 24
    assert len(sp.listing("n_branches = 1 and tier = 'hot'", limit=7)) == 7


def test_an_unknown_name_is_refused(sp):
    tree(sp)
    for call in (lambda: sp.listing(order=["size"]), lambda: sp.groups(order=["-n"]), lambda: sp.listing("no > 1"),
                 lambda: sp.groups("no > 1")):  # fmt: skip
        with pytest.raises(InputError, match=r"cannot order by|is no column"):
            call()
    with pytest.raises(InputError, match="'tier' cannot name a fact"):
        sp.annotate("tree", tier=1)


def test_what_comes_is_put_in_front_and_what_is_there_changes_in_place(sp, spool_uri):
    record(sp, "a", n_steps=1, final=False)
    other = spool.open(spool_uri, readonly=True)
    listing, sorted_ = other.listing(), other.listing(order=["-n_tokens"])
    assert not listing.refresh()
    record(sp, "b", n_steps=2)
    assert listing.refresh()
    assert [row.session_id for row in listing.rows(0, 9)] == ["b", "a"]
    assert [listing.place(number) for number in listing.numbers(0, 2)] == [0, 1]
    assert listing.place(99) is None
    sp.annotate("a", reward=0.5)
    assert not listing.refresh()
    assert listing.rows(1, 2)[0].reward == 0.5
    sorted_._rest_until = 0.0
    assert sorted_.refresh()
    assert [row.session_id for row in sorted_.rows(0, 9)] == ["b", "a"]
    other.close()


def test_groups_are_those_of_their_sessions(sp):
    rewards = {"a": [1.0, 0.0, 0.5], "b": [0.25], "c": [], None: [2.0]}
    for group, values in rewards.items():
        for n in range(4):
            record(sp, f"{group}-{n}", n_steps=1, n_prompt=3, n_response=2, group_id=group, final=n != 3)
            if n < len(values):
                sp.annotate(f"{group}-{n}", reward=values[n])
    sp.annotate("c-0", reward=None)
    sp.discard("a-2")
    found = {group.group_id: group for group in sp.groups()}
    assert found.keys() == rewards.keys()
    rewards["a"].pop()
    for name, values in rewards.items():
        group = found[name]
        assert group.n_sessions + group.n_discarded == 4
        assert group.n_rewards == len(values)
        if values:
            assert (group.reward_min, group.reward_max) == (min(values), max(values))
            assert math.isclose(group.reward_mean, statistics.fmean(values))
            assert math.isclose(group.reward_std, statistics.pstdev(values), abs_tol=1e-9)
        else:
            assert group.reward_mean is group.reward_std is None
        rows = [row for row in sp.sessions() if row.group_id == name]
        assert (group.n_tokens, group.n_final) == (
            sum(row.n_tokens for row in rows), sum(row.state == "final" for row in rows),
        )  # fmt: skip
    assert [group.group_id for group in sp.groups(order=["-reward_max"], limit=2)] == [None, "a"]
    assert [group.group_id for group in sp.groups("reward >= 1")] == [None, "a"]


def test_tiers_are_those_of_the_packs(tmp_path, by_hand):
    uri = f"file://{tmp_path}/hot?spill=file://{tmp_path}/cold"
    with spool.open(uri) as sp:
        record(sp, "old", n_steps=1)
        sp.flush()
        sp.spill()
        record(sp, "new", n_steps=1)
        tiers = {row.session_id: row.tier for row in sp.listing().rows(0, 9)}
        assert tiers == {"old": "both", "new": "hot"}
        assert len(sp.listing("tier = 'both'")) == 1
        sp.flush()
        sp.spill()
    with spool.open(f"file://{tmp_path}/cold", readonly=True) as cold:
        assert {row.session_id: row.tier for row in cold.listing().rows(0, 9)} == {"old": "cold", "new": "cold"}
        assert cold.listing().rows(0, 1)[0].stored_bytes > 0


@pytest.mark.parametrize("readonly", [False, True])
@pytest.mark.parametrize("order", [("-number",), ("session_id",)])
def test_a_listing_of_an_index_that_is_made_anew_begins_anew(tmp_path, readonly, order):
    root = str(tmp_path / "s")
    with spool.open(root) as sp:
        for number in range(20):
            record(sp, f"s{number:02}", n_steps=1)
    with spool.open(root, readonly=readonly) as sp:
        listing = sp.listing(order=order)
        with spool.open(root) as other:
            other.rebuild()
        assert listing.refresh()
        assert sorted(row.session_id for row in listing.rows(0, 50)) == [f"s{number:02}" for number in range(20)]
        assert len(listing) == 20
