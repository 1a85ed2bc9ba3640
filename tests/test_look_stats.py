"""The shape of a run: what the index counts is what a loop over all rows counts."""

from __future__ import annotations

import json
import math
import random
import statistics
import subprocess
import sys
from collections import Counter

import msgspec
import numpy as np
import pytest
from kit import add, counting, session
from shell import on_terminal, run

import spool
from spool.catalog.bins import EXACT
from spool.catalog.summary import MOST_BINS, MOST_NAMES, MOST_PERIODS, MOST_STEPS
from spool.errors import InputError
from spool.importers import import_runs
from spool.look.routing import RoutingSummary
from spool.look.stats import Stats, sample_routing, stats

OUTCOMES = ("completed", "failed", "truncated")


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """A spool of sessions of many kinds."""
    root = str(tmp_path_factory.mktemp("stats") / "many")
    rng = random.Random(7)
    with spool.open(root) as sp:
        for number in range(90):
            name = f"s{number}"
            s = session(
                sp, name, source=rng.choice(["swe", "tau", None]), group_id=f"g{number // 4}", rollout_step=number // 9
            )
            prompt, version = counting(rng.randint(1, 40)), number // 9
            for step in range(rng.randint(1, 5)):
                response = counting(rng.randint(1, 30), first=9000 + 100 * step)
                add(s, prompt, response, weight_version=str(version), finish_reason=rng.choice(["stop", "length"]))
                prompt, version = [*prompt, *response, 5], version + rng.randint(0, 1)
            if number % 10 != 9:
                s.finalize(outcome=rng.choice(OUTCOMES))
            if number % 3:
                sp.annotate(name, reward=1.0 if number // 4 == 7 else rng.choice([0.0, 1.0, -0.25, rng.random()]))
            if number % 17 == 16:
                sp.discard(name)
    return root


@pytest.fixture(scope="module")
def sp_many(many):
    with spool.open(many, readonly=True) as sp:
        yield sp


@pytest.mark.parametrize("where", [None, "source = 'swe'", "reward > 0.1 and n_steps > 1", "n_steps > 1000"])
def test_counts_are_those_of_a_loop(sp_many, where):
    found = sp_many.summary(where)
    rows = list(sp_many.sessions(where))
    kept = {row.session_id for row in rows}
    segments = [ref for ref in sp_many.segments() if ref.session_id in kept]
    totals = found.totals
    assert (totals.n_sessions, totals.n_steps) == (len(rows), sum(row.n_steps for row in rows))
    assert (totals.n_tokens, totals.n_generated) == (
        sum(row.n_tokens for row in rows), sum(row.n_generated for row in rows)
    )  # fmt: skip
    assert totals.n_open == sum(row.state == "open" for row in rows)
    assert totals.n_discarded == len(list(sp_many.sessions(where, discarded=True))) - len(rows)
    assert totals.n_groups == len({row.group_id for row in rows})
    rewards = {row.group_id: [own.reward for own in rows if own.group_id == row.group_id] for row in rows}
    assert totals.n_equal_groups or where is not None
    known = [[value for value in values if value is not None] for values in rewards.values()]
    assert totals.n_equal_groups == sum(len(values) > 1 and len(set(values)) == 1 for values in known)
    assert (totals.n_segments, totals.n_trainable) == (len(segments), sum(ref.trainable_tokens for ref in segments))
    assert {share.name: share.n_sessions for share in found.outcomes} == Counter(row.outcome for row in rows)
    for share in found.sources:
        own = [row for row in rows if row.source == share.name]
        rewards = [row.reward for row in own if row.reward is not None]
        assert (share.n_sessions, share.n_tokens, share.n_rewards) == (
            len(own), sum(row.n_tokens for row in own), len(rewards)
        )  # fmt: skip
        assert share.reward == (pytest.approx(sum(rewards) / len(rewards)) if rewards else None)
    for histogram, values in (
        (found.tokens, [row.n_tokens for row in rows]),
        (found.steps, [row.n_steps for row in rows]),
        (found.rewards, [row.reward for row in rows if row.reward is not None]),
        (found.segment_tokens, [ref.n_tokens for ref in segments]),
    ):
        check(histogram, values)
    assert found.rewards.n + found.rewards.n_missing == len(rows)


def check(histogram, values):
    assert histogram.n == len(values)
    if not values:
        assert (histogram.bins, histogram.mean) == ((), None)
        return
    assert (histogram.low, histogram.high) == (min(values), max(values))
    assert histogram.mean == pytest.approx(sum(values) / len(values))
    assert len(histogram.bins) <= 64
    assert histogram.bins[0].n and histogram.bins[-1].n
    for number, found in enumerate(histogram.bins):
        last = number == len(histogram.bins) - 1
        assert found.n == sum(found.low <= value < found.high or (last and value == found.high) for value in values)
        assert number == 0 or found.low == histogram.bins[number - 1].high


def test_series_hold_every_session_once(sp_many):
    found, rows = sp_many.summary(), list(sp_many.sessions())
    assert [point.first for point in found.rollout] == sorted({row.rollout_step for row in rows})
    for point in found.rollout:
        own = [row for row in rows if row.rollout_step == point.first]
        rewards = [row.reward for row in own if row.reward is not None]
        assert (point.last, point.n_sessions, point.n_rewards) == (point.first, len(own), len(rewards))
        if rewards:
            assert point.reward == pytest.approx(np.mean(rewards))
            assert point.reward_std == pytest.approx(np.std(rewards), abs=1e-6)
            assert (point.reward_low, point.reward_high) == (min(rewards), max(rewards))
    periods = found.timeline.periods
    assert sum(period.n_opened for period in periods) == len(rows)
    assert sum(period.n_finished for period in periods) == sum(row.finished_at is not None for row in rows)
    assert sum(period.n_tokens for period in periods) == sum(row.n_tokens for row in rows)


def test_staleness_is_counted_from_the_newest_at_the_time(sp_many):
    sessions = {row.session_id: row for row in sp_many.sessions()}
    segments = [ref for ref in sp_many.segments() if ref.session_id in sessions]
    behind = []
    for ref in segments:
        at = sessions[ref.session_id].finished_at
        newest = max(int(other.version_span[1]) for other in segments if sessions[other.session_id].finished_at <= at)
        behind.append(newest - int(ref.version_span[0]))
    stale = sp_many.summary().staleness
    check(stale.behind, behind)
    assert (stale.ordered, stale.against) == (True, None)
    assert int(stale.newest) == max(int(ref.version_span[1]) for ref in segments)
    check(sp_many.summary(current_version="40").staleness.behind, [40 - int(ref.version_span[0]) for ref in segments])
    ahead = sp_many.summary(current_version="0").staleness.behind
    assert ahead.bins[0].low == -1 and ahead.low == -max(int(ref.version_span[0]) for ref in segments)


def test_versions_that_are_no_numbers_count_as_they_appeared(sp):
    for number, version in enumerate(["base", "step-b", "step-a", "base"]):
        s = session(sp, f"v{number}")
        add(s, [1, 2], [3], weight_version=version)
        s.finalize()
    add(no := session(sp, "none"), [1], [2])
    no.finalize()
    stale = sp.summary().staleness
    assert (stale.ordered, stale.newest, stale.n_versions) == (False, "step-a", 3)
    assert {found.low: found.n for found in stale.behind.bins if found.n} == {0: 3, 2: 1}
    assert stale.behind.n_missing == 1
    against = sp.summary(current_version="step-b").staleness.behind
    assert {found.low: found.n for found in against.bins if found.n} == {-1: 1, 0: 1, 1: 2}
    assert sp.summary(current_version="unheard of").staleness.behind.low == 1


@pytest.mark.parametrize("prefix", ["", "step-"])
def test_versions_are_those_of_the_segments_that_are_asked_for(sp, prefix):
    for name, versions, source in (("a", "123", "x"), ("b", "23", "x"), ("gone", "9", "y"), ("c", "7", "z")):
        s = session(sp, name, source=source)
        spans = [(prefix + version, at, at + 1) for at, version in enumerate(versions)]
        add(s, [1], list(range(2, 2 + len(versions))), weight_version=spans)
        s.finalize()
    sp.discard("gone")

    def found(where=None):
        stale = sp.summary(where).staleness
        return stale.n_versions, stale.newest, stale.behind.n

    assert found() == (4, f"{prefix}7", 3)
    assert found("source = 'x'") == (3, "step-2" if prefix else "3", 2)
    assert found("source = 'y'") == (0, None, 0)


def test_far_apart_values_stay_few_bins(sp):
    for number, reward in enumerate([-1e30, 0, 1e-9, 3.5e12, 1e300]):
        s = session(sp, f"s{number}", rollout_step=number * 10**15, source=f"source {number}")
        add(s, [1], [2])
        s.finalize()
        sp.annotate(f"s{number}", reward=reward)
    found = sp.summary()
    assert len(found.rewards.bins) <= MOST_BINS and sum(part.n for part in found.rewards.bins) == 5
    assert len(found.rollout) <= MOST_STEPS and sum(point.n_sessions for point in found.rollout) == 5
    assert len(found.timeline.periods) <= MOST_PERIODS + 1
    json.dumps(json.loads(run("stats", sp.config.root, "--json").text), allow_nan=False)


def test_one_reward_and_a_fact_that_is_no_reward(sp):
    for name, reward in (("a", 0.0), ("b", "much"), ("c", True)):
        add(s := session(sp, name), [1], [2])
        s.finalize()
        if name != "b":
            sp.annotate(name, reward=float(reward))
    found = sp.summary().rewards
    assert (found.n, found.n_missing, found.mean) == (2, 1, 0.5)


@pytest.mark.parametrize(
    "rewards",
    [[n / 10 for n in range(11)], [0.3] * 5 + [0.0, 1.0], [0.7] * 4 + [0.0, 1.0], [n / 60 for n in range(60)],
     [n / 10 for n in range(-7, 4)], [math.nextafter(0.3, 0), 1.3], [0.3, 0.3], [0, 1, 2, 24], [-0.15, 1.1]],
)  # fmt: skip
def test_a_reward_on_an_edge_is_in_the_bin_that_begins_there(sp, rewards):
    for number, reward in enumerate(rewards):
        add(s := session(sp, f"s{number}"), [1], [2])
        s.finalize()
        sp.annotate(f"s{number}", reward=reward)
    found = sp.summary().rewards
    check(found, rewards)
    assert len(found.bins) <= MOST_BINS


def test_more_sources_than_are_told_apart(sp):
    for number in range(MOST_NAMES + 5):
        add(session(sp, f"s{number}", source=f"source {number:02}"), [1], [2])
    add(session(sp, "again", source="source 20"), [1], [2])
    sources = sp.summary().sources
    assert len(sources) == MOST_NAMES and sources[0].name == "source 20"
    assert (sources[-1].name, sources[-1].n_names, sources[-1].n_sessions) == (None, 6, 6)


def test_an_empty_spool_has_a_shape(sp):
    found = stats(sp, routing=5)
    assert found.summary.totals.n_sessions == 0 and found.summary.outcomes == () and found.routing == ()
    assert (found.summary.timeline.periods, found.summary.rollout, found.n_sampled) == ((), (), 0)
    assert "n_sessions\t0" in run("stats", sp.config.root, "--routing", "all").text


def test_a_filter_that_does_not_parse_is_refused(sp_many):
    for ask in (sp_many.summary, lambda where: sp_many.sample(3, where), sp_many.slowest):
        with pytest.raises(InputError, match="rewrd"):
            ask("rewrd > 1")


def test_a_sample_is_spread_and_the_same_each_time(sp_many):
    kept = {row.session_id for row in sp_many.sessions()}
    every = {ref.id for ref in sp_many.segments() if ref.session_id in kept}
    chosen = [ref.id for ref in sp_many.sample(10)]
    assert len(set(chosen)) == 10 and set(chosen) <= every
    assert chosen == [ref.id for ref in sp_many.sample(10)]
    places = sorted(sorted(every).index(name) for name in chosen)
    assert places[0] < len(every) / 2 < places[-1]
    assert {ref.id for ref in sp_many.sample(10**6)} == every
    assert {ref.source for ref in sp_many.sample(50, "source = 'tau'")} == {"tau"}


def test_the_slowest_come_first(sp_many):
    rows = sp_many.slowest(limit=5)
    took = [row.last_at - row.opened_at for row in sp_many.sessions()]
    assert [row.last_at - row.opened_at for row in rows] == sorted(took, reverse=True)[:5]


def test_routing_of_a_sample_is_the_sum_of_its_segments(sp_many):
    refs = sp_many.sample(6)
    (model,) = sample_routing(sp_many, refs).models
    whole = RoutingSummary.none()
    for ref in refs:
        whole = whole.add(RoutingSummary.of(sp_many, ref))
    assert (model.load == whole.load).all() and model.n_rows == whole.n_rows
    (shown,) = stats(sp_many, routing=6).routing
    assert shown.n_refs == 6 and [layer.layer for layer in shown.layers] == [1, 2]
    assert [layer.imbalance for layer in shown.layers] == pytest.approx(list(whole.imbalance))


def test_stats_on_the_command_line(many):
    found = run("stats", many, "--json", "--routing", "all", "--current-version", "30").json
    assert found["summary"]["staleness"]["against"] == "30"
    assert msgspec.json.decode(json.dumps(found), type=Stats, strict=True).n_released == 0
    assert found["n_sampled"] == found["routing"][0]["n_refs"] == found["summary"]["totals"]["n_segments"]
    text = run("stats", many, "--routing", "3").text
    assert "share\tname\tn_sessions" in text and "\nmodel\tlayer\timbalance" in text and "#" not in text
    shown = on_terminal("stats", many, columns=100)
    assert "HISTOGRAM" in shown and "####" in shown
    assert all(len(line) <= 100 for line in shown.replace("\x1b[0m", "").replace("\x1b[1m", "").splitlines())
    for wrong in ("0", "-1", "x", "1.5"):
        assert "number of segments" in run("stats", many, "--routing", wrong, code=2).err
    assert "rewrd" in run("stats", many, "--where", "rewrd = 1", code=2).err


@pytest.mark.parametrize("folder", ["A_12L_256E", "B_8L_384E"])
def test_real_routing(sp, shared_data, folder):
    import_runs(shared_data / "routing" / folder, sp)
    (model,) = stats(sp, routing=10).routing
    n_layers, n_experts = (int(part[:-1]) for part in folder.split("_")[1:])
    assert (len(model.layers), model.num_experts, model.topk) == (n_layers, n_experts, 8)
    for layer in model.layers:
        assert 1 < layer.imbalance < n_experts / 8 + 1 and 0.3 < layer.entropy < 1 and 0 < layer.overlap < 1
    loads = np.zeros((n_layers, n_experts), np.int64)
    for path in (shared_data / "routing" / folder).glob("*.npz"):
        experts = np.load(path)["routed_experts"]
        for layer in range(n_layers):
            loads[layer] += np.bincount(experts[:, layer].ravel(), minlength=n_experts)
    expected = loads.max(axis=1) * n_experts / loads.sum(axis=1)
    # the importer ends a segment at its last generated token, so some rows are not in it
    assert [layer.imbalance for layer in model.layers] == pytest.approx(expected, rel=0.2)


def test_bins_double_from_where_they_stop_being_exact(sp):
    for number, version in enumerate([0, 1, EXACT - 1, EXACT, 5 * EXACT, 1000]):
        add(s := session(sp, f"s{number}"), [1], [2], weight_version=str(1000 - version))
        s.finalize()
    found = {part.low: part.n for part in sp.summary(current_version="1000").staleness.behind.bins if part.n}
    assert found == {0: 1, 1: 1, EXACT - 1: 1, EXACT: 1, 4 * EXACT: 1, 512: 1}
    assert math.log2(512) == 9


@pytest.mark.parametrize(
    "rewards",
    [[1e308, -1e308], [5e-324, 0.0], [1.7e308], [1e9, 1e9 + 1, 1e9 + 2], [1e8 + 0.1, 1e8 + 0.2, 1e8 + 0.3],
     [1.0, 1.0 + 2**-52], [1e200, 0.0], [-0.0, 0.0], [0.1, 0.7]],
)  # fmt: skip
def test_rewards_of_any_size_are_counted_and_spread(sp, tmp_path, rewards):
    for n, reward in enumerate(rewards):
        s = sp.session(f"s{n}", group_id="g", rollout_step=0)
        s.append(prompt_token_ids=[1], response_token_ids=[2], weight_version="9" * 30)
        s.finalize(outcome="completed")
        sp.annotate(f"s{n}", reward=reward)
    found = sp.summary(current_version="9" * 22)
    assert sum(part.n for part in found.rewards.bins) == len(rewards)
    assert (found.rewards.low, found.rewards.high) == (min(rewards), max(rewards))
    if len(found.rewards.bins) > 1:
        assert all(part.low < part.high for part in found.rewards.bins)
    (group,), (point,) = sp.groups(), found.rollout
    for std in (group.reward_std, point.reward_std):
        assert std is not None
        if max(map(abs, rewards)) < 1e100:
            assert math.isclose(std, statistics.pstdev(rewards), rel_tol=1e-6, abs_tol=1e-15)
    done = run("stats", sp.config.root, "--json")
    assert done.code == 0
    assert max(map(len, run("stats", sp.config.root).text.split())) < 40
    assert run("report", sp.config.root, "-o", tmp_path / "page.html").code == 0


def test_a_summary_is_of_one_moment(tmp_path):
    root = str(tmp_path / "s")
    code = (
        "import sys, spool\n"
        "sp, n = spool.open(sys.argv[1]), 0\n"
        "while True:\n"
        "    s = sp.session(f's{n}'); s.append(prompt_token_ids=[1], response_token_ids=[2]); s.finalize(); n += 1\n"
        "    print(n, flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, root], stdout=subprocess.PIPE, text=True) as writer:
        while int(writer.stdout.readline()) < 50:
            pass
        counted = set()
        with spool.open(root, readonly=True) as sp:
            for _ in range(40):
                found = sp.summary()
                n = found.totals.n_sessions
                assert sum(share.n_sessions for share in found.outcomes) == found.tokens.n == n
                assert sum(period.n_opened for period in found.timeline.periods) == n
                counted.add(n)
        writer.kill()
    assert len(counted) > 5
