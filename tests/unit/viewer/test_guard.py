"""Who may ask the viewer, and for what."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.support.groups import PROJECT
from tests.support.viewed_runs import Shape, make_run
from tests.support.viewer_client import ask
from viewer.__main__ import listen, main


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "run", Shape(steps=2))


@pytest.mark.parametrize("token", [None, "", "another", "the-tokeN"])
async def test_without_the_token_the_data_stay_closed(run: Path, token: str | None) -> None:
    assert (await ask([run], "/api/runs", token=token)).status == 401


async def test_the_page_itself_needs_no_token_and_holds_no_data(run: Path) -> None:
    answer = await ask([run], "/", token=None)
    assert answer.status == 200
    assert str(run).encode() not in answer.content


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8265", "localhost.evil.example", "127.0.0.1.nip.io", ""]
)
async def test_a_foreign_name_is_refused(run: Path, host: str) -> None:
    assert (await ask([run], "/api/runs", host=host)).status == 421


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:9", "[::1]:8265", "LOCALHOST:1", "gpu-one:8265"])
async def test_names_of_this_machine_and_those_that_were_allowed_are_answered(run: Path, host: str) -> None:
    assert (await ask([run], "/api/runs", host=host, allowed_hosts=["gpu-one"])).status == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "http://localhost:9999"},
    ],
)
async def test_another_site_is_refused(run: Path, headers: dict[str, str]) -> None:
    assert (await ask([run], "/api/runs", headers=headers)).status == 403


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
async def test_nothing_but_reading_is_possible(run: Path, method: str) -> None:
    assert (await ask([run], "/api/runs", method=method)).status == 405


@pytest.mark.parametrize(
    "path",
    [
        "/api/runs/0/../../etc/passwd",
        "/static/..%2f..%2fetc%2fpasswd",
        "/static/../app.py",
        "/api/runs/0/train/..%2f1",
        "/api/runs/0/services/1",
        "/api/runs/0/checkpoints/1",
        "/static/vendor/VENDORED",
        "/static//app.css",
        "/config.yaml",
        "/api/runs/1",
        "/api/runs/-1",
        "/api/runs/0/train/1/x",
        "/" + "a" * 60 + "!",  # an expression with a choice at each letter would never end
        "/api/runs/" + "9" * 5_000,
    ],
)
async def test_addresses_hold_numbers_and_known_names_alone(run: Path, path: str) -> None:
    assert (await ask([run], path)).status == 404


async def test_a_run_that_there_is_not_is_named(run: Path) -> None:
    for path in ("/api/runs/7", "/api/runs/7/train/1", "/api/runs/7/live"):
        answer = await ask([run], path)
        assert (answer.status, answer.json["error"]) == (
            404,
            "There is no run 7: the viewer shows 1, and counts from 0.",
        )


async def test_every_answer_forbids_what_a_page_does_not_need(run: Path) -> None:
    for path, token in (("/", None), ("/api/runs", "the-token"), ("/api/runs", None), ("/nothing", None)):
        answer = await ask([run], path, token=token)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "require-trusted-types-for 'script'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-store"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.com"])
def test_an_address_that_others_can_reach_is_refused(host: str) -> None:
    with pytest.raises(OSError, match="loopback"):
        listen(host, 0)


def test_a_port_in_use_and_a_folder_that_is_no_run_are_one_sentence_each(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with listen("127.0.0.1", 0) as taken:
        assert main([str(run), "--port", str(taken.getsockname()[1])]) == 2
    assert "--port 0 takes a free one" in capsys.readouterr().err
    for path in (tmp_path, tmp_path / "nothing"):
        assert main([str(path)]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert str(path) in error
        assert error.count("\n") == 1


def test_the_program_prints_its_address_and_ends_by_ctrl_c_without_a_word(run: Path) -> None:
    command = [sys.executable, "-m", "viewer", str(run), "--port", "0"]
    process = subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    found = re.fullmatch(r"1 run: http://127\.0\.0\.1:(\d+)/#token=([\w-]{32})\n", process.stdout.readline())
    assert found is not None
    asked = urllib.request.Request(f"http://127.0.0.1:{found[1]}/api/runs/0/live")
    asked.add_header("Authorization", f"Bearer {found[2]}")
    with urllib.request.urlopen(asked, timeout=30) as news:
        assert news.readline() == b"event: reset\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (0, "")
