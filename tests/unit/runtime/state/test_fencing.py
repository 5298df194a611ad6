"""Fencing of controllers."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.runtime.state.fencing import FencingToken
from splitppo.rpc.errors import InvalidArgument, NotIntroduced, StaleEpoch, WrongState


def test_nobody_is_served_before_the_handshake() -> None:
    for epoch in (0, 1):
        with pytest.raises(NotIntroduced, match="call Handshake first"):
            FencingToken().check("run", epoch)


def test_the_newest_controller_is_served() -> None:
    fencing = FencingToken()
    fencing.take("run", 1)
    fencing.take("run", 1)
    fencing.check("run", 1)
    assert fencing.epoch == 1


def test_an_older_controller_is_refused_from_the_takeover_on() -> None:
    fencing = FencingToken()
    fencing.take("run", 1)
    fencing.take("run", 2)
    with pytest.raises(StaleEpoch, match="epoch 2 has taken over"):
        fencing.check("run", 1)
    with pytest.raises(StaleEpoch, match="epoch 2 has taken over"):
        fencing.take("run", 1)
    fencing.check("run", 2)


def test_a_newer_controller_must_introduce_itself() -> None:
    fencing = FencingToken()
    fencing.take("run", 1)
    with pytest.raises(WrongState, match="Handshake first"):
        fencing.check("run", 2)


def test_the_run_must_not_change_within_an_epoch() -> None:
    fencing = FencingToken()
    fencing.take("run", 1)
    with pytest.raises(WrongState, match="epoch 1 belongs to run 'run'"):
        fencing.take("other", 1)
    with pytest.raises(WrongState, match="Handshake first"):
        fencing.check("other", 1)


@pytest.mark.parametrize(("run_id", "epoch"), [("", 1), ("run", 0), ("run", -1)])
def test_a_controller_needs_a_run_and_an_epoch(run_id: str, epoch: int) -> None:
    with pytest.raises(InvalidArgument):
        FencingToken().take(run_id, epoch)


def test_a_controller_whose_run_folder_was_claimed_again_is_refused_by_a_fresh_worker(tmp_path: Path) -> None:
    (tmp_path / "controller.epoch").write_text('{"run_id": "run", "epoch": 4}')
    fencing = FencingToken(tmp_path / "controller.epoch")
    with pytest.raises(StaleEpoch, match="epoch 4 has taken over"):
        fencing.take("run", 3)
    fencing.take("run", 4)
