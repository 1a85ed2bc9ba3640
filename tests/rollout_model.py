"""A session over plain lists, for comparison with `spool.rollout`, and a store of rows that never held a byte.

A token is a pair (id, unit): unit is None or (key, rows it expands to). A stored row is the triple (field, step,
position) that says who sent it for what.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

import numpy as np

from spool.model.events import SessionOpened, StepCommitted, StepDiscarded, Transaction
from spool.model.fields import FieldSpec
from spool.model.refs import Extent, Unit, VersionSpan
from spool.rollout import prefix
from spool.rollout.coverage import Range
from spool.rollout.state import SessionState

TOKENS = FieldSpec(name="token_ids", dtype="int32", align="token")
ROUTED = FieldSpec(name="routed_experts", dtype="uint8", align="forward", shape=(2, 2))
LOGPROBS = FieldSpec(name="logprobs", dtype="float32", align="response")
SCORE = FieldSpec(name="score", dtype="float32", align="step")
KEPT = FieldSpec(name="kept", dtype="int32", align="response", ragged=True)
LINKS = FieldSpec(name="links", dtype="int32", align="forward", ragged=True)
FIELDS = (TOKENS, ROUTED, LOGPROBS, SCORE, KEPT, LINKS)
BY_NAME = {spec.name: spec for spec in FIELDS}


class Store:
    """Rows of arrays, written in runs that never cross a multiple of ``pack`` rows, ragged values apart."""

    def __init__(self, pack=1000):
        self.pack = pack
        self.rows = {}
        self.runs = {}
        self.names = itertools.count(1)

    def write(self, array, values):
        """Return extents, without position, of ``values`` written one after the other."""
        rows, runs = self.rows.setdefault(array, []), []
        while values:
            n = len(values) if array.endswith(".values") else min(len(values), self.pack - len(rows) % self.pack)
            run = Extent("st", len(rows), n, 0, next(self.names))
            self.runs[array, run.crc] = (run.row, n)
            rows += values[:n]
            values = values[n:]
            runs.append(run)
        return runs

    def place(self, array, ranges, values):
        """Write ``values`` for the positions in ``ranges`` and return extents that stand for these."""
        positions = [p for r in ranges for p in range(r.position, r.position + r.n)]
        assert len(positions) == len(values)
        extents = []
        for run in self.write(array, list(values)):
            for k in range(run.n):
                p = positions.pop(0)
                if k and p == extents[-1].position + extents[-1].n:
                    extents[-1] = run.at(p - k).cut(extents[-1].position, p + 1)
                else:
                    extents.append(run.at(p - k).cut(p, p + 1))
        return extents

    def get(self, array, extent):
        """Return the rows of an extent, after checking that it still names the run it was cut from."""
        assert self.runs[array, extent.crc] == (extent.row - extent.before, extent.before + extent.n + extent.after)
        return self.rows[array][extent.row : extent.row + extent.n]

    def read(self, extents, spec):
        """Return {position: row} of a field."""
        own, *partner = (extents.get(array.name, ()) for array in spec.arrays)
        found, last = {}, None
        for i, extent in enumerate(own):
            assert extent.n > 0
            assert last is None or extent.position >= last
            last = extent.position + extent.n
            rows = self.get(spec.arrays[0].name, extent)
            if partner:
                values = partner[0][i]
                assert (values.before, values.after) == (0, 0), "values are never cut"
                held = self.get(spec.arrays[1].name, values)
                assert set(rows) <= set(held)
            found.update(zip(range(extent.position, last), rows, strict=True))
        if partner:
            assert len(partner[0]) == len(own)
        return found


@dataclass
class Step:
    index: int
    step_id: str
    parent: int | None
    base: int
    tokens: list
    n_prompt: int
    finish: str | None
    n_nonfinite: int
    versions: list  # one a response token
    rows: dict  # field -> {position: row} of the chain; response fields: own response only; step fields: {0: row}
    added_by: str | None = None
    withdrawn_by: str | None = None
    points: set = field(default_factory=set)


def row_of(tokens, n):
    """Return the first row of token ``n``."""
    return sum(1 if unit is None else unit[1] for _, unit in tokens[:n])


def forward(tokens, n):
    return max(row_of(tokens, n) - 1, 0)


class Session:
    """The rules of sessions said slowly."""

    def __init__(self, prefer="first", trim=0):
        self.prefer, self.trim = prefer, trim
        self.steps = {}
        self.next_index = 0

    def seen(self, transaction=None):
        return [
            s for _, s in sorted(self.steps.items()) if s.withdrawn_by is None and s.added_by in (None, transaction)
        ]

    def children(self, index):
        return [s for s in self.steps.values() if s.parent == index]

    def find_parent(self, prompt, transaction, named=None):
        found = []
        for step in self.seen(transaction):
            if named is not None and step.index != named:
                continue
            for cut in range(min(self.trim, len(step.tokens) - step.n_prompt) + 1):
                n = len(step.tokens) - cut
                if n and prompt[:n] == step.tokens[:n]:
                    found.append((n, cut == 0, step.index))
        return (max(found)[2], max(found)[0]) if found else (None, 0)

    def find_donor(self, prompt, transaction):
        found = [
            (n, step.index)
            for step in self.seen(transaction)
            for n in step.points
            if n <= len(prompt) and prompt[:n] == step.tokens[:n]
        ]
        return max(found, default=(0, None))

    def append(
        self, prompt, response, given, *, transaction=None, parent=None, step_id=None, finish=None, versions=None
    ):
        """``given``: field -> set of positions."""
        tokens, n_prompt = [*prompt, *response], len(prompt)
        above, base = self.find_parent(prompt, transaction, parent)
        shared, donor = self.find_donor(prompt, transaction)
        if shared <= base:
            shared, donor = base, above
        index = self.next_index
        inherited = {} if above is None else self.steps[above].rows
        lent = {} if donor is None else self.steps[donor].rows
        rows, stored = {}, {}
        for spec in FIELDS:
            sent = {p: (spec.name, index, p) for p in given.get(spec.name, ())}
            have, more = inherited.get(spec.name, {}), lent.get(spec.name, {})
            if spec.align == "token":
                have = below(have, base)
                more = {p: v for p, v in more.items() if base <= p < shared}
                chosen = {**sent, **more, **have}
            elif spec.align == "forward":
                first, last = forward(tokens, base), forward(tokens, shared)
                have = below(have, first)
                late = {p: v for p, v in more.items() if p == last and first <= p < forward(tokens, len(tokens))}
                more = {p: v for p, v in more.items() if first <= p < last}
                if self.prefer == "first":
                    chosen = {**late, **sent, **more, **have}
                else:
                    chosen = {**late, **more, **have, **sent}
            else:
                chosen = sent
            rows[spec.name] = chosen
            stored[spec.name] = {p for p, v in chosen.items() if v[1] == index}
        step = Step(
            index, f"#{index}" if step_id is None else step_id, above, base, tokens, n_prompt, finish,
            index % 3 if response else 0, list(versions or []), rows, transaction,
        )  # fmt: skip
        ends = {len(tokens) - cut for cut in range(min(self.trim, len(response)) + 1)}
        step.points = {*range(prefix.BLOCK, len(tokens) + 1, prefix.BLOCK), *ends, n_prompt} - {0}
        if base == len(tokens):
            step.points |= {base}
        step.points = {n for n in step.points if n > base or n in ends | {n_prompt}}
        self.steps[index] = step
        self.next_index = index + 1
        return step, stored

    def leaf(self, index, transaction):
        kids = self.children(index)
        if transaction is not None:
            kids = [k for k in kids if k.withdrawn_by != transaction]
        return not kids and self.steps[index] in self.seen(transaction)

    def discard(self, index, transaction=None):
        if transaction is None:
            del self.steps[index]
        else:
            self.steps[index].withdrawn_by = transaction

    def rollback(self, transaction):
        self.steps = {i: s for i, s in self.steps.items() if s.added_by != transaction}
        for step in self.steps.values():
            if step.withdrawn_by == transaction:
                step.withdrawn_by = None

    def settle(self, transaction):
        for step in self.steps.values():
            if step.added_by == transaction:
                step.added_by = None
        self.steps = {i: s for i, s in self.steps.items() if s.withdrawn_by != transaction}

    # -- views: tokens of a segment are (token, step that generated it or None, its place in that step's response)

    def path(self, index):
        path = []
        while index is not None:
            path.insert(0, self.steps[index])
            index = self.steps[index].parent
        return path

    def authors(self, path):
        """Return for every token of the path's chain which step generated it."""
        authors = []
        for step in path:
            if step.tokens:
                fresh = [None] * (step.n_prompt - step.base) + [step.index] * (len(step.tokens) - step.n_prompt)
                authors = authors[: step.base] + fresh
        return authors

    def segments(self, view, *, train="first", superseded="drop", trailing="cut", gaps="cut", transaction=None):
        seen = self.seen(transaction)
        if view == "timeline":
            raw = []
            for step in seen:
                authors = [None] * step.n_prompt + [step.index] * (len(step.tokens) - step.n_prompt)
                raw.append((step, [step], authors, False))
        else:
            raw = []
            for step in seen:
                if any(other.parent == step.index for other in seen):
                    continue
                repeated = any(
                    o.index > step.index
                    and o.parent == step.parent
                    and o.tokens[: o.n_prompt] == step.tokens[: step.n_prompt]
                    for o in seen
                )
                if repeated and superseded == "drop":
                    continue
                path = self.path(step.index)
                raw.append((step, path, self.authors(path), repeated))
        done, trained = [], set()
        for leaf, path, authors, repeated in raw:
            segment = self.cut(leaf, path, authors, trailing, gaps)
            if segment is None:
                continue
            segment["superseded"] = repeated
            mask = []
            for at, author in enumerate(segment["authors"]):
                new = author is not None and (view == "timeline" or train == "all" or (author, at) not in trained)
                mask.append(new)
                trained.add((author, at))
            segment["mask"] = mask
            done.append(segment)
        return done

    def cut(self, leaf, path, authors, trailing, gaps):
        last = next((s for s in reversed(path) if s.tokens), None)
        tokens = last.tokens if last and authors else []
        rows = last.rows if last and authors else {name: {} for name in BY_NAME}
        whole = end = len(authors)
        generated = [i for i, author in enumerate(authors) if author is not None]
        if trailing == "cut" and generated:
            end = generated[-1] + 1
        if gaps == "cut":
            allowed = end
            for spec in FIELDS:
                need = forward(tokens, end)
                held = {p for p in rows[spec.name] if p < need} if spec.align == "forward" else set()
                while held and not set(range(forward(tokens, allowed))) <= held:
                    allowed -= 1
            if allowed < end:
                end = allowed
                left = [i for i in generated if i < end]
                if generated and not left:
                    return None
                if trailing == "cut" and left:
                    end = left[-1] + 1
        first = next((i for i in generated if i < end), end)
        kept = {a for a in authors[:end] if a is not None}
        values = {}
        for spec in FIELDS:
            if spec.align == "token":
                values[spec.name] = below(rows[spec.name], end)
            elif spec.align == "forward":
                values[spec.name] = below(rows[spec.name], forward(tokens, end))
            elif spec.align == "response":
                values[spec.name] = {
                    i: self.steps[a].rows[spec.name][i]
                    for i, a in enumerate(authors[:end])
                    if a is not None and i in self.steps[a].rows[spec.name]
                }
            else:
                values[spec.name] = {i: s.rows[spec.name][0] for i, s in enumerate(path) if 0 in s.rows[spec.name]}
        versions = [None] * end
        for i, author in enumerate(authors[:end]):
            if author is not None and self.steps[author].versions:
                versions[i] = self.steps[author].versions[i - self.steps[author].n_prompt]
        return {
            "steps": tuple(s.index for s in path), "authors": authors[:end], "n_rows": row_of(tokens, end),
            "n_tokens": end, "response_start": first, "cut_tokens": whole - end, "values": values,
            "finish": leaf.finish, "n_nonfinite": sum(self.steps[a].n_nonfinite for a in kept), "versions": versions,
            "units": [(u[0], i, u[1]) for i, (_, u) in enumerate(tokens[:end]) if u is not None],
        }  # fmt: skip


