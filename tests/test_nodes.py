"""Many nodes on one cold root: directories as nodes, a process each for whoever writes, reads and trains."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import msgspec
import nodes
import pytest
from tiers import record, remove_root, wait_for

import spool
from spool.model.refs import SegmentRef
from spool.stores.objects import open_objects

SESSIONS_A_WRITER = 3
STEPS = 3


def digests(location, refs):
    """Return what another process reads at a location."""
    return nodes.result(nodes.start("read", location_=location, refs=msgspec.json.encode(refs).decode()))


def test_eight_writers_four_readers_and_a_trainer(cold, tmp_path):
    roots = [tmp_path / f"node{number}" for number in range(4)]
    uris = [nodes.location(root, cold, publish_interval_s=0.2) for root in roots]
    names = {number: [f"g{number}-{k}" for k in range(SESSIONS_A_WRITER)] for number in range(8)}
    writers = [nodes.start("write", uri=uris[number % 4], names=names[number]) for number in range(8)]
    refs, acknowledged = [], {}
    for writer in writers:
        for line in nodes.result(writer):
            if "segments" in line:
                refs += msgspec.json.decode(line["segments"], type=list[SegmentRef])
            else:
                acknowledged[line["session"]] = line["steps"]
    assert len(acknowledged) == 8 * SESSIONS_A_WRITER

    def count(sp):
        sessions = {row.session_id: row for row in sp.sessions()}
        assert sessions.keys() == acknowledged.keys()
        assert {name: [step.index for step in sp.steps(name)] for name in sessions} == acknowledged
        assert sum(row.n_steps for row in sessions.values()) == 8 * SESSIONS_A_WRITER * STEPS
        assert sorted(ref.id for ref in sp.segments()) == sorted(ref.id for ref in refs)

    with spool.open(uris[0]) as own, spool.open(cold) as only_cold, spool.open(uris[3], readonly=True) as other:
        for sp in (own, only_cold, other):
            count(sp)
        # the references of all nodes in one call
        samples = only_cold.read(refs)
        assert len({stream for ref in refs for runs in ref.extents.values() for stream in [runs[0].stream]}) >= 8
        assert [len(sample["token_ids"]) for sample in samples] == [ref.n_tokens for ref in refs]
    wanted = digests(cold, refs)
    assert digests(f"file://{roots[0]}", refs) == wanted
    assert digests(uris[2], refs) == wanted
    remove_root(roots[1])
    for location in (uris[0], cold):
        assert digests(location, refs) == wanted

    # a trainer without a hot root
    with spool.open(cold) as trainer:
        for name in acknowledged:
            if name.endswith("-0"):
                trainer.annotate(name, reward=1.0)
        chosen = [ref for ref in refs if ref.session_id.endswith("-0")]
        trainer.release(chosen, tag="ckpt-1")
        assert {row.session_id for row in trainer.sessions("reward = 1.0")} == {ref.session_id for ref in chosen}
        trainer.checkpointed("ckpt-1")
        trainer.release([ref for ref in refs if ref not in chosen])
    with spool.open(uris[2]) as sp:
        count(sp)
        assert len(list(sp.segments("released"))) == len(refs)
        assert len(list(sp.segments("reward = 1.0"))) == len(chosen)

    # each node collects its own; what the dead one left goes by hand
    for number in (0, 2, 3):
        with spool.open(nodes.location(roots[number], cold, retention="released", grace_s=0.001)) as sp:
            sp.gc()
            sp.gc()
    with spool.open(f"{cold}?retention=released&grace_s=0.001") as operator:
        left = {ref.session_id for ref in operator.segments()}
        assert left == {name for number in (1, 5) for name in names[number]}
        operator.gc()
        operator.gc()
        assert list(operator.sessions()) == []
        for ref in refs:
            with pytest.raises(spool.ReleasedError):
                operator.read(ref)
        assert operator._feeds.cold.objects.list("manifests/") == []
        assert not [
            o.key for o in operator._feeds.cold.objects.list("streams/") if "/c/" in o.key or "/records/" in o.key
        ]


def test_a_session_goes_on_at_another_node(cold, tmp_path):
    a, b = (nodes.location(tmp_path / name, cold, publish_interval_s=0.1) for name in "ab")
    (told,) = nodes.result(nodes.start("suspend", uri=a, session_id="moved"))
    token, prompt = told["token"], told["prompt"]
    with spool.open(b) as sp:
        s = sp.resume(token)
        n = len(prompt) + 4
        import numpy as np

        step = s.append(
            prompt_token_ids=prompt, response_token_ids=[5, 6, 7, 8], logprobs=[0.5] * 4, weight_version="2",
            routed_experts=np.arange((n - 1) * 6 * 4).reshape(n - 1, 6, 4) % 128,
            messages=[{"role": "user", "content": "later"}],
        )  # fmt: skip
        assert step.index == 2
        # A does not know of the ending yet: it keeps its packs whoever released what there is
        with spool.open(nodes.location(tmp_path / "a", cold, retention="released", grace_s=0.001)) as at_a:
            assert not any(item.go for item in at_a.gc(dry_run=True))
            assert "moved" in {name for item in at_a.gc(dry_run=True) for name in item.sessions}
        (segment,) = s.finalize(outcome="completed")
        assert segment.version_span == ("1", "2")
        assert len({run.stream for runs in segment.extents.values() for run in runs}) == 2
        sp.publish(segment, timeout_s=120)
        wanted = digests(b, [segment])
        for location in (a, cold):
            assert digests(location, [segment]) == wanted
        with spool.open(cold) as there:
            assert there.messages(segment) == sp.messages(segment)
            there.release(segment)
        with pytest.raises(spool.SessionStateError):
            sp.resume(token).steps  # noqa: B018 - the state is looked at, and has gone on
    # final at B, released in a fact file: now A's pack may go, and B's; a spiller may be first
    for name in "ab":
        with spool.open(nodes.location(tmp_path / name, cold, retention="released", grace_s=0.001)) as sp:
            sp.gc()
            sp.gc()
    with spool.open(cold) as there:
        assert list(there.sessions()) == []
        with pytest.raises(spool.ReleasedError):
            there.read(segment)


def test_one_id_on_two_nodes_gives_two_records_that_are_not_mixed(cold, tmp_path):
    locations = [nodes.location(tmp_path / name, cold, publish_interval_s=0.1) for name in "ab"]
    with spool.open(locations[0]) as a, spool.open(locations[1]) as b:
        sessions = {name: sp.session("same") for name, sp in (("a", a), ("b", b))}
        tails = {"a": 10, "b": 20}

        def append(name, prompt, tail):
            sessions[name].append(
                prompt_token_ids=prompt, response_token_ids=[tail, tail], logprobs=[0.5] * 2,
                messages=[{"role": "user", "content": f"{name}{n}"} for n in range(len(prompt) // 2)],
            )  # fmt: skip

        for name in "abba":  # the second step of b is older than that of a
            n = 1 if tails[name] % 10 == 0 else 2
            append(name, [1, 2] if n == 1 else [1, 2, tails[name] - 1, tails[name] - 1], tails[name])
            tails[name] += 1
        refs = {name: sessions[name].finalize() for name in "ba"}
        a.publish(refs["a"], timeout_s=120)
        b.publish(refs["b"], timeout_s=120)
    with spool.open(cold) as there:
        for name, first in (("a", 10), ("b", 20)):
            (sample,) = there.read(refs[name])
            assert sample["token_ids"].tolist() == [1, 2, first, first, first + 1, first + 1]
        # what is listed is b's, which was finalised first, whole
        assert [ref.to_json() for ref in there.segments()] == [ref.to_json() for ref in refs["b"]]
        assert [there.read([ref])[0]["token_ids"].tolist()[-2:] for ref in there.steps("same")] == [[20, 20], [21, 21]]
        assert [item["content"] for item in there.messages(refs["b"][0])] == ["b0", "b1"]
        with pytest.raises(spool.NotFoundError, match="recorded by two owners at once"):
            there.messages(refs["a"][0])
        assert there.verify().findings == ()


def made_at_once(cold, tmp_path):
    """Return the ids that four nodes say which make a spool on one cold root at once."""
    makers = [nodes.start("create", uri=nodes.location(tmp_path / f"node{number}", cold)) for number in range(4)]
    for maker in makers:
        assert maker.stdout.readline() == '"ready"\n'
    for maker in makers:
        maker.stdin.write("go\n")
        maker.stdin.flush()
    return {spool_id for maker in makers for spool_id in nodes.result(maker)}


def test_nodes_that_make_a_spool_at_once_agree_on_its_id(cold, tmp_path):
    ids = made_at_once(cold, tmp_path)
    assert len(ids) == 1
    with spool.open(cold, readonly=True) as sp:
        assert {sp.spool_id} == ids


def test_a_server_that_creates_once_gives_a_root_an_id_of_its_own(hostile, s3_root, tmp_path, by_hand):
    ids = made_at_once(s3_root, tmp_path)
    assert len(ids) == 1
    # emptied and made anew it is another spool, and the old hot root brings nothing over to it
    with contextlib.closing(open_objects(s3_root)) as objects:
        assert [found.key for found in objects.list("")] == ["spool.json"]
        objects.delete(["spool.json"])
        hostile.created.clear()
        with spool.open(nodes.location(tmp_path / "new", s3_root)) as sp:
            assert {sp.spool_id}.isdisjoint(ids)
        with spool.open(nodes.location(tmp_path / "node0", s3_root)) as sp:
            record(sp, "one")
            sp.flush()
            with pytest.raises(spool.ConfigError, match="another cold root was put in its place"):
                sp.spill()
        assert objects.list("streams/") == []


def test_a_hot_root_that_joins_beside_a_new_node_keeps_its_id_or_says_so(hostile, s3_root, tmp_path):
    alone = tmp_path / "alone"
    with spool.open(f"file://{alone}") as sp:
        record(sp, "one")
    before = (alone / "spool.json").read_bytes()
    with contextlib.closing(open_objects(s3_root)) as objects:
        hostile.fault("delay", "PUT", part="spool.json", n=3.0, times=1)  # the new node's, which the other overtakes
        maker = nodes.start("create", uri=nodes.location(tmp_path / "new", s3_root))
        maker.stdout.readline()
        maker.stdin.write("go\n")
        maker.stdin.flush()
        while not any("spool.json" in path for method, path in hostile.requests if method == "PUT"):
            assert maker.poll() is None
        try:
            with spool.open(nodes.location(alone, s3_root)) as sp:
                spool_id = sp.spool_id
        except spool.ConfigError:  # on a slow machine the other one is first all the same
            assert (alone / "spool.json").read_bytes() == before
            (spool_id,) = nodes.result(maker)
        else:
            assert nodes.result(maker) == [spool_id] and spool_id.encode() in before
        assert spool_id.encode() in objects.get("spool.json")


def test_nodes_that_make_a_spool_write_the_same_identity(s3_root, tmp_path):
    """Without exclusive creation the last one wins: nobody may see another's bytes, and take them for torn."""
    written = []
    with contextlib.closing(open_objects(s3_root)) as objects:
        for name in "ab":
            with spool.open(nodes.location(tmp_path / name, s3_root)):
                written.append(objects.get("spool.json"))
            objects.delete(["spool.json"])
    assert written[0] == written[1]


