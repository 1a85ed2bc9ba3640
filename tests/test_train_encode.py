"""Units are encoded once a mini-batch, and encoder and backbone get the gradients of the plain way."""

from __future__ import annotations

import fcntl
import gc
import os
import time
import weakref

import encode_ranks
import ml_dtypes
import numpy as np
import pytest
import torch
from encoding import DIM, PATCH, Backbone, Encoder, Store, assert_close, plain, real_rows, segment, train
from torch import multiprocessing
from torch.utils.checkpoint import checkpoint

from spool.errors import InputError, PayloadError
from spool.train import Mesh, Place, encode_once, plan, plan_units
from tools.bench.harness import resident_bytes


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


def test_several_micro_batches_may_be_on_their_way():
    """As with a pipeline: forward of all, then backward in another order; with recomputed activations."""
    refs, planned, units = planned_units()
    peer, encoder, backbone = Encoder(), Encoder(), Backbone()
    theirs = plain(refs, planned, peer)
    once = encode_once(encoder, units, load=Store(refs).load)
    losses = []
    for micro, share in enumerate(planned.rank(0).shares):
        embeds = backbone.embed(share).index_copy(0, once.rows(micro), once.features(micro))

        def layer(embeds, share=share):
            return backbone.loss(real_rows(share), embeds, lambda rows: rows)

        losses.append(checkpoint(layer, embeds, use_reentrant=False))
    for loss in losses[::-1]:
        loss.backward()
    once.backward()
    assert_same_gradients(peer, theirs, encoder, backbone)


def test_features_may_be_taken_twice():
    """Two losses over one micro-batch, each of half the weight; and a look without gradients in between."""
    refs, planned, units = planned_units()
    peer, encoder, backbone = Encoder(), Encoder(), Backbone()
    theirs = plain(refs, planned, peer)
    once = encode_once(encoder, units, load=Store(refs).load)
    for micro, share in enumerate(planned.rank(0).shares):
        for _ in range(2):
            embeds = backbone.embed(share).index_copy(0, once.rows(micro), once.features(micro))
            (backbone.loss(real_rows(share), embeds, lambda rows: rows) / 2).backward()
        with torch.no_grad():
            assert not once.features(micro).requires_grad
    once.backward()
    assert_same_gradients(peer, theirs, encoder, backbone)


def test_features_are_fresh_leaves_and_keep_no_gradient():
    _, _, units = planned_units(n_micro=1)
    once = encode_once(Encoder(), units, load=Store(references()).load)
    first, second = once.features(0), once.features(0)
    assert first.is_leaf
    assert first.requires_grad
    with torch.no_grad():
        first.zero_()
    assert second.abs().min() > 0
    assert len(once.rows(0)) == len(first) == 7 + 3 + 7 + 7 + 3 + 11
    second.sum().backward()
    assert second.grad is None


@pytest.mark.filterwarnings("ignore:Using backward")
def test_gradients_that_have_a_graph_are_summed_without_it():
    refs, _, units = planned_units(n_micro=1)
    once = encode_once(Encoder(), units, load=Store(refs).load)
    for _ in range(2):
        (once.features(0) ** 2).sum().backward(create_graph=True)
    assert not once._gradient.requires_grad
    once.backward()


def test_a_frozen_encoder_gets_nothing():
    refs, planned, units = planned_units()
    encoder, backbone = Encoder().requires_grad_(False), Backbone()
    once = encode_once(encoder, units, load=Store(refs).load, recompute=True)
    train(once, planned, Place(), backbone)
    assert not once.trainable
    once.backward()
    assert_close(backbone.table.grad, plain(refs, planned, encoder).table.grad)
    assert all(parameter.grad is None for parameter in encoder.parameters())
    with pytest.raises(InputError, match="features after EncodeOnce"):
        once.features(0)


def test_without_gradients_nothing_is_kept():
    refs, _, units = planned_units()
    with torch.no_grad():
        once = encode_once(Encoder(), units, load=Store(refs).load)
        features = once.features(0)
    assert not once.trainable
    assert not features.requires_grad
    assert once.stats.held_bytes == units.index.n_rows * DIM * 8


def test_a_mini_batch_of_text_only():
    refs = [segment("t", 5)]
    _, planned, units = planned_units(refs, n_micro=1)
    backbone = Backbone()
    once = encode_once(None, units, load=Store(refs).load, like=backbone.table)
    assert once.features(0).shape == (0, DIM)
    train(once, planned, Place(), backbone)
    once.backward()
    assert_close(backbone.table.grad, plain(refs, planned, Encoder()).table.grad)
    assert once.stats.encoder_calls == once.stats.peak_bytes == 0
    assert encode_once(None, units, load=Store(refs).load).features(0).shape == (0, 0)


