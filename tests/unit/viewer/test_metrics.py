"""Columns of metrics.jsonl, also of lines that no run writes."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import numpy as np

from splitppo.run_folder.files import RunDir
from viewer.metrics import MAX_METRICS, Metrics


def test_lines_of_any_metrics_become_columns_of_numbers(tmp_path: Path) -> None:
    many = {f"m{number}": number for number in range(MAX_METRICS + 100)}
    lines = [{"step": 1, **many}, {"step": 2}, {"step": 3, "m1": None, "m2": "x", "m3": 1e300, "m4": 10**400}]
    lines += [{"step": step, f"m{MAX_METRICS - 1}": step} for step in range(4, 1000)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    metrics = Metrics(RunDir(tmp_path))
    metrics.refresh()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = metrics.columns([1, 2, 3, 4, MAX_METRICS - 1], 0)
    rows = [[1, 2, 3, 4, MAX_METRICS - 1], [np.nan] * 5, [np.nan, np.nan, np.inf, np.nan, np.nan], [*[np.nan] * 4, 4]]
    np.testing.assert_array_equal(np.stack(found, axis=1)[:4], np.array(rows, np.float32))
    assert len(metrics.names) == MAX_METRICS
    assert metrics.recent(f"m{MAX_METRICS - 1}", 2) == [998.0, 999.0]
    assert metrics.recent(f"m{MAX_METRICS}") == metrics.recent("none") == []
    # A line holds its own numbers, not a place for every metric of the run.
    assert sum(values.nbytes for _, values in metrics._rows) < 8 * (MAX_METRICS + 1100)
