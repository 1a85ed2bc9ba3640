"""Units: the index of a mini-batch, and the encoder's plan. Each unit once, and every row where it is needed."""

from __future__ import annotations

import pickle
import subprocess
import sys
from itertools import product

import msgspec
import numpy as np
import pytest
from encoding import segment
from hypothesis import given
from hypothesis import strategies as st

from spool.errors import InputError
from spool.model.refs import StepRef
from spool.train import Item, Mesh, Place, UnitIndex, plan, plan_units, unit_index, unit_plan_from_json
from spool.train.units.index import IndexedUnit, UnitTrajectory, UnitUse

ROWS = {f"u{number}": 1 + 3 * number for number in range(5)}


@st.composite
def references(draw):
    """Segments of few sessions, which use few units often."""
    found = []
    for _ in range(draw(st.integers(0, 8))):
        n_tokens = draw(st.integers(1, 12))
        at = sorted(draw(st.sets(st.integers(0, n_tokens - 1), max_size=4)))
        keys = [draw(st.sampled_from(sorted(ROWS))) for _ in at]
        units = [(key, position, ROWS[key]) for key, position in zip(keys, at, strict=True)]
        found.append(segment(draw(st.sampled_from("abc")), n_tokens, units))
    return found


@st.composite
def meshes(draw):
    pp = draw(st.integers(1, 2))
    return Mesh(
        dp=draw(st.integers(1, 3)), cp=draw(st.integers(1, 3)), tp=draw(st.integers(1, 2)), pp=pp, num_layers=2 * pp,
        order=draw(st.sampled_from(["tp-cp-ep-dp-pp", "dp-cp-tp-pp"])),
    )  # fmt: skip


@st.composite
def plans_of_units(draw):
    refs, mesh = draw(references()), draw(meshes())
    split = draw(st.sampled_from(["zigzag", "contiguous", "micro_batch"]))
    planned = plan(refs, mesh, n_micro=draw(st.integers(1, 3)), split=split)
    encoders = draw(st.none() | st.integers(1, 5) | st.sets(st.integers(0, 9), min_size=1, max_size=4).map(sorted))
    return refs, plan_units(
        refs, planned, encoders=encoders, tp_gradients=draw(st.sampled_from(["replicated", "partial"]))
    )


def places(mesh):
    return [Place(*where) for where in product(*(range(getattr(mesh, axis)) for axis in Place._fields))]


def test_the_index_leads_from_samples_over_trajectories_to_units():
    refs = [
        segment("a", 5, [("x", 1, 4), ("y", 3, 2)], group="g", index=7),
        segment("b", 3, group="g", index=8),
        segment("a", 4, [("x", 0, 4), ("x", 2, 4)], group="g", index=7),
    ]
    index = unit_index(refs)
    assert index.units == (IndexedUnit("x", 4, 3), IndexedUnit("y", 2, 1))
    first, second = index.samples
    assert (first.session_id, first.group_id, first.sample_index) == ("a", "g", 7)
    assert first.trajectories == (
        UnitTrajectory(0, "a@lineage/0", (UnitUse(0, 1, 1), UnitUse(1, 3, 6))),
        UnitTrajectory(2, "a@lineage/0", (UnitUse(0, 0, 0), UnitUse(0, 2, 5))),
    )
    assert second.trajectories == (UnitTrajectory(1, "b@lineage/0", ()),)
    assert (index.n_uses, index.n_rows) == (4, 6)
    assert [trajectory.item for trajectory in index.trajectories] == [0, 1, 2]
    assert msgspec.json.decode(index.to_json(), type=UnitIndex) == index == pickle.loads(pickle.dumps(index))


def test_steps_are_indexed_too():
    step = StepRef(spool_id="s", session_id="a", step_id="#0", index=0, n_tokens=2, n_rows=2)
    (sample,) = unit_index([step]).samples
    assert sample.trajectories == (UnitTrajectory(0, "a:0", ()),)


def test_a_unit_of_two_sizes_is_refused():
    with pytest.raises(InputError, match=r"unit 'x' has 5 rows in b@lineage/0 \(entry 1 of refs\), but 4 rows"):
        unit_index([segment("a", 3, [("x", 1, 4)]), segment("b", 3, [("x", 1, 5)])])


@pytest.mark.parametrize("odd", [None, 5, "refs", [1.5], [object()]])
def test_what_is_no_list_of_references_is_refused(odd):
    with pytest.raises(InputError, match="refs must be references"):
        unit_index(odd)


