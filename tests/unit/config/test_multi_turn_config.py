"""`rollout.multi_turn`: environments and tools, what is refused, and what a resumed run keeps."""

from __future__ import annotations

from pathlib import Path

import pytest

from splitppo.config import dump_config, load_config
from splitppo.config.keys import may_change, step_work
from splitppo.config.resolve import REPLY_STEPS, resolve_run
from splitppo.config.subsections.multi_turn import EnvironmentConfig
from splitppo.config.worker_digest import worker_digest
from splitppo.machine.cores import PermittedCores
from tests.support.configs import load, mistake

SECTION = "rollout.multi_turn"
TOOLS = f"{SECTION}.environments.math={{tools: [my_tools.py:lookup]}}"
GAME = f"{SECTION}.environments.default={{path: guess.py, name: Guess, kwargs: {{top: 31}}}}"
KNOWN = (
    "known here: environments, gateway, mcp_servers, mcp_tools, tool_format, max_turns, max_turn_length,"
    " max_context_length, max_observation_length, max_parallel_calls, timeout_s, num_workers, max_error_rate,"
    " reply_steps, record"
)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            (TOOLS, f"{SECTION}.timeout_s=700"),
            "rollout.multi_turn.timeout_s (700) must be under services.progress_timeout_s (600)",
        ),
        (
            (TOOLS, "services.progress_timeout_s=60"),
            "rollout.multi_turn.timeout_s (60) must be under services.progress_timeout_s (60)",
        ),
        (
            (TOOLS.replace("my_tools.py:lookup", "python"), f"{SECTION}.timeout_s=30"),
            "rollout.multi_turn.timeout_s (30) must be over three times reward.code.timeout_s (30), in which the tool"
            " python ends a program",
        ),
        (
            (TOOLS, "debug.response_lengths={kind: uniform, low: 1, high: 2}"),
            "debug.response_lengths and rollout.multi_turn.environments exclude each other: a response of forced length"
            " has one turn; remove one of them",
        ),
        ((f"{SECTION}.record=maybe",), f"key '{SECTION}.record': expected auto, true or false, got 'maybe'"),
        ((f"{SECTION}.mcp_servers={{s: {{}}}}",), f"key '{SECTION}.mcp_servers.s': expected either url or command"),
        (
            (f"{SECTION}.mcp_servers={{s: {{command: [a], headers: {{b: c}}}}}}",),
            f"key '{SECTION}.mcp_servers.s.headers': they are sent to a url, and there is none",
        ),
        (
            (f"{SECTION}.environments.math={{tools: pyhton}}",),
            f"key '{SECTION}.environments.math.tools.0': expected file.py:function, python, mcp:SERVER, or a file of"
            " verl's, got 'pyhton'",
        ),
        (
            (f"{SECTION}.environments.math={{tools: [a.py:b, 'mcp:search']}}",),
            f"key '{SECTION}.mcp_servers': tools of environments name the server 'search', which is not there",
        ),
        (
            (f"{SECTION}.environments.math={{tools: [a.py:b, a.py:b]}}",),
            f"key '{SECTION}.environments.math.tools': expected each tool once, a.py:b stands there 2 times",
        ),
        (
            (f"{SECTION}.environments.math={{path: a.py}}",),
            f"key '{SECTION}.environments.math': path and name belong together: expected both, or neither",
        ),
        (
            (f"{SECTION}.environments.math={{name: gymnasum}}",),
            f"key '{SECTION}.environments.math.name': expected gymnasium or openenv, or a path beside it, got"
            " 'gymnasum' (did you mean gymnasium?)",
        ),
        (
            (f"{SECTION}.environments.math={{path: a.py, name: A, tools: a.py:b}}",),
            "expected one of name, with path if it is your own, tools, agent and command, got name and tools",
        ),
        (
            (f"{SECTION}.environments.math={{}}",),
            "expected one of name, with path if it is your own, tools, agent and command, got none",
        ),
        (
            (f"{SECTION}.environments.math={{tools: a.py:b, kwargs: {{a: 1}}}}",),
            f"key '{SECTION}.environments.math.kwargs': they are those of a class, and there is no name",
        ),
        (
            (f"{SECTION}.environments.math={{agent: run}}",),
            f"key '{SECTION}.environments.math.agent': expected file.py:function, got 'run'",
        ),
        (
            (f"{SECTION}.environments.math={{command: node agent.js}}",),
            f"key '{SECTION}.environments.math.command': expected a program and its arguments, as a list of texts, got"
            " 'node agent.js'",
        ),
        (
            (f"{SECTION}.environments.math={{agent: a.py:b, env: {{A: b}}}}",),
            f"key '{SECTION}.environments.math.env': they are variables of a command, and there is none",
        ),
        (
            (f"{SECTION}.environments.math={{agent: a.py:b, reward: output}}",),
            f"key '{SECTION}.environments.math.reward': got output; the ways of agent are return and null",
        ),
        (
            (f"{SECTION}.environments.math={{tools: a.py:b, reward: output}}",),
            f"key '{SECTION}.environments.math.reward': got output; the ways are of agent and command alone",
        ),
        (
            (f"{SECTION}.environments.math={{command: [a], reward: print}}",),
            f"key '{SECTION}.environments.math.reward': expected return (of an agent), output or endpoint (of a"
            " command), or null, got 'print'",
        ),
        ((f"{SECTION}.gateway.max_agents=0",), "input should be greater than or equal to 1, got 0"),
        (
            (f"{SECTION}.tool_format=herms",),
            f"key '{SECTION}.tool_format': expected auto, hermes, qwen3_coder, llama3_json, or file.py:function, got"
            " 'herms'",
        ),
        ((f"{SECTION}.reply_steps=-1",), f"key '{SECTION}.reply_steps': expected auto, or a number of at least 0"),
        ((f"{SECTION}.max_observation_length=9000",), "input should be less than or equal to 8192, got 9000"),
        (
            (TOOLS, f"{SECTION}.max_context_length=512"),
            f"{SECTION}.max_context_length (512) must exceed data.max_prompt_length (512): a context holds the prompt"
            " and the turns that follow",
        ),
        (
            (TOOLS, f"{SECTION}.max_context_length=700", "actor.ppo_max_token_len_per_gpu=699"),
            f"actor.ppo_max_token_len_per_gpu (699) must hold one row of {SECTION}.max_context_length (700) tokens;"
            " raise it, or actor.ulysses_sequence_parallel_size, so that ranks divide rows",
        ),
        (
            (TOOLS, f"{SECTION}.max_context_length=700", "rollout.backend=vllm", "rollout.vllm.max_model_len=699"),
            f"rollout.vllm.max_model_len (699) must hold {SECTION}.max_context_length (700) tokens; raise"
            " rollout.vllm.max_model_len",
        ),
        ((f"{SECTION}.max_turns=0",), f"key '{SECTION}.max_turns': input should be greater than or equal to 1, got 0"),
    ],
)
def test_what_cannot_be_held_is_refused(tmp_path: Path, overrides: tuple[str, ...], sentence: str) -> None:
    assert mistake(tmp_path, *overrides).startswith(sentence) or mistake(tmp_path, *overrides).endswith(sentence)


