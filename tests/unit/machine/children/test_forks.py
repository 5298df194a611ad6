"""Processes that are forked from another one, and the titles that they get."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from splitppo.machine.children.ending import end
from splitppo.machine.children.forks import UNKNOWN, Forked, ForkServer
from splitppo.machine.children.tree import is_stopped
from tests.support.groups import PROJECT, is_alive, wait_until

SERVER = """
import os, signal, sys, time
sys.path.insert(0, {project!r})
from splitppo.machine.children.ending import end
from splitppo.machine.children.forks import serve_forks
from splitppo.machine.children.parent import end_with
from splitppo.machine.children.title import set_process_title

def run(request, *more):
    {body}

end_with(int(sys.argv[-1]))
{before}
serve_forks(int(sys.argv[-2]), run)
"""


class Forks:
    """A server whose processes run `body`, and what they print."""

    def __init__(self, body: str, folder: Path, before: str = "") -> None:
        script = folder / "server.py"
        script.write_text(SERVER.format(project=str(PROJECT), body=body, before=before))
        self.output_file = folder / "output"
        with tempfile.TemporaryFile() as nothing:
            self.server = ForkServer((sys.executable, "-S", str(script), "an argument"), dict(os.environ), nothing)

    def fork(self, request: object = None, stdin: int | None = None, more: Sequence[int] = ()) -> Forked:
        with self.output_file.open("ab") as output, Path(os.devnull).open() as nothing:
            return self.server.fork(request, nothing.fileno() if stdin is None else stdin, output.fileno(), more)

    @property
    def output(self) -> str:
        return self.output_file.read_text()


@contextmanager
def forks(body: str, folder: Path, before: str = "") -> Iterator[Forks]:
    made = Forks(body, folder, before)
    try:
        yield made
    finally:
        made.server.end()


def started(forked: Forked) -> Forked:
    wait_until(lambda: forked.pid or forked.poll() is not None, what="a forked process")
    return forked


@pytest.mark.parametrize(
    ("body", "exit_code"),
    [
        ("return 7", 7),
        ("os._exit(0)", 0),
        ("os.kill(os.getpid(), 9)", -9),
        ("sys.exit('said')", 1),
        ("raise ValueError('said')", 1),
    ],
)
def test_the_exit_code_of_a_forked_process_is_known(tmp_path: Path, body: str, exit_code: int) -> None:
    with forks(body, tmp_path) as made:
        assert made.fork().wait(30) == exit_code
        assert ("said" in made.output) is ("said" in body)


def test_each_process_gets_its_request_and_its_standard_streams(tmp_path: Path) -> None:
    with forks("print(request['number'], sys.stdin.readline(), flush=True); return 0", tmp_path) as made:
        reading, writing = os.pipe()
        processes = [made.fork({"number": number}, reading) for number in (1, 2)]
        os.close(reading)
        os.write(writing, b"a line\n")
        os.close(writing)
        assert [process.wait(30) for process in processes] == [0, 0]
        assert sorted(made.output.split()) == ["1", "2", "a", "line"]


def test_a_process_has_nothing_open_of_the_server_or_of_its_siblings(tmp_path: Path) -> None:
    body = "print(sorted(map(int, os.listdir('/proc/self/fd')))[:-1], flush=True); time.sleep(60)"
    with forks(body, tmp_path) as made:
        processes = [started(made.fork()) for _ in range(3)]
        wait_until(lambda: made.output.count("\n") == 3, what="three lines")
        assert set(made.output.splitlines()) == {"[0, 1, 2]"}
        for process in processes:
            process.kill()


def test_a_process_gets_further_descriptors_after_its_request(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    with forks("os.write(more[0], request.encode()); return 0", tmp_path) as made:
        process = made.fork("said", more=(writing,))
        os.close(writing)
        assert process.wait(30) == 0
        assert os.read(reading, 100) == b"said"
    os.close(reading)


def test_the_pid_of_a_process_stays_its_own_until_its_exit_code_is_taken(tmp_path: Path) -> None:
    with forks("return 3", tmp_path) as made:
        process = made.fork()
        assert process.has_begun_within(30)
        status = Path(f"/proc/{process.pid}/status")
        wait_until(lambda: "State:\tZ" in status.read_text(), what="a zombie")
        assert end(process, 30) == 3
        wait_until(lambda: not status.exists(), what="the end of the zombie")


def test_a_server_that_has_ended_forks_nothing_more(tmp_path: Path) -> None:
    with forks("return 0", tmp_path) as made:
        os.kill(made.server.pid, signal.SIGKILL)
        assert not made.fork().has_begun_within(30)


def test_a_process_that_is_asked_for_before_the_server_is_ready_comes_later(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    before = f"while not os.path.exists({str(ready)!r}): time.sleep(0.01)"
    with forks("return 3", tmp_path, before) as made:
        asked = made.fork()
        assert asked.poll() is None
        assert not asked.pid
        ready.touch()
        assert asked.wait(30) == 3


def test_processes_outlive_their_server_and_what_comes_to_their_end_is_not_known(tmp_path: Path) -> None:
    with forks("time.sleep(60)", tmp_path) as made:
        process = started(made.fork())
        made.server.end()
        assert process.poll() is None
        assert is_alive(process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == UNKNOWN


def test_the_end_of_a_process_is_seen_though_its_server_is_stopped(tmp_path: Path) -> None:
    with forks("time.sleep(60)", tmp_path) as made:
        process = started(made.fork())
        os.kill(made.server.pid, signal.SIGSTOP)
        process.kill()
        assert process.wait(30) == UNKNOWN


def test_a_process_that_a_killed_server_has_not_forked_never_comes(tmp_path: Path) -> None:
    with forks("return 0", tmp_path, "os.kill(os.getpid(), 9)") as made:
        asked = made.fork()
        assert asked.wait(30) == UNKNOWN
        assert (asked.pid, made.server.join(30)) == (0, -9)
        assert made.fork().wait(30) == UNKNOWN


STOPPED_AT_FIRST = "os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGSTOP))"


@pytest.mark.parametrize("has_server", [True, False])
def test_a_process_that_was_stopped_at_once_ends_when_its_standard_input_does(tmp_path: Path, has_server: bool) -> None:
    with forks("sys.stdin.read(); return 0", tmp_path, STOPPED_AT_FIRST) as made:
        reading, writing = os.pipe()
        process = started(made.fork(None, reading))
        os.close(reading)
        wait_until(lambda: is_stopped(process.pid), what="a stopped process")
        if not has_server:
            made.server.end()
        os.close(writing)
        assert process.wait(30) == (0 if has_server else UNKNOWN)


def test_a_server_that_was_stopped_at_once_ends_with_its_owner(tmp_path: Path) -> None:
    script = tmp_path / "server.py"
    before = "os.kill(os.getpid(), signal.SIGSTOP)"
    script.write_text(f"import os, signal\n{before}\n" + SERVER.format(project=str(PROJECT), body="pass", before=""))
    start = f"""