def test_a_cold_root_that_is_copied_keeps_its_id_and_reads(cold, tmp_path):
    with spool.open(nodes.location(tmp_path / "a", cold, publish_interval_s=0.1)) as sp:
        refs = record(sp, "one")
        sp.publish(refs, timeout_s=120)
        spool_id = sp.spool_id
    moved = f"{cold}-moved"
    with spool.open(cold) as old:
        source = old._feeds.cold.objects
        target = spool.root.open_cold(old.config, moved)
        target.create("spool.json", source.get("spool.json"))
        for found in source.list(""):
            target.put(found.key, source.get(found.key))
    wanted = digests(cold, refs)
    with spool.open(cold) as old:
        source.delete([found.key for found in old._feeds.cold.objects.list("")])
    remove_root(tmp_path / "a")
    with spool.open(moved) as sp:
        assert sp.spool_id == spool_id
        assert [row.session_id for row in sp.sessions()] == ["one"]
    assert digests(moved, refs) == wanted


def test_two_spools_are_not_joined(cold, tmp_path):
    alone, pair = tmp_path / "alone", tmp_path / "pair"
    with spool.open(f"file://{alone}") as sp:
        record(sp, "one")
    with spool.open(nodes.location(pair, cold)) as sp:
        spool_id = sp.spool_id
    before = (alone / "spool.json").read_bytes()
    with pytest.raises(spool.ConfigError, match="take another hot or cold root"):
        spool.open(nodes.location(alone, cold))
    other = f"{cold}-other"
    with pytest.raises(spool.ConfigError, match="open it with the same spill="):
        spool.open(nodes.location(pair, other))
    assert (alone / "spool.json").read_bytes() == before
    with spool.open(nodes.location(tmp_path / "third", cold)) as sp:
        assert sp.spool_id == spool_id


