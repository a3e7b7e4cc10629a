"""Measured speeds in a report: joined by digest, shown in all three forms, strangers named."""

import json
from pathlib import Path

import pytest

from quantkit.bench.record import Bench, Distribution, Machine, Press, Rate, Row, Workload
from quantkit.report import document, files, html, inputs, markdown, speed
from quantkit.report.comparison import Report
from quantkit.scoring.evaluation import read_all


def row(model, digest, tokens_per_s, failures=None):
    rate = Rate(mean=tokens_per_s, low=tokens_per_s, high=tokens_per_s)
    times = Distribution(n=9, mean=0.2, p50=0.1, p90=0.3, p99=0.4, max=0.5)
    return Row(
        model=model,
        digest=digest,
        workload=Workload(name="fixed", prompt_tokens=512, output_tokens=128),
        load=Press(kind="closed", concurrency=8),
        load_name="8 users",
        n_requests=10,
        n_ok=10,
        failures=failures or {},
        requests_per_s=rate,
        output_tokens_per_s=rate,
        total_tokens_per_s=rate,
        ttft_s=times,
        tpot_s=times,
        e2e_s=times,
        gpu_peak_bytes=3 << 30,
        kv_tokens=54_321,
    )


def bench(*rows):
    return Bench(
        engine="vllm",
        engine_version="1.2.3",
        machine=Machine(processor="x86_64", n_cpus=8, gpus=["NVIDIA H200"]),
        versions={},
        created="now",
        rows=list(rows),
    )


@pytest.fixture(scope="module")
def report():
    scores = Path(__file__).parents[2] / "reports" / "smollm2-135m" / "scores"
    return Report.compare([evaluation.card for evaluation in read_all([scores])])


def test_speeds_join_by_digest_and_by_name_where_there_is_none(report):
    source, best = report.baseline, report.candidates[0]
    rows = [row("moved", best.digest, 900), row(source.name, None, 300), row("stranger", "x", 1)]
    found = speed.joined(report, [bench(*rows)])
    assert [(one.model, one.output_tokens_per_s) for one in found.speed] == [
        (source.name, 300),
        (best.name, 900),
    ]
    assert found.notes == (
        "the speed of stranger was measured, but it is not one of the models that were scored",
    )


def test_a_name_of_other_bytes_is_a_stranger(report):
    found = speed.joined(report, [bench(row(report.baseline.name, "other bytes", 1))])
    assert found.speed == ()
    assert len(found.notes) == 1


def test_speeds_are_in_all_three_forms(report, tmp_path):
    source, best = report.baseline, report.candidates[0]
    rows = [row(source.name, source.digest, 300), row("b", best.digest, 1234, {"HTTP 500": 2})]
    found = speed.joined(report, [bench(*rows)])
    files.write(found, tmp_path)
    read = document.read(tmp_path / "report.json")
    assert [one.output_tokens_per_s for one in read.speed] == [300, 1234]
    assert read.speed[0].ttft_p99_s == 0.4
    text = markdown.render(found)
    assert "## How fast they serve" in text
    assert "1,234 (2 of 10 failed)" in text
    assert "vLLM 1.2.3 on H200" in text
    page = html.render(read, "1")
    assert "How fast they serve" in page
    assert "54,321" in page


def test_a_report_without_speeds_says_nothing_of_them(report):
    assert "How fast" not in markdown.render(report)
    assert "How fast" not in html.render(report.document, "1")


def test_files_of_measurements_are_told_apart_from_scores(tmp_path):
    folder = tmp_path / "measured"
    folder.mkdir()
    (folder / "bench.json").write_text(json.dumps(bench(row("a", None, 5)).to_json()))
    other = tmp_path / "other.json"
    other.write_text("{}")
    (found,) = inputs.speeds([folder, other])
    assert found.rows[0].output_tokens_per_s.mean == 5
    (again,) = inputs.speeds([folder / "bench.json"])
    assert again == found
    with pytest.raises(Exception, match="no score files among these"):
        inputs.read([folder])
