"""Groups on this machine: start, discovery, end, and the report on a group that dies; a script replaces torchrun."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from controller.workers.launcher import LocalLauncher
from controller.workers.local_group import GroupFailed, LocalGroup
from splitppo.config import ConfigError
from splitppo.config.resolve import resolve_run
from splitppo.machine.cores import PermittedCores
from splitppo.rpc.bearer_tokens import BearerTokens
from splitppo.run_folder.processes import Rank
from tests.support.fake_services import make_config
from tests.support.groups import PROJECT, is_alive, wait_until

# Forks what stands for torchrun, as the template of the groups does.
TEMPLATE = """
import os, runpy, sys
sys.path.insert(0, {project!r})
from splitppo.machine.children.forks import serve_forks
from splitppo.machine.children.parent import end_with

def run(request):
    os.environ.update(request["environment"])
    sys.argv[:] = [{script!r}, *request["arguments"]]
    runpy.run_path({script!r}, {{"report_file": request["report_file"]}}, run_name="__main__")
    return 0

end_with(int(sys.argv[-1]))
{behaviour}
serve_forks(int(sys.argv[-2]), run)
"""
# Takes torchrun's arguments; what `behaviour` does is up to the test.
TORCHRUN = """
import json, os, pathlib, signal, sys, time
role = next(argument for argument in sys.argv if argument.startswith("services.")).partition(".")[2]
run_dir = pathlib.Path(sys.argv[sys.argv.index("--config") + 1]).parent

def serve(pid=os.getpid()):
    ranks = [{"rank": 0, "pid": pid}]
    content = {"role": role, "address": "here:" + role, "instance_id": str(os.getpid()), "processes": ranks}
    (run_dir / "services" / (role + ".part")).write_text(json.dumps(content))
    os.replace(run_dir / "services" / (role + ".part"), run_dir / "services" / (role + ".json"))
    sys.stdin.read()

def say_first_end(**end):
    pathlib.Path(report_file).write_text(json.dumps(end))

"""
SERVE_UNTIL_SIGTERM = """
def drain(*_):
    (run_dir / (role + ".drained")).touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, drain)
serve()
"""

Launch = Callable[..., LocalLauncher]


@pytest.fixture
async def launch(tmp_path: Path) -> AsyncIterator[Launch]:
    """Makes a launcher whose torchrun does what `behaviour` says; its groups are ended with the test."""
    launchers: list[LocalLauncher] = []
    (tmp_path / "services").mkdir()
    (tmp_path / "logs").mkdir()

    def make(
        behaviour: str, *, tokens: BearerTokens | None = None, template: str = "", **changes: Any
    ) -> LocalLauncher:
        script, forking = tmp_path / "torchrun.py", tmp_path / "template.py"
        script.write_text(TORCHRUN + behaviour)
        forking.write_text(TEMPLATE.format(project=str(PROJECT), script=str(script), behaviour=template))
        config = make_config(tmp_path, **{"services__start_timeout_s": 30, **changes})
        config = resolve_run(config, None, PermittedCores(frozenset(range(6))))
        command = (sys.executable, "-S", str(forking))
        launchers.append(LocalLauncher(config, tmp_path / "config.yaml", command, tokens=tokens))
        return launchers[-1]

    yield make
    for launcher in launchers:
        launcher.kill()
        await launcher.stop()


async def failure(start: Awaitable[Any]) -> GroupFailed:
    with pytest.raises(GroupFailed) as failed:
        await start
    return failed.value


async def forked(group: LocalGroup) -> None:
    """Waits until the template has forked the group's torchrun."""
    assert group._start is not None
    assert await group._start.torchrun.started()


# Start and end.


async def test_groups_are_found_where_their_rank_0_announced_them(launch: Launch) -> None:
    endpoints = await launch(SERVE_UNTIL_SIGTERM).start()
    assert {role: endpoint.address for role, endpoint in endpoints.items()} == {
        "actor": "here:actor",
        "critic": "here:critic",
    }
    assert endpoints["actor"].processes == [Rank(0, int(endpoints["actor"].instance_id))]


