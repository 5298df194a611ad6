"""Conversations in whole runs: no schedule, resume, lost process or slow environment changes the weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.kill_matrix.conversation_cells import LIMITS, MAX_RESPONSE_LENGTH, agent, conversation_cells_at, echo
from tests.kill_matrix.harness import matrix_config, run_cells, undisturbed_digests
from tests.support import text_game, user_agents, user_environments, verl_files
from tests.support.context_episodes import MAX_CONTEXT_LENGTH, WITH_TEMPLATE
from tests.support.external import ExternalGroups, external_groups
from tests.support.mcp_server import HttpServer
from tests.support.models import CHAT_TEMPLATE
from tests.support.runs import EACH_STEP, NUM_STEPS, Inputs, RunFolder, started
from tests.support.user_tools import write

# Without a checkpoint before the end, a run that is started again makes all its steps again, and no record goes.
FROM_START = (
    "checkpoint.save_freq=-1",
    "evaluation.test_freq=-1",
    "evaluation.val_before_train=false",
)

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def talking(config: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExternalGroups]:
    """One actor rank and one critic rank with room for several turns in a response."""
    data = {**config["data"], "max_response_length": MAX_RESPONSE_LENGTH}
    rollout = {**config["rollout"], "multi_turn": {"max_context_length": MAX_CONTEXT_LENGTH}}
    own = {**config, "data": data, "rollout": rollout}
    with external_groups(own, tmp_path_factory.mktemp("talking") / "run") as groups:
        yield groups


@pytest.fixture
def groups(talking: ExternalGroups) -> ExternalGroups:
    """`talking`, with an empty run folder."""
    talking.empty()
    return talking


def episodes(folder: Path, **kwargs: Any) -> str:
    """Returns the override by which all conversations of a run are the `episode`s of a file, with these arguments."""
    text = (
        "from tests.support.context_episodes import episode\n\n"
        f"async def converse(chat, row):\n    return await episode(chat, row, **{kwargs!r})\n"
    )
    path = write(folder, text, "_".join(("episodes", *kwargs)) + ".py")
    return f"rollout.multi_turn.environments={{default: {{path: {path}, name: converse}}}}"


@pytest.mark.promise("conversations")
def test_schedules_a_resume_and_lost_environments_end_with_the_same_weights(
    groups: ExternalGroups, tmp_path: Path
) -> None:
    """Half of the conversations begin further contexts: anew, behind an earlier turn, or because one is full."""
    killing = episodes(tmp_path, kills=str(tmp_path / "killed"))
    runs: dict[str, tuple[str, ...]] = {
        "serial": ("run.schedule=serial", episodes(tmp_path)),
        "overlap": ("run.schedule=overlap", episodes(tmp_path, max_pause_s=0.02)),
        "lost": (EACH_STEP, "run.stop_after_step=2", killing),
        "resumed": (EACH_STEP, killing),
    }
    folders: dict[str, RunFolder] = {}
    for name, options in runs.items():
        if name != "resumed":
            groups.empty()
        with groups.started(*LIMITS, WITH_TEMPLATE, *options) as controller:
            controller.complete()
        folders[name] = groups.keep(tmp_path / name) if name != "lost" else controller.folder
    assert (tmp_path / "killed").exists()
    digests = [folders[name].summary["weights_sha256"] for name in ("serial", "overlap", "resumed")]
    assert digests == digests[:1] * 3
    for line in folders["overlap"].metrics[1:]:
        assert line["num_turns/mean"] == 3.0
        assert line["response_length/sampled/max"] <= 18.0 < line["response_length/min"] + 18.0
        assert line["environment/num_lost"] == 0.0
        assert line["num_contexts/max"] == 3.0
        assert line["num_contexts/returned"] > 0.0
        assert line["training/rollout_probs_diff_max"] < 1e-4
    validation = folders["overlap"].metrics[2]
    assert validation["val-aux/num_turns/max"] == 3.0
    turns = [span["step"] for span in folders["overlap"].spans() if span["pool"] == "environments"]
    assert {*turns} == {line["step"] for line in folders["overlap"].metrics}


@pytest.mark.extended
def test_gathered_runs_end_with_the_same_weights(groups: ExternalGroups, tmp_path: Path) -> None:
    digests = []
    for schedule in ("serial", "gather"):
        groups.empty()
        options = (f"run.schedule={schedule}", "rollout.stream_groups=1", episodes(tmp_path, max_pause_s=0.02))
        with groups.started(*LIMITS, WITH_TEMPLATE, *options) as controller:
            digests.append(controller.complete().summary["weights_sha256"])
    assert digests == digests[:1] * 2


@pytest.mark.extended
def test_an_environment_that_ends_after_one_turn_changes_nothing(config: dict[str, Any], tmp_path: Path) -> None:
    digests = []
    for name, options in (("alone", ()), ("environment", (echo(turns=1),))):
        # A turn is known to be the last one some steps later, so that parts would hold other rows.
        with started(config, tmp_path / name, "rollout.stream_groups=1", *options) as controller:
            digests.append(controller.complete().summary["weights_sha256"])
    assert digests[0] == digests[1]
    assert controller.folder.metrics[-1]["num_turns/max"] == 1.0


@pytest.mark.extended
def test_a_text_game_of_gymnasium_is_played(groups: ExternalGroups) -> None:
    game = "{name: gymnasium, kwargs: {id: 'tests.support.text_game:Letters-v0'}}"
    with groups.started(*LIMITS, f"rollout.multi_turn.environments={{default: {game}}}") as controller:
        line = controller.complete().metrics[-1]
    assert (line["num_turns/min"], line["num_turns/max"]) == (text_game.NUM_TURNS, text_game.NUM_TURNS)
    assert line["environment/num_lost"] == 0.0
    assert 0.0 < line["reward_extra/length/max"] <= 6.0
    assert line["critic/score/max"] > 0.0


@pytest.fixture
def templated(tmp_path: Path) -> tuple[str, ...]:
    """The limits of runs with agents, whose messages a chat template writes."""
    template = write(tmp_path, CHAT_TEMPLATE.replace("'\\n'", "'<eos>'"), "template.jinja")
    return (*LIMITS, f"data.chat_template={template}")


@pytest.mark.promise("agents")
def test_an_agent_by_the_client_of_openai_trains_as_a_coroutine_does_and_also_when_processes_are_lost(
    groups: ExternalGroups, templated: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: dict[str, tuple[str, ...]] = {
        "coroutine": ("run.schedule=serial", agent("by_chat")),
        "agent": ("run.schedule=overlap", agent()),
        "lost": (EACH_STEP, "run.stop_after_step=2", agent("by_retries")),
        "resumed": (EACH_STEP, agent("by_retries")),
    }
    folders: dict[str, RunFolder] = {}
    for name, options in runs.items():
        if name == "lost":
            monkeypatch.setenv(user_agents.KILLS, str(tmp_path / "killed"))
        if name != "resumed":
            groups.empty()
        with groups.started(*templated, *options) as controller:
            if name == "resumed":
                controller.wait_until(lambda folder: 3 in folder.steps, "step 3")
                groups.restart("actor")
            controller.complete()
        folders[name] = groups.keep(tmp_path / name) if name != "lost" else controller.folder
    assert (tmp_path / "killed").exists()
    digests = [folders[name].summary["weights_sha256"] for name in ("coroutine", "agent", "resumed")]
    assert digests == digests[:1] * 3
    assert learned(folders["coroutine"]) == learned(folders["agent"])
    assert len(recorded(folders["coroutine"])) == NUM_STEPS
    for name in ("agent", "resumed"):
        assert recorded(folders[name]) == recorded(folders["coroutine"])
    for line in folders["agent"].metrics[1:]:
        assert line["num_turns/mean"] == user_agents.NUM_TURNS
        assert (line["environment/num_lost"], line["environment/num_agent_errors"]) == (0.0, 0.0)
        assert line["reward_extra/num_asked/mean"] == user_agents.NUM_TURNS
        assert line["training/rollout_probs_diff_max"] < 1e-4
    assert max(line["critic/score/max"] for line in folders["agent"].metrics[1:]) > 0.0


@pytest.mark.extended
def test_programs_train_as_a_coroutine_does_also_if_they_are_ended_and_started_again_for_each_turn(
    groups: ExternalGroups, templated: tuple[str, ...]
) -> None:
    digests = []
    records = []
    for options in (
        (agent("by_chat"),),
        (agent("by_anthropic"), "run.schedule=gather"),
        (agent("by_urllib"), "rollout.multi_turn.gateway.max_agents=4"),
    ):
        groups.empty()
        shared = ("rollout.stream_groups=1", "run.stop_after_step=1")
        with groups.started(*templated, *options, *shared) as controller:
            digests.append(controller.complete().summary["weights_sha256"])
        records.append(recorded(controller.folder))
    assert digests == digests[:1] * 3
    assert records == records[:1] * 3
    assert all(row["ids"] for row in records[0]["1.parquet"])


def test_agents_that_all_fail_after_an_answer_end_the_run_with_one_sentence(
    groups: ExternalGroups, templated: tuple[str, ...]
) -> None:
    with groups.started(*templated, "evaluation.val_before_train=false", agent("fails")) as controller:
        assert controller.wait() == 1
    [line] = [line for line in controller.output.splitlines() if "agents of step 1 failed" in line]
    assert "ModuleNotFoundError: No module named 'a_package_that_is_not_there'" in line
    assert f"{user_agents.__file__}:fails, line " in line
    assert "Traceback" not in controller.output


TEMPLATE = """{% if tools %}{{ tools | tojson }}{% endif -%}
{% for message in messages %}{{ message.role }}: {{ message.content }}<eos>{% endfor %}"""
PARSER = """
from environments.chat import ToolCall

