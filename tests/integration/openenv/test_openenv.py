"""Sessions with a server of OpenEnv itself, and a run whose server is killed and started again."""

from __future__ import annotations

import json
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from environments.adapters.openenv import Adapter
from environments.chat import Step
from tests.support.groups import PROJECT, wait_until
from tests.support.runs import Inputs, started

PYTHON = PROJECT / ".venv-openenv" / "bin" / "python"

pytestmark = [
    pytest.mark.extended,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON.exists(), reason="needs .venv-openenv: make test-openenv"),
]


class Server:
    """The server of server.py; may be killed and started again, at the same address."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            self._port = int(taken.getsockname()[1])
        self.url = f"http://127.0.0.1:{self._port}"
        self._log = folder / "server.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts the server and waits until it answers."""
        with self._log.open("ab") as log:
            command = [str(PYTHON), str(Path(__file__).with_name("server.py")), str(self._port)]
            self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        wait_until(self._answers, 240.0, "the server of OpenEnv")

    def kill(self) -> None:
        """Kills the server, as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _answers(self) -> bool:
        with suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5.0):
            return True
        return False


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A server that answers."""
    server = Server(tmp_path)
    server.start()
    yield server
    server.kill()


async def test_a_session_has_its_own_state_rewards_and_end(server: Server) -> None:
    games = [Adapter(server.url, observation_field="text"), Adapter(server.url, action_field=None)]
    games[0].check()
    assert await games[0].reset(seed=7, ground_truth="abc", data_source="letters") == " abc7"
    assert json.loads(await games[1].reset(seed=8)) == {"text": " 8", "turn": 0}
    assert await games[0].step("four") == Step("1", 0.25)
    assert await games[1].step('{"message": "four", "loudness": 2}') == Step('{"text": "1", "turn": 1}', 0.5)
    assert (await games[1].step('{"loudness": "very"}')).text == (
        "message: Field required; loudness: Input should be a valid integer, unable to parse string as an integer"
    )
    assert [(await games[0].step("")).done for _ in range(2)] == [False, True]
    with pytest.raises(RuntimeError, match="EXECUTION_ERROR: it is broken"):
        await games[1].step('{"message": "break"}')
    for game in games:
        await game.close()


def test_a_server_that_is_killed_costs_its_conversations_and_the_run_goes_on(server: Server, tmp_path: Path) -> None:
    config = Inputs.make(tmp_path / "inputs").config()
    config["data"]["max_response_length"] = 48
    config["run"]["total_steps"] = 6
    kwargs: dict[str, Any] = {"url": server.url, "observation_field": "text"}
    limits = {"max_turn_length": 6, "reply_steps": 4, "max_error_rate": 1.0}
    environments = {"default": {"name": "openenv", "kwargs": kwargs}}
    config["rollout"] = {**config["rollout"], "multi_turn": {"environments": environments, **limits}}
    with started(config, tmp_path / "run") as controller:
        controller.wait_until(lambda folder: folder.metrics[1:], "a step")
        server.kill()
        controller.wait_until(lambda folder: folder.metrics[-1]["environment/num_lost"], "lost conversations")
        server.start()
        folder = controller.complete()
    assert folder.metrics[1]["environment/num_lost"] == 0.0
    assert folder.metrics[1]["num_turns/mean"] == 3.0
    assert "no OpenEnv server" not in controller.output
    assert "the environment failed in " in controller.output
    server.kill()
    with started(config, tmp_path / "late") as late:
        assert late.wait() == 2
    [sentence] = late.errors
    assert f"environments.default.kwargs': openenv: no OpenEnv server answers at {server.url}" in sentence
