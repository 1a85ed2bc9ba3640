"""The rows of the benchmark that need a real S3 server, in their short forms: what is counted holds, the rest runs."""

from __future__ import annotations

from tools.bench import cold_reads


def test_cold_reads(tmp_path):
    rows = list(cold_reads.reads(str(tmp_path), runs=1, n_tokens=8192))
    assert [row.name for row in rows] == [
        "s3_read_amplification", "s3_read_amplification", "cold_stage_layers_share",
        "cold_segment_vs_cat_file", "cold_segment_vs_cat_file",
    ]  # fmt: skip
    assert all(row.holds for row in rows[:3]), rows
    assert all(row.ratio > 0 for row in rows)


def test_opening_a_cold_root():
    (row,) = cold_reads.opening(runs=1, n_steps=30_000)
    assert row.name == "cold_open_1m_steps"
    assert "30000 steps in 3 manifests" in row.value
