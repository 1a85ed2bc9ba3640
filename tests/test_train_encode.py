"""Units are encoded once a mini-batch, and encoder and backbone get the gradients of the plain way."""

from __future__ import annotations

import fcntl
import os
import time

import encode_ranks
import pytest
import torch
from encoding import DIM, Backbone, Encoder, Store, assert_close, plain, segment, train
from torch import multiprocessing

from spool.train import Mesh, Place, encode_once, plan, plan_units


def references():
    """Text, a unit twice in one sequence, and the same one in others."""
    return [
        segment("a", 9, [("x", 1, 7), ("y", 4, 3), ("x", 6, 7)]),
        segment("b", 12),
        segment("c", 5, [("x", 0, 7)]),
        segment("d", 8, [("z", 7, 11), ("y", 2, 3)][::-1]),
    ]


def planned_units(refs=None, *, n_micro=3, **more):
    refs = references() if refs is None else refs
    planned = plan(refs, Mesh(), n_micro=n_micro)
    return refs, planned, plan_units(refs, planned, **more)


def both_ways(refs=None, *, n_micro=3, **options):
    """Train a mini-batch in both ways; return encoders, backbones and the handle."""
    refs, planned, units = planned_units(refs, n_micro=n_micro)
    peer, encoder, backbone = Encoder(), Encoder(), Backbone()
    theirs = plain(refs, planned, peer)
    once = encode_once(encoder, units, load=Store(refs).load, **options)
    train(once, planned, Place(), backbone)
    once.backward()
    return peer, theirs, encoder, backbone, once


def assert_same_gradients(peer, theirs, encoder, backbone):
    for other, own in zip([*peer.parameters(), *theirs.parameters()], [*encoder.parameters(), *backbone.parameters()],
                          strict=True):  # fmt: skip
        assert_close(own.grad, other.grad)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("max_rows", [None, 1, 10])
@pytest.mark.parametrize("n_micro", [1, 3, 6])
def test_gradients_are_those_of_encoding_in_every_micro_batch(n_micro, max_rows, recompute):
    peer, theirs, encoder, backbone, once = both_ways(n_micro=n_micro, max_rows=max_rows, recompute=recompute)
    assert_same_gradients(peer, theirs, encoder, backbone)
    calls = {None: 1, 1: 3, 10: 2}[max_rows]
    assert peer.calls == 6
    assert encoder.calls == once.stats.encoder_calls == calls * (1 + recompute)
    assert once.stats.loaded_units == 3 * (1 + recompute)
    assert (once.stats.n_units, once.stats.n_uses) == (3, 6)
    assert once.stats.sent_bytes == once.stats.received_bytes == once.stats.held_bytes == 0


@pytest.fixture(scope="module")
def over_processes(tmp_path_factory):
    """What each of four processes got in each scenario; run once, whichever of pytest's workers comes first."""
    shared = tmp_path_factory.getbasetemp()
    folder = (shared.parent if os.environ.get("PYTEST_XDIST_WORKER") else shared) / "encode-ranks"
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "3.pt").exists():
            spawned(encode_ranks.run_all, encode_ranks.N, str(folder))
    found = [torch.load(f"{folder}/{rank}.pt", weights_only=False) for rank in range(encode_ranks.N)]
    return {name: [each[name] for each in found] for name in found[0]}


def spawned(function, n, *arguments, timeout_s=150):
    context = multiprocessing.spawn(function, arguments, nprocs=n, join=False)
    deadline = time.monotonic() + timeout_s
    try:
        while not context.join(timeout=1):
            assert time.monotonic() < deadline, "the processes hang"
    finally:
        for process in context.processes:
            process.kill()


@pytest.mark.parametrize("name", list(encode_ranks.SCENARIOS))
def test_over_processes_gradients_are_those_of_the_plain_way(over_processes, name):
    refs, planned, units = encode_ranks.made(name)
    scenario, found = encode_ranks.SCENARIOS[name], over_processes[name]
    peer = Encoder()
    theirs = plain(refs, planned, peer)
    for number, parameter in enumerate(peer.parameters()):
        given = [each["encoder"][number] for each in found if each["encoder"] and each["encoder"][number] is not None]
        if scenario.get("frozen") or not units.index.units:
            assert given == []
        else:
            assert_close(sum(given), scenario.get("scale", 1.0) * parameter.grad)
    assert_backbone(found, planned.mesh, units.tp_gradients, theirs)
    assert sorted({key for each in found for key in each["loaded"]}) == sorted(u.key for u in units.index.units)


def assert_backbone(found, mesh, tp_gradients, theirs):
    """The table of one TP rank (of all, where each has a part) over DP and CP; the columns of each TP rank."""
    embedding = [each for each in found if each["backbone"]]
    one = [each for each in embedding if tp_gradients == "partial" or each["place"].tp == 0]
    assert_close(sum(each["backbone"][0] for each in one), theirs.table.grad)
    for tp in range(mesh.tp):
        columns = sum(each["backbone"][1] for each in embedding if each["place"].tp == tp)
        assert_close(columns, theirs.columns.grad[:, tp :: mesh.tp])