def test_a_dead_node_leaves_what_it_published(cold, tmp_path):
    dead = tmp_path / "dead"
    writer = nodes.start("write", uri=nodes.location(dead, cold, publish_interval_s=0.1), names=["d-0", "d-1"])
    refs = [ref for line in nodes.result(writer) if "segments" in line
            for ref in msgspec.json.decode(line["segments"], type=list[SegmentRef])]  # fmt: skip
    Path(tmp_path / "gone").mkdir()
    shutil.move(dead, tmp_path / "gone" / "dead")
    with spool.open(nodes.location(tmp_path / "alive", cold)) as sp:
        wait_for(lambda: {row.session_id for row in sp.sessions()} == {"d-0", "d-1"}, what="the dead node's sessions")
        assert len(sp.read(refs)) == len(refs)
        assert not any(item.go for item in sp.gc(dry_run=True))
        with pytest.raises(spool.NotFoundError):
            sp.annotate("d-9", reward=1.0)


def test_an_open_session_of_a_lost_node_can_be_discarded_and_says_so(cold, tmp_path):
    with spool.open(nodes.location(tmp_path / "lost", cold)) as sp:
        session = sp.session("late")
        session.append(prompt_token_ids=[1, 2], response_token_ids=[3])
        sp.publish(session.view())
    remove_root(tmp_path / "lost")
    with spool.open(nodes.location(tmp_path / "node", cold)) as sp:
        again = sp.session("late")
        with pytest.raises(spool.LockedError, match="if that node is lost, discard the session"):
            again.append(prompt_token_ids=[1, 2], response_token_ids=[3])
        sp.discard("late")
        for session in (again, sp.session("late")):
            with pytest.raises(spool.SessionStateError, match="was discarded; open another one"):
                session.append(prompt_token_ids=[1, 2], response_token_ids=[3])