@given(plans_of_units())
def test_each_unit_is_assigned_once(made):
    _, found = made
    assert sorted(unit for units in found.assigned for unit in units) == list(range(len(found.index.units)))
    assert len(found.assigned) == len(found.encoders) == len(found.costs)
    rows = [sum(found.index.units[unit].n_rows for unit in units) for units in found.assigned]
    assert rows == list(found.costs)


@given(plans_of_units())
def test_context_ranks_together_need_each_use_of_a_unit_once_and_where_it_lies(made):
    """Against the sequences laid out row by row."""
    refs, found = made
    mesh, planned = found.plan.mesh, found.plan
    seen = {}
    for place in places(mesh):
        shares = planned.rank(place).shares
        for micro, (share, needs) in enumerate(zip(shares, found.needs(place), strict=True)):
            if place.pp:
                assert needs == ()
                continue
            layout = [None] * share.n_rows
            for piece in share.pieces:
                whole = laid_out(refs[piece.item], piece.item)
                layout[piece.to : piece.to + piece.n_rows] = whole[piece.row : piece.row + piece.n_rows]
            mine = [None] * share.n_rows
            for rows in needs:
                for i in range(rows.stop - rows.start):
                    mine[rows.to + i] = (found.index.units[rows.unit].key, rows.start + i)
            assert mine == [entry and entry[1:] for entry in layout]
            assert [rows.to for rows in needs] == sorted(rows.to for rows in needs)
            for entry in filter(None, layout):
                seen.setdefault((place.tp, micro, place.dp), []).append(entry)
    for tp in range(mesh.tp):
        held = sorted(entry for (other, *_), entries in seen.items() if other == tp for entry in entries)
        expected = [entry for item, ref in enumerate(refs) for entry in laid_out(ref, item) if entry]
        assert held == sorted(expected)


def laid_out(ref, item):
    """For each row of a sequence the place and unit it belongs to and which row of that it is; None for text."""
    units = {unit.position: unit for unit in ref.units}
    found = []
    for token in range(ref.n_tokens):
        unit = units.get(token)
        found += [((item, token), unit.key, row) for row in range(unit.n_rows)] if unit else [None]
    return found


@given(plans_of_units())
def test_routes_bring_each_rank_what_it_needs_once_and_no_more(made):
    _, found = made
    routes = found.routes()
    assert len({(route.source, route.target) for route in routes}) == len(routes)
    for process in {*found.encoders, *found.backbone, 10}:
        assert found.routes(process) == tuple(r for r in routes if process in (r.source, r.target))
    for place in places(found.plan.mesh):
        process = next(p for p in found.backbone if found.place_of(p) == place)
        needed = {
            (rows.unit, row) for micro in found.needs(place) for rows in micro for row in range(rows.start, rows.stop)
        }
        brought = []
        for route in routes:
            if route.target == process:
                brought += [(run.unit, row) for run in route.runs for row in range(run.start, run.stop)]
                assert {run.unit for run in route.runs} <= set(found.units_of(route.source))
                assert route.returns == (found.tp_gradients == "partial" or place.tp == 0)
                assert route.n_rows == sum(run.n_rows for run in route.runs) > 0
        assert len(brought) == len(set(brought))
        assert set(brought) == needed


@given(plans_of_units())
def test_a_plan_of_units_is_the_same_everywhere_and_travels(made):
    refs, found = made
    again = plan_units(
        unit_index(refs), found.plan, encoders=found.encoders, backbone=found.backbone, tp_gradients=found.tp_gradients
    )
    assert again == found == unit_plan_from_json(found.to_json()) == pickle.loads(pickle.dumps(found))
    assert again.routes() == found.routes()


def test_samples_that_failed_or_are_lengths_only_use_no_unit():
    refs = [None, segment("a", 3, [("x", 1, 4)]), 7, segment("b", 2, [("x", 0, 4)]), None]
    planned = plan([12, refs[1], 7, refs[3], Item(5)], Mesh(dp=2, cp=2), n_micro=2)
    found = plan_units(refs, planned)
    index = unit_index([*refs[:4], Item(5)])
    assert found.index == index and index.n_items == 5
    assert [trajectory.item for trajectory in index.trajectories] == [1, 3]
    assert (index.units[0].n_uses, len(index.samples)) == (2, 2)
    needed = [found.needs(place) for place in places(planned.mesh)]
    assert sum(rows.stop - rows.start for place in needed for micro in place for rows in micro) == 2 * 4
    assert unit_plan_from_json(found.to_json()) == found
    with pytest.raises(InputError, match="a reference where an Item has units"):
        unit_index([Item(5, ((1, 4),))])
    with pytest.raises(InputError, match="the plan has 5 items and refs are 4"):
        plan_units(refs[:4], planned)


