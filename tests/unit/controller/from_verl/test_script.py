"""What a launch script passes to verl: evaluated without running anything, and one sentence for what cannot be."""

from __future__ import annotations

import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest

from controller.from_verl.script import read_script
from controller.from_verl.shell_words import Unknown
from splitppo.config import ConfigError

NOW = datetime(2026, 8, 9, 10, 11, tzinfo=UTC)


def words(script: str, **environment: str) -> list[str]:
    """What follows the entry point; a word that is not known stands as its reason in brackets."""
    launch = read_script(Path("run.sh"), script, environment, NOW)
    return [w.text if isinstance(w.text, str) else f"{w.text.before}<{w.text.why}>" for w in launch.words]


def mistake(script: str, **environment: str) -> str:
    with pytest.raises(ConfigError) as caught:
        words(script, **environment)
    return str(caught.value)


RUN = "python3 -m verl.trainer.main_ppo"


# By what it shows: a script, and what it passes.
SCRIPTS: dict[str, tuple[str, list[str]]] = {
    "continued lines": (f"{RUN} a=1 \\\n  b=2 \\\n  # no more\n", ["a=1", "b=2"]),
    "variables": (f"LR=1e-6\n{RUN} lr=$LR x=${{LR}}5", ["lr=1e-6", "x=1e-65"]),
    "defaults": (f"{RUN} lr=${{LR:-1e-5}} m=${{M:-$HOME/m}}", ["lr=1e-5", "m=/home/me/m"]),
    "an empty variable": (f"A=\n{RUN} a=${{A:-1}} b=${{A-1}} c=${{A:+1}}", ["a=1", "b=", "c="]),
    "a default that stays": (f"{RUN} a=${{A:=1}} b=$A", ["a=1", "b=1"]),
    "cut": (f"F=x/y.tar.gz\n{RUN} a=${{F##*/}} b=${{F%.*}} c=${{F%%.*}}", ["a=y.tar.gz", "b=x/y.tar", "c=x/y"]),
    "replaced": (f"N='my run it'\n{RUN} a=${{N// /_}} b=\"${{N/ /_}}\"", ["a=my_run_it", "b=my_run it"]),
    "letters": (f"N=Ab\n{RUN} a=${{N,,}} b=${{N^^}} c=${{#N}}", ["a=ab", "b=AB", "c=2"]),
    "arithmetic": (f"N=$((1024 * 2 + 6 / (1 + 1)))\n{RUN} n=$((N % 1000)) m=$N", ["n=51", "m=2051"]),
    "quotes": (f'{RUN} f="[\'$HOME/a\', \\"b\\"]" l=\'["c"]\'', ["f=['/home/me/a', \"b\"]", 'l=["c"]']),
    "escapes": (f"{RUN} l=\\['a','b'\\] m=a\\ b", ["l=[a,b]", "m=a b"]),
    "blanks between": (f'A=1 B=2\n{RUN} "a=$A $B  ${{A}}  ${{B}} " b=$A', ["a=1 2  1  2 ", "b=1"]),
    "two on a line": (f"A=1 B=2\nC=3 D=4\nexport E=$A$B\nF=6 {RUN} a=$A$B$C$D$E", ["a=123412"]),
    "arrays": (f"A=(x=1 # one\n 'y=2 3')\nA+=(z=4)\n{RUN} \"${{A[@]}}\"", ["x=1", "y=2 3", "z=4"]),
    "an entry": (f"A=(x y)\n{RUN} a=${{A[1]}} b=$A", ["a=y", "b=x"]),
    "nothing to add": (f'A=()\n{RUN} a=1 "${{A[@]}}" $NOTHING', ["a=1"]),
    "split without quotes": (f"A='x=1 y=2'\n{RUN} $A \"$A\"", ["x=1", "y=2", "x=1 y=2"]),
    "no arguments": (f'E=${{1:-vllm}}\n{RUN} e=$E "$@"', ["e=vllm"]),
    "Hydra's signs": (f"{RUN} ++a=1 +b.c=2 ~d e=[x,y] f={{g:1}}", ["++a=1", "+b.c=2", "~d", "e=[x,y]", "f={g:1}"]),
    "case": (f"G=gpu\ncase $G in\n npu) X=1 ;;\n gpu|cuda) X=2 ;;\n *) exit 1 ;;\nesac\n{RUN} x=$X", ["x=2"]),
    "if": (f'if [ -z "$X" ] && [[ 3 -gt 2 ]]; then X=1; else X=3; fi\n{RUN} x=$X', ["x=1"]),
    "elif": (f"if [ 1 = 2 ]; then X=1; elif [[ a == a* ]]; then X=2; else X=3; fi\n{RUN} x=$X", ["x=2"]),
    "an expression": (f"if [[ $HOME =~ ^/home ]]; then X=1; fi\n{RUN} x=$X", ["x=1"]),
    "a list of tests": (f'[ $HOME != /x ] && X=1 || X=2\n[ -n "$Y" ] && X=3\n{RUN} x=$X', ["x=1"]),
    "for": (f"A=()\nfor f in a b; do A+=(x.$f=1); done\n{RUN} ${{A[@]}}", ["x.a=1", "x.b=1"]),
    "a loop not entered": (f"while [[ $# -gt 0 ]]; do M=$1; shift; done\n{RUN} m=${{M:-x}}", ["m=x"]),
    "a function": (f'run() {{ {RUN} name=$1 "$@"; }}\nrun x=1 y=2', ["name=x=1", "x=1", "y=2"]),
    "a text before it": (f"cat <<EOF\n{RUN} not=this\nEOF\n{RUN} a=1", ["a=1"]),
    "commands passed over": (f"cd $(dirname $0) && mkdir -p logs\nno_such_tool --frozen\n{RUN} a=1", ["a=1"]),
    "a launcher": ('L=(env A=1 python3)\n"${L[@]}" -m verl.trainer.main_ppo a=1', ["a=1"]),
    "what is known": (f"D=$(basename /a/b)_$(echo c)\n{RUN} d=$D", ["d=b_c"]),
    "a module that is not installed": (
        f"D=${{D:-$(python3 -c 'import no_such_module' 2>/dev/null && echo npu || echo gpu)}}\n{RUN} d=$D",
        ["d=gpu"],
    ),
}