@pytest.mark.parametrize(
    "name", [name for name in encode_ranks.SCENARIOS if "refs" not in encode_ranks.SCENARIOS[name]]
)
def test_each_unit_is_encoded_by_one_process(over_processes, name):
    _, _, units = encode_ranks.made(name)
    options = encode_ranks.SCENARIOS[name].get("options", {})
    times = 1 + options.get("recompute", False)
    loaded = sorted(key for each in over_processes[name] for key in each["loaded"])
    assert loaded == sorted(["x", "y", "z"] * times)
    for rank, each in enumerate(over_processes[name]):
        n_units = len(units.units_of(rank))
        assert (each["stats"].n_units, each["calls"]) == (n_units, each["stats"].encoder_calls)
        assert each["stats"].loaded_units == n_units * times
        assert each["calls"] <= n_units * times
        assert each["stats"].held_bytes == 0


def test_the_scenarios_are_what_they_are_to_be():
    """A unit is cut by a CP boundary; DP ranks share one; an encoder rank has none."""
    for name in ("tp and cp", "tp and cp, contiguous", "tp and cp, partial", "dp and cp"):
        _, _, units = encode_ranks.made(name)
        needs = [rows for cp in range(2) for micro in units.needs(Place(cp=cp)) for rows in micro]
        assert any(rows.start > 0 or rows.stop < units.index.units[rows.unit].n_rows for rows in needs)
        assert min(map(len, units.assigned)) == 0
    _, _, units = encode_ranks.made("dp and cp")
    sharing = [{rows.unit for micro in units.needs(Place(dp=dp)) for rows in micro} for dp in range(2)]
    assert sharing[0] & sharing[1]


@pytest.mark.parametrize("name", list(encode_ranks.SCENARIOS))
def test_only_what_is_needed_travels(over_processes, name):
    _, _, units = encode_ranks.made(name)
    trains = not encode_ranks.SCENARIOS[name].get("frozen")
    for rank, each in enumerate(over_processes[name]):
        sent = received = 0
        for route in units.routes():
            if route.source != route.target:
                there, back = route.n_rows * DIM * 8, route.n_rows * DIM * 8 * (route.returns and trains)
                sent += there * (route.source == rank) + back * (route.target == rank)
                received += there * (route.target == rank) + back * (route.source == rank)
        assert (each["stats"].sent_bytes, each["stats"].received_bytes) == (sent, received)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fail_to_encode", ["failed on ranks [1]", "unit 'z', which stands for 11 rows", "failed on ranks [1]"]),
        ("have_no_encoder", ["has no encoder: pass it", "failed on ranks [0]", "failed on ranks [0]"]),
        ("plan_differently", ["ranks [2] have another plan", "ranks [2] have", "ranks [0, 1, 3] have another plan"]),
        ("encode_to_other_kinds", ["must be alike; cast in the encoder"] * 3),
        ("forget_a_gradient", ["missing on ranks [3]"] * 3 + ["no gradient came for micro-batches [0"]),
        ("ask_where_nothing_is", [None, None, "process 2 encodes only"]),
        ("be_too_few", ["names process 6, but the group has 4 processes"] * 4),
    ],
)
def test_what_fails_on_one_process_is_said_on_all(over_processes, name, said):
    for found, expected in zip(over_processes[name], said, strict=False):
        if expected is None:
            assert found is None
        else:
            kind, message = found
            assert expected in message
            assert kind in {"InputError", "PayloadError", "RankError"}


def test_processes_are_numbered_as_in_their_group(over_processes):
    found = over_processes["in a group of two"]
    assert [each[0] for each in found[::2]] == ["InputError", "InputError"]
    refs = encode_ranks.references()
    planned, peer = plan(refs, Mesh(dp=2), n_micro=2), Encoder()
    theirs = plain(refs, planned, peer)
    for number, parameter in enumerate(peer.parameters()):
        assert_close(sum(each["encoder"][number] for each in found[1::2]), parameter.grad)
    assert_backbone(found[1::2], planned.mesh, "replicated", theirs)


@pytest.mark.parametrize(("where", "how"), [("encode", "die"), ("encode", "sleep"), ("backward", "die")])
def test_a_rank_that_is_gone_is_an_error_and_no_hang(tmp_path, where, how):
    spawned(encode_ranks.die_or_sleep, 2, str(tmp_path), where, how, timeout_s=60)
    (kind, message), took = torch.load(tmp_path / "said.pt", weights_only=False)
    assert kind == "RankError"
    assert "rank 0 of 2 waited up to 3 s for all ranks" in message
    assert took < 15
