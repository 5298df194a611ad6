"""The command line: the output of --check, exit codes, and one sentence for each mistake."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from controller.__main__ import main
from controller.preflight import load_inputs
from controller.run.folder import RunFolder
from splitppo.config import load_config
from splitppo.config.resolve import resolve_run
from splitppo.machine.cores import permitted_cores
from tests.support import user_environments
from tests.support.fake_gpus import put_gpus
from tests.support.models import save_policy

pytestmark = pytest.mark.slow


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    """A config whose files are all there."""
    model = tmp_path / "model"
    model.mkdir()
    backend = Backend(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.save(str(model / "tokenizer.json"))
    (model / "config.json").write_text('{"vocab_size": 2}')
    header = b'{"weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'
    (model / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    row = {"prompt": "ab", "data_source": "sort_letters", "reward_model": {"ground_truth": "ab"}}
    (tmp_path / "train.jsonl").write_text((json.dumps(row) + "\n") * 4)
    tree: dict[str, Any] = {
        "run": {"dir": str(tmp_path / "run"), "total_steps": 2},
        "data": {"train_files": str(tmp_path / "train.jsonl"), "train_batch_size": 4, "max_prompt_length": 8},
        "rollout": {"n": 2},
        "actor": {"model": str(model), "ppo_mini_batch_size": 2},
    }
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


def check(config_file: Path, *overrides: str) -> int:
    return main(["--config", str(config_file), "--check", *overrides])


def test_check_prints_the_resolved_config_and_the_batch_plan_and_starts_nothing(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(config_file, "rollout.n=3", "-v") == 0
    printed = capsys.readouterr().out
    resolved, _, plan = printed.partition("\nstep: ")
    (tmp_path / "resolved.yaml").write_text(resolved)
    expected = resolve_run(load_config(config_file, ["rollout.n=3"]), None, permitted_cores())
    assert load_config(tmp_path / "resolved.yaml") == expected
    assert plan.startswith("4 prompts x 3 samples = 12 responses\nactor: 2 mini-batches of 2 prompts (6 responses")
    assert not (tmp_path / "run").exists()


def test_check_shows_only_the_keys_that_differ_from_their_defaults(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(config_file, "rollout.n=3", "rollout.temperature=1.0", "services.actor.threads=1") == 0
    shown = yaml.safe_load(capsys.readouterr().out.partition("\nstep: ")[0])
    assert (shown["rollout"]["n"], shown["services"]["actor"], "temperature" in shown["rollout"]) == (
        *(3, {"threads": 1}),
        False,
    )
    assert check(config_file, "services.rollout={num_processes: 1}") == 0
    shown = yaml.safe_load(capsys.readouterr().out.partition("\nstep: ")[0])
    assert shown["services"]["rollout"] == {}  # all of its keys are at their defaults, but it makes a group


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        ("doctr", "(did you mean doctor?)"),
        ("frobnicate", "expected one of doctor, play, plan, sync, from-verl, or --config"),
    ],
)
def test_a_command_that_is_none_gets_the_nearest_or_all(
    command: str, answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--config", "x"]) == 2
    [sentence] = capsys.readouterr().err.splitlines()
    assert sentence.startswith(f"error: unknown command {command!r}: ")
    assert answer in sentence


def test_a_missing_package_is_one_sentence_that_says_how_to_enter_the_environment(tmp_path: Path) -> None:
    (tmp_path / "pydantic.py").write_text("import no_such_package")
    environment = {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "controller", "--config", "x"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    [sentence] = done.stderr.splitlines()
    assert (
        "does not have the package no_such_package: `make setup` makes an environment, `. .venv/bin/activate`"
        in sentence
    )


def test_check_says_what_holds_in_which_steps(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        check(config_file, "run.total_steps=4", "algorithm.phases={from_step: 3, name: cool, entropy_coeff: 0.5}") == 0
    )
    plan = "steps 1 to 2: loss vanilla, entropy_coeff 0\n  steps 3 to 4 (cool): loss vanilla, entropy_coeff 0.5"
    assert f"\nrun: 4 steps\n  {plan}\n" in capsys.readouterr().out


@pytest.mark.promise("your own reward")
def test_check_loads_the_reward_function(config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    function = tmp_path / "mine.py"
    function.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None, *, a=1): return a / 4"
    )
    keys = [f"reward.custom_function_path={function}"]
    assert check(config_file, *keys, "reward.custom_function_kwargs={a: 2}") == 0
    said = r"\nscores of a ground truth as the response \(.*\): sort_letters 0\.5\n"
    assert re.search(said, capsys.readouterr().out)
    assert check(config_file, *keys, "reward.custom_function_kwargs={b: 2}") == 2
    [sentence] = capsys.readouterr().err.splitlines()
    assert sentence.startswith("error: key 'reward.custom_function_kwargs': compute_score(data_source, ")
    assert sentence.endswith("got an unexpected keyword argument 'b'")


def test_check_says_what_a_reward_function_raises_and_where(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    function = tmp_path / "mine.py"
    function.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    assert (solution_str, ground_truth, extra_info) == ('a b', 'ab', {'ended_by': 'length'})\n"
        "    return float(extra_info['points'])\n"
    )
    keys = [f"reward.custom_function_path={function}"]
    assert check(config_file, *keys) == 2
    assert capsys.readouterr().err == (
        f"error: {tmp_path}/train.jsonl, line 1, data_source 'sort_letters': its ground truth as the response gets no"
        f" score: KeyError: 'points' ({function}, line 3)\n"
    )
    assert check(config_file, *keys, "reward.max_error_rate=1") == 0


def test_check_says_what_an_environment_raises_when_it_begins_and_closes_it(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(
        "from pathlib import Path\n"
        "class Game:\n"
        "    def reset(self, *, ground_truth, fails=False):\n"
        "        if Path(__file__).with_name('fails').exists():\n"
        "            raise KeyError(ground_truth)\n"
        "    def step(self, text): return text\n"
        "    def close(self): Path(__file__).with_name('closed').touch()\n"
    )
    game = f"rollout.multi_turn.environments={{default: {{path: {tmp_path}/mine.py, name: Game}}}}"
    exact = "rollout.multi_turn.record=true"  # nothing else is tried then
    assert check(config_file, game, exact) == 0
    assert (tmp_path / "closed").exists()
    (tmp_path / "fails").touch()
    assert check(config_file, game, exact) == 2
    assert capsys.readouterr().err.endswith(
        f"error: {tmp_path}/train.jsonl, line 1: the environment failed when it began: Game of {tmp_path}/mine.py,"
        " line 5: reset: KeyError: 'ab'\n"
    )


AGENT = """
import json, urllib.request

