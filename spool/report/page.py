"""A report as HTML: nothing in it is fetched, no script runs, and what was recorded is text and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Any, NamedTuple

from spool.look.text import count, iso_time, one_line
from spool.report import charts
from spool.report.svg import GREEN, PURPLE, short
from spool.sizes import format_size

if TYPE_CHECKING:
    from spool.catalog.shape import Counts, Histogram, Share, Summary
    from spool.look.routing import RoutingSummary
    from spool.report.gather import Extreme, FieldBytes, Report

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""No browser fetches or runs anything for such a page, whatever is in it."""

MOST_TEXT = 200
"""Characters of a recorded text that are shown."""
MOST_MODELS = 4
LONG = 32
"""Longer texts in tables go on in the next line."""

Cell = str | int | float | None


class _Chart(NamedTuple):
    """One figure.

    Attributes:
        title: what it shows.
        says: the same in a sentence, with the numbers that matter.
        draw: makes the SVG, given its number; None where there is nothing to draw.
        head, rows: the numbers behind it.
        wide: it takes the whole width.
        about: heading of those numbers.
    """

    title: str
    says: str
    draw: Callable[[int], str] | None
    head: Sequence[str] = ()
    rows: Sequence[Sequence[Cell]] = ()
    wide: bool = False
    about: str = "Numbers"


def page(report: Report) -> str:
    """Return the page; valid UTF-8 whatever was recorded."""
    summary = report.summary
    sections = [
        ("The run", [_activity(summary), _outcomes(summary), _sources(summary)]),
        ("Rewards", [_rewards_by_rollout(summary), _rewards(summary)]),
        ("Lengths and staleness", [part(summary) for part in (_segment_tokens, _session_tokens, _steps, _stale)]),
        ("Bytes", [_bytes(report.fields)]),
        ("Routing", [chart for model in report.routing[:MOST_MODELS] for chart in _routing(model)] or [_no_routing()]),
    ]
    parts, number = [], 0
    for title, figures in sections:
        drawn = []
        for chart in figures:
            number += 1
            drawn.append(_figure(chart, number))
        parts.append(f"<section><h2>{title}</h2>\n<div class=grid>\n{''.join(drawn)}</div></section>\n")
    parts.append(f"<section><h2>What stands out</h2>\n{_extremes(report.extremes)}</section>\n")
    title = f"Spool report: {_text(report.facts['root'])}"
    return (
        "<!doctype html>\n<html lang=en>\n<head>\n<meta charset=utf-8>\n"
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name=viewport content="width=device-width, initial-scale=1">\n'
        f'<meta name=color-scheme content="light dark">\n<title>{title}</title>\n<style>\n{_style()}</style>\n</head>\n'
        f"<body>\n{_header(report)}<main>\n{_problems(report)}{''.join(parts)}</main>\n{_footer(report)}</body>\n</html>\n"
    )


def _style() -> str:
    return (files("spool.report") / "page.css").read_text(encoding="utf-8")


def _text(value: object) -> str:
    """Return a recorded text as a part of HTML: in one line, nothing in it means anything."""
    shown = one_line(str(value))
    return escape(shown if len(shown) <= MOST_TEXT else shown[:MOST_TEXT] + "…")


# -- frame -----------------------------------------------------------------------------------------------------------


def _header(report: Report) -> str:
    facts, summary = report.facts, report.summary
    shown = [
        ("spool", facts["id"]),
        ("cold root", facts["spill"]),
        ("created", iso_time(facts["created_at"]) if facts["created_at"] is not None else None),
        ("streams", f"{count(facts['n_streams'])}, {facts['n_live']} being written"),
        ("packs", count(facts["n_packs"])),
        ("only sessions with", summary.where),
        ("newest weights", summary.staleness.newest),
    ]
    items = "".join(f"<li>{name} <b class=mono>{_text(value)}</b></li>" for name, value in shown if value is not None)
    return (
        f"<header>\n<h1 class=mono>{_text(facts['root'])}</h1>\n<ul class='facts muted'>{items}</ul>\n"
        f"<dl class=tiles>\n{''.join(_tile(*tile) for tile in _tiles(report))}</dl>\n</header>\n"
    )