def test_half_precision_gradients_are_summed_in_float32():
    """256 micro-batches of 1 and one of 256: bfloat16 would stop at 256."""
    refs = [segment(f"s{number}", 2, [("x", 0, 1)]) for number in range(256)]
    planned = plan(refs, Mesh(), n_micro=256)
    weight = torch.nn.Parameter(torch.ones(PATCH, DIM, dtype=torch.bfloat16))
    store = Store(refs)
    for wanted, more in ((512.0, {}), (256.0, {"accumulate_dtype": torch.bfloat16})):
        weight.grad = None
        once = encode_once(
            lambda units: torch.ones_like(units[0][:, :1]).bfloat16() @ weight[:1], plan_units(refs, planned),
            load=store.load, **more,
        )  # fmt: skip
        for micro in range(256):
            (once.features(micro).sum() * (256 if micro == 0 else 1)).backward()
        once.backward()
        assert weight.grad[0, 0] == {512.0: 512.0, 256.0: 256.0}[wanted]


class Large(Encoder):
    """Keeps 32 MiB for the backward of each unit, and knows how many such are there when it is called."""

    def __init__(self):
        super().__init__()
        self.seen, self.base = [], resident_bytes()

    def one(self, unit):
        self.seen.append(round((resident_bytes() - self.base) / (32 << 20)))
        return super().one(unit) + torch.tanh(self.inner.sum() + torch.zeros(4 << 20, dtype=torch.float64)).mean()


def test_with_recomputation_activations_of_one_batch_are_there_at_once():
    """Of eight units in batches of two: those of two, and a gradient as large as one; else all eight."""
    refs = [segment("a", 9, [(f"k{number}", number, 10) for number in range(8)])]
    _, _, units = planned_units(refs, n_micro=1)
    for recompute in (False, True):
        encoder, store = Large(), Store(refs)
        once = encode_once(encoder, units, load=store.load, recompute=recompute, max_rows=20)
        once.features(0).sum().backward()
        once.backward()
        assert store.loaded == [unit.key for unit in units.index.units] * (1 + recompute)
        before = min(encoder.seen)
        if recompute:
            assert max(encoder.seen[:8]) == before
            assert len(encoder.seen) == 16
        assert max(encoder.seen) - before in ((1, 2, 3) if recompute else (6, 7, 8))


def test_recomputation_draws_the_same_random_numbers():
    refs, planned, units = planned_units()

    class Dropping(Encoder):
        def one(self, unit):
            return torch.nn.functional.dropout(super().one(unit), 0.5)

    grads = []
    for recompute in (False, True):
        encoder = Dropping()
        torch.manual_seed(3)
        once = encode_once(encoder, units, load=Store(refs).load, recompute=recompute, max_rows=8)
        train(once, planned, Place(), Backbone())
        torch.manual_seed(4)
        once.backward()
        grads.append(encoder.inner.grad)
    assert_close(*grads)


def test_what_is_held_is_bounded_by_the_unique_rows():
    """Outputs, features and their gradients: three times the units' rows, however often they are used."""
    refs = [segment(f"s{number}", 3, [("x", 0, 50), ("y", 2, 30)]) for number in range(20)]
    *_, once = both_ways(refs, n_micro=10)
    assert once.stats.n_uses == 40
    assert once.stats.peak_bytes == 3 * 80 * DIM * 8


def test_everything_is_let_go_of():
    refs, planned, units = planned_units()
    once = encode_once(Encoder(), units, load=Store(refs).load)
    train(once, planned, Place(), Backbone())
    held = [weakref.ref(once._features), weakref.ref(once._gradient), *map(weakref.ref, once._encoder.outputs)]
    once.backward()
    assert [each() for each in held] == [None] * len(held)
    gone = weakref.ref(once)
    del once
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    "encoder",
    [
        lambda made: lambda units: [made.one(unit) for unit in units],
        lambda made: lambda units: tuple(made.one(unit) for unit in units),
    ],
)
def test_an_encoder_may_give_a_tensor_for_each_unit(encoder):
    refs, planned, units = planned_units()
    made, backbone = Encoder(), Backbone()
    once = encode_once(encoder(made), units, load=Store(refs).load)
    train(once, planned, Place(), backbone)
    once.backward()
    peer = Encoder()
    assert_same_gradients(peer, plain(refs, planned, peer), made, backbone)


