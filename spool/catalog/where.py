"""Filter expressions -> parameterised SQL. Nothing of the text reaches SQLite but bound values.

::

    or    := and ("or" and)*
    and   := not ("and" not)*
    not   := "not" not | test
    test  := sum [("=" | "==" | "!=" | "<>" | "<" | "<=" | ">" | ">=") sum
                  | ["not"] "in" "(" sum ("," sum)* ")" | ["not"] "like" sum | ["not"] "between" sum "and" sum
                  | "is" ["not"] "null"]
    sum   := term (("+" | "-") term)*      term := unary (("*" | "/" | "%") unary)*
    unary := "-" unary | number | 'text' | true | false | name | "(" or ")"

A name is a column, or else a late fact; `check_names` refuses one that is neither. Null follows SQL: it is neither
equal to nor different from anything. ``/`` does not cut fractions off, and ``%`` is what is left over of numbers with
fractions too; by zero both are null. A column of numbers is compared with no text; one of times takes text that is a
date or time of ISO 8601, in UTC where it does not say.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from difflib import get_close_matches
from typing import Literal, NamedTuple, NoReturn

from spool.arguments import refused
from spool.errors import InputError

MAX_DEPTH = 64
MAX_TOKENS = 20_000
MAX_OPERATORS = 400
MAX_TEXT = 10_000

DEEP = 8
"""Operators that one ``%`` counts for: each is a query inside the expression."""

CLOSE = 0.75
"""How much alike names must be for one to be suggested for the other."""

Value = int | float | str

_TOKEN = re.compile(
    r"""(?P<space>\s+)
      | (?P<number>(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?(?![\w.]))
      | (?P<text>'(?:[^']|'')*')
      | (?P<name>[^\W\d]\w*)
      | (?P<symbol><=|>=|<>|!=|==|[=<>(),+\-*/%])""",
    re.VERBOSE,
)
NAME = re.compile(r"[^\W\d]\w*")
KEYWORDS = frozenset({"and", "or", "not", "in", "like", "between", "is", "null", "true", "false"})
_REMAINDER = (
    "(SELECT iif(typeof(x) = 'integer' AND typeof(y) = 'integer', x % y, mod(x, y)) FROM (SELECT {} AS x, {} AS y))"
)
_COMPARE = {"=": "=", "==": "=", "!=": "<>", "<>": "<>", "<": "<", "<=": "<=", ">": ">", ">=": ">="}


class Columns(NamedTuple):
    """What names mean.

    Attributes:
        known: SQL expression by column name.
        fact: SQL expression with one ``?``, the name of a late fact.
        others: whose columns other names are, for errors.
        kinds: of columns that hold numbers or times (seconds since the epoch) alone.
    """

    known: Mapping[str, str]
    fact: str
    others: Mapping[str, str] = {}
    kinds: Mapping[str, Literal["number", "time"]] = {}


class _Token(NamedTuple):
    kind: str
    text: str
    at: int


class Filter(NamedTuple):
    """An SQL condition and its parameters, in order; ``atom`` where it is a name or a text and nothing more."""

    sql: str
    values: tuple[Value, ...] = ()
    atom: _Token | None = None


def compile_where(text: str, columns: Columns) -> Filter:
    """Translate a filter expression.

    Args:
        text: the expression.
        columns: what names mean.

    Raises:
        InputError: it does not parse; the message points at the place and lists the columns.
    """
    return _parsed(text, columns)[0]


def check_names(text: str, columns: Columns, is_fact: Callable[[str], bool], facts: Callable[[], list[str]]) -> None:
    """Refuse a filter with a name that is neither a column nor a late fact of anything here.

    Args:
        text: the expression.
        columns: what names mean.
        is_fact: whether a late fact of that name is recorded.
        facts: returns the names of all late facts, for the error.

    Raises:
        InputError: it does not parse, or has such a name; the message points at the place and lists what there is.
    """
    _, parser = _parsed(text, columns)
    for name, at in parser.facts.items():
        if not is_fact(name):
            parser.fail(at, _unknown(name, columns, known := facts()), known)


def _unknown(name: str, columns: Columns, facts: list[str]) -> str:
    if name in columns.others:
        return f"{name!r} is a column of {columns.others[name]}, and nothing here has a late fact of that name"
    close = get_close_matches(name, [*columns.known, *facts], 1, CLOSE)
    hint = f"; did you mean {close[0]}?" if close else f"; a text is written in single quotes, '{name}'"
    return f"{name!r} is no column, and nothing here has a late fact of that name (yet){hint}"


def _parsed(text: str, columns: Columns) -> tuple[Filter, _Parser]:
    if not isinstance(text, str):
        raise refused("where", "a filter such as \"reward > 0.5 and source = 'swe'\"", text)
    parser = _Parser(text, columns)
    found = parser.disjunction(0)
    parser.end()
    return found, parser


class _Parser:
    def __init__(self, text: str, columns: Columns) -> None:
        self._text = text
        self._columns = columns
        self._operators = 0
        self.facts: dict[str, int] = {}
        self._tokens = self._split()
        self._next = 0

    # -- tokens ------------------------------------------------------------------------------------------------------

    def _split(self) -> list[_Token]:
        tokens, at = [], 0
        while at < len(self._text):
            match = _TOKEN.match(self._text, at)
            if match is None:
                self.fail(at, self._strange(at))
            kind, found = str(match.lastgroup), match[0]
            if kind == "name" and found.lower() in KEYWORDS:
                kind, found = "keyword", found.lower()
            if kind != "space":
                tokens.append(_Token(kind, found, at))
            if len(tokens) > MAX_TOKENS:
                self.fail(at, f"more than {MAX_TOKENS} words")
            at = match.end()
        return [*tokens, _Token("end", "", len(self._text))]

    def _strange(self, at: int) -> str:
        char = self._text[at]
        if char == "'":
            return "this text has no closing quote"
        if char in '"`':
            return "text is written in single quotes, 'like this'"
        if char in "&|":
            return "write 'and' or 'or'"
        return "this is not a number" if char.isdigit() or char == "." else f"unexpected {char!r}"

    def fail(self, at: int, problem: str, facts: Sequence[str] | None = None) -> NoReturn:
        """Refuse the filter at a place; say the late facts there are, where they are known."""
        low = max(0, at - 60)
        shown = re.sub(r"\s", " ", self._text[low : at + 40]).encode("utf-8", "replace").decode()
        others = "any other name is a late fact" if facts is None else f"late facts here: {', '.join(facts) or 'none'}"
        raise InputError(
            f"cannot read the filter, at character {at}: {problem}\n  {shown}\n  {' ' * (at - low)}^\n"
            f"columns: {', '.join(sorted(self._columns.known))}; {others}",
            position=at,
            columns=sorted(self._columns.known),
        )

    def _peek(self, *texts: str) -> bool:
        token = self._tokens[self._next]
        return token.kind in ("symbol", "keyword") and token.text in texts

    def _take(self, *texts: str) -> str | None:
        if not self._peek(*texts):
            return None
        self._next += 1
        return self._tokens[self._next - 1].text

    def _expect(self, text: str) -> None:
        if self._take(text) is None:
            token = self._tokens[self._next]
            self.fail(token.at, f"expected {text!r}, found {token.text or 'the end'!r}")

    def _count(self, n: int = 1) -> None:
        # SQLite refuses deep expressions; a chain of operators is as deep as it is long
        self._operators += n
        if self._operators > MAX_OPERATORS:
            self.fail(self._tokens[self._next].at, f"more than {MAX_OPERATORS} operators; use in (...)")

    def end(self) -> None:
        """Refuse what is left."""
        token = self._tokens[self._next]
        if token.kind != "end":
            self.fail(token.at, f"expected an operator or the end, found {token.text!r}")

    # -- rules -------------------------------------------------------------------------------------------------------

    def disjunction(self, depth: int) -> Filter:
        """Parse ``or`` chains, the whole of an expression."""
        found = self._conjunction(depth)
        while self._take("or"):
            found = self._join(found, "OR", self._conjunction(depth))
        return found

    def _conjunction(self, depth: int) -> Filter:
        found = self._negation(depth)
        while self._take("and"):
            found = self._join(found, "AND", self._negation(depth))
        return found

    def _negation(self, depth: int) -> Filter:
        if self._take("not"):
            inner = self._negation(self._deeper(depth))
            return Filter(f"(NOT {inner.sql})", inner.values)
        return self._test(depth)

    def _test(self, depth: int) -> Filter:
        left = self._sum(depth)
        symbol = self._take(*_COMPARE)
        if symbol is not None:
            if self._peek("null"):
                self.fail(self._tokens[self._next].at, "nothing equals null; write 'is null' or 'is not null'")
            right = self._sum(depth)
            return self._join(self._fitting(right, left), _COMPARE[symbol], self._fitting(left, right))
        if self._take("is"):
            negated = self._take("not")
            self._expect("null")
            return Filter(f"({left.sql} IS {'NOT ' if negated else ''}NULL)", left.values)
        negated = self._take("not")
        kind = self._take("in", "like", "between")
        if kind is None:
            if negated:
                self.fail(self._tokens[self._next].at, "expected 'in', 'like' or 'between' after 'not'")
            return left
        operator = f"NOT {kind.upper()}" if negated else kind.upper()
        if kind == "in":
            return self._among(left, operator, depth)
        right = self._sum(depth)
        if kind == "between":
            self._expect("and")
            low, high = self._fitting(left, right), self._fitting(left, self._sum(depth))
            right = self._join(low, "AND", high, bare=True)
        return self._join(left, operator, right)

    def _among(self, left: Filter, operator: str, depth: int) -> Filter:
        self._expect("(")
        items = [self._fitting(left, self._sum(depth))]
        while self._take(","):
            items.append(self._fitting(left, self._sum(depth)))
        self._expect(")")
        values = tuple(value for item in items for value in item.values)
        return self._join(left, operator, Filter(f"({', '.join(item.sql for item in items)})", values))

    def _fitting(self, column: Filter, other: Filter) -> Filter:
        """Return ``other`` as what ``column``, if it is one, can be compared with; refuse a text beside numbers."""
        name, text = column.atom, other.atom
        kind = self._columns.kinds.get(name.text) if name is not None and name.kind == "name" else None
        if name is None or kind is None or text is None or text.kind != "text":
            return other
        seconds = _seconds(str(other.values[0])) if kind == "time" else None
        if seconds is not None:
            return Filter("?", (seconds,))
        if kind == "time":
            self.fail(text.at, f"{name.text} is a time: write seconds since the epoch, or '2026-01-31T12:00:00Z'")
        return self.fail(text.at, f"{name.text} is a number, and this is a text; write numbers without quotes")

    def _sum(self, depth: int) -> Filter:
        found = self._term(depth)
        while symbol := self._take("+", "-"):
            found = self._join(found, symbol, self._term(depth))
        return found

    def _term(self, depth: int) -> Filter:
        found = self._unary(depth)
        while symbol := self._take("*", "/", "%"):
            found = self._multiplied(found, symbol, self._unary(depth))
        return found

    def _multiplied(self, left: Filter, symbol: str, right: Filter) -> Filter:
        # SQLite's own / and % of whole numbers cut fractions off, and mod() rounds whole numbers past 2^53
        if symbol == "%":
            self._count(DEEP)
            return Filter(_REMAINDER.format(left.sql, right.sql), left.values + right.values)
        return self._join(left if symbol == "*" else left._replace(sql=f"CAST({left.sql} AS REAL)"), symbol, right)

    def _unary(self, depth: int) -> Filter:
        if self._take("-"):
            inner = self._unary(self._deeper(depth))
            return Filter(f"(- {inner.sql})", inner.values)
        if self._take("("):
            found = self.disjunction(self._deeper(depth))
            self._expect(")")
            return found
        token = self._tokens[self._next]
        self._next += 1
        if token.kind == "number":
            return Filter("?", (_number(token.text),))
        if token.kind == "text":
            return Filter("?", (self._literal(token),), token)
        if token.text in ("true", "false") and token.kind == "keyword":
            return Filter("?", (int(token.text == "true"),))
        if token.kind == "name":
            known = self._columns.known.get(token.text)
            if known is not None:
                return Filter(known, atom=token)
            self.facts.setdefault(token.text, token.at)
            return Filter(self._columns.fact, (token.text,))
        return self.fail(token.at, f"expected a name, number or 'text', found {token.text or 'the end'!r}")

    def _literal(self, token: _Token) -> str:
        text = token.text[1:-1].replace("''", "'")
        if len(text) > MAX_TEXT:
            self.fail(token.at, f"this text is longer than {MAX_TEXT} characters")
        if not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
            self.fail(token.at, "this text holds a lone surrogate, which no recorded text does")
        return text

    def _deeper(self, depth: int) -> int:
        if depth >= MAX_DEPTH:
            self.fail(self._tokens[self._next].at, f"nested more than {MAX_DEPTH} deep")
        return depth + 1

    def _join(self, left: Filter, operator: str, right: Filter, *, bare: bool = False) -> Filter:
        self._count()
        sql = f"{left.sql} {operator} {right.sql}"
        return Filter(sql if bare else f"({sql})", left.values + right.values)


def _seconds(text: str) -> float | None:
    try:
        at = datetime.fromisoformat(text)
        return (at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None


def _number(text: str) -> Value:
    if text.isdigit() and len(text) < 20 and int(text) < 1 << 63:
        return int(text)
    return float(text)
