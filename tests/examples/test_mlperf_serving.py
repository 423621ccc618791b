"""MLPerf's LoadGen drives a ranker. Skipped unless its package is installed."""

import pytest

from .serving import ranker_of

pytest.importorskip("fastapi", reason='needs the extra "serve"')
pytest.importorskip("mlperf_loadgen", reason="needs the package mlcommons-loadgen")
pytestmark = pytest.mark.slow


def test_a_short_run(served, tmp_path):
    import mlperf_scenario
    import mlperf_serving

    arguments = [
        "--weights",
        str(served["attention"]),
        "--qps",
        "20",
        "--candidates",
        "64",
        "--seconds",
        "2",
        "--out",
        str(tmp_path),
    ]
    options = mlperf_serving.parse_arguments([*arguments, "--samples", "30", "--limit-ms", "2000"])
    ranker = ranker_of(served["attention"])
    summary = mlperf_serving.measure(ranker, options)
    assert summary.keys() == mlperf_scenario.SUMMARY.keys() and summary["result"] in (
        "VALID",
        "INVALID",
    )
    assert 0 < int(summary["p50 ns"]) <= int(summary["p99 ns"])
    assert ranker.counts["reused"] > ranker.counts["encoded"] > 0


def test_a_failed_query_is_no_result(served, tmp_path):
    import mlperf_serving

    ranker = ranker_of(served["attention"])
    ranker.score = lambda requests: 1 / 0
    arguments = [
        "--weights",
        str(served["attention"]),
        "--qps",
        "20",
        "--candidates",
        "64",
        "--seconds",
        "1",
        "--out",
        str(tmp_path),
    ]
    with pytest.raises(RuntimeError, match=r"^\d+ queries failed$"):
        mlperf_serving.measure(ranker, mlperf_serving.parse_arguments(arguments))
