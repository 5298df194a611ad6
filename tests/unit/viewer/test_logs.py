"""The logs at the moment of a loss: of the lost rank, of rank 0 and of the controller, as far as they are there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.killed_run import BEGAN_S, log_line, write_log
from tests.support.viewer_client import ask

LOST = {"kind": "group_lost", "role": "actor", "rank": 0, "unix_s": BEGAN_S + 100.5}


async def logs_of(folder: Path, *events: dict[str, Any], number: int = 0) -> Any:
    (folder / "logs").mkdir(exist_ok=True)
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    answer = await ask([folder], f"/api/runs/0/log/{number}")
    return answer.json["error"] if answer.status == 422 else answer.json


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    return tmp_path / "logs"


async def test_a_log_ends_at_the_moment_and_begins_60_lines_before(logs: Path) -> None:
    write_log(logs / "actor_0.log", "actor", BEGAN_S, BEGAN_S + 500)
    write_log(logs / "controller_0.log", "controller", BEGAN_S, BEGAN_S + 500)
    actor, _, controller = await logs_of(logs.parent, LOST)
    for found, name in ((actor, "actor"), (controller, "controller")):
        assert found["file"] == f"logs/{name}_0.log"
        assert [line.rpartition(": ")[2] for line in found["lines"]] == [f"line {n}" for n in range(41, 101)]
        assert "up to" in found["sentence"]


async def test_the_log_before_the_last_start_of_a_group_is_the_one_that_has_the_moment(logs: Path) -> None:
    write_log(logs / "actor_0.log", "new", BEGAN_S + 110, BEGAN_S + 200)
    write_log(logs / "actor_0.log.old", "old", BEGAN_S, BEGAN_S + 100)
    actor = (await logs_of(logs.parent, LOST))[0]
    assert actor["file"] == "logs/actor_0.log.old"
    assert actor["lines"][-1].endswith("old: line 100")


async def test_a_log_that_was_replaced_twice_is_gone_and_the_controllers_is_there(logs: Path) -> None:
    for name in ("actor_0.log", "actor_0.log.old"):
        write_log(logs / name, "new", BEGAN_S + 110, BEGAN_S + 200)
    write_log(logs / "controller_0.log", "controller", BEGAN_S, BEGAN_S + 200)
    later = {"kind": "group_up", "role": "actor"}
    actor, controller = await logs_of(logs.parent, LOST, later)
    assert actor["lines"] == []
    assert "All lines are younger" in actor["sentence"]
    assert len(controller["lines"]) == 60


async def test_the_logs_of_the_lost_rank_and_of_rank_0_are_both_there(logs: Path) -> None:
    for rank in (0, 3):
        write_log(logs / f"actor_{rank}.log", f"rank {rank}", BEGAN_S, BEGAN_S + 9)
    found = await logs_of(logs.parent, {**LOST, "rank": 3})
    assert [one["file"] for one in found[:2]] == ["logs/actor_3.log", "logs/actor_0.log"]
    assert [one["lines"][-1][-14:] for one in found[:2]] == ["rank 3: line 9", "rank 0: line 9"]


async def test_without_time_stamps_the_last_lines_are_shown_and_said_to_be_that(logs: Path) -> None:
    (logs / "actor_torchrun.log").write_text("".join(f"Traceback {n}\n" for n in range(100)))
    found = {one["file"]: one for one in await logs_of(logs.parent, LOST)}["logs/actor_torchrun.log"]
    assert found["lines"] == [f"Traceback {n}" for n in range(40, 100)]
    assert "no time stamps" in found["sentence"]


async def test_what_torchrun_printed_is_that_of_the_last_start_alone(logs: Path) -> None:
    (logs / "actor_torchrun.log").write_text("of another instance\n")
    found = await logs_of(logs.parent, LOST, {"kind": "group_up", "role": "actor"})
    assert [one["file"] for one in found] == ["logs/actor_0.log", "logs/controller_0.log"]


async def test_missing_logs_and_links_are_sentences(logs: Path, tmp_path: Path) -> None:
    write_log(tmp_path / "secret", "secret", BEGAN_S, BEGAN_S + 9)
    (logs / "actor_0.log").symlink_to(tmp_path / "secret")
    actor, _, controller = await logs_of(logs.parent, LOST)
    assert actor["lines"] == controller["lines"] == []
    assert "logs/actor_0.log cannot be read" in actor["sentence"]
    assert "No such file" in controller["sentence"]


async def test_a_folder_of_logs_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (tmp_path / "elsewhere").mkdir()
    write_log(tmp_path / "elsewhere" / "controller_0.log", "secret", BEGAN_S, BEGAN_S + 9)
    (run / "logs").symlink_to(tmp_path / "elsewhere")
    assert all(one["lines"] == [] for one in await logs_of(run, LOST))


async def test_the_moment_is_found_in_a_huge_log_of_which_little_is_read(logs: Path) -> None:
    with (logs / "actor_0.log").open("w") as file:
        file.seek(1 << 36)  # zeros, which the disk does not hold
        file.write("\n")
        file.writelines(log_line(BEGAN_S + number / 64, f"line {number}") for number in range(100_000))
    for number in (0, 3, 12_345, 99_999):
        actor = (await logs_of(logs.parent, {**LOST, "unix_s": BEGAN_S + (number + 0.5) / 64}))[0]
        assert actor["lines"][-1].endswith(f" line {number}")


@pytest.mark.parametrize("num_bytes", [140_000, 9_000_000])
async def test_lines_without_stamps_in_between_do_not_lead_astray(logs: Path, num_bytes: int) -> None:
    with (logs / "actor_0.log").open("w") as file:
        file.writelines(log_line(BEGAN_S + number, f"line {number}") for number in range(3_000))
        file.write("NCCL says something\n" * (num_bytes // 20))
        file.writelines(log_line(BEGAN_S + number, f"line {number}") for number in range(3_000, 9_000))
    for number in (5, 1_000, 2_998, 3_001, 8_000):
        actor = (await logs_of(logs.parent, {**LOST, "unix_s": BEGAN_S + number + 0.5}))[0]
        assert actor["lines"][-1].endswith(f" line {number}")


async def test_of_a_clock_that_went_back_lines_up_to_the_moment_are_shown(logs: Path) -> None:
    with (logs / "actor_0.log").open("w") as file:
        for numbers in (range(3_000), range(1_000, 4_000)):
            file.writelines(log_line(BEGAN_S + number, f"line {number}") for number in numbers)
    actor = (await logs_of(logs.parent, {**LOST, "unix_s": BEGAN_S + 1_500.5}))[0]
    assert actor["lines"][-1].endswith(" line 1500")


async def test_lines_are_cut_and_have_no_secrets(logs: Path) -> None:
    secrets = [
        "SPLITPPO_TOKEN=abcdefgh-ijklmnop",
        "{'authorization': 'Bearer abcdefgh-ijklmnop'}",
        "metadata ('authorization', 'Bearer abcdefgh-ijklmnop')",
        '"api_key": "abcdefgh-ijklmnop"',
    ]
    texts = [*secrets, "max_tokens: 123456789", "x" * 5_000]
    (logs / "actor_0.log").write_text("".join(log_line(BEGAN_S, text) for text in texts))
    lines = (await logs_of(logs.parent, LOST))[0]["lines"]
    assert not any("abcdefgh" in line for line in lines)
    assert all("(hidden)" in line for line in lines[:4])
    assert "123456789" in lines[4]
    assert len(lines[5]) == 2_000


async def test_for_any_other_event_the_log_is_the_controllers(logs: Path) -> None:
    write_log(logs / "controller_0.log", "controller", BEGAN_S, BEGAN_S + 9)
    [found] = await logs_of(logs.parent, {"kind": "start", "role": "actor", "unix_s": BEGAN_S + 3.5})
    assert found["lines"][-1].endswith("line 3")


@pytest.mark.parametrize(
    ("event", "told"),
    [
        ({"role": "../../etc/passwd"}, "names no role"),
        ({"role": ["actor"]}, "names no role"),
        ({"role": "actor\n"}, "names no role"),
        ({"unix_s": "now"}, "has no time"),
        ({"unix_s": 1e300}, "has no time"),
        ({"unix_s": float("nan")}, "has no time"),
        ({"unix_s": None}, "has no time"),
        ({"unix_s": [1]}, "has no time"),
    ],
)
async def test_a_hostile_event_is_a_sentence(logs: Path, event: dict[str, Any], told: str) -> None:
    assert told in await logs_of(logs.parent, LOST | event)


@pytest.mark.parametrize("rank", [-1, 10**30, 1.5, "0/../../x", None])
async def test_a_rank_that_is_none_is_rank_0(logs: Path, rank: object) -> None:
    found = await logs_of(logs.parent, {**LOST, "rank": rank})
    assert [one["file"] for one in found] == ["logs/actor_0.log", "logs/actor_torchrun.log", "logs/controller_0.log"]


async def test_an_event_that_is_not_there_is_a_sentence(logs: Path) -> None:
    assert "there is none with number 7" in await logs_of(logs.parent, LOST, number=7)
