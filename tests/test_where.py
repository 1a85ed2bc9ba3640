"""Filter expressions: the same answers as SQLite gives to the same text, and errors that point at the place."""

from __future__ import annotations

import apsw
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spool.catalog.query import SEGMENT, SESSION
from spool.catalog.where import MAX_DEPTH, Columns, compile_where
from spool.errors import InputError

ROWS = [
    (1, 0.5, "swe", None, 1, None),
    (2, None, "math", "length", 0, "it's"),
    (3, -1.25, "swe", "stop", 1, 7),
    (4, 1e9, "", "tool_calls", None, 0.5),
    (5, 0.0, "SWE", "weird reason", 0, ""),
]
COLUMNS = Columns(
    {name: f"t.{name}" for name in ("n", "x", "source", "reason", "flag")},
    "(SELECT f.value FROM f WHERE f.n = t.n AND f.key = ?)",
)


@pytest.fixture(scope="module")
def db():
    connection = apsw.Connection(":memory:")
    connection.execute("CREATE TABLE t(n INTEGER, x REAL, source TEXT, reason TEXT, flag INTEGER, late)")
    connection.execute("CREATE TABLE f(n INTEGER, key TEXT, value)")
    for row in ROWS:
        connection.execute("INSERT INTO t VALUES(?, ?, ?, ?, ?, ?)", row)
        connection.execute("INSERT INTO f VALUES(?, 'late', ?)", (row[0], row[-1]))
    return connection


def matches(db, text):
    found = compile_where(text, COLUMNS)
    return [n for (n,) in db.execute(f"SELECT n FROM t WHERE {found.sql} ORDER BY n", found.values)]


def as_sql(db, text):
    return [n for (n,) in db.execute(f"SELECT n FROM t WHERE {text} ORDER BY n")]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("source = 'swe'", [1, 3]),
        ("source == 'swe'", [1, 3]),
        ("source != 'swe' AND n < 5", [2, 4]),
        ("source <> 'swe' and not n >= 4", [2]),
        ("x > 0.25 and n < 3", [1]),
        ("reason is null", [1]),
        ("reason is not null and reason not in ('length', 'stop')", [4, 5]),
        ("n in (1, 1 + 1, 9)", [1, 2]),
        ("source like 'sw%'", [1, 3, 5]),
        ("source not like 'sw%'", [2, 4]),
        ("n between 2 and 3 or n = 5", [2, 3, 5]),
        ("n not between 2 and 4", [1, 5]),
        ("source = 'swe' and (n = 1 or reason != 'stop')", [1]),
        ("late = 'it''s'", [2]),
        ("late = 7", [3]),
        ("late is null", [1]),
        ("never_noted is null", [1, 2, 3, 4, 5]),
        ("flag", [1, 3]),
        ("not flag", [2, 5]),
        ("flag = true", [1, 3]),
        ("flag = false", [2, 5]),
        ("-x > 1", [3]),
        ("n * 2 - 1 = 5", [3]),
        ("n % 2 = 1 and n / 2.0 > 1", [3, 5]),
        ("1 - 1 - 1 = -1 and n = 1", [1]),
        ("not not not n = 1", [2, 3, 4, 5]),
        ("n = 1 or n = 2 and n = 3", [1]),
        ("x = 1e9", [4]),
        ("n = 1.", [1]),
        ("n > .5e0 and n<2", [1]),
        ("\n n\t=\n1 ", [1]),
        ("n < 99999999999999999999999999", [1, 2, 3, 4, 5]),
        ("x < 1e999", [1, 3, 4, 5]),
        ("n / 0 is null and n % 0 is null and x / 0.0 is null and x % 0 is null", [1, 2, 3, 4, 5]),
        ("n / 2 = 1.5", [3]),
        ("n / 4 > 0.5 and n / 4 < 1", [3]),
        ("flag / n > 0.3", [1, 3]),
        ("6 / n / 2 = 1.5", [2]),
        ("6 / (n / 2) = 6", [2]),
        ("x % 1 != 0", [1, 3]),
        ("x % 1 = -0.25 and -n % 2 = -1", [3]),
        ("n % 2 % 2 * 3 = 3", [1, 3, 5]),
        ("(9007199254740993 + n) % 10 = 4", [1]),
        ("late / 2 = 0.25 or late % 4 = 3", [3, 4]),
        ("source % 2 is null", [1, 2, 3, 4, 5]),
    ],
)
def test_matches(db, text, expected):
    assert matches(db, text) == expected


