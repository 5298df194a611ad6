"""Launch scripts that want more than docs/from-verl.md allows: none reads, writes or reaches anything beyond that."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from controller.__main__ import main
from controller.commands.from_verl.shell.script import read_script
from rewards.code.bubblewrap import is_root, own_uid
from splitppo.config import ConfigError
from tests.support.verl_launch import BASE

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")]
NOW = datetime(2026, 8, 9, 10, 11, tzinfo=UTC)
RUN = 'python3 -m verl.trainer.main_ppo "got=$R"'
SECRET = "a-word-that-no-script-may-know"
SWAPPINESS = Path("/proc/sys/vm/swappiness")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a script, `mine`, beside a home folder with secrets; and a process that listens."""
    mine, home = tmp_path / "mine", tmp_path / "home"
    (mine / ".hidden").mkdir(parents=True)
    (home / ".ssh").mkdir(parents=True)
    for secret in (
        "mine/notes.txt",
        "mine/prod.env",
        "mine/.env.sh",
        "mine/.hidden/x.sh",
        "home/.ssh/key",
        "home/x.sh",
    ):
        (tmp_path / secret).write_text(f"R={SECRET}\n")
    (mine / "link.sh").symlink_to(home / "x.sh")
    os.mkfifo(mine / "fifo")
    (mine / "null").symlink_to("/dev/null")
    (mine / "many").mkdir()
    for number in range(300):
        (mine / "many" / str(number)).touch()
    monkeypatch.chdir(mine)
    with socket.socket(socket.AF_UNIX) as listening, socket.create_server(("127.0.0.1", 0)) as port:
        listening.bind("socket")
        listening.listen()
        monkeypatch.setenv("PORT", str(port.getsockname()[1]))
        yield mine


def outcome(script: str, limit_s: float = 60) -> str:
    """What the script passes to verl, or the sentence by which it is refused."""
    text = f"R=; {script}\n{RUN}\n"
    Path("run.sh").write_text(text)
    environment = {"HOME": str(Path.cwd().parent / "home"), "PORT": os.environ["PORT"], "UNNAMED": SECRET}
    environment |= {"HF_TOKEN": SECRET, "WANDB_API_KEY": SECRET, "PROXY": f"http://me:{SECRET}@host"}
    try:
        launch = read_script(Path("run.sh"), text, environment, NOW, limit_s=limit_s)
    except ConfigError as error:
        return str(error)
    return " ".join(f"{word.text}<{word.unknown}>" if word.unknown else word.text for word in launch.words)


def snapshot(folder: Path) -> dict[str, bytes | None]:
    """All files below a folder, except for the script, with their contents."""
    files = (file for file in folder.rglob("*") if file.name != "run.sh")
    return {str(file): file.read_bytes() if file.is_file() else None for file in files}