def run(endpoint, row):
    if row["prompt"] == "early":
        raise ValueError("no key of a search engine")
    body = json.dumps({"messages": [{"role": "user", "content": "What is " + row["prompt"]}]}).encode()
    headers = {"Authorization": f"Bearer {endpoint.api_key}", "Content-Type": "application/json"}
    asked = urllib.request.Request(endpoint.base_url + "/chat/completions", body, headers)
    answer = json.load(urllib.request.urlopen(asked))["choices"][0]["message"]["content"]
    if row["prompt"] == "wrong":
        return "good"
    if row["prompt"] == "schema":
        tool = {"type": "function", "function": {"nam": "add"}}
        asked.data = json.dumps({**json.loads(body), "tools": [tool]}).encode()
        urllib.request.urlopen(asked)
    return {"one": 1.0}[answer]
"""


WRONG = {  # whatever the policy says
    "early": ("the environment failed when it began: {file}:run, line 6: ValueError: no key of a search engine",),
    "wrong": ("{file}:run: the agent returned 'good', expected a number, or a dict with 'score'",),
    "schema": ("HTTPError: HTTP Error 400", "; its last request was refused: tools[0], name: it is missing"),
    "no room": ("the first request of the agent, which is the prompt: it has ", "more than data.max_prompt_length ("),
}


@pytest.mark.parametrize("prompt", ["ab", *WRONG])
def test_check_says_what_agents_ask_first_and_why_they_fail(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], prompt: str
) -> None:
    rows = [{"prompt": prompt, "data_source": "x", "reward_model": {"ground_truth": ""}}] * 2
    (tmp_path / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    file = tmp_path / "mine.py"
    file.write_text(AGENT)
    agent = f"rollout.multi_turn.environments={{default: {{agent: '{file}:run'}}}}"
    length = f"data.max_prompt_length={len(prompt) + 1 if prompt == 'no room' else 40}"
    code = check(config_file, agent, "data.train_batch_size=2", length)
    said = capsys.readouterr()
    if prompt in WRONG:
        assert code == 2
        assert said.err.startswith(f"error: {tmp_path}/train.jsonl, line 1: ")
        assert [part for part in WRONG[prompt] if part.format(file=file) not in said.err] == []
    else:
        assert (code, said.err) == (0, "")
        assert f"{tmp_path}/train.jsonl, line 1: asks first, in " in said.out
        assert "(messages: user): 'What is ab'\n" in said.out
        failed = "told an empty answer, it failed, which the emptiness may have caused (play answers otherwise): "
        assert f"    {failed}{file}:run, line 17: KeyError: ''\n" in said.out


@pytest.mark.parametrize(
    ("reset", "sentence"),
    [
        (
            "*, board): pass",
            "line 1: the environment failed when it began: Game of {file}: reset wants the field 'board', which the row"
            " does not have: it has seed, data_source, ground_truth",
        ),
        (
            "*, ground_truth): self.number = int(ground_truth)",
            "line 3: the environment failed when it began: Game of {file}, line 2: reset: ValueError: invalid literal"
            " for int() with base 10: 'three'",
        ),
    ],
)
def test_check_says_which_of_the_first_rows_an_environment_cannot_begin_with(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], reset: str, sentence: str
) -> None:
    rows = [
        {"prompt": "ab", "data_source": "x", "reward_model": {"ground_truth": truth}} for truth in ("1", "2", "three")
    ]
    (tmp_path / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    file = tmp_path / "mine.py"
    file.write_text(f"class Game:\n    def reset(self, {reset}\n    def step(self, text): return text\n")
    game = f"rollout.multi_turn.environments={{default: {{path: {file}, name: Game}}}}"
    assert check(config_file, game, "data.train_batch_size=2") == 2
    assert capsys.readouterr().err == f"error: {tmp_path}/train.jsonl, {sentence.format(file=file)}\n"


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        (
            "    def step(self, text): return 1 / 0",
            "was told an empty turn: Game of {file}, line 3: step: ZeroDivision",
        ),
        (
            "    def step(self, text): return text, 1.0, True",
            "was told an empty turn: Game of {file}: step: expected a text or a Step, got tuple: ('', 1.0, True)",
        ),
        (
            "    def step(self, text): return text\n    def get_reward(self): return {}['x']",
            "ended: Game of {file}, line 4: get_reward: KeyError: 'x'",
        ),
        (
            "async def Game(chat, row):\n    turn = await chat.turn()\n    return turn.text",
            "was told an empty turn: Game of {file}: TypeError: the environment returned '', expected a number",
        ),
    ],
)
def test_check_says_what_an_environment_does_wrong_when_it_is_told_an_empty_turn(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], code: str, sentence: str
) -> None:
    file = tmp_path / "mine.py"
    is_class = code.startswith(" ")
    file.write_text(f"class Game:\n    def reset(self): pass\n{code}\n" if is_class else code)
    game = f"rollout.multi_turn.environments={{default: {{path: {file}, name: Game}}}}"
    assert check(config_file, game) == 2
    error = capsys.readouterr().err
    assert f"train.jsonl, line 1: the environment failed when it {sentence.format(file=file)}" in error


def test_check_begins_environments_that_no_record_would_repeat(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dice = f"rollout.multi_turn.environments={{default: {{path: {user_environments.__file__}, name: Dice}}}}"
    assert check(config_file, dice) == 0
    assert check(config_file, dice, "rollout.multi_turn.record=false") == 2
    assert "gave other texts for the same seed: a resumed run would differ" in capsys.readouterr().err


def test_check_names_environments_whose_files_import_from_the_folder_it_is_called_in(
    config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])  # without the folder, as in the command `splitppo`
    monkeypatch.chdir(tmp_path)
    (tmp_path / "names_of_ours.py").write_text("from tests.support.user_environments import Game")
    (tmp_path / "mine.py").write_text("from names_of_ours import Game")
    assert check(config_file, "rollout.multi_turn.environments={default: {path: mine.py, name: Game}}") == 0
    assert "\nenvironments: default: Game of mine.py\nrun: 2 steps\n" in capsys.readouterr().out


def test_check_ends_with_the_memory_of_each_group(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(config_file) == 0
    plan = capsys.readouterr().out.partition("\nstep: ")[2].splitlines()
    assert [line.split(":")[:2] for line in plan[-2:]] == [
        [f"memory of the {role}", " unknown"] for role in ("actor", "critic")
    ]

    save_policy(config_file.parent / "model", max_position_embeddings=1024)
    assert check(config_file) == 0
    plan = capsys.readouterr().out.partition("\nstep: ")[2].splitlines()
    assert [line for line in plan if line.startswith("memory of")] == [
        f"memory of each of 1 ranks of the {role} (CPU), GiB, estimated:" for role in ("actor", "critic")
    ]


def test_check_refuses_what_cannot_fit_on_a_gpu_that_is_there(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_policy(config_file.parent / "model", max_position_embeddings=1024)
    capsys.readouterr()
    put_gpus(monkeypatch, [1 << 40, 1 << 40, 1 << 40, 256 << 20])
    assert check(config_file, "services.actor.devices=[3]") == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: GPU 3 (services.actor.devices) has 0.2 GiB, but the actor (1.0 GiB per rank)")
    assert printed.err.count("\n") == 1
    assert check(config_file, "services.actor.devices=[2]") == 0


@pytest.mark.parametrize("sizes", [None, [], [1 << 40]], ids=["no driver", "no GPU", "too few GPUs"])
def test_check_prints_the_plan_and_refuses_gpus_that_are_not_there(
    config_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, sizes: list[int] | None
) -> None:
    put_gpus(monkeypatch, sizes)
    assert check(config_file, "services.critic.devices=[1]") == 2
    printed = capsys.readouterr()
    assert "\nmemory of " in printed.out
    warning, error = printed.err.splitlines()
    assert warning.startswith("warning: critic.dtype: fp32 on GPUs is slow")
    assert error == (
        f"error: services.critic.devices is [1], but this machine offers {len(sizes or [])} GPUs;"
        " leave services.critic.devices empty to compute on the CPU"
    )


def test_check_counts_gpus_in_the_list_of_those_that_the_controller_may_use(
    config_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    put_gpus(monkeypatch, [1 << 20, 1 << 20, 1 << 40, 1 << 40])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    devices = ["services.actor.devices=[0]", "services.critic.devices=[1]"]
    assert check(config_file, *devices) == 0
    capsys.readouterr()
    assert check(config_file, *devices, "services.critic.devices=[3]") == 2
    assert capsys.readouterr().err.endswith(
        "error: services.critic.devices is [3], but CUDA_VISIBLE_DEVICES=2,3 offers 2 GPUs: devices are places in that"
        " list, here from 0 to 1; leave services.critic.devices empty to compute on the CPU\n"
    )


def test_check_accepts_a_gpu_that_shares_the_memory_of_the_machine(
    config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_gpus(monkeypatch, [None])
    assert check(config_file, "services.actor.devices=[0]") == 0


def test_check_warns_of_models_that_compute_in_fp32_on_gpus(
    config_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    put_gpus(monkeypatch, [1 << 40])
    on_gpu = ["services.actor.devices=[0]", "actor.dtype=fp32"]
    assert check(config_file, *on_gpu) == 0
    printed = capsys.readouterr().err
    assert printed.startswith("warning: actor.dtype: fp32 on GPUs is slow: ")
    assert printed.count("\n") == 1
    assert check(config_file, *on_gpu, "actor.dtype=bf16") == 0
    assert capsys.readouterr().err == ""


def test_check_refuses_the_resume_of_a_run_with_other_training_rows(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config(config_file)
    with RunFolder(config) as folder:
        folder.keep_rows(load_inputs(config).training_rows(config))
        (config.run.dir / "metrics.jsonl").write_text('{"step": 1}\n')
    assert check(config_file) == 0
    file = tmp_path / "train.jsonl"
    file.write_text(file.read_text().replace('"ground_truth": "ab"', '"ground_truth": "ba"', 1))
    capsys.readouterr()
    assert check(config_file) == 2
    began = f"run.dir: {config.run.dir} belongs to a run with other rows of {file} (4 rows then, 4 now)"
    assert began in capsys.readouterr().err


def test_check_warns_of_a_run_in_which_the_critic_alone_learns(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(config_file, "run.total_steps=2", "critic.warmup_steps=2") == 0
    printed = capsys.readouterr().err
    assert printed.startswith("warning: critic.warmup_steps (2) covers all 2 steps of the run")
    assert printed.count("\n") == 1


def test_check_warns_of_more_threads_than_cores(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(config_file, "services.actor.threads=9999") == 0
    printed = capsys.readouterr().err
    assert printed.startswith("warning: 1 x services.actor.threads (9999) + 1 x services.critic.threads (")
    assert printed.count("\n") == 1


@pytest.mark.promise("mistakes are sentences")
@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (
            "actor.learning_rate=1",
            "override 'actor.learning_rate=1': unknown key 'actor.learning_rate', did you mean 'actor.lr'?",
        ),
        ("rollout.temprature=1", "did you mean 'rollout.temperature'?"),
        ("run.total_steps=0", "key 'run.total_steps': "),
        ("run.schedule=fast", "key 'run.schedule'"),
        (
            "actor.ppo_mini_batch_size=3",
            "data.train_batch_size (4) must be a multiple of actor.ppo_mini_batch_size (3)",
        ),
        ("algorithm.adv_estimator=magic", "expected one of gae, grpo, grpo_passk"),
        ("algorithm.kl_penalty=k9", "key 'algorithm.kl_penalty': input should be 'kl', 'k1'"),
        ("data.train_files=none.parquet", "data.train_files: no such file none.parquet"),
        ("data.train_batch_size=6", "data.train_batch_size (6) is larger than the number of training prompts (4)"),
        ("data.max_prompt_length=1", "all 4 prompts are longer than data.max_prompt_length (1 tokens"),
        ("data.prompt_key=question", "line 1: column 'question' is missing"),
        ("actor.model=/no/model", "model folder /no/model does not exist (key actor.model)"),
        ("reward.custom_function_path=none.py", "key 'reward.custom_function_path': there is no file none.py"),
        (
            "services.critic.threads=many",
            "key 'services.critic.threads': expected auto, or a number of at least 1, got 'many'",
        ),
        ("services.actor.threads=0", "key 'services.actor.threads': expected auto, or a number of at least 1, got 0"),
        ("services.actor.devices=[0,1]", "devices lists 2 GPUs for num_processes 1"),
        ("nonsense", "override 'nonsense' must look like key.path=value"),
        ("run.dir=/dev/null/run", "run.dir: cannot use the run folder /dev/null/run: Not a directory (/dev/null)"),
        ("run.resume=/tmp", "run.resume: /tmp is no complete checkpoint; expected auto, disable or a folder"),
        (f"data.filters={'[' * 9999}", "lists and sections are nested too deeply"),
    ],
)
def test_a_mistake_gives_exit_code_2_and_one_line_that_says_which(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, sentence: str
) -> None:
    assert check(config_file, override) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert sentence in printed.err
    assert printed.err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_gpus_of_both_groups_must_not_overlap(
    config_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    put_gpus(monkeypatch, [1 << 40])
    devices = ["services.actor.devices=[0]", "services.critic.devices=[0]"]
    assert check(config_file, *devices) == 2
    assert "set services.allow_shared_devices" in capsys.readouterr().err
    assert check(config_file, *devices, "services.allow_shared_devices=true") == 0
    assert check(config_file, *devices, "algorithm.adv_estimator=reinforce_plus_plus") == 0


def test_a_config_file_that_is_missing_is_a_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(tmp_path / "none.yaml") == 2
    assert capsys.readouterr().err.startswith(f"error: cannot read the config file {tmp_path / 'none.yaml'}")


def test_a_machine_that_has_too_few_files_is_one_sentence(
    config_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_more(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr("controller.preflight.try_inputs", no_more)
    assert check(config_file) == 1
    assert capsys.readouterr().err == "error: [Errno 24] Too many open files\n"


def test_without_arguments_the_usage_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    assert "the following arguments are required: --config" in capsys.readouterr().err


def test_the_process_ends_with_the_commands_status(config_file: Path) -> None:
    command = [sys.executable, "-m", "controller", "--config", str(config_file), "run.resume=nowhere", "rollout.n=0"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: ")
    assert "Traceback" not in ended.stderr