def _tiles(report: Report) -> Iterable[tuple[str, str, str]]:
    totals, rewards = report.summary.totals, report.summary.rewards
    yield "Sessions", short(totals.n_sessions), f"{count(totals.n_open)} open, {count(totals.n_discarded)} discarded"
    yield "Steps", short(totals.n_steps), _groups(totals)
    yield "Tokens", short(totals.n_tokens), f"{short(totals.n_generated)} generated"
    yield "Segments", short(totals.n_segments), f"{short(totals.n_trainable)} tokens to train"
    mean = "none yet" if rewards.mean is None else f"{rewards.mean:.3g}"
    yield "Mean reward", mean, f"of {count(rewards.n)} sessions"
    sent = sum(field.sent_bytes or 0 for field in report.fields)
    stored = sum(field.stored_bytes or 0 for field in report.fields)
    hot, cold = (sum(getattr(field, name) or 0 for field in report.fields) for name in ("hot_bytes", "cold_bytes"))
    ratio = f"as int32 {format_size(sent)}, {sent / stored:.3g} times as much" if stored else "nothing stored"
    yield "Payload", format_size(stored), ratio
    yield "On disk", format_size(hot + cold), f"{format_size(hot)} hot, {format_size(cold)} cold"


def _groups(totals: Counts) -> str:
    equal = f", {count(totals.n_equal_groups)} with equal rewards" if totals.n_equal_groups else ""
    return f"in {count(totals.n_groups)} groups{equal}"


def _tile(name: str, value: str, more: str) -> str:
    return f"<div><dt>{name}</dt><dd>{value}<small>{more}</small></dd></div>\n"


def _problems(report: Report) -> str:
    if not report.problems:
        return ""
    items = "".join(f"<li>{_text(problem)}</li>" for problem in report.problems)
    return f"<section><h2>Not on this page</h2><div class='card problems' role=note><ul>{items}</ul></div></section>\n"


def _footer(report: Report) -> str:
    return (
        f"<footer><p>Made {iso_time(report.made_at)} by <span class=mono>spool report</span>. Sessions that were "
        f"discarded are counted once and left out of all else. Times are UTC.</p></footer>\n"
    )