WITH_PROC = ": < <(:)\n"  # such a script has a /proc
# By what it tries: a script, and what comes of it: all that it passes (got=...), or a part of the sentence that refuses
# it, or "": that depends on what it is stopped by first.
SCRIPTS: dict[str, tuple[str, str]] = {
    "write the kernel's settings": (
        f"{WITH_PROC}read v <{SWAPPINESS} && echo $v >{SWAPPINESS} && R=written",
        "got=",
    ),
    "read what /proc says about the machine": (
        f'{WITH_PROC}for f in version cpuinfo cmdline meminfo sys/kernel/ostype; do read v </proc/$f && R+=$v; done',
        "got=",
    ),
    "read the environment of other processes": (
        f'{WITH_PROC}R=$(cat /proc/[0-9]*/environ | tr "\\0" " " | grep -c PYTEST_CURRENT)',
        "got=0",
    ),
    "a /proc without need": ("[ -e /proc/self ] && R=there; [ -d /sys/kernel ] && R+=sys; R+=$(ls /proc /sys)", "got="),
    "a socket": ("[ -e socket ] && R=there; [ -S socket ] && R+=socket; : <socket && R+=open", "got="),
    "a FIFO": ("[ -p fifo ] && R=there; [ -e fifo ] && read -t 1 R <fifo", "got="),
    "a device": ("for d in /dev/* null /dev/mem /dev/zero; do [ -e $d ] && R+=$d; done", "got=/dev/null/dev/urandom"),
    "the network": ("(: >/dev/tcp/127.0.0.1/$PORT) && R=tcp; (: >/dev/udp/127.0.0.1/$PORT) && R=udp", "got="),
    "a text beside it": ("R=$(cat notes.txt)", "got=<notes.txt is not read>"),
    "a text beside it, by lines": ("while read -r line; do R+=$line; done <notes.txt", "got=# <notes.txt is not read>"),
    "a text by a redirection": ("R=$(<notes.txt)", "got=# <notes.txt is not read>"),
    "a text through a tool": ("R=$(head -c 10 notes.txt)", "got=<notes.txt is not read>"),
    "a file of variables": ("source prod.env; . ./prod.env", "got="),
    "a hidden file": ("source .env.sh; source .hidden/x.sh; [ -s .env.sh ] && bash .env.sh", "got="),
    "a link out of its folder": ("source link.sh; source ./link.sh", "got="),
    "a file above its folder": ("source ../home/x.sh; source ~/x.sh; source $HOME/x.sh", "got="),
    "a key": ("R=$(cat ~/.ssh/key)", "got=<key is not read>"),
    "files of the system": ("R=$(cat /etc/passwd /etc/hosts)$(grep root /etc/passwd)", "got=<passwd is not read>"),
    "a token": ("R=$HF_TOKEN", "got=<HF_TOKEN looks like a secret, whose value no script gets>"),
    "a part of a key": (
        "R=$(echo ${WANDB_API_KEY} | cut -c 1-4)",
        "got=<WANDB_API_KEY looks like a secret, whose value no script gets>"),
    "a password in an address": ("R=$PROXY", "got=<PROXY looks like a secret, whose value no script gets>"),
    "a token, letter by letter": (
        "for c in {a..z}; do [[ $HF_TOKEN == $c* ]] && R+=$c; done; [[ -n $HF_TOKEN ]] && R+=.",
        "got=.",
    ),
    "all variables": ("R=$(env | grep -c UNN''AMED)$(declare -p | grep -c UNN''AMED)", "got=00"),
    "a variable by a made name": ("N=UNN; N+=AMED; R=${!N}", "got="),
    "write and delete files": (
        "rm -rf ~ .. /tmp/* *.txt fifo; cd /; echo x >~/x.sh; echo x >/etc/hosts; mkdir /root; R=$(cat /etc/hosts)",
        "got=x",
    ),
    "write shared libraries": ("(: >/usr/lib/x) && R=made; (: >/lib64/x) && R+=made; rm -rf /usr/lib/p*", "got="),
    "to be somebody": ("R=$UID.$EUID", "got=65534.65534"),
    "another program": (
        "R=$(/lib64/ld-linux-x86-64.so.2 /usr/lib/git-core/git)",
        "got=<ld-linux-x86-64.so.2 in line 1 would have to be run>",
    ),
    "kill all": ("kill -9 -1; kill -9 0 1 $PPID", ""),
    "a fork bomb": ("b() { b | b & }; b", ""),
    "much memory": ("set +x; R=x; while R=$R$R$R$R; do :; done 2>/dev/null", ""),
    "a large file": ("set +x; printf -v X %9999999s; printf %s \"$X\" >/tmp/x", ""),
    "many large files": ("set +x; printf -v X %999999s; for n in {1..80}; do printf %s \"$X\" >/tmp/$n; done", ""),
    "many files": ("set +x; while : >/tmp/$((n++)); do :; done", "exceeds the limit of files"),
    "much output": ("while :; do echo line $((n++)) >&2; done", "runs or prints more than a launch script may"),
    "notes of its own": (
        "for n in {199..210}; do printf 'launch\\0x\\0y\\0' >&$n; printf 'a\\x1fb\\x1fc\\x1fd\\x1e' >&$n; done; R=1",
        "",
    ),
    "our descriptors by their names": (
        f"{WITH_PROC}for n in /proc/*/fd/2* /dev/fd/2*; do echo -n x >$n; : >$n; done; R=1",
        "got=1",
    ),
    "numbers that are none": (
        f"printf 'x: line {'9' * 5000}: no\\nx: line 1: 99999999999: unbound variable\\n' >&2\n"
        "echo 'x: line 1: LD_PRELOAD: unbound variable' >&2; R=1",
        "got=1",
    ),
    "names without end": (
        "for n in {1..600}; do echo \"x: line 1: X$n: unbound variable\" >&2; done",
        "reads more than 500 variables",
    ),
    "files without end": ("for f in {1..300}; do [ -e many/$f ] && R=1; done", "more than 200 files"),
}  # fmt: skip


@pytest.mark.parametrize("attempt", SCRIPTS)
def test_a_script_gets_nothing_beyond_what_the_page_says(machine: Path, attempt: str) -> None:
    script, expected = SCRIPTS[attempt]
    before, swappiness = snapshot(machine.parent), SWAPPINESS.read_text()
    result = outcome(script)
    assert result == expected if expected.startswith("got=") else expected in result
    assert SECRET not in result
    assert snapshot(machine.parent) == before
    assert SWAPPINESS.read_text() == swappiness


def test_nothing_of_a_script_runs_any_more_when_it_is_refused(machine: Path) -> None:
    sentence = outcome("(while :; do :; done) & (sed q /dev/null; wc /dev/urandom) & wc -c /dev/urandom", limit_s=1.5)
    assert "exceeds the limit of time that a launch script has; give verl's own configuration instead" in sentence
    lines = subprocess.run(["ps", "-ewwo", "uid,args"], capture_output=True, text=True, check=True).stdout.splitlines()
    uid = str(own_uid(0))
    assert [line for line in lines if (line.split()[0] == uid and is_root()) or str(machine) in line] == []


def test_tests_of_unknown_words_take_one_run_for_each_set_of_them(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []
    start = subprocess.Popen.__init__
    monkeypatch.setattr(subprocess.Popen, "__init__", lambda *a, **b: (runs.append(1), start(*a, **b))[1])
    tests = "\n".join(f"[ $(probe{n}) = {n} ] && echo {n}" for n in range(4))
    assert outcome(f"{tests}\nR=1") == "got=1"
    assert len(runs) <= 2**4 + 12


def test_a_sentence_with_text_of_a_script_cannot_move_the_cursor(
    machine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("run.sh").write_text("echo $'x: line 1: \\e]0;mine\\a' >&2")
    assert main(["from-verl", "run.sh"]) == 2
    printed = capsys.readouterr().err
    assert "\\x1b]0;mine" in printed
    assert "\x1b" not in printed


def test_files_that_it_would_run_and_that_are_not_read_are_in_the_report(
    machine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("run.sh").write_text(f"source prod.env; source link.sh\npython -m verl.trainer.main_ppo {' '.join(BASE)}")
    assert main(["from-verl", "run.sh", "--verl-version=0.9"]) == 0
    assert (
        f"were not read (if they set what its keys depend on, set that yourself): {machine}/prod.env, {machine}/link.sh"
        in (capsys.readouterr().err)
    )
    Path("run.sh").write_text("bash ../home/x.sh")
    assert main(["from-verl", "run.sh"]) == 2
    assert f"(not read: {machine.parent}/home/x.sh; only shell files in its folder are)" in capsys.readouterr().err
