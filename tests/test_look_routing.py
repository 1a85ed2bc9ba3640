"""Routing in numbers: against counting row by row, in windows, with gaps, units, and nothing at all."""

import math
from collections import Counter

import numpy as np
import pytest
from kit import SHAPE, add, counting, routing

import spool
from spool.errors import InputError, NotFoundError
from spool.importers import import_runs
from spool.look import rows as rows_of
from spool.look.routing import RoutingSummary, compare
from spool.model.moe import MoEShape

WIDE = MoEShape(num_layers=2, num_experts=512, topk=4)


def drawn(n, shape, seed=0):
    """Distinct experts, some more popular: int32 [n, layers, topk]."""
    rng = np.random.default_rng(seed)
    noise = rng.gumbel(size=(n, shape.num_layers, shape.num_experts)) + np.linspace(0, 2, shape.num_experts)
    return np.argsort(-noise, axis=-1)[..., : shape.topk].astype(np.int32)


def expected(rows, positions, layers, num_experts):
    """The same numbers, counted one expert at a time: a list a layer of (load, imbalance, entropy, unused, overlap)."""
    found = []
    for number in layers:
        load = Counter(int(expert) for row in rows for expert in row[number] if expert >= 0)
        total = sum(load.values())
        shared = [
            sum(int(expert) in set(row[number].tolist()) - {-1} for expert in before[number])
            for before, row, gone, here in zip(rows[:-1], rows[1:], positions[:-1], positions[1:], strict=True)
            if here == gone + 1
        ]
        found.append((
            [load[expert] for expert in range(num_experts)],
            max(load.values()) / (total / num_experts),
            -sum(n / total * math.log(n / total) for n in load.values()) / math.log(num_experts),
            1 - len(load) / num_experts,
            sum(shared) / len(shared) / rows.shape[-1],
        ))  # fmt: skip
    return found


def check(summary, rows, positions, layers, num_experts):
    wanted = expected(rows, positions, layers, num_experts)
    assert summary.layers == tuple(layers) and summary.n_rows == len(rows)
    assert summary.load.tolist() == [load for load, *_ in wanted]
    for number, values in enumerate((summary.imbalance, summary.entropy, summary.unused, summary.overlap), 1):
        assert np.allclose(values, [layer[number] for layer in wanted], rtol=1e-12, atol=1e-12)


def whole(sp, rows, shape, **more):
    """A finished session of one step whose routing is ``rows``."""
    s = sp.session(experts=shape)
    n = len(rows) + 1
    s.append(prompt_token_ids=counting(n - 1), response_token_ids=[7], routed_experts=rows, **more)
    return s.finalize()[0]


@pytest.fixture
def small_windows(monkeypatch):
    monkeypatch.setattr(rows_of, "WINDOW_ROWS", 16)


@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 33, 100])
def test_every_number_is_as_counted_one_by_one_whatever_the_windows(sp, small_windows, n):
    rows = drawn(n + 1, WIDE)
    check(RoutingSummary.of(sp, whole(sp, rows, WIDE)), rows, range(n + 1), (0, 1), 512)


def test_only_the_moe_layers_are_there_by_their_own_numbers(sp):
    s = sp.session(experts=SHAPE)
    add(s, counting(40), counting(5, 50))
    summary = RoutingSummary.of(sp, s.finalize()[0])
    check(summary, routing([*counting(40), *counting(5, 50)]), range(44), (1, 2), 256)


def test_moe_layers_that_are_not_next_to_each_other(sp):
    shape = MoEShape(num_layers=6, num_experts=32, topk=4, moe_layers=(1, 3, 5))
    rows = drawn(50, shape)
    rows[:, ::2] = 0
    check(RoutingSummary.of(sp, whole(sp, rows, shape)), rows, range(50), (1, 3, 5), 32)


def test_gaps_are_told_and_no_neighbours_across_them(sp, small_windows):
    s = sp.session(experts=WIDE)
    rows = drawn(120, WIDE)
    tokens = counting(121)
    s.append(prompt_token_ids=tokens[:20], response_token_ids=tokens[20:25], routed_experts=rows[:24])
    s.append(prompt_token_ids=tokens[:60], response_token_ids=tokens[60:70], routed_experts=rows[59:69],
             routed_experts_start=59)  # fmt: skip
    ref = s.append(prompt_token_ids=tokens[:110], response_token_ids=tokens[110:121], routed_experts=rows[109:],
                   routed_experts_start=109)  # fmt: skip
    there = [*range(24), *range(59, 69), *range(109, 120)]
    summary = RoutingSummary.of(sp, ref)
    check(summary, rows[there], there, (0, 1), 512)
    assert summary.gaps == ((24, 59), (69, 109)) and summary.n_missing == 75
    part = RoutingSummary.of(sp, ref, rows=slice(10, 65))
    check(part, rows[[*range(10, 24), *range(59, 65)]], [*range(10, 24), *range(59, 65)], (0, 1), 512)
    assert part.gaps == ((24, 59),)