def below(rows, stop):
    return {p: v for p, v in rows.items() if p < stop}


class Pair:
    """A `SessionState` and its model, driven together."""

    def __init__(self, prefer="first", trim=0, pack=1000):
        self.opened = SessionOpened("s", 1.0, group_id="g", sample_index=2, prefer=prefer, trim=trim, fields=FIELDS)
        self.state = SessionState("spool", self.opened, roots=("file:///x",))
        self.model = Session(prefer, trim)
        self.store = Store(pack)
        self.log = []
        self.pending = {}

    def append(
        self, prompt, response, *, given=None, transaction=None, parent=None, step_id=None, versions=None, finish=None
    ):
        """``given``: forward positions sent; everything where None. Other fields are always sent whole."""
        tokens = [*prompt, *response]
        rows = range(forward(tokens, len(tokens)))
        forward_given = set(rows) if given is None else {p for p in given if p in rows}
        whole = range(len(prompt), len(tokens))
        sent = {
            "token_ids": set(range(len(tokens))), "routed_experts": forward_given, "links": forward_given,
            "logprobs": set(whole), "kept": set(whole), "score": {0},
        }  # fmt: skip
        names = versions or []
        plan = self.state.plan(
            ids(prompt), ids(response), given={name: ranges_of(at) for name, at in sent.items()},
            parent=parent, units=units_of(tokens), step_id=step_id, transaction=transaction,
        )  # fmt: skip
        step, stored = self.model.append(
            prompt,
            response,
            sent,
            transaction=transaction,
            parent=parent,
            step_id=step_id,
            finish=finish,
            versions=names,
        )
        assert (plan.index, plan.step_id, plan.parent, plan.base) == (step.index, step.step_id, step.parent, step.base)
        assert {name: positions_of(ranges) for name, ranges in plan.store.items()} == {
            k: v for k, v in stored.items() if v
        }
        event = self.event_of(plan, names, finish)
        self.state.commit(event, transaction)
        self.record(event, transaction)
        return step

    def event_of(self, plan, names, finish):
        extents = {}
        for spec in FIELDS:
            ranges = plan.store.get(spec.name, ())
            values = [(spec.name, plan.index, p) for r in ranges for p in range(r.position, r.position + r.n)]
            first, *second = (array.name for array in spec.arrays)
            own = self.store.place(first, ranges, values)
            pairs = [(e, None) for e in own]
            if second and own:
                (held,) = self.store.write(second[0], values)
                pairs = [(e, held) for e in own]
            shared = plan.shared.get(first, ())
            pairs += zip(shared, plan.shared.get(second[0], ()) if second else [None] * len(shared), strict=True)
            pairs.sort(key=lambda pair: pair[0].position)
            if pairs:
                extents[first] = tuple(e for e, _ in pairs)
                if second:
                    extents[second[0]] = tuple(v for _, v in pairs)
        spans, at = [], plan.n_prompt
        for name, run in itertools.groupby(names):
            n = len(list(run))
            spans.append(VersionSpan(name, at, at + n))
            at += n
        return StepCommitted(
            "s", plan.index, plan.step_id, 2.0, plan.parent, plan.base, plan.n_prompt, plan.n_tokens, plan.n_rows,
            extents, versions=tuple(spans), finish_reason=finish, units=plan.units,
            n_nonfinite=plan.index % 3 if plan.n_tokens > plan.n_prompt else 0,
            block_hashes=plan.block_hashes, prompt_hash=plan.prompt_hash, end_hashes=plan.end_hashes,
        )  # fmt: skip

    def record(self, event, transaction):
        (self.log if transaction is None else self.pending.setdefault(transaction, [])).append(event)

    def discard(self, index, transaction=None):
        event = StepDiscarded("s", index, 3.0)
        self.state.discard(event, transaction)
        self.model.discard(index, transaction)
        self.record(event, transaction)

    def settle(self, transaction):
        self.state.settle(transaction)
        self.model.settle(transaction)
        if events := self.pending.pop(transaction, []):
            self.log.append(Transaction(tuple(events)))

    def rollback(self, transaction):
        self.state.rollback(transaction)
        self.model.rollback(transaction)
        self.pending.pop(transaction, None)

    def replayed(self, seed=0):
        """Return a state made from the log alone, in some order."""
        events = [self.opened, *self.log]
        random.Random(seed).shuffle(events)
        return SessionState.from_events("spool", events, roots=("file:///x",))

    # -- comparison

    def check_steps(self, state=None, transaction=None):
        state = state or self.state
        seen = self.model.seen(transaction)
        assert state.visible(transaction) == [s.index for s in seen]
        for step in seen:
            self.check_step(state.ref(step.index), step)

    def check_step(self, ref, step):
        n = len(step.tokens)
        assert (ref.spool_id, ref.session_id, ref.group_id, ref.sample_index) == ("spool", "s", "g", 2)
        assert ref.roots == ("file:///x",)
        assert (ref.index, ref.step_id, ref.parent, ref.finish_reason) == (
            step.index,
            step.step_id,
            step.parent,
            step.finish,
        )
        assert (ref.n_tokens, ref.n_rows, ref.response_start) == (n, row_of(step.tokens, n), step.n_prompt)
        assert [(s.step, s.start, s.stop, s.trained) for s in ref.spans] == (
            [(step.index, step.n_prompt, n, True)] if n > step.n_prompt else []
        )
        assert [(u.key, u.position, u.n_rows) for u in ref.units] == [
            (u[0], i, u[1]) for i, (_, u) in enumerate(step.tokens) if u is not None
        ]
        assert versions_at(ref) == [None] * step.n_prompt + (step.versions or [None] * (n - step.n_prompt))
        for spec in FIELDS:
            assert self.store.read(ref.extents, spec) == step.rows[spec.name], (spec.name, step.index)
        assert all(ref.extents.values())

    def check_segments(self, refs, expected, view):
        assert [ref.steps for ref in refs] == [segment["steps"] for segment in expected]
        for i, (ref, segment) in enumerate(zip(refs, expected, strict=True)):
            assert (ref.view, ref.index, ref.count) == (view, i, len(expected))
            for name in ("n_tokens", "n_rows", "response_start", "cut_tokens", "superseded", "n_nonfinite"):
                assert getattr(ref, name) == segment[name], name
            assert ref.finish_reason == segment["finish"]
            assert [(u.key, u.position, u.n_rows) for u in ref.units] == segment["units"]
            authors, mask = [None] * ref.n_tokens, [False] * ref.n_tokens
            last = 0
            for span in ref.spans:
                assert last <= span.start < span.stop
                last = span.stop
                authors[span.start : span.stop] = [span.step] * (span.stop - span.start)
                mask[span.start : span.stop] = [span.trained] * (span.stop - span.start)
            assert (authors, mask) == (segment["authors"], segment["mask"])
            assert versions_at(ref) == segment["versions"]
            for spec in FIELDS:
                assert self.store.read(ref.extents, spec) == segment["values"][spec.name], spec.name
            assert all(ref.extents.values())


def versions_at(ref):
    versions, last = [None] * ref.n_tokens, 0
    for span in ref.versions:
        assert last <= span.start < span.stop <= ref.n_tokens
        last = span.stop
        versions[span.start : span.stop] = [span.version] * (span.stop - span.start)
    return versions


def ids(tokens):
    return np.array([token for token, _ in tokens], np.int32)


def plain(*tokens):
    """Return tokens without units."""
    return [(token, None) for token in tokens]


def units_of(tokens):
    return tuple(Unit(unit[0], i, unit[1]) for i, (_, unit) in enumerate(tokens) if unit is not None)


def ranges_of(positions):
    """Return ranges, one a position, in no useful order."""
    return tuple(Range(p, 1) for p in sorted(positions, key=lambda p: (p % 3, p)))


def positions_of(ranges):
    out = [p for r in ranges for p in range(r.position, r.stop)]
    assert out == sorted(set(out))
    return set(out)