def test_collate_makes_what_the_encoder_takes():
    refs, _, units = planned_units()
    seen = []

    def collate(arrays):
        seen.append([type(array) for array in arrays])
        return torch.from_numpy(np.concatenate(arrays)), [len(array) for array in arrays]

    made = Encoder()
    once = encode_once(
        lambda batch: torch.cat([made.one(unit) for unit in batch[0].split(batch[1])]), units,
        load=Store(refs).load, collate=collate,
    )  # fmt: skip
    assert seen == [[np.ndarray] * 3]
    assert len(once.features(0)) > 0


@pytest.mark.parametrize(
    "array",
    [
        np.frombuffer(np.ones((7, PATCH)).tobytes()).reshape(7, PATCH),
        np.ones((PATCH, 7)).T,
        torch.ones(7, PATCH, dtype=torch.float64),
        np.ones((7, PATCH), ml_dtypes.bfloat16),
    ],
    ids=["read-only", "transposed", "tensor", "bfloat16"],
)
def test_arrays_of_any_kind_become_tensors(array, recwarn):
    refs = [segment("a", 2, [("x", 0, 7)])]
    _, _, units = planned_units(refs, n_micro=1)
    seen = []
    once = encode_once(
        lambda found: seen.append(found) or Encoder()([found[0].double()]), units, load=lambda _: [array]
    )
    assert once.features(0).shape == (7, DIM)
    ((tensor,),) = seen
    assert isinstance(tensor, torch.Tensor)
    assert (tensor == 1).all()
    assert tensor.dtype == (torch.bfloat16 if array.dtype == ml_dtypes.bfloat16 else torch.float64)
    assert not recwarn.list


WRONG = {
    "rows": (lambda made: lambda units: torch.cat([made.one(unit) for unit in units])[:20],
             r"the encoder gives \[.*, 6\] for the units x, y, z; it must give \[21, width\]"),
    "rows of one": (lambda made: lambda units: torch.cat([made.one(unit[: min(len(unit), 10)]) for unit in units]),
                    r"gives \[10, 6\] for unit 'z', which stands for 11 rows .* must give \[11, width\]"),
    "rows in a list": (lambda made: lambda units: [made.one(unit[:3]) for unit in units],
                       r"gives \[3, 6\] for unit 'x', which stands for 7 rows"),
    "too few": (lambda made: lambda units: [made.one(units[0])], "gives 1 tensors for 3 units"),
    "three dimensions": (lambda made: lambda units: made(units)[None], r"gives \[1, 7, 6\] for unit 'x'"),
    "integers": (lambda made: lambda units: made(units).detach().long(), "features of torch.int64; they must be of"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(WRONG))
def test_an_encoder_that_gives_something_else_is_named(name):
    encoder, message = WRONG[name]
    refs, _, units = planned_units()
    with pytest.raises(InputError, match=message):
        encode_once(encoder(Encoder()), units, load=Store(refs).load)


def test_batches_must_be_of_one_width():
    refs, _, units = planned_units()
    with pytest.raises(PayloadError, match=r"width 3, .* without gradient.*width 7"):
        encode_once(lambda found: found[0][:, :1].expand(-1, min(len(found[0]), 7)), units, load=Store(refs).load,
                    max_rows=1)  # fmt: skip


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"units": None}, "units must be a UnitPlan"),
        ({"load": None}, "load must be a function of keys"),
        ({"load": lambda keys: []}, r"load\(\) gave 0 arrays for 3 keys"),
        ({"load": lambda keys: dict.fromkeys(keys)}, r"load\(\) gave a mapping"),
        ({"load": lambda keys: None}, r"load\(\) gave NoneType: it must give a list of arrays"),
        ({"load": lambda keys: [[1.0]] * len(keys)}, r"load\(\) gave list for a key: it must give numpy arrays"),
        ({"max_rows": 0}, "max_rows must be at least 1"),
        ({"max_rows": "1"}, "max_rows must be an integer"),
        ({"like": 6}, "like must be a tensor"),
        ({"like": torch.tensor(1.0)}, "like must be of one of torch.float32.* and have a last size"),
        ({"like": torch.empty(1, DIM, dtype=torch.int64)}, "like must be of one of torch.float32"),
        (
            {"like": torch.empty(0, 5, dtype=torch.float64)},
            "give features 6 wide of torch.float64 and like= asks for 5 wide of torch.float64",
        ),
        ({"like": torch.empty(0, DIM)}, "of torch.float64 and like= asks for 6 wide of torch.float32"),
        ({"accumulate_dtype": torch.int8}, "accumulate_dtype must be one of torch.float32"),
        ({"timeout_s": -1}, "timeout_s must be seconds"),
        ({"encoder": 5}, "encoder must be a function of a batch, or None"),
        ({"collate": 5}, "collate must be a function of a list of arrays"),
        ({"encoder": None}, "is to encode 3 units and has no encoder"),
    ],
)
def test_wrong_arguments_are_refused(more, message):
    refs, _, units = planned_units()
    arguments = {"encoder": Encoder(), "units": units, "load": Store(refs).load, **more}
    with pytest.raises(InputError, match=message):
        encode_once(arguments.pop("encoder"), arguments.pop("units"), **arguments)