def test_units_count_the_rows_they_expand_to(sp, small_windows):
    n_rows = 30 + 39 + 2
    rows = drawn(n_rows - 1, WIDE)
    s = sp.session(experts=WIDE)
    s.append(prompt_token_ids=counting(20), response_token_ids=counting(10, 50), routed_experts=rows,
             units=[("image", 3, 40), ("small", 15, 3)])  # fmt: skip
    ref = s.finalize()[0]
    assert ref.n_rows == n_rows
    check(RoutingSummary.of(sp, ref), rows, range(n_rows - 1), (0, 1), 512)
    check(RoutingSummary.of(sp, ref, rows=slice(10, 50)), rows[10:50], range(10, 50), (0, 1), 512)


def test_an_absent_entry_is_no_expert(sp):
    rows = drawn(40, WIDE).astype(np.int16)
    rows[::3, 0, 1] = -1
    s = sp.session(fields=[spool.expert_field(WIDE, signed=True)])
    s.append(prompt_token_ids=counting(40), response_token_ids=[1], routed_experts=rows)
    check(RoutingSummary.of(sp, s.finalize()[0]), rows, range(40), (0, 1), 512)


@pytest.mark.parametrize("n_tokens", [0, 1])
def test_a_reference_without_a_forward_has_no_numbers(sp, n_tokens):
    s = sp.session(experts=SHAPE)
    ref = s.append(prompt_token_ids=counting(n_tokens), response_token_ids=[])
    summary = RoutingSummary.of(sp, ref)
    assert summary.n_rows == summary.n_missing == 0 and summary.gaps == ()
    for values in (summary.imbalance, summary.entropy, summary.unused, summary.overlap):
        assert np.isnan(values).all()


def test_two_tokens_have_no_neighbours(sp):
    summary = RoutingSummary.of(sp, whole(sp, drawn(1, WIDE), WIDE))
    assert summary.n_rows == 1 and summary.n_pairs == 0
    assert np.isnan(summary.overlap).all() and (summary.imbalance == 128).all()


def test_no_routing_at_all_is_a_gap(sp):
    s = sp.session("plain")
    s.append(prompt_token_ids=counting(5), response_token_ids=[1, 2])
    summary = RoutingSummary.of(sp, s.finalize()[0])
    assert summary.layers == () and summary.gaps == ((0, 6),) and summary.n_missing == 6
    never = sp.session("never", experts=SHAPE)
    never.append(prompt_token_ids=counting(5), response_token_ids=[1, 2])
    summary = RoutingSummary.of(sp, never.finalize(view="timeline")[0])
    assert summary.n_missing == 6 and not summary.load.any() and np.isnan(summary.overlap).all()


def test_sums_are_as_if_read_together(sp):
    parts = [drawn(n, WIDE, n) for n in (30, 3, 50)]
    none = RoutingSummary.none()
    total = none
    for rows in parts:
        total = total.add(RoutingSummary.of(sp, whole(sp, rows, WIDE)))
    assert total.n_rows == 83 and total.n_refs == 3 and total.n_pairs == 80
    load = [np.bincount(np.concatenate(parts)[:, layer].ravel(), minlength=512).tolist() for layer in (0, 1)]
    assert total.load.tolist() == load
    assert none.add(none).layers == () and total.add(none).load.tolist() == load
    with pytest.raises(InputError, match="2 layers of 512 experts, top 4 and 3 layers"):
        total.add(RoutingSummary.of(sp, whole(sp, drawn(4, MoEShape(3, 8, 2)), MoEShape(3, 8, 2))))


def test_no_read_asks_for_more_than_a_window_and_progress_is_told(sp, monkeypatch, small_windows):
    ref = whole(sp, drawn(100, WIDE), WIDE)
    asked, seen, read = [], [], sp.read

    def counted(ref, **options):
        asked.append(options["tokens"])
        return read(ref, **options)

    monkeypatch.setattr(sp, "read", counted)
    RoutingSummary.of(sp, ref, progress=lambda done, total: seen.append((done, total)))
    assert [part.stop - part.start for part in asked] == [16] * 6 + [5]
    assert seen == [(done, 100) for done in (0, 16, 32, 48, 64, 80, 96, 100)]


def test_a_long_gap_is_not_read(sp, monkeypatch, small_windows):
    s = sp.session(experts=WIDE)
    ref = s.append(prompt_token_ids=counting(1000), response_token_ids=[1], routed_experts=drawn(2, WIDE),
                   routed_experts_start=998)  # fmt: skip
    asked, read = [], sp.read
    monkeypatch.setattr(sp, "read", lambda ref, **options: asked.append(options["tokens"]) or read(ref, **options))
    assert RoutingSummary.of(sp, ref).n_rows == 2
    assert asked == [slice(998, 1001)]


