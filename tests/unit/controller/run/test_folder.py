"""The lock of a run folder, and the configurations that may use it."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

from controller.run.checkpoint_store import CheckpointStore
from controller.run.folder import RunFolder
from controller.run.restore import RestorePoint
from controller.run.state import RunState
from splitppo.config import Config, ConfigError, load_config
from splitppo.config.resolve import resolve_run
from splitppo.machine.cores import permitted_cores
from splitppo.run_folder.processes import write_processes
from tests.support.fake_services import make_config
from tests.support.released_runs import RELEASED, released_run
from tests.support.table_of_files import entry_of

pytestmark = pytest.mark.slow


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"


def leave_a_run(run_dir: Path, **changes: Any) -> None:
    """Writes the files of a run that has recorded step 1."""
    with RunFolder(make_config(run_dir, **changes)):
        (run_dir / "metrics.jsonl").write_text('{"step": 1}\n')


def reopen(run_dir: Path, **changes: Any) -> None:
    with RunFolder(make_config(run_dir, **changes)):
        pass


# The config.


def test_the_resolved_config_is_stored_and_loads_to_an_equal_one(run_dir: Path) -> None:
    config = make_config(run_dir, actor__lr=1e-6)
    with RunFolder(config) as folder:
        assert load_config(folder.config_file) == folder.config == resolve_run(config, None, permitted_cores())


def test_a_resumed_run_may_have_another_learning_rate_and_keeps_a_line_for_each_change(run_dir: Path) -> None:
    leave_a_run(run_dir, actor__lr=1e-6, rollout__temperature=1.0)
    changes = {"actor__lr": 5e-7, "run__schedule": "serial"}
    with RunFolder(make_config(run_dir, **changes)) as folder:
        assert folder.changes == [
            "run.schedule: 'gather' in the folder, 'serial' now",
            "actor.lr: 1e-06 in the folder, 5e-07 now",
        ]
        assert load_config(folder.config_file).actor.lr == 5e-7
    with pytest.raises(
        ConfigError, match=r"another config:\n  rollout\.temperature: 1\.0 in the folder, 0\.5 now\na resumed"
    ):
        reopen(run_dir, **changes, rollout__temperature=0.5)


def threads(config: Config) -> list[int | str]:
    return [config.services.actor.threads, config.services.critic.threads]


def test_threads_are_stored_as_numbers_which_a_resumed_run_keeps_on_any_machine(run_dir: Path) -> None:
    with RunFolder(make_config(run_dir)) as folder:
        assert all(isinstance(number, int) for number in threads(folder.config))
    leave_a_run(run_dir, services={"actor": {"threads": 61}, "critic": {"threads": 67}})  # on a machine with many cores
    assert threads(RunFolder(make_config(run_dir)).resolve()) == [61, 67]
    reopen(run_dir)
    assert threads(load_config(run_dir / "config.yaml")) == [61, 67]
    reopen(run_dir, services__critic={"threads": 2})
    assert threads(load_config(run_dir / "config.yaml")) == [61, 2]


def test_the_number_of_parts_is_stored_and_kept(run_dir: Path) -> None:
    leave_a_run(run_dir, rollout={"n": 2, "stream_groups": 2})
    assert (
        RunFolder(make_config(run_dir, rollout={"n": 2, "stream_groups": "auto"})).resolve().rollout.stream_groups == 2
    )
    reopen(run_dir, rollout={"n": 2, "stream_groups": "auto"})
    assert load_config(run_dir / "config.yaml").rollout.stream_groups == 2
    with pytest.raises(ConfigError, match=r"rollout\.stream_groups: 2 in the folder, 3 now"):
        reopen(run_dir, rollout={"n": 2, "stream_groups": 3})


ON_CORES: dict[str, Any] = {"actor": {"cpus": [0]}, "critic": {"cpus": [1]}, "rollout": {"cpus": [1]}}


def test_the_share_of_a_rollout_group_is_stored_and_kept_wherever_the_group_is(run_dir: Path) -> None:
    leave_a_run(run_dir, services=ON_CORES)
    moved = ON_CORES | {"rollout": {"cpus": [2]}}
    for share in ({}, {"rollout__share": "auto"}, {"rollout__share": 0.5}):
        assert RunFolder(make_config(run_dir, services=moved, **share)).resolve().rollout.share == 0.5
    with RunFolder(make_config(run_dir, services=moved)) as folder:
        assert folder.changes == ["services.rollout.cpus: [1] in the folder, [2] now"]
        assert load_config(folder.config_file).rollout.share == 0.5
    with pytest.raises(
        ConfigError, match=r"another config:\n  rollout\.share: 0\.5 in the folder, 0\.25 now\na resumed run keeps"
    ):
        reopen(run_dir, services=ON_CORES, rollout__share=0.25)


def test_a_share_that_is_kept_needs_its_group(run_dir: Path) -> None:
    leave_a_run(run_dir, services=ON_CORES)
    sentence = (
        f"run.dir: with the values of {run_dir}/config.yaml, which a resumed run keeps, rollout.share (0.5) is the"
        " share of a rollout group: expected services.rollout, e.g. with the devices or cpus of services.critic"
    )
    for start in (RunFolder.resolve, RunFolder.__enter__):
        with pytest.raises(ConfigError) as refused:
            start(RunFolder(make_config(run_dir)))
        assert str(refused.value) == sentence
    reopen(run_dir, services=ON_CORES)  # nothing was changed


def test_a_changed_key_is_named_and_not_the_rule_that_it_breaks_with_a_value_that_is_kept(run_dir: Path) -> None:
    leave_a_run(run_dir, services=ON_CORES)
    for start in (RunFolder.resolve, RunFolder.check, RunFolder.__enter__):
        with pytest.raises(ConfigError, match=r"another config:\n  run\.seed: 1 in the folder, 5 now\na resumed run"):
            start(RunFolder(make_config(run_dir, run__seed=5)))


def test_a_start_that_failed_leaves_no_threads_to_keep(run_dir: Path) -> None:
    with RunFolder(make_config(run_dir, services__actor={"threads": 61})):
        pass
    with RunFolder(make_config(run_dir)) as folder:
        assert folder.config == resolve_run(make_config(run_dir), None, permitted_cores())


def test_threads_of_groups_that_others_start_are_theirs_to_resolve(run_dir: Path) -> None:
    with RunFolder(make_config(run_dir, services__launch="external")) as folder:
        assert threads(folder.config) == threads(load_config(folder.config_file)) == ["auto", "auto"]


@pytest.mark.parametrize("stored", ["{", "[]", "services: 7", "", "# nothing", "run: {name: 2024-13-45}"])
def test_a_stored_config_that_somebody_has_broken_is_refused(run_dir: Path, stored: str) -> None:
    leave_a_run(run_dir)
    (run_dir / "config.yaml").write_text(stored)
    broken = "is not valid YAML|expected a mapping of sections|belongs to a run with another config"
    with pytest.raises(ConfigError, match=rf"run\.dir: .* ({broken})"):
        reopen(run_dir)


def test_another_config_is_refused_with_each_difference_by_key(run_dir: Path) -> None:
    leave_a_run(run_dir)
    changed = make_config(run_dir, actor__weight_decay=0.5, algorithm__adv_estimator="grpo", data__val_files="v.jsonl")
    for start in (RunFolder(changed).check, RunFolder(changed).__enter__):
        with pytest.raises(ConfigError, match="belongs to a run with another config") as refused:
            start()
        assert str(refused.value).splitlines()[1:] == [
            "  data.val_files: [] in the folder, ['v.jsonl'] now",
            "  algorithm.adv_estimator: 'gae' in the folder, 'grpo' now",
            "  actor.weight_decay: 0.01 in the folder, 0.5 now",
            "a resumed run keeps these keys, a new run may change them: run.dir=NEW",
        ]


def test_a_new_run_starts_from_the_checkpoint_with_the_keys_that_a_resumed_run_cannot_change(run_dir: Path) -> None:
    leave_a_run(run_dir)
    store = CheckpointStore(run_dir / "checkpoints")
    store.commit(2, RunState(step=2, kl_coef=0.5).model_dump(mode="json"), {}, manifests={}, keep=None)
    changes = {"rollout__n": 4, "algorithm__filter_groups": {"enable": True}}
    with pytest.raises(ConfigError) as refused:
        reopen(run_dir, **changes)
    way = f"a resumed run keeps these keys, a new run may change them: run.dir=NEW run.resume={store.folder(2)}"
    assert str(refused.value).splitlines()[-1] == way
    with RunFolder(make_config(run_dir / "NEW", run__resume=str(store.folder(2)), **changes)) as folder:
        assert RestorePoint(folder.config, folder.checkpoints).step == 2


def test_a_run_of_a_version_that_had_fewer_keys_goes_on_with_their_defaults(run_dir: Path) -> None:
    leave_a_run(run_dir)
    file = run_dir / "config.yaml"
    stored = yaml.safe_load(file.read_text())
    del stored["reward"]["max_error_rate"], stored["data"]["prompt_key"]
    file.write_text(yaml.safe_dump(stored))
    reopen(run_dir)
    file.write_text(yaml.safe_dump(stored))
    with pytest.raises(ConfigError, match=r"data\.prompt_key: 'prompt' in the folder, 'question' now"):
        reopen(run_dir, data__prompt_key="question")


def test_the_table_of_files_has_every_file_that_a_start_makes(run_dir: Path) -> None:
    with RunFolder(make_config(run_dir)):
        write_processes(run_dir, [])
        made = [str(path.relative_to(run_dir)) for path in run_dir.rglob("*") if path.is_file()]
    assert [path for path in made if entry_of(path) is None] == []
    assert "config.yaml" in made


def test_a_refused_config_leaves_the_stored_one(run_dir: Path) -> None:
    leave_a_run(run_dir)
    before = (run_dir / "config.yaml").read_bytes(), (run_dir / "controller.epoch").read_bytes()
    with pytest.raises(ConfigError):
        reopen(run_dir, actor__weight_decay=0.5)
    assert ((run_dir / "config.yaml").read_bytes(), (run_dir / "controller.epoch").read_bytes()) == before


@pytest.mark.parametrize(
    "changes",
    [
        {"run__total_steps": 99},
        {"run__stop_after_step": 1},
        {"run__schedule": "serial"},
        {"run__name": "other"},
        {"evaluation__test_freq": 7},
        {"checkpoint__save_freq": 7},
        {"checkpoint__keep": 9},
        {"tracking__sample_freq": 7},
        {"services__actor": {"num_processes": 2}},
        {"services__launch": "external"},
        {"placement__reference": "critic"},
        {"actor__ppo_max_token_len_per_gpu": 4096},
    ],
)
def test_how_long_where_and_how_often_may_change(run_dir: Path, changes: dict[str, Any]) -> None:
    leave_a_run(run_dir)
    reopen(run_dir, **changes)
    expected = resolve_run(make_config(run_dir, **changes), None, permitted_cores())
    assert load_config(run_dir / "config.yaml") == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"run__seed": 2},
        {"data__train_batch_size": 3},
        {"rollout__temperature": 0.5},
        {"actor__ppo_epochs": 2},
        {"critic__warmup_steps": 2},
        {"algorithm__gamma": 0.5},
        {"reward__custom_function_path": "mine.py"},
    ],
)
def test_what_is_computed_may_not_change(run_dir: Path, changes: dict[str, Any]) -> None:
    leave_a_run(run_dir)
    with pytest.raises(ConfigError, match=" in the folder, "):
        reopen(run_dir, **changes)


def test_a_start_that_recorded_nothing_does_not_bind_the_folder(run_dir: Path) -> None:
    reopen(run_dir, actor__model="models/mistyped")
    reopen(run_dir, actor__model="models/policy", run__resume="disable")
    assert load_config(run_dir / "config.yaml").actor.model == "models/policy"


def test_who_only_asks_whether_the_folder_is_held_keeps_no_controller_out(run_dir: Path) -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / "controller.lock").open("a+") as asking:
        fcntl.flock(asking, fcntl.LOCK_SH)
        done = threading.Timer(0.05, fcntl.flock, (asking, fcntl.LOCK_UN))
        done.start()
        reopen(run_dir)
        done.join()


def test_a_fresh_run_is_refused_where_a_run_is(run_dir: Path) -> None:
    leave_a_run(run_dir)
    with pytest.raises(ConfigError, match=r"holds a run already; remove it, .* or set run\.resume=auto"):
        reopen(run_dir, run__resume="disable")


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"run\.dir: cannot use the run folder .*file/run: Not a directory"):
        reopen(tmp_path / "file" / "run")


@pytest.mark.parametrize("name", ["config.yaml", "controller.epoch"])
def test_a_file_that_cannot_be_written_is_named_and_the_folder_left(run_dir: Path, name: str) -> None:
    (run_dir / name).mkdir(parents=True)
    with pytest.raises(ConfigError, match=rf"run\.dir: cannot use .*: expected a file, got a folder \(.*{name}\)"):
        reopen(run_dir)
    (run_dir / name).rmdir()
    reopen(run_dir)


def test_a_nonce_that_cannot_be_removed_does_not_keep_the_folder(run_dir: Path) -> None:
    with RunFolder(make_config(run_dir)) as folder:
        nonce = run_dir / folder.lease.nonce
        nonce.unlink()
        nonce.mkdir()
    nonce.rmdir()
    reopen(run_dir)


def test_a_run_whose_steps_cannot_all_be_read_is_not_gone_on_with(run_dir: Path) -> None:
    leave_a_run(run_dir)
    (run_dir / "metrics.jsonl").write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(ConfigError, match=r"metrics\.jsonl, line 2: not valid JSON"):
        reopen(run_dir)
    (run_dir / "metrics.jsonl").write_text('{"step": 1}\n{"step": 3}\n{"st')
    reopen(run_dir)


# One controller at a time.


def test_a_second_controller_is_refused_while_the_first_one_lives(run_dir: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from controller.run.folder import RunFolder\n"
        "from tests.support.fake_services import make_config\n"
        "with RunFolder(make_config(Path(sys.argv[1]))): print('mine', flush=True); sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", code, str(run_dir)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "mine\n"
        with pytest.raises(ConfigError, match=r"run\.dir: another controller is running in "):
            reopen(run_dir)
        with pytest.raises(ConfigError, match=r"run\.dir: another controller is running in "):
            RunFolder(make_config(run_dir)).check()
        other.communicate("")
    reopen(run_dir)
    RunFolder(make_config(run_dir)).check()


def test_a_refusal_leaves_the_folder_to_others(run_dir: Path) -> None:
    leave_a_run(run_dir)
    with pytest.raises(ConfigError):
        reopen(run_dir, actor__weight_decay=0.5)
    reopen(run_dir)


def test_every_start_raises_the_epoch_and_keeps_the_run_id(run_dir: Path) -> None:
    leases = []
    for _ in range(3):
        with RunFolder(make_config(run_dir)) as folder:
            leases.append(folder.lease)
    assert [lease.epoch for lease in leases] == [1, 2, 3]
    assert len({lease.run_id for lease in leases}) == 1
    assert len({lease.nonce for lease in leases}) == 3


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"run_id": "a"}',
        '{"run_id": "a", "epoch": "3"}',
        "\x00\x00",
        f'{{"run_id": "a", "epoch": {2**70}}}',
    ],
)
def test_an_epoch_that_cannot_be_read_is_one_sentence_and_is_not_made_anew(run_dir: Path, content: str) -> None:
    reopen(run_dir)
    record = run_dir / "controller.epoch"
    record.write_text(content)
    with pytest.raises(ConfigError, match=r'expected {"run_id": "\.\.\.", "epoch": N}, got ') as refused:
        reopen(run_dir)
    assert "\n" not in str(refused.value)
    assert record.read_text() == content
    record.write_text('{"run_id": "a", "epoch": 3}')
    with RunFolder(make_config(run_dir)) as folder:
        assert (folder.lease.run_id, folder.lease.epoch) == ("a", 4)


def test_two_folders_are_two_runs(tmp_path: Path) -> None:
    with RunFolder(make_config(tmp_path / "a")) as first, RunFolder(make_config(tmp_path / "b")) as other:
        assert first.lease.run_id != other.lease.run_id


def test_the_nonce_is_there_while_the_folder_is_held_and_gone_afterwards(run_dir: Path) -> None:
    with RunFolder(make_config(run_dir)) as folder:
        assert (run_dir / folder.lease.nonce).exists()
    assert not list(run_dir.glob("nonce-*"))


def test_a_nonce_that_a_crash_has_left_is_removed(run_dir: Path) -> None:
    run_dir.mkdir()
    (run_dir / "nonce-0123").touch()
    with RunFolder(make_config(run_dir)) as folder:
        assert [file.name for file in run_dir.glob("nonce-*")] == [folder.lease.nonce]


@pytest.mark.parametrize("name", RELEASED)
def test_a_run_of_the_first_release_goes_on(tmp_path: Path, name: str) -> None:
    run_dir, _ = released_run(name, tmp_path)
    config = load_config(run_dir / "config.yaml", [f"run.dir={run_dir}"], is_stored=True)
    with RunFolder(config) as folder:
        assert folder.changes == [f"run.dir: '/runs/{name}' in the folder, '{run_dir}' now"]
        assert folder.lease.epoch == 2


def test_a_run_of_a_version_that_had_other_names_goes_on(run_dir: Path) -> None:
    leave_a_run(run_dir)
    file = run_dir / "config.yaml"
    stored = yaml.safe_load(file.read_text())
    stored["actor"]["loss_mode"] = stored["actor"].pop("policy_loss")["loss_mode"]
    file.write_text(yaml.safe_dump(stored))

    assert load_config(file, is_stored=True).actor.policy_loss.loss_mode == "vanilla"
    reopen(run_dir)
    assert "loss_mode" not in yaml.safe_load(file.read_text())["actor"]


@pytest.mark.parametrize("name", ["trace.json", "rollouts/val/4.jsonl", "controller.epoch", "metrics.jsonl"])
def test_a_folder_in_the_place_of_a_file_is_refused_before_groups_are_started(run_dir: Path, name: str) -> None:
    leave_a_run(run_dir)
    (run_dir / name).unlink(missing_ok=True)
    (run_dir / name).mkdir(parents=True)
    with pytest.raises(ConfigError, match=rf"expected a file, got a folder.*{name}|{name}: expected a file"):
        reopen(run_dir)