def test_what_is_called_at_the_wrong_time_is_refused():
    refs, planned, units = planned_units()
    once = encode_once(Encoder(), units, load=Store(refs).load)
    for odd in (-1, 3, "0", None, True):
        with pytest.raises(InputError, match="micro must be"):
            once.features(odd)
    late = once.features(0)
    with pytest.raises(InputError, match=r"no gradient came for micro-batches \[0, 1, 2\]"):
        once.backward()
    train(once, planned, Place(), Backbone())
    with pytest.raises(InputError, match="missing must be one of"):
        once.backward(missing="skip")
    for odd in ("x", None, True, float("nan"), float("inf")):
        with pytest.raises(InputError, match="scale must be a finite number"):
            once.backward(scale=odd)
    once.backward(scale=np.float32(1))
    with pytest.raises(InputError, match=r"^backward after EncodeOnce.backward\(\)"):
        once.backward()
    with pytest.raises(InputError, match="features after"):
        once.features(0)
    with pytest.raises(InputError, match="backward of a micro-batch after"):
        late.sum().backward()


def test_a_micro_batch_may_be_left_out():
    refs, _, units = planned_units()
    encoder, other = Encoder(), Encoder()
    for made, skipped in ((encoder, None), (other, 1)):
        once = encode_once(made, units, load=Store(refs).load)
        for micro in range(3):
            if micro != skipped:
                (once.features(micro).sum() * (micro != 1)).backward()
        once.backward(missing="error" if skipped is None else "zero")
    assert_close(encoder.inner.grad, other.inner.grad)
    nothing = Encoder()
    encode_once(nothing, units, load=Store(refs).load).backward(missing="zero")
    assert not nothing.inner.grad.any()


def test_a_plan_of_more_processes_needs_a_group():
    refs = references()
    units = plan_units(refs, plan(refs, Mesh(dp=2), n_micro=2))
    with pytest.raises(InputError, match="this plan is for 2 processes: call torch"):
        encode_once(Encoder(), units, load=Store(refs).load)


def test_an_error_of_the_encoder_comes_as_it_is():
    refs, _, units = planned_units()

    def broken(units):
        raise KeyError("patch")

    with pytest.raises(KeyError, match="patch"):
        encode_once(broken, units, load=Store(refs).load)


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
    assert loaded == sorted([unit.key for unit in units.index.units] * times)
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
        ("load_nothing", ["load() gave NoneType: it must give a list", "failed on ranks [0]", "failed on ranks [0]"]),
        ("plan_differently", ["ranks [2] have another plan", "ranks [2] have", "ranks [0, 1, 3] have another plan"]),
        ("encode_to_other_kinds", ["on some ranks trained, on others frozen"] * 3),
        ("take_other_kinds", ["6 wide of torch.float64 and like= asks for 6 wide of torch.float32"] * 4),
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


def test_features_of_two_bytes_travel_as_they_are(over_processes):
    """And their gradients are summed in float32 on both sides: 256 + 1 + 1 stays 256 in bfloat16."""
    for got in over_processes["features_of_two_bytes"]:
        assert got["features"].dtype == torch.bfloat16
        assert torch.equal(got["features"], got["expected"])
    assert sum(got["stats"].sent_bytes for got in over_processes["features_of_two_bytes"]) == 3 * 5 * DIM * (2 + 4)
    (gradient,) = [got["gradient"] for got in over_processes["features_of_two_bytes"] if got["gradient"] is not None]
    assert gradient.unique().tolist() == [4 * 258]


@pytest.mark.parametrize(("where", "how"), [("encode", "die"), ("encode", "sleep"), ("backward", "die")])
def test_a_rank_that_is_gone_is_an_error_and_no_hang(tmp_path, where, how):
    spawned(encode_ranks.die_or_sleep, 2, str(tmp_path), where, how, timeout_s=60)
    (kind, message), took = torch.load(tmp_path / "said.pt", weights_only=False)
    assert kind == "RankError"
    assert "rank 0 of 2 waited up to 3 s for all ranks" in message
    assert took < 15