@pytest.mark.parametrize(
    ("text", "at", "problem"),
    [
        ("", 0, "found 'the end'"),
        ("   ", 3, "found 'the end'"),
        ("n =", 3, "found 'the end'"),
        ("n = 1 n", 6, "found 'n'"),
        ("n = 1; drop table t", 5, "unexpected ';'"),
        ("n = 1 --", 8, "found 'the end'"),
        ("n = 1 /* x */", 7, "found '*'"),
        ('source = "swe"', 9, "single quotes"),
        ("source = 'swe", 9, "no closing quote"),
        ("n = 1 && x = 2", 6, "'and' or 'or'"),
        ("n = null", 4, "is null"),
        ("n is 1", 5, "expected 'null'"),
        ("n in ()", 6, "found ')'"),
        ("n in 1", 5, "expected '('"),
        ("n in (1", 7, "expected ')'"),
        ("n between 1", 11, "expected 'and'"),
        ("n not = 1", 6, "after 'not'"),
        ("(n = 1", 6, "expected ')'"),
        ("n = 1)", 5, "found ')'"),
        ("n = 1a", 4, "not a number"),
        ("n = 1.2.3", 4, "not a number"),
        ("n = ?", 4, "unexpected '?'"),
        ("n = :a", 4, "unexpected ':'"),
        ("abs(n) = 1", 3, "found '('"),
        ("and n", 0, "found 'and'"),
        ("n = 'a\ud800'", 4, "surrogate"),
        ("n = '" + "a" * 10_001 + "'", 4, "longer than"),
        (" or ".join(["n = 1"] * 300), None, "operators"),
        ("n" + " % 2" * 51, None, "operators"),
        ("n in (" + "1," * 10_000 + "1)", None, "words"),
    ],
)
def test_refused(text, at, problem):
    with pytest.raises(InputError) as caught:
        compile_where(text, COLUMNS)
    message = str(caught.value)
    assert problem in message
    assert "columns: flag, n, reason, source, x; any other name is a late fact" in message
    if at is not None:
        assert caught.value.details["position"] == at
        shown, caret = message.split("\n")[1:3]
        pointed = shown[caret.index("^") :]
        assert pointed.startswith(text[at : at + 5].encode("utf-8", "replace").decode().replace("\n", " "))


def test_nothing_of_the_text_reaches_the_statement():
    hostile = "x'; DROP TABLE t; --"
    found = compile_where(f"source = '{hostile.replace(chr(39), chr(39) * 2)}' and nasty_name > 3", COLUMNS)
    assert found.values == (hostile, "nasty_name", 3)
    assert "DROP" not in found.sql
    assert "nasty" not in found.sql


def test_depth_is_limited(db):
    assert matches(db, "(" * MAX_DEPTH + "n = 1" + ")" * MAX_DEPTH) == [1]
    for deep in ("(" * (MAX_DEPTH + 1) + "n = 1" + ")" * (MAX_DEPTH + 1), "not " * 100_000 + "n", "-" * 5000 + "n"):
        with pytest.raises(InputError, match=r"nested more than|words"):
            compile_where(deep, COLUMNS)


def test_long_lists_and_chains_run(db):
    assert matches(db, f"n in ({', '.join(map(str, range(3, 9000)))})") == [3, 4, 5]
    assert matches(db, " or ".join(f"n = {n}" for n in range(150))) == [1, 2, 3, 4, 5]
    assert matches(db, "(" * MAX_DEPTH + "n" + " % 2" * 50 + ")" * MAX_DEPTH) == [1, 3, 5]
    assert matches(db, "n" + " / 1" * 399 + " = 3") == [3]


_ATOMS = st.sampled_from(
    ["n", "x", "source", "reason", "flag", "late", "1", "0.5", "-2", "'swe'", "''", "'it''s'", "'7'"]
)
_SUMS = st.recursive(
    _ATOMS, lambda inner: st.builds("({} {} {})".format, inner, st.sampled_from("+-*/"), inner), max_leaves=3
)
_TESTS = st.one_of(
    st.builds("{} {} {}".format, _SUMS, st.sampled_from(["=", "==", "!=", "<>", "<", "<=", ">", ">="]), _SUMS),
    st.builds("{} {} ({}, {})".format, _SUMS, st.sampled_from(["in", "not in", "IN"]), _SUMS, _SUMS),
    st.builds("{} {} {} and {}".format, _SUMS, st.sampled_from(["between", "not between"]), _SUMS, _SUMS),
    st.builds("{} {} 's%'".format, _SUMS, st.sampled_from(["like", "NOT LIKE"])),
    st.builds("{} {} null".format, _SUMS, st.sampled_from(["is", "is not"])),
    _SUMS,
)
_FILTERS = st.recursive(
    _TESTS,
    lambda inner: st.one_of(
        st.builds("{} {} {}".format, inner, st.sampled_from(["and", "or", "AND", "Or"]), inner),
        st.builds("not ({})".format, inner),
        st.builds("({})".format, inner),
    ),
    max_leaves=6,
)


@given(text=_FILTERS)
def test_agrees_with_sqlite(db, text):
    # columns with a type convert what they are compared with; take that out, it is not what the parser decides
    plain = Columns({name: f"+t.{name}" for name in COLUMNS.known}, COLUMNS.fact)
    found = compile_where(text, plain)
    got = [n for (n,) in db.execute(f"SELECT n FROM t WHERE {found.sql} ORDER BY n", found.values)]
    sql = text
    sql = sql.replace(" / ", " * 1.0 / ")
    for name in ("n", "x", "source", "reason", "flag", "late"):
        sql = _replace_name(sql, name)
    assert got == as_sql(db, sql)


def _replace_name(text, name):
    parts = text.split("'")
    for i in range(0, len(parts), 2):
        words = parts[i].replace("(", "( ").replace(")", " )").replace(",", " ,").split(" ")
        parts[i] = " ".join(f"(+{word})" if word == name else word for word in words)
    return "'".join(parts)


@given(text=st.text(max_size=60))
def test_any_text_compiles_or_is_refused(db, text):
    try:
        found = compile_where(text, COLUMNS)
    except InputError:
        return
    db.execute(f"SELECT n FROM t WHERE {found.sql}", found.values).fetchall()


def test_columns_of_sessions_and_segments():
    for name in ("session_id", "outcome", "source", "attempt", "finish_reason", "n_tokens", "n_nonfinite", "reward"):
        assert name in SESSION.known
        assert name in SEGMENT.known
    assert "state" in SESSION.known
    assert {"view", "index", "superseded", "trainable_tokens", "first_version", "released"} <= SEGMENT.known.keys()
