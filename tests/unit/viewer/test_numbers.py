"""The numbers of the pages against a recomputation in float64."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.viewed_runs import GAMMA, LAM, Shape, add_step, gae, make_run
from tests.support.viewer_client import ask


@pytest.mark.parametrize("with_conversations", [False, True])
async def test_deltas_kl_ratio_and_mismatch_are_those_of_the_formulas(tmp_path: Path, with_conversations: bool) -> None:
    shape = Shape(steps=0, with_conversations=with_conversations, with_update=True)
    run = make_run(tmp_path / "run", shape)
    rows = [row for row in add_step(run, 1, shape) if row["why"]]
    assert len(rows) > 20
    for row in rows:
        answer = (await ask([run], f"/api/runs/0/train/1/{row['row']}")).json
        derived = answer["derived"]
        counts = row["flags"] > 0
        places = np.flatnonzero(counts)
        value, reward = row["value"], row["rewards"]
        expected = [
            reward[t] + GAMMA * (value[places[n + 1]] if n + 1 < len(places) else 0) - value[t]
            for n, t in enumerate(places)
        ]
        for name, wanted in (
            ("delta", expected),
            ("kl", (row["old"] - row["ref"])[counts]),
            ("ratio", np.exp(row["new"] - row["old"])[counts]),
            ("mismatch", np.abs(row["old"] - row["rollout"])[counts]),
        ):
            shown = [number for number in derived[name] if number is not None]
            np.testing.assert_allclose(shown, wanted, atol=1e-9)
            assert [number is None for number in derived[name]] == [not one for one in counts]
        # The sum of the deltas with their discount is the advantage that the run computed.
        discount = (GAMMA * LAM) ** np.arange(len(places))
        assert gae(reward, value, counts)[places[0]] == pytest.approx(np.sum(discount * expected), abs=1e-9)


async def test_what_was_not_recorded_is_null(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", Shape(steps=1, with_critic=False))
    answer = (await ask([run], "/api/runs/0/train/1/0")).json
    assert answer["row"]["value"] is None
    assert answer["derived"]["delta"] is None
    assert answer["derived"]["ratio"] is None
    assert answer["derived"]["kl"] is not None
    not_recorded = (await ask([run], "/api/runs/0/train/1/4")).json["row"]
    assert (not_recorded["response"], not_recorded["ends"], not_recorded["why"]) == (None, None, 0)


async def test_colours_have_the_limits_of_the_whole_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", Shape(steps=12))
    scales = (await ask([run], "/api/runs/0/scales")).json
    assert set(scales) == {"value", "advantage", "delta", "reward", "kl", "mismatch", "ratio", "entropy"}
    rows = [row for step in range(1, 13) for row in add_step(tmp_path_of(tmp_path, step), step, Shape())]
    values = np.concatenate([row["value"][row["flags"] > 0] for row in rows])
    low, high = scales["value"]
    assert np.mean(values < low) < 0.03
    assert np.mean(values > high) < 0.03
    assert low < 0.1 < 0.9 < high


def tmp_path_of(tmp_path: Path, step: int) -> Path:
    folder = tmp_path / f"again{step}"
    folder.mkdir()
    return folder


async def test_the_critics_curve_is_that_of_the_footers(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", Shape(steps=3))
    rows = add_step(tmp_path_of(tmp_path, 2), 2, Shape())
    value, ret = (np.concatenate([row[name][row["flags"] > 0] for row in rows]) for name in ("value", "ret"))
    critic = (await ask([run], "/api/runs/0/recorded")).json
    assert critic["steps"] == [1, 2, 3]
    assert critic["value"][1] == pytest.approx(1 - np.var(ret - value) / np.var(ret))
    assert critic["low"][1] < critic["value"][1] < critic["high"][1]
    assert critic["p50"][1] == np.median([row["length"] for row in rows])
    assert (await ask([run], "/api/runs/0/recorded?since=2")).json["steps"] == [3]