def test_the_name_of_an_environment_in_a_record_has_no_keys_of_agents() -> None:
    assert str(EnvironmentConfig(name="openenv")) == "path=None name='openenv' kwargs={} tools=()"
    assert str(EnvironmentConfig(command=("a",))) == "path=None name=None kwargs={} tools=() command=('a',)"


def test_without_environments_other_keys_are_free(tmp_path: Path) -> None:
    load(tmp_path, "services.progress_timeout_s=30", "debug.response_lengths={kind: uniform, low: 1, high: 2}")


def test_the_longest_turn_may_be_longer_than_the_longest_response(tmp_path: Path) -> None:
    assert load(tmp_path, TOOLS, f"{SECTION}.max_turn_length=4096").rollout.multi_turn.max_turn_length == 4096


def test_what_a_model_holds_at_once_is_a_context_and_never_more_than_a_response_with_its_prompt(
    tmp_path: Path,
) -> None:
    def longest(*overrides: str) -> int:
        return load(tmp_path, *overrides).longest_context

    assert longest() == longest(TOOLS) == 1024
    assert longest(TOOLS, f"{SECTION}.max_context_length=700") == 700
    assert longest(TOOLS, f"{SECTION}.max_context_length=7000") == 1024
    assert longest(f"{SECTION}.max_context_length=100") == 1024  # there are no conversations