def parse(text, schemas):
    number = sum(map(ord, text)) % 10
    calls = [ToolCall("rewarded", {"value": number / 8})]
    return text, calls + [ToolCall("python", {"code": f"print({number} * 111)"})] * (number > 0)
"""


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_tools_for_verl_and_programs_are_called_and_rewarded_in_a_run(groups: ExternalGroups, tmp_path: Path) -> None:
    files = {"tools.py": verl_files.FUNCTIONS, "parser.py": PARSER, "template.jinja": TEMPLATE}
    paths = {name: str(write(tmp_path, text, name)) for name, text in files.items()}
    options = (
        f"rollout.multi_turn.environments={{default: {{tools: [{paths['tools.py']}, python]}}}}",
        f"rollout.multi_turn.tool_format={paths['parser.py']}:parse",
        f"data.chat_template={paths['template.jinja']}",
        "rollout.multi_turn.max_turns=2",
        "rollout.multi_turn.max_parallel_calls=2",
        "evaluation={val_before_train: false, test_freq: 1}",
        "run.stop_after_step=1",
    )
    with groups.started(*LIMITS, *options) as controller:
        folder = controller.complete()
    metrics = folder.metrics[-1]
    assert (metrics["environment/num_bad_calls"], metrics["environment/num_tool_errors"]) == (0.0, 0.0)
    assert metrics["tool_call_counts/max"] > 2.0
    programs = 0
    for line in (folder.path / "rollouts/val/1.jsonl").read_text().splitlines():
        first, *replies, last = (row := json.loads(line))["messages"]
        calls = [call["function"]["arguments"] for turn in (first, last) for call in turn["tool_calls"]]
        assert row["turn_scores"] == [arguments["value"] for arguments in calls if "value" in arguments]
        assert replies[0]["content"] == f"gave {row['turn_scores'][0]}"
        number = int(8 * row["turn_scores"][0])
        assert [reply["content"] for reply in replies[1:]] == [f"{number * 111}\n"] * (number > 0)
        programs += len(replies) - 1
    assert programs > 0


def test_too_many_failures_of_environments_end_the_run_with_one_sentence(groups: ExternalGroups) -> None:
    with groups.started(*LIMITS, echo(fails=0.1), "rollout.multi_turn.max_error_rate=0.9") as controller:
        controller.complete()
    assert sum(line["environment/num_lost"] for line in controller.folder.metrics[1:]) > 0
    groups.empty()
    with groups.started(*LIMITS, "evaluation.val_before_train=false", echo("Dice", fails=0.5)) as controller:
        assert controller.wait() == 1
    # A start with a mended environment asks it again.
    assert not list((controller.folder.path / "episodes").iterdir())
    [line] = [line for line in controller.output.splitlines() if "environment failed" in line]
    assert "more than rollout.multi_turn.max_error_rate (0.2) allows; first" in line
    assert "step: ValueError: the game is broken" in line
    assert "Traceback" not in controller.output


@pytest.mark.extended
def test_a_tool_server_that_is_killed_is_told_to_the_policy_and_a_run_does_not_start_without_it(
    groups: ExternalGroups, tmp_path: Path
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% if tools %}t{% endif %}" + CHAT_TEMPLATE.replace("'\\n'", "'<eos>'"))
    with HttpServer() as server:
        settings = {
            "environments": "{default: {tools: 'mcp:words'}}",
            "mcp_servers": f"{{words: {{url: '{server.url}'}}}}",
            "tool_format": f"{user_environments.__file__}:look_up_everything",
            "max_turns": "2",
        }
        options = [f"rollout.multi_turn.{key}={value}" for key, value in settings.items()]
        with groups.started(*LIMITS, f"data.chat_template={template}", *options) as controller:
            controller.wait_until(lambda folder: any(line["step"] == 1 for line in folder.metrics), "step 1")
            server.kill()
            first, *_, last = controller.complete().metrics[1:]
        groups.empty()
        with groups.started(*LIMITS, f"data.chat_template={template}", *options) as controller:
            assert controller.wait() == 2
    assert first["tool_call_counts/mean"] == last["tool_call_counts/mean"] == 2.0
    assert (first["environment/num_tool_errors"], last["environment/num_tool_errors"]) == (0.0, 2.0 * 32)
    assert last["environment/num_lost"] == 0.0
    [error] = controller.errors
    assert error.startswith(f"error: rollout.multi_turn.mcp_servers.words: {server.url} cannot be used: ")


@pytest.mark.extended
def test_ranks_and_groups_that_sample_may_be_lost_in_a_conversation(inputs: Inputs, tmp_path: Path) -> None:
    config = matrix_config(inputs)
    lost = ("actor_1-talk_reply_taken_shared", "rollout_0-talk_turn_ended_shared")
    cells = [
        {cell.name: cell for cell in conversation_cells_at(step)}[name] for step, name in zip((2, 3), lost, strict=True)
    ]
    undisturbed = undisturbed_digests(config, tmp_path / "undisturbed", *cells[0].kind)
    verdict = run_cells(cells, config, tmp_path / "run")
    assert verdict.failures(undisturbed) == []


@pytest.mark.extended
def test_a_run_with_a_clock_and_random_numbers_repeats_what_it_has_learned(
    groups: ExternalGroups, tmp_path: Path
) -> None:
    files = {"asked": str(tmp_path / "asked"), "kills": str(tmp_path / "killed")}
    options = (*LIMITS, *FROM_START, echo("Dice", **files, max_pause_s=0.02))
    kept = ("checkpoint.save_last=false", "run.schedule=overlap", *options)
    with groups.started(*kept) as controller:
        controller.wait_until(lambda folder: 2 in folder.steps, "two steps")
        controller.process.kill()
        controller.process.wait()
        before = learned(controller.folder)
    with groups.started(*kept) as controller:
        after = learned(controller.complete())
    assert {step: after[step] for step in before} == before
    assert len(after) == NUM_STEPS
    assert (tmp_path / "killed").exists()
    assert [line["environment/num_lost"] for line in controller.folder.metrics] == [0.0] * NUM_STEPS
    digests = controller.folder.summary["weights_sha256"]
    episodes = groups.keep(tmp_path / "recorded").path / "episodes"
    assert {file.name for file in episodes.iterdir()} == {f"{step}.jsonl" for step in range(1, NUM_STEPS + 1)}
    groups.empty()
    shutil.copytree(episodes, groups.folder.path / "episodes")
    (tmp_path / "asked").unlink()
    with groups.started("run.schedule=serial", *options) as controller:
        assert controller.complete().summary["weights_sha256"] == digests
    # Only the validation after the last step has asked; after the last checkpoint nobody needs the record.
    assert len((tmp_path / "asked").read_text().split()) == 8
    assert not list((groups.folder.path / "episodes").iterdir())


def recorded(folder: RunFolder) -> dict[str, list[dict[str, Any]]]:
    """The record of each training step, row by row: token ids, texts, rewards, contexts."""
    files = (folder.path / "rollouts/train").iterdir()
    return {file.name: pq.read_table(file).to_pylist() for file in files}


def learned(folder: RunFolder) -> dict[int, dict[str, float]]:
    """What each step has learned from, and with what result, without times."""
    kinds = ("actor/", "critic/", "num_turns/", "response_length/")
    return {
        line["step"]: {name: value for name, value in line.items() if name.startswith(kinds)} for line in folder.metrics
    }