import os, sys
from splitppo.machine.children.ending import end
from splitppo.machine.children.forks import ForkServer
server = ForkServer((sys.executable, {str(script)!r}), dict(os.environ), sys.stderr)
print(server.pid, flush=True)
sys.stdin.read()
"""
    owner = subprocess.Popen(
        [sys.executable, "-c", start], cwd=PROJECT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    server = int(owner.stdout.readline())
    wait_until(lambda: is_stopped(server), what="a stopped server")
    owner.kill()
    owner.communicate()
    wait_until(lambda: not is_alive(server), what="the end of the server")


def test_a_killed_server_is_missed_though_a_process_that_it_started_holds_its_socket(tmp_path: Path) -> None:
    holder = tmp_path / "holder"
    before = f"""
if not (child := os.fork()):
    time.sleep(300)
open({str(holder)!r}, "w").write(str(child))
os.kill(os.getpid(), 9)
"""
    with forks("return 0", tmp_path, before) as made:
        asked = made.fork()
        try:
            wait_until(lambda: asked.poll() is not None, what="the end of the wait")
            assert (asked.pid, asked.returncode) == (0, UNKNOWN)
            assert made.fork().wait(30) == UNKNOWN
        finally:
            os.kill(int(holder.read_text()), signal.SIGKILL)


def test_exit_codes_are_known_though_the_launcher_ignores_the_ends_of_children(tmp_path: Path) -> None:
    with forks("return 7", tmp_path, "signal.signal(signal.SIGCHLD, signal.SIG_IGN)") as made:
        assert [made.fork().wait(30) for _ in range(2)] == [7, 7]


def test_a_machine_that_gives_no_process_is_a_refusal(tmp_path: Path) -> None:
    before = "def refuse(): raise OSError('no further process')\nos.fork = refuse"
    with forks("return 0", tmp_path, before) as made:
        asked = made.fork()
        assert asked.wait(30) == UNKNOWN
        assert asked.refusal == "no further process"


@pytest.mark.timeout(60)
def test_a_server_that_takes_no_requests_keeps_nobody_waiting(tmp_path: Path) -> None:
    with forks("return 0", tmp_path, "os.kill(os.getpid(), signal.SIGSTOP)") as made:
        wait_until(lambda: is_stopped(made.server.pid), what="a stopped server")
        asked = [made.fork("x" * 60_000) for _ in range(20)]
        assert (asked[0].poll(), asked[-1].poll()) == (None, UNKNOWN)


def test_waiting_has_a_limit(tmp_path: Path) -> None:
    with forks("time.sleep(60)", tmp_path) as made:
        process = made.fork()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.05)
        started(process).kill()
        assert process.wait(30) == -9


def test_a_server_ends_with_its_owner(tmp_path: Path) -> None:
    made = Forks("return 0", tmp_path)
    assert made.fork().wait(30) == 0
    made.server._control.close()
    assert made.server.join(30) == 0


@pytest.mark.parametrize("title", ["a title", "one that is longer than the command line: " + "x" * 5000])
def test_a_process_is_shown_by_its_title(tmp_path: Path, title: str) -> None:
    body = "set_process_title(request); print('named', flush=True); time.sleep(60)"
    with forks(body, tmp_path) as made:
        process = started(made.fork(title))
        wait_until(lambda: made.output, what="the title")
        shown = Path(f"/proc/{process.pid}/cmdline").read_bytes().rstrip(b"\0").decode()
        assert title.startswith(shown)
        assert len(shown) >= min(len(title), 20)
        process.kill()