def test_encoder_ranks_are_balanced_among_themselves():
    refs = [segment("a", 20, [(f"v{n}", n, 8 + n) for n in range(16)])]
    found = plan_units(refs, plan(refs, Mesh(), n_micro=1), encoders=4)
    assert found.imbalance < 1.05
    by_square = plan_units(refs, found.plan, encoders=4, cost=lambda n_rows: n_rows**2)
    assert by_square.imbalance < 1.05
    assert by_square.costs != found.costs
    alone = plan_units(refs, found.plan, encoders=4, cost=[100, *[1] * 15])
    assert alone.assigned[0] == (0,)
    assert plan_units([], plan([], Mesh(), n_micro=1), encoders=3).imbalance == 1.0


def test_one_process_may_have_any_part():
    refs = [segment("a", 3, [("x", 1, 4)])]
    found = plan_units(refs, plan(refs, Mesh(tp=2), n_micro=1), encoders=[5], backbone=[7, 2])
    assert found.n_processes == 8
    assert [found.place_of(process) for process in (2, 5, 7)] == [Place(tp=1), None, Place()]
    assert [found.units_of(process) for process in (2, 5, 7)] == [(), (0,), ()]
    assert [(route.source, route.target, route.returns) for route in found.routes()] == [(5, 7, True), (5, 2, False)]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"encoders": 0}, "encoders must be at least one process"),
        ({"encoders": [1, 1]}, "encoders must be at least one process, each named once"),
        ({"encoders": [-1]}, "none of them negative"),
        ({"encoders": "two"}, "encoders must be numbers of processes"),
        ({"encoders": True}, "encoders must be numbers of processes"),
        ({"backbone": [0]}, "backbone names 1 processes, but the mesh has 2 ranks"),
        ({"cost": [1, 2]}, "cost has 2 numbers for 1 units"),
        ({"cost": [-1]}, "entry 0 of units costs -1"),
        ({"cost": lambda n_rows: float("nan")}, "entry 0 of units costs nan"),
        ({"tp_gradients": "mean"}, "tp_gradients must be one of replicated, partial"),
        ({"refs": []}, "the plan has 1 items and refs are 0"),
        ({"refs": [segment("a", 3)]}, r"entry 0 of refs, a@lineage/0, has the units \(\)"),
        ({"planned": None}, "planned must be the backbone's Plan"),
    ],
)
def test_wrong_arguments_of_a_plan_are_refused(more, message):
    refs = [segment("a", 3, [("x", 1, 4)])]
    arguments = {"refs": refs, "planned": plan(refs, Mesh(dp=2), n_micro=1), **more}
    with pytest.raises(InputError, match=message):
        plan_units(**arguments)


def test_what_is_no_plan_of_units_is_refused():
    for text in ("", "{}", "[1]"):
        with pytest.raises(InputError, match="not a plan of units"):
            unit_plan_from_json(text)
    refs = [segment("a", 3, [("x", 1, 4)])]
    sound = plan_units(refs, plan(refs, Mesh(), n_micro=1)).to_json()
    with pytest.raises(InputError, match="this plan is damaged"):
        unit_plan_from_json(sound.replace('"dp":1', '"dp":2'))


def test_planning_units_needs_no_framework_and_no_store():
    code = (
        "import sys\nfrom spool.train import Mesh, plan, plan_units\n"
        "plan_units([], plan([], Mesh(), n_micro=1)).routes()\n"
        "print(sorted({'torch', 'apsw', 'pyarrow', 'fsspec'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"


def test_planning_a_large_mini_batch_is_fast_and_its_plan_small():
    """By count, not by the clock: a plan holds each use once."""
    rng = np.random.default_rng(0)
    refs = [
        segment(f"s{n}", 400, [(f"k{rng.integers(200)}", int(at), 256) for at in range(0, 400, 100)])
        for n in range(64)
    ]  # fmt: skip
    found = plan_units(refs, plan(refs, Mesh(dp=4, cp=2), max_tokens=8192))
    assert len(found.to_json()) < 64 * 4 * 64 + 200 * 32 + 64 * 400