@pytest.mark.parametrize("what", SCRIPTS)
def test_words_are_those_of_the_script(what: str) -> None:
    script, expected = SCRIPTS[what]
    assert words(script, HOME="/home/me") == expected


@pytest.mark.parametrize("what", SCRIPTS)
def test_bash_passes_the_same_words(what: str, tmp_path: Path) -> None:
    script, expected = SCRIPTS[what]
    python = tmp_path / "python3"
    python.write_text('#!/bin/bash\n[ "$1" = -m ] || exit 1\nshift 2\nprintf "%s\\0" "$@" > passed\n')
    python.chmod(0o755)
    environment = {"HOME": "/home/me", "PATH": f"{tmp_path}:/usr/bin:/bin"}
    (tmp_path / "run.sh").write_text(script)
    subprocess.run(["/bin/bash", "./run.sh"], env=environment, cwd=tmp_path, check=False, capture_output=True)
    (passed,) = tmp_path.rglob("passed")
    assert passed.read_text().removesuffix("\0").split("\0") == expected


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (f"export A=1 B=2\nC=3 {RUN} a=$A$B > log 2>&1 | tee -a log &", ["a=12"]),
        ("ray job submit -- python -m recipe.dapo.main_dapo a=1", ["a=1"]),
        (f"N=run_$(date +%Y%m%d)\n{RUN} n=$N", ["n=run_20260809"]),
    ],
)
def test_words_are_found_however_verl_is_started(script: str, expected: list[str]) -> None:
    assert words(script) == expected


def test_the_environment_gives_variables_and_is_named_where_it_was_read() -> None:
    launch = read_script(Path("run.sh"), f"B=2\n{RUN} m=${{M:-x}} b=$B", {"M": "/m", "B": "1", "C": "3"}, NOW)
    assert [word.text for word in launch.words] == ["m=/m", "b=2"]
    assert list(launch.from_environment) == ["M"]


def test_lines_are_those_of_the_script() -> None:
    launch = read_script(Path("run.sh"), f"#!/bin/sh\n{RUN} a=1 \\\n  b=2 $@", {}, NOW)
    assert [(word.text, word.line) for word in launch.words] == [("a=1", 2), ("b=2", 3)]


def test_what_only_a_command_could_say_is_not_known_and_says_why(tmp_path: Path) -> None:
    script = f"touch {tmp_path}/made\nN=$(touch {tmp_path}/made; echo 3)\n{RUN} a=1 n.x=$N"
    launch = read_script(Path("run.sh"), script, {}, NOW)
    unknown = launch.words[-1].text
    assert isinstance(unknown, Unknown)
    assert unknown.before == "n.x="
    assert "line 2" in unknown.why
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("script", "line", "fact"),
    [
        pytest.param(f"a=1\nif [ 1 = 1 ]; then\n{RUN} x=1", 0, "cannot be parsed", id="an if without its end"),
        pytest.param(
            f"N=$(nproc)\nif [ $N -gt 4 ]; then X=1; fi\n{RUN} x=$X",
            2,
            "$(nproc) in line 1",
            id="a branch on an output",
        ),
        pytest.param(f"if check; then X=1; fi\n{RUN} x=$X", 1, "check in line 1", id="a branch on a command"),
        pytest.param(
            f"case $(uname) in Linux) X=1;; esac\n{RUN} x=$X", 1, "$(uname) in line 1", id="a case on an output"
        ),
        pytest.param(f"{RUN} a=1\n{RUN} b=1", 2, "a second run", id="two runs"),
        pytest.param(f"A=z\nX=$((A*2))\n{RUN} x=$X", 2, "expected a whole number", id="no number"),
        pytest.param("f() { f; }\nf", 1, "calls itself", id="a function without an end"),
        pytest.param(f"while read l; do X=$l; done < f\n{RUN} x=$X", 1, "a loop", id="a loop over input"),
        pytest.param(f"X='a b'\n{RUN} x=$X", 2, "quote it", id="a value that falls apart"),
        pytest.param(f"{RUN} x=$'a'", 1, "$'a'", id="a quote that is not read"),
        pytest.param(f"X=abc\n{RUN} x=${{X:1:2}}", 2, "${X:1:2}", id="an expansion that is not read"),
    ],
)
def test_what_cannot_be_evaluated_is_said_with_its_line(script: str, line: int, fact: str) -> None:
    sentence = mistake(script)
    assert fact in sentence
    assert f"run.sh, line {line}: " in sentence or not line


@pytest.mark.parametrize(
    ("script", "fact"),
    [
        ("echo hello", "starts no verl.trainer.main_ppo; expected python -m verl.trainer.main_ppo"),
        (f"[ a = b ] || exit 1\n{RUN} a=1", "starts no verl.trainer.main_ppo before it ends in line 1"),
    ],
)
def test_a_script_without_a_run_is_refused(script: str, fact: str) -> None:
    assert fact in mistake(script)
