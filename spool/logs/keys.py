"""Keys of the objects of a cold root, and what they say."""

from __future__ import annotations

from spool.formats.manifest import PackEntry

IDENTITY = "spool.json"
MANIFESTS, FACTS, GONE = "manifests/", "facts/", "gone/"
FACT_STREAM = "facts-"


def records_key(stream: str, pack: int) -> str:
    """Return where the records of a pack lie."""
    return f"streams/{stream}/records/{pack}.arrow"


def gone_key(stream: str, pack: int) -> str:
    """Return the object that says that a pack is deleted: its tombstone."""
    return f"{GONE}{stream}-{pack}"


def parse_gone_key(key: str) -> tuple[str, int] | None:
    """Return the pack that a tombstone is about; None for a key of something else."""
    stream, _, number = key.removeprefix(GONE).rpartition("-")
    return (stream, int(number)) if stream and _is_number(number) else None


def parse_pack_key(key: str) -> tuple[str, int] | None:
    """Return the pack whose records or shard an object is; None of a key of something else."""
    parts = key.split("/")
    if len(parts) < 4 or parts[0] != "streams":
        return None
    number = parts[3].removesuffix(".arrow") if parts[2] == "records" else "/".join(parts[3:5]).removeprefix("c/")
    return (parts[1], int(number)) if _is_number(number) else None


def _is_number(text: str) -> bool:
    """Whether this is how a key writes a number."""
    return text.isascii() and text.isdigit() and text == str(int(text))


def manifest_key(entry: PackEntry) -> str:
    """Return where a pack's manifest lies: by the time it was sealed, so that a repeated upload writes the same."""
    return f"{MANIFESTS}{int(entry.sealed_at * 1000):013d}-{entry.stream}-{entry.pack}.parquet"


def is_rollup(key: str) -> bool:
    """Whether the key of a manifest or fact file is that of a roll-up."""
    return key.partition("/")[2].partition("-")[2].startswith("rollup-")


def parse_manifest_key(key: str) -> tuple[str, int]:
    """Return the pack that a manifest's key names; of a roll-up or fact file its name, and 0."""
    name = key.partition("/")[2].removesuffix(".parquet").partition("-")[2]
    stream, _, number = name.rpartition("-")
    return (stream, int(number)) if _is_number(number) and not is_rollup(key) else (name, 0)


def time_of(key: str) -> float | None:
    """Return the time in the key of a manifest or fact file, seconds since the epoch; None where it has none."""
    text = key.partition("/")[2].partition("-")[0]
    return int(text) / 1000 if text.isascii() and text.isdigit() else None


def fact_stream(key: str) -> str:
    """Return the name under which the catalog files the events of a fact file."""
    return FACT_STREAM + key.removeprefix(FACTS).removesuffix(".parquet")


def fact_key(stream: str) -> str:
    """Return the fact file that a name of `fact_stream` stands for."""
    return f"{FACTS}{stream.removeprefix(FACT_STREAM)}.parquet"


def is_fact_stream(stream: str) -> bool:
    """Whether a name in the catalog is that of a fact file."""
    return stream.startswith(FACT_STREAM)
