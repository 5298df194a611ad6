"""The words that a launch script passes to verl, and the questions on words that bash cannot know."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from controller.commands.from_verl.shell.script import Launch, read_script
from splitppo.config import ConfigError

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")]
NOW = datetime(2026, 8, 9, 10, 11, tzinfo=UTC)
RUN = "python3 -m verl.trainer.main_ppo"


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TZ", "UTC")


def launch_of(script: str, **environment: str) -> Launch:
    Path("run.sh").write_text(script)
    return read_script(Path("run.sh"), script, environment, NOW)


def words(script: str, **environment: str) -> list[str]:
    """Returns the words after the entry point; unknown words have the reason in brackets."""
    launch = launch_of(script, **environment)
    return [f"{word.text}<{word.unknown}>" if word.unknown else word.text for word in launch.words]


def mistake(script: str, **environment: str) -> str:
    with pytest.raises(ConfigError) as caught:
        words(script, **environment)
    return str(caught.value)


# By what it shows: a script, and what it passes.
SCRIPTS: dict[str, tuple[str, list[str]]] = {
    "continued lines": (f"{RUN} a=1 \\\n  b=2 \\\n  # no more\n", ["a=1", "b=2"]),
    "a line continued to the end of the file": (f"{RUN} a=1 \\", ["a=1"]),
    "defaults": (f"{RUN} lr=${{LR:-1e-5}} m=${{M:-$HOME/m}}", ["lr=1e-5", "m=/home/me/m"]),
    "an empty default": (f'{RUN} a=1 "b=${{B:-}}" ${{MORE-}}', ["a=1", "b="]),
    "a default that is computed": (f"X=${{X:-$((1024*2))}}\n{RUN} x=$X y=$(((X+1)*2))", ["x=2048", "y=4098"]),
    "quotes": (
        f"{RUN} f=\"['$HOME/a', \\\"b\\\"]\" l='[\"c\"]' m=$'d\\te'",
        ["f=['/home/me/a', \"b\"]", 'l=["c"]', "m=d\te"],
    ),
    "a value of two lines": (f"X='a\nb'\n{RUN} \"x=$X\" y=1", ["x=a\nb", "y=1"]),
    "parts of a text": (f"X=abcd\n{RUN} x=${{X:1:2}} y=${{X^^}} z=${{X%d}}", ["x=bc", "y=ABCD", "z=abc"]),
    "arrays": (f"A=(x=1 # one\n 'y=2 3')\nA+=(z=4)\n{RUN} \"${{A[@]}}\" n=${{#A[@]}}", ["x=1", "y=2 3", "z=4", "n=3"]),
    "split without quotes": (f"A='x=1 y=2'\n{RUN} $A \"$A\"", ["x=1", "y=2", "x=1 y=2"]),
    "no arguments": (f'E=${{1:-vllm}}\n{RUN} e=$E "$@" $*', ["e=vllm"]),
    "Hydra's signs": (f"{RUN} ++a=1 +b.c=2 ~d e=[x,y] f={{g:1}}", ["++a=1", "+b.c=2", "~d", "e=[x,y]", "f={g:1}"]),
    "blanks in a test": (f'X=\'a b\'\nif [[ "$X" == *" "* ]]; then Y=2; fi\n{RUN} y=$Y', ["y=2"]),
    "a test of what is not set": (f'if [ -z "$X" ]; then X=1; fi\n{RUN} x=$X', ["x=1"]),
    "a case": (f"case ${{G:-gpu}} in\n npu) X=1 ;;\n gpu|cuda) X=2 ;;\nesac\n{RUN} x=$X", ["x=2"]),
    "loops": (
        f"A=()\nfor f in a b; do A+=(x.$f=1); done\nwhile [[ $# -gt 0 ]]; do shift; done\n{RUN} ${{A[@]}}",
        ["x.a=1", "x.b=1"],
    ),
    "input of a loop": (f"while read -r l; do X+=$l; done < <(echo a; echo b)\n{RUN} x=$X", ["x=ab"]),
    "a function": (f'run() {{ {RUN} name=$1 "$@"; }}\nrun x=1 y=2', ["name=x=1", "x=1", "y=2"]),
    "a text before it": (f"cat > made.sh <<EOF\n{RUN} not=this\nEOF\n{RUN} a=1", ["a=1"]),
    "commands passed over": (
        f"set -euo pipefail\ncd /root/verl && mkdir -p logs\nno_such_tool --frozen\npip install x\n{RUN} a=1",
        ["a=1"],
    ),
    "tools": (
        f"D=$(basename /a/b.sh .sh)_$(echo c/d | tr / - | sed s/c/e/)_$(date +%F)\n{RUN} d=$D",
        ["d=b_e-d_2026-08-09"],
    ),
    "a device": (f"D=$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)\n{RUN} d=$D", ["d=gpu"]),
    "a log of all": (f"exec > >(tee log) 2>&1\n{RUN} a=1 > other 2>&1", ["a=1"]),
    "exec": (f"exec {RUN} a=1", ["a=1"]),
    "a launcher": ('L=(env A=1 nohup python3)\n"${L[@]}" -m verl.trainer.main_ppo a=1 > log 2>&1 &', ["a=1"]),
    "torchrun": ("torchrun --nproc_per_node 8 -m verl.trainer.main_ppo a=1 || true", ["a=1"]),
    "a job of Ray": ("ray job submit --no-wait -- python -m recipe.dapo.main_dapo a=1", ["a=1"]),
    "another trainer": ("python3 -m recipe.one_step_off_policy.async_main_ppo a=1", ["a=1"]),
    "fully asynchronous": ("python -m verl.experimental.fully_async_policy.fully_async_main a=1", ["a=1"]),
    "a shell elsewhere with it": ("ssh n1 'python3 -m verl.x.fully_async_main a=1'", ["a=1"]),
    "a shell elsewhere": (f"srun --nodes 1 bash -c \"{RUN} a=1 b='2 3'\"", ["a=1", "b=2 3"]),
    "a program by its path": ("/opt/venv/bin/python -m verl.trainer.main_ppo a=1", ["a=1"]),
    "names of its own": (
        "NOW=1 MARK=2 ENTRY_POINT=verl.trainer.main_ppo\nnote() { :; }\nD=$(date +%F)\npython3 -m $ENTRY_POINT d=$D",
        ["d=2026-08-09"],
    ),
    "a shell by its path": (f"/bin/sh -c '{RUN} a=1'", ["a=1"]),
    "a branch that changes no word": (
        'IP=$(srun hostname --ip-address)\nif [[ "$IP" == *" "* ]]; then\n  IFS=" " read -ra A <<<"$IP"\n'
        "  if [[ ${A[0]} > x ]]; then IP=${A[1]}; fi\nfi\n[ $(nproc) -lt 8 ] && exit 1\nexport IP\n" + f"{RUN} a=1",
        ["a=1"],
    ),
    "a loop that waits": (f"until nvidia-smi >/dev/null; do sleep 2; done\n{RUN} a=1", ["a=1"]),
    "the same run once more": (f"for i in 1 2; do {RUN} a=1; done", ["a=1"]),
    "a variable that another command gets": (
        f"export LD_LIBRARY_PATH=/x:$LD_LIBRARY_PATH\necho $NOT\n{RUN} a=1",
        ["a=1"],
    ),
}


@pytest.mark.parametrize("what", SCRIPTS)
def test_words_are_those_that_bash_passes(what: str) -> None:
    script, expected = SCRIPTS[what]
    assert words(script, HOME="/home/me") == expected


def test_the_environment_gives_variables_and_is_named_where_words_depend_on_it() -> None:
    launch = launch_of(f"B=2\n{RUN} m=${{M:-x}} b=$B", M="/m", B="1", C="3")
    assert [word.text for word in launch.words] == ["m=/m", "b=2"]
    assert list(launch.from_environment) == ["M"]


def test_lines_are_those_of_the_script() -> None:
    launch = launch_of(f"#!/bin/sh\nA=(c=3)\n{RUN} a=1 \\\n  b=2 ${{A[@]}} $@")
    assert [(word.text, word.line) for word in launch.words] == [("a=1", 3), ("b=2", 4), ("c=3", 2)]


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        pytest.param(f"{RUN} x=x-$D/y z=1", ["x=<D is set nowhere>", "z=1"], id="within a word"),
        pytest.param(f"{RUN} a=1 $MORE", ["a=1", "<MORE is set nowhere>"], id="a word of its own"),
        pytest.param(f"M=$1\n{RUN} m=$M", ["m=<the script's argument 1 is not given>"], id="an argument"),
        pytest.param(
            f"N=$(nvidia-smi -L | wc -l)\n{RUN} n.x=$N z=1",
            ["n.x=<nvidia-smi in line 1 would have to be run>", "z=1"],
            id="an output",
        ),
        pytest.param(
            f"N=${{N:-$(nproc)}}\n{RUN} n=x-$(basename $N)",
            ["n=x-<nproc in line 1 would have to be run>"],
            id="an output that a tool got",
        ),
    ],
)
def test_what_nobody_has_set_and_what_a_command_would_say_is_named_and_never_empty(
    script: str, expected: list[str]
) -> None:
    assert words(script) == expected


def test_files_that_a_script_reads_are_those_of_this_machine(tmp_path: Path) -> None:
    Path("conf").mkdir()
    Path("conf/env.sh").write_text("export A=1\n")
    Path("other.sh").write_text(f'#!/usr/bin/env bash\n{RUN} a=$A "$@"\n')
    there = f"[ -f {tmp_path}/conf/env.sh ] && B=2\n[ -d conf ] && C=3\n[ -e none ] && C=4"
    script = f'cd "$(dirname "$0")"\nsource conf/env.sh\n{there}\nbash other.sh b=$B c=$C'
    assert words(script) == ["a=1", "b=2", "c=3"]
    Path("other.sh").chmod(0o755)
    assert words("./other.sh d=1", A="5") == ["a=5", "d=1"]


def test_a_script_changes_nothing_and_sees_no_other_file(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s")
    script = f"touch {tmp_path}/made run.sh.log\nrm -f {secret} run.sh\nX=$(ls /etc /home 2>/dev/null)\n"
    assert words(script + f'{RUN} "x=$X" home=$(ls -d {Path.home()}/* 2>/dev/null | wc -l)')[-1] == "home=0"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["run.sh", "secret"]


@pytest.mark.parametrize(
    ("script", "line", "fact"),
    [
        pytest.param(f"a=1\nif [ 1 = 1 ]; then\n{RUN} x=1", 4, "syntax error", id="an if without its end"),
        pytest.param(
            f"N=$(nproc)\nif [ $N -gt 4 ]; then X=1; fi\n{RUN} x=${{X:-2}}",
            2,
            "nproc in line 1",
            id="a branch on an output",
        ),
        pytest.param(
            f"if check; then X=1; fi\n{RUN} x=${{X:-2}}", 1, "whether check succeeds", id="a branch on a command"
        ),
        pytest.param(
            f"command -v x || X=1\n{RUN} x=${{X:-2}}", 1, "whether command-v succeeds", id="a program that is there"
        ),
        pytest.param(
            f"N=$(nproc)\n[ $N -gt 4 ] || Y=1\nif [[ $N == 2 ]]; then\n [ $N = 3 ] && X=1\nfi\n{RUN} x=${{X:-2}}",
            4,
            "nproc in line 1",
            id="a branch within a branch",
        ),
        pytest.param(
            f"if [ $(nproc) != 4 ]; then :; else X=1; fi\n{RUN} x=${{X:-2}}", 1, "nproc", id="a test that holds"
        ),
        pytest.param(f"case $(id -u) in 0) X=1;; esac\n{RUN} x=${{X:-2}}", 1, "id in line 1", id="a case on an output"),
        pytest.param(f"N=$(nproc)\n{RUN} a=$((N * 2))", 2, "nproc in line 1", id="a computation with an output"),
        pytest.param(f"\n{RUN} a=$((N * 2))", 2, "N is set nowhere", id="a computation with nothing"),
        pytest.param(f"set -u\n{RUN} a=$N", 2, "N is set nowhere; set it in the environment", id="set -u"),
        pytest.param(f"set -u\n{RUN} a=$1", 2, "argument 1 is not given; write `set -- ...`", id="set -u, an argument"),
        pytest.param(f"{RUN} a=1\n{RUN} b=1", 2, "a second run", id="two runs"),
        pytest.param(f"{RUN} a=${{M:?is needed}}", 1, "M: is needed", id="what must be given"),
    ],
)
def test_what_bash_cannot_know_is_said_with_its_line(script: str, line: int, fact: str) -> None:
    sentence = mistake(script)
    assert fact in sentence
    assert sentence.startswith(f"run.sh, line {line}: ")


@pytest.mark.parametrize(
    "branch",
    [
        "grep -q zzz secret.txt && X=1",
        "if grep -q zzz <secret.txt; then X=1; fi",
        "cat secret.txt | grep -q zzz || X=1",
        "grep -q zzz secret.txt\n[ $? -eq 0 ] && X=1",
        "while ! grep -q zzz secret.txt; do X=1; break; done",
    ],
)
def test_whether_a_tool_succeeds_on_a_file_that_is_not_read_is_not_known(branch: str) -> None:
    Path("secret.txt").write_text("1e-3\n")
    assert "line 1: what is passed depends on whether grep succeeds" in mistake(f"{branch}\n{RUN} x=${{X:-2}}")
    assert words(f"grep -q zzz secret.txt && echo found\n{RUN} x=2") == ["x=2"]


@pytest.mark.parametrize(
    ("script", "fact"),
    [
        ("echo hello", "starts no verl.trainer.main_ppo; expected python -m verl.trainer.main_ppo"),
        (f"[ a = b ] || exit 1\n{RUN} a=1", "starts no verl.trainer.main_ppo before it ends in line 1"),
    ],
)
def test_a_script_without_a_run_is_refused(script: str, fact: str) -> None:
    assert fact in mistake(script)


@pytest.fixture
def shared_folder() -> Iterator[Path]:
    """A folder that every user of the machine reaches: root starts bubblewrap as another one."""
    with tempfile.TemporaryDirectory(prefix="splitppo-bwrap-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def bwrap(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program of its name."""
    (folder / "bwrap").write_text(f"#!/bin/bash\n{script}\n")
    (folder / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_without_bubblewrap_the_configuration_that_verl_prints_can_be_given(
    tmp_path: Path, shared_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bwrap(shared_folder, "echo 'bwrap: No permissions to create new namespace' >&2\nexit 1", monkeypatch)
    assert "No permissions to create new namespace" in mistake(f"{RUN} a=1")
    monkeypatch.setenv("PATH", str(tmp_path))
    sentence = mistake(f"{RUN} a=1")
    assert "bubblewrap (bwrap) is not installed" in sentence
    assert "bash run.sh --cfg job --resolve > resolved.yaml" in sentence


def test_a_container_may_forbid_to_mount_proc(shared_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = shutil.which("bwrap")
    find = 'while [[ $1 != --args ]]; do A+=("$1"); shift; done\nexec 9</proc/self/fd/$2\n'
    check = 'if grep -qz -x -- --proc <&9; then echo "bwrap: cannot mount proc" >&2; exit 1; fi\n'
    bwrap(shared_folder, f'{find}{check}exec {real} "${{A[@]}}" "$@"', monkeypatch)
    assert words(f"exec > >(tee log)\n{RUN} a=1") == ["a=1"]