def test_the_last_that_is_told_is_all_of_it(sp):
    never = sp.session(experts=WIDE).append(prompt_token_ids=counting(50), response_token_ids=[1])
    known = ((never, [0, 50]), (whole(sp, drawn(5, WIDE), WIDE), [0, 5]), (whole(sp, drawn(0, WIDE), WIDE), [0]))
    for ref, told in known:
        assert [done for _, done, _ in RoutingSummary.reading(sp, ref)] == told


# -- two references -------------------------------------------------------------------------------------------------


def test_branches_agree_on_their_prefix_and_are_told_apart_behind_it(sp):
    s = sp.session(experts=WIDE)
    rows, other = drawn(60, WIDE, 1), drawn(60, WIDE, 2)
    a = whole(sp, rows, WIDE)
    other[:30] = rows[:30]
    other[10, 0] = rows[10, 0][::-1]
    other[11, 1, 0] = next(expert for expert in range(512) if expert not in rows[11, 1])
    s.append(prompt_token_ids=[*counting(40), 5], response_token_ids=counting(20, 9), routed_experts=other)
    b = s.finalize()[0]
    difference = compare(sp, a, b)
    assert difference.n_common == 40
    same = [[len(set(rows[p, layer].tolist()) & set(other[p, layer].tolist())) for p in range(40)] for layer in (0, 1)]
    assert np.allclose(difference.agreement, [sum(layer) / 160 for layer in same])
    assert np.allclose(difference.identical, [layer.count(4) / 40 for layer in same])
    assert same[0][:30] == [4] * 30 and same[1][11] == 3
    shares = [[np.bincount(part[:, layer].ravel(), minlength=512) / 240 for layer in (0, 1)] for part in (rows, other)]
    assert np.allclose(difference.distance, [np.abs(p - q).sum() / 2 for p, q in zip(*shares, strict=True)])
    itself = compare(sp, a, a)
    assert itself.n_common == 60 and (itself.agreement == 1).all() and (itself.distance == 0).all()


def test_agreement_leaves_out_what_either_lacks(sp, small_windows):
    rows = drawn(60, WIDE)
    a = whole(sp, rows, WIDE)
    s = sp.session(experts=WIDE)
    b = s.append(prompt_token_ids=counting(60), response_token_ids=[7], routed_experts=rows[40:],
                 routed_experts_start=40)  # fmt: skip
    for one, two in ((a, b), (b, a)):
        difference = compare(sp, one, two)
        assert difference.n_common == 20 and (difference.agreement == 1).all()


def test_units_end_what_is_common(sp):
    refs = []
    for units, n in ((), 30), ((("image", 10, 5),), 34):
        s = sp.session(experts=WIDE)
        s.append(prompt_token_ids=counting(20), response_token_ids=counting(11, 50), routed_experts=drawn(n, WIDE),
                 units=units)  # fmt: skip
        refs.append(s.finalize()[0])
    assert compare(sp, *refs).n_common == 10


def test_different_models_and_missing_routing_are_refused(sp):
    a, b = whole(sp, drawn(4, WIDE), WIDE), whole(sp, drawn(4, MoEShape(2, 8, 2)), MoEShape(2, 8, 2))
    with pytest.raises(InputError, match="different shapes"):
        compare(sp, a, b)
    s = sp.session()
    s.append(prompt_token_ids=[1], response_token_ids=[2])
    with pytest.raises(InputError, match="both have routed_experts"):
        compare(sp, a, s.finalize()[0])


def test_released_data_is_no_gap(sp, monkeypatch):
    from spool.errors import ReleasedError

    ref = whole(sp, drawn(4, WIDE), WIDE)

    def released(*args, **options):
        raise ReleasedError("gone")

    monkeypatch.setattr(sp, "coverage", released)
    with pytest.raises(NotFoundError):
        RoutingSummary.of(sp, ref)


# -- recorded runs --------------------------------------------------------------------------------------------------


def test_recorded_routing(sp, shared_data):
    import_runs(shared_data / "routing", sp)
    refs = {ref.session_id: ref for ref in sp.segments()}
    assert len(refs) == 8
    for name, ref in refs.items():
        rows = np.load(shared_data / name)["routed_experts"]
        kept = rows[: ref.n_rows - 1]
        summary = RoutingSummary.of(sp, ref)
        load = [np.bincount(kept[:, layer].ravel(), minlength=summary.num_experts) for layer in range(rows.shape[1])]
        assert (summary.load == load).all()
        before, after = kept[:-1, :, :, None], kept[1:, :, None, :]
        shared = (before == after).any(axis=-1).mean(axis=(0, 2))
        assert np.allclose(summary.overlap, shared)
        assert (summary.imbalance > 4).all() and (summary.entropy > 0.7).all() and (summary.entropy < 0.9).all()
