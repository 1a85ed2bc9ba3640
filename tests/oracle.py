"""What sessions mean, said slowly: plain lists, no sharing, no hashes, no bytes. Tests compare Spool with it.

A row of routing, a logprob or a mask value is anything hashable; `GAP` stands for what was never sent. Each place
holds the *set* of values that reading it may give: mostly one. Sets with more than one value are places where the
rules leave freedom (a prefix may be shared at any of several ends).

How the rules were read, where they leave a choice:

* A chain of no tokens is extended by nobody: the next prompt begins a chain of its own.
* Among equally long chains the one with nothing trimmed wins, then the latest. A discarded step's chain is gone.
* A named parent whose chain the prompt does not start with (less ``trim``) is refused.
* Roots count as siblings: the first request sent again supersedes its first answer.
* Lineage segments come in the order of their leaves. The first that holds a generated token trains it. A superseded
  leaf that is left out trains nothing, so the one that stays trains the prefix.
* A segment is cut before the first missing row of its forward, then at its last generated token. A session that never
  got a row has no gaps; of a chain without any row, in a session that has some elsewhere, either is taken.
* Timeline segments are whole steps: nothing supersedes or cuts them unless asked.
* Under ``first`` a row sent again fills a gap of the chain; a present row stays. Under ``last`` every row sent wins.
* A trimmed chain keeps the rows of the tokens that stay; the row of its last one may be replaced.
* A step that the caller did not name has an id that no other step of the session has.
* Weight versions of tokens that left the chain leave with them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

GAP = None
BLOCK = 256


class RefusedError(Exception):
    """The rules forbid it; nothing changed."""


@dataclass(repr=False)
class OracleStep:
    """One step, with everything that a reader of it sees."""

    index: int
    step_id: str | None  # None where the caller gave none
    parent: int | None
    base: int
    tokens: list
    n_prompt: int
    rows: list  # of n_tokens - 1 sets
    logprobs: list  # of the response: value or GAP
    mask: list  # of the response
    versions: list  # of the response: str or None
    messages: list
    finish_reason: str | None
    discarded: bool = False

    @property
    def prompt(self) -> list:
        return self.tokens[: self.n_prompt]

    def __repr__(self) -> str:
        return f"step {self.index} after {self.parent}: {len(self.tokens)} tokens, {self.n_prompt} of prompt"


@dataclass
class OracleSegment:
    """What a view makes of a leaf."""

    steps: list
    tokens: list
    response_start: int
    mask: list  # of all tokens
    trained: list  # of all tokens: generated, and first in this segment; None where the rules leave it open
    logprobs: list  # of the response region: a value, GAP, or 0.0 on observations
    versions: list  # of the response region
    rows: list
    cut_tokens: int
    superseded: bool
    certain: bool = True  # False where the rules leave open where it ends


@dataclass
class OracleSession:
    """A session over plain lists."""

    prefer: str = "first"
    trim: int = 0
    steps: list = field(default_factory=list)
    finalized: bool = False

    # ---- append

    def append(
        self, prompt, response, *, rows=None, start=0, logprobs=None, loss_mask=None, version=None, step_id=None,
        parent=None, messages=None, finish_reason=None,
    ) -> OracleStep:  # fmt: skip
        """Append a step. ``rows`` is a list of hashable rows (GAP for a whole row of -1) or None."""
        if self.finalized:
            raise RefusedError("finalised")
        prompt, response = list(prompt), list(response)
        index, tokens = len(self.steps), prompt + response
        sent = accept_rows(rows, start, len(tokens))
        mask = accept_mask(loss_mask, len(prompt), len(response))
        if logprobs is not None and len(logprobs) != len(response):
            raise RefusedError("logprobs")
        versions = accept_versions(version, len(response))
        found, base = self.find_parent(prompt, parent)
        step = OracleStep(
            index=index,
            step_id=step_id,
            parent=found,
            base=base,
            tokens=tokens,
            n_prompt=len(prompt),
            rows=self.choose_rows(tokens, found, base, sent),
            logprobs=[GAP] * len(response) if logprobs is None else list(logprobs),
            mask=mask,
            versions=versions,
            messages=list(messages or []),
            finish_reason=finish_reason,
        )
        self.steps.append(step)
        return step

    def find_parent(self, prompt, named=None):
        """Return (index of the parent or None, tokens taken over from its chain)."""
        best = None
        for step in self.live():
            if named is not None and step.index != named:
                continue
            for trimmed in range(min(self.trim, len(step.tokens) - step.n_prompt) + 1):
                chain = step.tokens[: len(step.tokens) - trimmed]
                if chain and prompt[: len(chain)] == chain:
                    candidate = (len(chain), trimmed == 0, step.index)
                    best = candidate if best is None or candidate > best else best
        if best is None:
            if named is not None:
                raise RefusedError("the named parent does not fit")
            return None, 0
        return best[2], best[0]

    def choose_rows(self, tokens, parent, base, sent) -> list:
        return [self.choose_row(p, tokens, parent, base, sent) for p in range(max(len(tokens) - 1, 0))]

    def choose_row(self, p, tokens, parent, base, sent) -> set:
        inherited = self.steps[parent].rows if parent is not None else []
        if p in sent and self.prefer == "last":
            return {sent[p]}
        if p < base - 1:
            return fill(inherited[p], sent.get(p, GAP))
        options = {sent.get(p, GAP)}
        if p < min(base, len(inherited)):
            options |= inherited[p]
        sharers = [step for step in self.steps if len(step.rows) > p and step.tokens[: p + 1] == tokens[: p + 1]]
        for step in sharers:
            options |= {row for row in step.rows[p] if row is not GAP}
        if p not in sent and self.must_share(p, tokens, base):
            options.discard(GAP)
        return options

    def must_share(self, p, tokens, base) -> bool:
        """Row ``p`` lies in the whole blocks of the longest prefix that any step shares, and surely is there."""
        shared = [(common_prefix(step.tokens, tokens) // BLOCK * BLOCK, step) for step in self.live()]
        longest = max((n for n, _ in shared), default=0)
        if longest <= max(base, p):
            return False
        holders = [step for n, step in shared if n == longest]
        return all(p < len(step.rows) and GAP not in step.rows[p] for step in holders)

    # ---- life

    def live(self) -> list:
        return [step for step in self.steps if not step.discarded]

    def children(self, index) -> list:
        return [step for step in self.live() if step.parent == index]

    def discard(self, index) -> None:
        if self.finalized or self.steps[index].discarded or self.children(index):
            raise RefusedError("only a living leaf can be withdrawn")
        self.steps[index].discarded = True

    # ---- views

    def path(self, index) -> list:
        """Indexes from the root to ``index``."""
        out = []
        while index is not None:
            out.insert(0, index)
            index = self.steps[index].parent
        return out

    def superseded(self, leaf) -> bool:
        return not self.children(leaf.index) and any(
            other.index > leaf.index and other.parent == leaf.parent and other.prompt == leaf.prompt
            for other in self.live()
        )

    def timeline(self) -> list:
        return [self.segment([step.index], [step], "keep", "keep") for step in self.live()]

    def lineage(self, *, train_shared_prefix="first", superseded="drop", trailing="cut", gaps="cut") -> list:
        segments, seen = [], set()
        for leaf in self.live():
            if self.children(leaf.index) or (superseded == "drop" and self.superseded(leaf)):
                continue
            path = self.path(leaf.index)
            segment = self.segment(path, [self.steps[i] for i in path], trailing, gaps)
            segment.superseded = self.superseded(leaf)
            self.train_once(segment, seen if train_shared_prefix == "first" else set())
            segments.append(segment)
        return segments

    def spans(self, steps) -> list:
        """Return (step, start, stop) of the generated tokens that stay in the chain of ``steps``."""
        out = []
        for step, after in zip(steps, [*steps[1:], None], strict=True):
            stop = len(step.tokens) if after is None else min(len(step.tokens), after.base)
            out.append((step, step.n_prompt, max(stop, step.n_prompt)))
        return out

    def segment(self, path, steps, trailing, gaps) -> OracleSegment:
        leaf, spans = steps[-1], self.spans(steps)
        end, certain = len(leaf.tokens), True
        if gaps == "cut" and any(row != {GAP} for step in self.steps for row in step.rows):
            missing = [p for p, row in enumerate(leaf.rows) if GAP in row]
            if missing:
                routed = any(row != {GAP} for row in leaf.rows)
                end, certain = missing[0] + 1, routed and leaf.rows[missing[0]] == {GAP}
        generated = [t for _, start, stop in spans for t in range(start, min(stop, end))]
        if trailing == "cut":
            end = generated[-1] + 1 if generated else 0
        start = generated[0] if generated else end
        mask, trained, logprobs, versions = [0] * end, [0] * end, [0.0] * end, [None] * end
        for step, first, stop in spans:
            for t in range(first, min(stop, end)):
                mask[t], logprobs[t] = step.mask[t - first], step.logprobs[t - first]
                versions[t], trained[t] = step.versions[t - first], 1
        return OracleSegment(
            steps=path,
            tokens=leaf.tokens[:end],
            response_start=start,
            mask=mask,
            trained=trained,
            logprobs=logprobs[start:],
            versions=versions[start:],
            rows=leaf.rows[: max(end - 1, 0)],
            cut_tokens=len(leaf.tokens) - end,
            superseded=False,
            certain=certain and bool(generated),
        )

    def train_once(self, segment, seen) -> None:
        steps = [self.steps[i] for i in segment.steps]
        for step, start, stop in self.spans(steps):
            for t in range(start, min(stop, len(segment.tokens))):
                if (step.index, t) in seen:
                    segment.trained[t] = 0
                    segment.mask[t] = 0
                seen.add((step.index, t))


def fill(row: set, sent) -> set:
    """What an inherited row may be once ``sent`` came again under ``first``."""
    return (row - {GAP}) | {sent} if GAP in row else set(row)


def accept_rows(rows, start, n_tokens) -> dict:
    """Return {forward row: value} of a payload by its row count: T-1-start, T-1, T-start or T rows."""
    if rows is None:
        return {}
    last = max(n_tokens - 1, 0)
    for count, first in ((last - start, start), (last, 0), (n_tokens - start, start), (n_tokens, 0)):
        if len(rows) == count:
            placed = enumerate(rows[: last - first], start=first)
            return {p: row for p, row in placed if row is not GAP}
    raise RefusedError("row count")


def accept_mask(mask, n_prompt, n_response) -> list:
    if mask is None:
        return [1] * n_response
    if len(mask) == n_response:
        return list(mask)
    if len(mask) == n_prompt + n_response and not any(mask[:n_prompt]):
        return list(mask[n_prompt:])
    raise RefusedError("loss mask")


def accept_versions(version, n_response) -> list:
    if version is None or isinstance(version, str):
        return [version] * n_response
    out = [None] * n_response
    for name, start, stop in version:
        if not 0 <= start <= stop <= n_response:
            raise RefusedError("weight versions")
        out[start:stop] = [name] * (stop - start)
    return out


def common_prefix(a, b) -> int:
    for n, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return n
    return min(len(a), len(b))