async def test_an_estimator_without_critic_starts_no_critic(launch: Launch) -> None:
    launcher = launch(SERVE_UNTIL_SIGTERM, algorithm__adv_estimator="grpo")
    assert set(await launcher.start()) == {"actor"}


async def test_a_group_that_compiles_layers_says_so_at_its_start(
    launch: Launch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    await launch(SERVE_UNTIL_SIGTERM, critic__compile=True).start()
    said = [record.getMessage() for record in caplog.records if "compiles" in record.getMessage()]
    assert said == ["the critic group compiles layers (critic.compile): a minute or more, less from a cache"]


async def test_each_group_gets_its_own_ranks_gpus_and_threads(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,GPU-6,7")
    write_down = """
names = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
(run_dir / (role + ".seen")).write_text(json.dumps([sys.argv[1:], {name: os.environ[name] for name in names}]))
"""
    services = {
        "actor": {"num_processes": 2, "devices": [0, 3], "threads": 4},
        "critic": {"num_processes": 1},  # a third of six cores
    }
    await launch(write_down + SERVE_UNTIL_SIGTERM, services=services).start()
    arguments, environment = json.loads((tmp_path / "actor.seen").read_text())
    assert arguments[arguments.index("--nproc-per-node") + 1] == "2"
    assert "--lifeline" in arguments
    assert environment == {"OMP_NUM_THREADS": "4", "CUDA_VISIBLE_DEVICES": "4,7"}
    environment = json.loads((tmp_path / "critic.seen").read_text())[1]
    assert environment == {"OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": ""}


async def test_a_gpu_that_the_controller_may_not_use_starts_no_group(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with pytest.raises(ConfigError, match=r"services.critic.devices is \[2\], but CUDA_VISIBLE_DEVICES=4,5 offers 2"):
        await launch(SERVE_UNTIL_SIGTERM, services={"actor": {"devices": [1]}, "critic": {"devices": [2]}}).start()


NOTE_READY_GROUPS = """
ready = sorted(file.stem for file in (run_dir / "services").glob("*.json"))
(run_dir / (role + ".ready")).write_text(json.dumps(ready))
"""
CRITIC_WAITS_FOR_ACTOR = """
while role == "critic" and not (run_dir / "actor.ready").exists():
    time.sleep(0.01)
"""


def ready_before(folder: Path, role: str) -> set[str]:
    return {*json.loads((folder / f"{role}.ready").read_text())}


async def test_an_engine_on_the_critics_gpu_is_built_when_the_critic_is_ready(launch: Launch, tmp_path: Path) -> None:
    shared = {"devices": [0]}
    services = {"actor": shared, "critic": shared, "allow_shared_devices": True}
    launcher = launch(NOTE_READY_GROUPS + SERVE_UNTIL_SIGTERM, services=services, rollout__backend="vllm")
    assert list(await launcher.start()) == ["actor", "critic"]
    assert ready_before(tmp_path, "actor") == {"critic"}


async def test_a_rollout_group_on_the_critics_gpu_is_built_when_the_critic_is_ready(
    launch: Launch, tmp_path: Path
) -> None:
    services = {"actor": {"devices": [0]}, "critic": {"devices": [1]}, "rollout": {"devices": [1]}}
    behaviour = NOTE_READY_GROUPS + CRITIC_WAITS_FOR_ACTOR + SERVE_UNTIL_SIGTERM
    await launch(behaviour, services=services, rollout__backend="vllm", rollout__share=0.5).start()
    assert ready_before(tmp_path, "rollout") == {"actor", "critic"}


@pytest.mark.parametrize(
    ("backend", "devices"),
    [("vllm", (0, 1)), ("hf", (0, 0)), ("vllm", ())],
    ids=["a GPU of its own", "no engine", "no GPU"],
)
async def test_other_groups_start_at_the_same_time(
    launch: Launch, tmp_path: Path, backend: str, devices: tuple[int, ...]
) -> None:
    actor, critic = ({"devices": devices[role : role + 1]} for role in range(2))
    services = {"actor": actor, "critic": critic, "allow_shared_devices": True}
    behaviour = NOTE_READY_GROUPS + CRITIC_WAITS_FOR_ACTOR + SERVE_UNTIL_SIGTERM
    await launch(behaviour, services=services, rollout__backend=backend).start()
    assert "critic" not in ready_before(tmp_path, "actor")


async def test_ranks_leave_bytecode_behind_also_where_the_controller_must_not(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    write_down = '(run_dir / (role + ".seen")).write_text(str(sys.dont_write_bytecode))'
    await launch(write_down + SERVE_UNTIL_SIGTERM).start()
    assert (tmp_path / "actor.seen").read_text() == "False"


NOTE_TOKEN = """
(run_dir / (role + ".token")).write_text(os.environ.get("SPLITPPO_RUN_TOKEN", ""))
"""


async def test_groups_get_a_token_of_the_run_which_its_owner_finds_while_they_run(
    launch: Launch, tmp_path: Path
) -> None:
    launcher = launch(NOTE_TOKEN + SERVE_UNTIL_SIGTERM)
    await launcher.start()
    [token] = launcher.tokens.accepted
    file = tmp_path / "services" / "token"
    assert [(tmp_path / f"{role}.token").read_text() for role in ("actor", "critic")] == [token, token]
    assert (file.read_text(), file.stat().st_mode & 0o777) == (token, 0o600)
    await launcher.stop()
    assert not file.exists()
    assert launch(SERVE_UNTIL_SIGTERM).tokens != launcher.tokens


async def test_a_token_that_cannot_be_removed_keeps_no_run_from_ending(launch: Launch, tmp_path: Path) -> None:
    launcher = launch(SERVE_UNTIL_SIGTERM)
    await launcher.start()
    (tmp_path / "services" / "token").unlink()
    (tmp_path / "services" / "token").mkdir()
    await launcher.stop()
    assert all(group.has_ended for group in launcher.groups.values())


async def test_a_token_that_the_configuration_names_is_used_instead(launch: Launch, tmp_path: Path) -> None:
    tokens = BearerTokens(("one-that-is-configured",))
    launcher = launch(NOTE_TOKEN + SERVE_UNTIL_SIGTERM, tokens=tokens, services__security={"token_file": "there"})
    await launcher.start()
    assert launcher.tokens == tokens
    assert (tmp_path / "actor.token").read_text() == ""
    assert not (tmp_path / "services" / "token").exists()


async def test_an_announcement_of_an_earlier_start_is_not_believed(launch: Launch, tmp_path: Path) -> None:
    for role in ("actor", "critic"):
        (tmp_path / "services" / f"{role}.json").write_text(
            json.dumps({"role": role, "address": "stale:1", "instance_id": "x", "processes": []})
        )
    endpoints = await launch(SERVE_UNTIL_SIGTERM).start()
    assert endpoints["critic"].address == "here:critic"


async def test_stopping_lets_every_group_drain(launch: Launch, tmp_path: Path) -> None:
    launcher = launch(SERVE_UNTIL_SIGTERM)
    endpoints = await launcher.start()
    await launcher.stop()
    assert (tmp_path / "actor.drained").exists()
    assert (tmp_path / "critic.drained").exists()
    assert not any(is_alive(int(endpoint.instance_id)) for endpoint in endpoints.values())


async def test_killing_ends_groups_that_would_not_drain(launch: Launch, tmp_path: Path) -> None:
    launcher = launch("signal.signal(signal.SIGTERM, signal.SIG_IGN)\nserve()\ntime.sleep(60)")
    endpoints = await launcher.start()
    launcher.kill()
    for endpoint in endpoints.values():
        wait_until(lambda pid=int(endpoint.instance_id): not is_alive(pid))


async def test_stopping_what_was_never_started_does_nothing(launch: Launch) -> None:
    launcher = launch(SERVE_UNTIL_SIGTERM)
    launcher.kill()
    await launcher.stop()


async def test_only_the_group_that_was_lost_is_started_again(launch: Launch, tmp_path: Path) -> None:
    launcher = launch(SERVE_UNTIL_SIGTERM)
    first = await launcher.start()
    (tmp_path / "logs" / "critic_0.log").write_text("of the first start")
    await launcher.discard(["critic"])
    second = await launcher.start()
    assert second["actor"] == first["actor"]
    assert second["critic"].instance_id != first["critic"].instance_id
    assert (tmp_path / "logs" / "critic_0.log.old").read_text() == "of the first start"


async def test_a_lost_group_is_ended_at_once_even_if_it_is_stopped_and_would_drain(
    launch: Launch, tmp_path: Path
) -> None:
    launcher = launch(SERVE_UNTIL_SIGTERM)
    first = await launcher.start()
    pid = int(first["actor"].instance_id)
    os.kill(pid, signal.SIGSTOP)
    await launcher.discard(["actor"])
    assert not is_alive(pid)
    assert not (tmp_path / "actor.drained").exists()
    assert (await launcher.start())["actor"].instance_id != first["actor"].instance_id


# Its rank is a process of its own that hears no end of the group.
SERVE_BY_A_RANK = """
import subprocess
sleep = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
serve(subprocess.Popen(sleep, start_new_session=True).pid)
"""


async def test_a_group_whose_rank_has_ended_is_gone(launch: Launch) -> None:
    launcher = launch(SERVE_BY_A_RANK)
    endpoints = await launcher.start()
    assert not any(group.is_gone for group in launcher.groups.values())
    os.kill(endpoints["critic"].processes[0].pid, signal.SIGKILL)
    wait_until(lambda: launcher.groups["critic"].is_gone, what="the end of the critic")
    assert not launcher.groups["actor"].is_gone
    assert await launcher.groups["critic"].lost_rank() == 0


@pytest.mark.parametrize("end", ["stop", "kill"])
async def test_a_stopped_rank_ends_with_its_group_also_if_torchrun_has_ended_before(launch: Launch, end: str) -> None:
    launcher = launch(SERVE_BY_A_RANK, algorithm__adv_estimator="grpo")
    endpoint = (await launcher.start())["actor"]
    rank = endpoint.processes[0].pid
    os.kill(rank, signal.SIGSTOP)
    os.kill(int(endpoint.instance_id), signal.SIGKILL)
    while not launcher.groups["actor"].has_ended:  # noqa: ASYNC110 - nobody tells of it
        await asyncio.sleep(0.01)
    if end == "stop":
        await launcher.stop()
    else:
        launcher.kill()
    wait_until(lambda: not is_alive(rank), what="the end of the rank")


class FormerProcess(psutil.Process):
    """A process that has ended, and whose pid another one has."""

    def is_running(self) -> bool:
        return False


async def test_a_process_that_has_got_the_pid_of_a_rank_is_no_rank(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    bystander = await asyncio.create_subprocess_exec(sys.executable, "-S", "-c", "import time; time.sleep(60)")
    try:
        monkeypatch.setattr("controller.workers.local_group.find_processes", lambda pids: [*map(FormerProcess, pids)])
        launcher = launch(f"serve({bystander.pid})", algorithm__adv_estimator="grpo")
        await launcher.start()
        assert launcher.groups["actor"].is_gone
        await launcher.discard(["actor"])
        assert is_alive(bystander.pid)
    finally:
        bystander.kill()
        await bystander.wait()


# Groups that die.


async def test_a_group_that_dies_shows_the_last_lines_of_the_culprits_log(launch: Launch, tmp_path: Path) -> None:
    die = """
if role == "actor":
    lines = "".join(f"line {number}\\n" for number in range(30))
    (run_dir / "logs" / "actor_1.log").write_text(lines)
    (run_dir / "logs" / "actor_0.log").write_text("innocent")
    say_first_end(rank=1, how="was ended by SIGABRT", exit_code=-6)
    sys.exit(134)
serve()
"""
    failed = await failure(launch(die, services__actor={"num_processes": 2}).start())
    heading, *lines = str(failed).splitlines()
    log = tmp_path / "logs" / "actor_1.log"
    assert heading == f"the actor group ended at start (rank 1 was ended by SIGABRT); last lines of {log}:"
    assert lines == [f"  line {number}" for number in range(10, 30)]
    assert (failed.is_bad_input, failed.was_killed) == (False, True)


@pytest.mark.parametrize(
    ("num_kills", "is_oom_kill", "expected"),
    [(1, True, True), (1, False, False), (0, True, False)],
    ids=["the kernel", "somebody, while the kernel killed another process", "of a start before"],
)
async def test_a_rank_that_the_kernel_has_killed_is_named_as_such(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, *, num_kills: int, is_oom_kill: bool, expected: bool
) -> None:
    counts = iter([5, *[5 + num_kills] * 9])
    monkeypatch.setattr("controller.workers.local_group.num_oom_kills", lambda: next(counts))
    ends = f"""
import threading

def end():
    say_first_end(rank=1, how="was ended by SIGKILL", exit_code=-9, is_oom_kill={is_oom_kill})
    os._exit(137)

threading.Timer(0.2, end).start()
serve()
"""
    launcher = launch(ends, algorithm__adv_estimator="grpo")
    await launcher.start()
    group = launcher.groups["actor"]
    while not group.has_ended:  # noqa: ASYNC110 - nobody tells of it
        await asyncio.sleep(0.01)
    assert await group.oom_kill() == ("actor rank 1 was ended by SIGKILL" if expected else None)


@pytest.mark.parametrize(
    ("end", "rank", "sentence"),
    [
        (
            'say_first_end(rank=0, how="was ended by SIGKILL", exit_code=-9); os._exit(137)',
            0,
            "actor rank 0 was ended by SIGKILL",
        ),
        ("os.kill(os.getpid(), signal.SIGKILL)", None, "the torchrun of the actor was ended by SIGKILL"),
        ("os._exit(128 + signal.SIGTERM)", None, "the torchrun of the actor was ended by SIGTERM"),
        ("os.kill(os.getpid(), signal.SIGRTMIN + 1)", None, "the torchrun of the actor was ended by signal 35"),
        ("os._exit(1)", None, "the torchrun of the actor ended with exit code 1"),
    ],
    ids=["its rank by a signal", "torchrun", "torchrun, which drained it", "torchrun by a signal without name", "else"],
)
async def test_a_lost_group_tells_who_has_ended_first_and_how(
    launch: Launch, end: str, rank: int | None, sentence: str
) -> None:
    behaviour = f"def end(*_):\n    {end}\nsignal.signal(signal.SIGUSR1, end)\nserve()"
    launcher = launch(behaviour, algorithm__adv_estimator="grpo")
    pid = int((await launcher.start())["actor"].instance_id)
    group = launcher.groups["actor"]
    os.kill(pid, signal.SIGUSR1)
    wait_until(lambda: group.has_ended, what="the end of the actor")
    assert await group.lost_rank() == rank
    assert await group.how_it_ended() == sentence
    await group.discard()
    assert await group.how_it_ended() is None


async def test_a_rank_that_dies_before_it_has_a_log_is_quoted(launch: Launch) -> None:
    die = """
print("ImportError: no such module")
say_first_end(rank=0, how="ended with exit code 1", exit_code=1)
sys.exit(1)
"""
    failed = await failure(launch(die, algorithm__adv_estimator="grpo").start())
    heading, *lines = str(failed).splitlines()
    assert heading.startswith("the actor group ended at start (rank 0 ended with exit code 1); last lines of ")
    assert lines == ["  ImportError: no such module"]


async def test_a_torchrun_that_cannot_start_is_quoted(launch: Launch) -> None:
    failed = await failure(launch("sys.exit('No module named torch')", algorithm__adv_estimator="grpo").start())
    assert str(failed).startswith("the actor group ended at start; last lines of ")
    assert str(failed).endswith("\n  No module named torch")
    assert not failed.is_bad_input


async def test_refused_input_is_told_in_the_ranks_own_sentence(launch: Launch, tmp_path: Path) -> None:
    refuse = """
(run_dir / "logs" / "actor_0.log").write_text("INFO building\\nERROR cannot listen")
print("error: of a library")
say_first_end(rank=0, how="ended with exit code 2", exit_code=2, refusal="cannot listen: Permission denied")
sys.exit(2)
"""
    failed = await failure(launch(refuse, algorithm__adv_estimator="grpo").start())
    assert str(failed) == "actor: cannot listen: Permission denied"
    assert failed.is_bad_input


async def test_a_group_that_does_not_come_up_in_time_is_given_up(launch: Launch) -> None:
    launcher = launch(
        "print('loading', flush=True)\ntime.sleep(60)", services__start_timeout_s=0.5, algorithm__adv_estimator="grpo"
    )
    launcher.launch()
    await forked(launcher.groups["actor"])
    failed = await failure(launcher.start())
    assert str(failed).startswith("the actor group did not come up in 0.5 s; last lines of ")
    assert not failed.is_bad_input


async def test_when_both_groups_die_one_of_them_is_reported(launch: Launch) -> None:
    failed = await failure(launch("sys.exit('broken')").start())
    assert str(failed).startswith(("the actor group ended at start", "the critic group ended at start"))


async def test_a_group_that_has_ended_before_anybody_waits_for_it_is_told_of(launch: Launch) -> None:
    launcher = launch("sys.exit('broken')", algorithm__adv_estimator="grpo")
    launcher.launch()
    group = launcher.groups["actor"]
    await forked(group)
    wait_until(lambda: group.has_ended, what="the end of the group")
    assert str(await failure(launcher.start())).startswith("the actor group ended at start; last lines of ")


# The template.

KILL_ONCE = """
mark = sys.argv[0] + ".killed"
if not os.path.exists(mark):
    open(mark, "w").close()
    os.kill(os.getpid(), 9)
"""


async def test_groups_start_though_their_template_was_killed_before_it_forked_them(launch: Launch) -> None:
    endpoints = await launch(SERVE_UNTIL_SIGTERM, template=KILL_ONCE).start()
    assert endpoints.keys() == {"actor", "critic"}


async def test_a_template_that_is_killed_each_time_is_given_up(launch: Launch) -> None:
    launcher = launch(SERVE_UNTIL_SIGTERM, template="os.kill(os.getpid(), 9)", algorithm__adv_estimator="grpo")
    assert str(await failure(launcher.start())) == "the actor group ended at start: its templates were killed"


async def test_a_template_that_cannot_start_is_quoted(launch: Launch) -> None:
    launcher = launch(SERVE_UNTIL_SIGTERM, template="sys.exit('No module named torch')")
    failed = await failure(launcher.start())
    assert str(failed).endswith("_template.log:\n  No module named torch")


def parents_of(launcher: LocalLauncher) -> set[int]:
    endpoints = [group.endpoint for group in launcher.groups.values()]
    return {psutil.Process(int(endpoint.instance_id)).ppid() for endpoint in endpoints if endpoint is not None}


async def test_groups_with_the_same_number_of_threads_are_forked_from_one_template(launch: Launch) -> None:
    launcher = launch(SERVE_UNTIL_SIGTERM, services={"actor": {"threads": 1}, "critic": {"threads": 1}})
    await launcher.start()
    assert len(parents_of(launcher)) == 1
    launcher = launch(SERVE_UNTIL_SIGTERM, services={"actor": {"threads": 1}, "critic": {"threads": 2}})
    await launcher.start()
    assert len(parents_of(launcher)) == 2


async def test_a_group_that_starts_again_has_the_template_of_before(launch: Launch) -> None:
    launcher = launch(SERVE_UNTIL_SIGTERM)
    await launcher.start()
    [template] = parents_of(launcher)
    await launcher.discard(["critic"])
    await launcher.start()
    assert parents_of(launcher) == {template}


async def test_groups_go_on_without_their_template_and_start_again_from_another_one(launch: Launch) -> None:
    launcher = launch(SERVE_UNTIL_SIGTERM)
    first = await launcher.start()
    [template] = parents_of(launcher)
    os.kill(template, signal.SIGKILL)
    wait_until(lambda: not is_alive(template), what="the end of the template")
    assert not any(group.is_gone for group in launcher.groups.values())
    await launcher.discard(["critic"])
    second = await launcher.start()
    assert second["actor"] == first["actor"]
    assert second["critic"].instance_id != first["critic"].instance_id
    os.kill(int(first["actor"].instance_id), signal.SIGKILL)
    wait_until(lambda: launcher.groups["actor"].is_gone, what="the end of the group that nobody is the parent of")


async def test_a_run_that_ends_before_its_groups_have_started_waits_for_none(launch: Launch) -> None:
    launcher = launch(SERVE_UNTIL_SIGTERM, template="import time; time.sleep(60)")
    launcher.launch()
    await launcher.stop()
    assert all(group.has_ended for group in launcher.groups.values())


@pytest.mark.parametrize("end", ["stop", "kill"])
async def test_the_template_ends_with_the_run(launch: Launch, end: str) -> None:
    launcher = launch(SERVE_UNTIL_SIGTERM)
    await launcher.start()
    [template] = parents_of(launcher)
    if end == "stop":
        await launcher.stop()
    else:
        launcher.kill()
    assert not is_alive(template)


async def test_a_template_that_hangs_is_replaced(launch: Launch, tmp_path: Path) -> None:
    stop_once = KILL_ONCE.replace("os.getpid(), 9", "os.getpid(), 19")
    launcher = launch(SERVE_UNTIL_SIGTERM, template=stop_once, services__start_timeout_s=1.0)
    failed = await failure(launcher.start())
    assert "group did not come up in 1 s: its template has not forked it; last lines of" in str(failed)
    await launcher.discard(["actor", "critic"])
    assert (await launcher.start()).keys() == {"actor", "critic"}


async def test_a_template_that_is_stopped_after_it_has_forked_is_replaced_and_keeps_no_lost_group(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controller.workers.template.FORK_LIMIT_S", 0.2)
    monkeypatch.setattr("controller.workers.local_group.KILL_TIMEOUT_S", 5.0)
    launcher = launch(SERVE_UNTIL_SIGTERM)
    before = await launcher.start()
    [template] = parents_of(launcher)
    os.kill(template, signal.SIGSTOP)
    os.kill(int(before["critic"].instance_id), signal.SIGKILL)
    await launcher.discard(["critic"])
    assert launcher.groups["critic"].has_ended
    after = await launcher.start()
    assert after["actor"] == before["actor"]
    assert after["critic"].instance_id != before["critic"].instance_id
    assert not is_alive(template)


async def test_a_refusal_is_told_also_if_the_template_has_gone_before(launch: Launch, tmp_path: Path) -> None:
    refuse = """
os.kill(os.getppid(), 9)
while not (run_dir / "go").exists():
    time.sleep(0.01)
say_first_end(rank=0, how="ended with exit code 2", exit_code=2, refusal="no such model")
sys.exit(2)
"""
    launcher = launch(refuse, algorithm__adv_estimator="grpo")
    starting = asyncio.create_task(launcher.start())
    await asyncio.sleep(0)
    (tmp_path / "go").touch()
    failed = await failure(starting)
    assert (str(failed), failed.is_bad_input) == ("actor: no such model", True)