def test_workers_of_another_length_of_contexts_are_refused_where_they_sample(tmp_path: Path) -> None:
    limit = f"{SECTION}.max_context_length=700"
    plain = load(tmp_path, TOOLS, "services.rollout.num_processes=1", "rollout.share=0.5")
    limited = load(tmp_path, TOOLS, limit, "services.rollout.num_processes=1", "rollout.share=0.5")
    refused = {role for role in limited.roles if worker_digest(plain, role) != worker_digest(limited, role)}
    assert refused == {"actor", "rollout"}


def test_a_data_source_has_its_environment_or_that_of_all_others(tmp_path: Path) -> None:
    multi_turn = load(tmp_path, TOOLS, GAME).rollout.multi_turn
    of_math, of_others = multi_turn.environment_of("math"), multi_turn.environment_of("guess")
    assert of_math is not None
    assert of_others is not None
    assert of_math.tools == ("my_tools.py:lookup",)
    assert (of_others.path, of_others.name, of_others.kwargs) == (Path("guess.py"), "Guess", {"top": 31})
    assert load(tmp_path, TOOLS).rollout.multi_turn.environment_of("guess") is None


@pytest.mark.parametrize(
    ("environment", "is_remote"),
    [
        ("{name: openenv, kwargs: {url: 'http://there'}}", True),
        ("{name: gymnasium, kwargs: {id: Game-v0}}", False),
        ("{path: a.py, name: openenv}", False),
        ("{tools: [a.py:b]}", False),
    ],
)
def test_an_environment_that_a_server_holds_is_remote(tmp_path: Path, environment: str, is_remote: bool) -> None:
    config = load(tmp_path, f"{SECTION}.environments.default={environment}")
    assert config.rollout.multi_turn.environments["default"].is_remote == is_remote


def test_a_stored_configuration_has_its_environments(tmp_path: Path) -> None:
    config = load(tmp_path, TOOLS, GAME)
    file = tmp_path / "stored.yaml"
    file.write_text(dump_config(config))
    assert load_config(file).rollout.multi_turn == config.rollout.multi_turn


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        ((), REPLY_STEPS),
        ((f"{SECTION}.reply_steps=auto",), REPLY_STEPS),
        (("services.critic.devices=[0]",), REPLY_STEPS),
        (("services.actor.devices=[0]",), 0),
        (("services.actor.devices=[0]", "services.critic.devices=[1]", f"{SECTION}.reply_steps=4"), 4),
        (("services.rollout={devices: [0]}", "services.critic.devices=[1]"), 0),
    ],
)
def test_auto_waits_for_replies_where_sampling_is_exact(tmp_path: Path, overrides: tuple[str, ...], steps: int) -> None:
    assert load(tmp_path, *overrides).rollout.multi_turn.reply_steps == steps


def test_a_resumed_run_keeps_its_number_of_reply_steps(tmp_path: Path) -> None:
    stored, cores = load(tmp_path, TOOLS), PermittedCores((0, 1))
    moved = resolve_run(load(tmp_path, TOOLS, "services.actor.devices=[0]"), stored, cores)
    assert moved.rollout.multi_turn.reply_steps == REPLY_STEPS
    given = resolve_run(load(tmp_path, TOOLS, f"{SECTION}.reply_steps=4"), stored, cores)
    assert given.rollout.multi_turn.reply_steps == 4


@pytest.mark.parametrize(
    ("name", "is_free", "is_work"),
    [
        ("environments", False, True),
        ("mcp_servers", True, False),
        ("mcp_tools", False, False),
        ("max_turns", False, True),
        ("max_turn_length", False, True),
        ("max_observation_length", False, True),
        ("max_parallel_calls", False, True),
        ("tool_format", False, False),
        ("record", True, False),
        ("reply_steps", False, False),
        ("timeout_s", True, False),
        ("num_workers", True, False),
        ("max_error_rate", True, False),
    ],
)
def test_what_a_resumed_run_may_change(tmp_path: Path, name: str, is_free: bool, is_work: bool) -> None:
    assert may_change(f"{SECTION}.{name}") is is_free
    assert (f"{SECTION}.{name}" in step_work(load(tmp_path))) is is_work