def _figure(chart: _Chart, number: int) -> str:
    drawn = "<p class=muted>Nothing to draw.</p>" if chart.draw is None else chart.draw(number)
    wide = " class=wide" if chart.wide else ""
    numbers = ""
    if chart.rows:
        numbers = f"<details><summary>{chart.about}</summary>{_table(chart.head, chart.rows)}</details>"
    picture = f'<div role=img aria-labelledby="t{number} s{number}">{drawn}</div>' if chart.draw is not None else drawn
    return (
        f"<figure{wide}><figcaption><h3 id=t{number}>{chart.title}</h3><p id=s{number}>{chart.says}</p></figcaption>"
        f"{picture}{numbers}</figure>\n"
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    found = list(rows)
    numeric = [any(isinstance(row[place], int | float) for row in found) for place in range(len(head))]
    titles = "".join(
        f"<th scope=col{' class=n' * is_n}>{title}</th>" for title, is_n in zip(head, numeric, strict=True)
    )
    body = "".join(f"<tr>{''.join(map(_cell, row, numeric))}</tr>" for row in found)
    return f"<div class=scroll><table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>"


def _cell(value: Cell, is_number: bool) -> str:
    if value is None:
        return f"<td{' class=n' * is_number}>-</td>"
    if isinstance(value, int):
        return f"<td class=n>{count(value)}</td>"
    if isinstance(value, float):
        return f"<td class=n>{value:.4g}</td>"
    shown = _text(value)
    return f"<td{' class=long' * (len(shown) > LONG)}>{shown}</td>"


# -- charts ----------------------------------------------------------------------------------------------------------


def _activity(summary: Summary) -> _Chart:
    line, totals = summary.timeline, summary.totals
    says = (
        f"{count(totals.n_sessions)} sessions and {short(totals.n_tokens)} tokens, by {_period(line.period_s)}; tokens "
        "are counted when their session last did something."
    )
    return _Chart(
        "Sessions and tokens over time",
        says,
        (lambda number: charts.activity(number, line)) if line.periods else None,
        ("from", "opened", "finished", "tokens"),
        [(iso_time(part.at), part.n_opened, part.n_finished, part.n_tokens) for part in line.periods],
        wide=True,
    )


def _period(seconds: float) -> str:
    for unit, size in (("day", 86_400), ("hour", 3600), ("minute", 60)):
        if seconds >= size:
            n = seconds / size
            return unit if n == 1 else f"{n:g} {unit}s"
    return "second" if seconds == 1 else f"{seconds:g} seconds"


def _outcomes(summary: Summary) -> _Chart:
    shares = summary.outcomes
    n = sum(share.n_sessions for share in shares if share.name == "completed")
    total = summary.totals.n_sessions
    return _Chart(
        "Outcomes",
        f"{count(n)} of {count(total)} sessions are completed ({100 * n / total:.3g} %)." if total else "No sessions.",
        (lambda number: charts.outcomes(number, shares)) if shares else None,
        _SHARED,
        _share_rows(shares, "open"),
    )


_SHARED = ("name", "sessions", "tokens", "mean reward", "with reward")


def _share_rows(shares: Sequence[Share], unnamed: str) -> list[Sequence[Cell]]:
    return [
        (
            f"{count(share.n_names)} others" if share.n_names > 1 else unnamed if share.name is None else share.name,
            share.n_sessions,
            share.n_tokens,
            share.reward,
            share.n_rewards,
        )
        for share in shares
    ]


def _sources(summary: Summary) -> _Chart:
    rows = _share_rows(summary.sources, "no source")
    table = _table(("source", *_SHARED[1:]), rows)
    reasons = _share_rows(summary.finish_reasons, "none")
    return _Chart(
        "Sources",
        "Where sessions come from, and what they are worth.",
        (lambda _: table) if rows else None,
        ("last finish reason", *_SHARED[1:]),
        reasons,
        about="By last finish reason",
    )


def _rewards_by_rollout(summary: Summary) -> _Chart:
    points = summary.rollout
    known = [point for point in points if point.reward is not None]
    says = "No session of a rollout step has a reward."
    if known:
        says = (
            f"Mean {known[0].reward:.3g} at step {known[0].first}, {known[-1].reward:.3g} at step {known[-1].last}; "
            "the band is one standard deviation, cut off at the least and the most: the dotted lines."
        )
    return _Chart(
        "Reward over rollout steps",
        says,
        (lambda number: charts.rewards_by_rollout(number, points)) if known else None,
        ("step", "sessions", "tokens", "rewards", "mean", "std", "least", "most"),
        [
            (
                f"{point.first}" if point.first == point.last else f"{point.first} to {point.last}",
                point.n_sessions, point.n_tokens, point.n_rewards, point.reward, point.reward_std, point.reward_low,
                point.reward_high,
            )
            for point in points
        ],
    )  # fmt: skip


def _rewards(summary: Summary) -> _Chart:
    found = summary.rewards
    return _Chart(
        "Distribution of rewards",
        _spread(found, "rewards", "sessions have none"),
        (lambda number: charts.rewards(number, found)) if found.n else None,
        *_bins(found),
    )


def _spread(found: Histogram, what: str, missing: str) -> str:
    more = f"; {count(found.n_missing)} {missing}" if found.n_missing else ""
    if found.low is None or found.high is None or found.mean is None:
        return f"There are no {what}{more}."
    return f"{count(found.n)} {what} from {found.low:,.6g} to {found.high:,.6g}, {found.mean:,.4g} on average{more}."


def _bins(found: Histogram) -> tuple[Sequence[str], Sequence[Sequence[Cell]]]:
    return ("from", "to", "n"), [(f"{part.low:,.6g}", f"{part.high:,.6g}", part.n) for part in found.bins]


def _segment_tokens(summary: Summary) -> _Chart:
    found = summary.segment_tokens
    return _Chart(
        "Length of segments",
        _spread(found, "segments", "unknown").replace(" on average", " tokens on average"),
        (lambda number: charts.lengths(number, found, "tokens")) if found.n else None,
        *_bins(found),
    )


def _session_tokens(summary: Summary) -> _Chart:
    found = summary.tokens
    return _Chart(
        "Tokens of sessions",
        _spread(found, "sessions", "unknown").replace(" on average", " tokens on average"),
        (lambda number: charts.lengths(number, found, "tokens", PURPLE)) if found.n else None,
        *_bins(found),
    )


def _steps(summary: Summary) -> _Chart:
    found = summary.steps
    return _Chart(
        "Steps of sessions",
        _spread(found, "sessions", "unknown").replace(" on average", " steps on average"),
        (lambda number: charts.lengths(number, found, "steps", GREEN)) if found.n else None,
        *_bins(found),
    )


def _stale(summary: Summary) -> _Chart:
    stale = summary.staleness
    says = _spread(stale.behind, "segments with a version", "have none").replace(
        " on average", " versions behind on average"
    )
    if stale.behind.n:
        says += " Counted are versions between a segment's oldest weights and the newest when its session ended."
    return _Chart(
        "Staleness",
        says,
        (lambda number: charts.staleness(number, stale)) if stale.behind.n else None,
        *_bins(stale.behind),
    )


def _bytes(fields: Sequence[FieldBytes]) -> _Chart:
    shown = [field for field in fields if field.sent_bytes or field.hot_bytes or field.cold_bytes]
    sent, stored = (sum(getattr(field, name) or 0 for field in shown) for name in ("sent_bytes", "stored_bytes"))
    says = "Nothing is stored."
    if stored:
        says = (
            f"Engines send {format_size(sent)}, with routing of all layers as int32; as stored that is "
            f"{format_size(stored)}. Files and objects are counted with all that is around it."
        )
    return _Chart(
        "Bytes by field and tier",
        says,
        (lambda number: charts.field_bytes(number, shown[:12])) if shown else None,
        ("field", "as int32", "stored", "hot files", "cold objects"),
        [(field.field, field.sent_bytes, field.stored_bytes, field.hot_bytes, field.cold_bytes) for field in shown],
        wide=True,
    )


def _no_routing() -> _Chart:
    return _Chart("Load of experts", "No routing is stored, or there is no segment to look at.", None)


def _routing(model: RoutingSummary) -> list[_Chart]:
    columns = (model.imbalance, model.entropy, model.overlap, model.unused)
    rows: list[Any] = [
        (int(layer), *(float(column[place]) for column in columns)) for place, layer in enumerate(model.layers)
    ]
    named = f"{len(model.layers)} layers of {count(model.num_experts)} experts, top {model.topk}"
    counted = f"{count(model.n_rows)} tokens of {count(model.n_refs)} segments, spread over all"
    missing = f"; {count(model.n_missing)} more were never sent" if model.n_missing else ""
    return [
        _Chart(
            "Load of experts",
            f"How often each expert is chosen, over the mean of its layer: {named}; {counted}{missing}.",
            lambda number: charts.expert_load(number, model),
            wide=True,
        ),
        _Chart(
            "Routing by layer",
            f"The busiest expert of a layer does {max(row[1] for row in rows):.3g} times the mean at worst.",
            lambda number: charts.layers(number, model),
            ("layer", "imbalance", "entropy", "overlap", "never used"),
            rows,
            wide=True,
        ),
    ]


def _extremes(extremes: Sequence[Extreme]) -> str:
    if not extremes:
        return "<div class=card><p class=muted>Nothing is recorded yet.</p></div>"
    head = ("why", "how much", "session", "outcome", "reward", "steps", "tokens", "source", "opened")
    rows: list[Sequence[Cell]] = [
        (
            extreme.why, extreme.value, extreme.row.session_id, extreme.row.outcome or "open", extreme.row.reward,
            extreme.row.n_steps, extreme.row.n_tokens, extreme.row.source, iso_time(extreme.row.opened_at),
        )
        for extreme in extremes
    ]  # fmt: skip
    return f"<div class=card>{_table(head, rows)}</div>\n"
