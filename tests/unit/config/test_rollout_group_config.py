"""The keys of a rollout group: GPUs, machines and addresses, the folder of the weights, and its line in the plan."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest

from splitppo.config.batch_plan import batch_plan
from splitppo.config.resolve import resolve_run
from splitppo.config.threads import crowding
from splitppo.machine.cores import PermittedCores
from tests.support.configs import load, mistake

GROUP = "services.rollout={}"
SHARED = "services.allow_shared_devices=true"


def devices(**gpus: int) -> list[str]:
    """A GPU for each of these groups."""
    return [f"services.{role}.devices=[{gpu}]" for role, gpu in gpus.items()]


@pytest.mark.parametrize("overrides", [(), (SHARED,)])
def test_actor_and_rollout_group_never_share_a_gpu(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    sentence = mistake(tmp_path, *devices(actor=0, critic=1, rollout=0), *overrides)
    assert sentence == (
        "services.actor.devices [0] and services.rollout.devices [0] overlap, and the groups of actor and rollout work"
        " at the same time: give each group its own GPUs, or remove services.rollout, so that the actor's group samples"
    )
    # Also if another pair shares a GPU with a lower index, on purpose.
    wide = [
        "services.critic={num_processes: 2, devices: [0, 1]}",
        "services.rollout={num_processes: 2, devices: [1, 2]}",
    ]
    actor = "services.actor={num_processes: 2, devices: [0, 2]}"
    assert "services.actor.devices [0, 2] and services.rollout.devices [1, 2] overlap" in mistake(
        tmp_path, *wide, actor, SHARED
    )


def test_a_rollout_group_shares_a_gpu_with_the_critic_on_purpose_and_with_a_reward_group_where_that_is_allowed(
    tmp_path: Path,
) -> None:
    assert load(tmp_path, *devices(actor=0, critic=1, rollout=1)).gpus_in_turns == {1}
    gpus = devices(actor=0, critic=1, reward=2, rollout=2)
    reward = (*gpus, "reward_model.model=rm", "placement.reward_model=reward")
    assert mistake(tmp_path, *reward).startswith(
        "services.reward.devices [2] and services.rollout.devices [2] overlap; give each group its own GPUs"
    )
    assert load(tmp_path, *reward, SHARED).shared_devices == (2,)


def test_groups_that_others_start_may_have_the_same_indices_on_their_own_machines(tmp_path: Path) -> None:
    load(tmp_path, *devices(actor=0, critic=0, rollout=0), "services.launch=external")


@pytest.mark.parametrize("host", ["actor", "critic"])
def test_frozen_models_stay_where_they_are_placed(tmp_path: Path, host: str) -> None:
    frozen = ("algorithm.use_kl_in_reward=true", f"placement.reference={host}", "reward_model.model=rm")
    config = load(tmp_path, GROUP, *frozen, "placement.reward_model=reward")
    assert (config.reference_host, config.reward_model_host) == (host, "reward")
    assert config.roles == ("actor", "critic", "reward", "rollout")


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ("services.rollout={num_processes: 2, nnodes: 2}",),
            "services.launch is local, which starts groups on this machine alone: expected external, because"
            " services.rollout.nnodes is 2",
        ),
        (
            ("services.rollout={num_processes: 2, nnodes: 2}", "services.launch=external"),
            "services.rollout.master_addr: expected the name of machine 0 of the group",
        ),
        (
            (
                "services.rollout.address='localhost:1'",
                "services.actor.address='localhost:1'",
                "services.launch=external",
            ),
            "services.rollout.address and services.actor.address are both localhost:1",
        ),
        (("services.rollout.bind='0.0.0.0:1'",), "services.rollout.bind is '0.0.0.0:1', which is not a loopback"),
        (
            ("services.rollout.bind='0.0.0.0:1'", "debug.failpoints={actor.update: {action: kill}}"),
            "debug.failpoints is for tests on one machine: expected a loopback address in services.rollout.bind",
        ),
        (("services.rollout.num_procs=2",), "unknown key 'services.rollout.num_procs', did you mean"),
        (("services.rollout.num_processes=0",), "key 'services.rollout.num_processes': input should be greater than"),
        (
            (GROUP, "services.actor.num_processes=2", "rollout={backend: vllm, vllm: {tensor_model_parallel_size: 2}}"),
            "services.rollout.num_processes (1) must be a multiple of rollout.vllm.tensor_model_parallel_size (2)",
        ),
        (("rollout.sync_dir=weights",), "key 'rollout.sync_dir': expected an absolute path, got 'weights'"),
        (("rollout.sync_dir='~/weights'",), "key 'rollout.sync_dir': expected an absolute path, got '~/weights'"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_keys_to_change(
    tmp_path: Path, overrides: tuple[str, ...], sentence: str
) -> None:
    assert mistake(tmp_path, *overrides).startswith(sentence)


def test_failpoints_need_no_rollout_group(tmp_path: Path) -> None:
    assert load(tmp_path, "debug.failpoints={actor.update: {action: kill}}").services.rollout is None


def test_an_override_below_a_key_that_is_null_makes_its_section(tmp_path: Path) -> None:
    config = load(tmp_path, "services.rollout=null", "services.rollout.num_processes=2")
    assert config.groups["rollout"].num_processes == 2


@pytest.mark.parametrize(
    ("overrides", "folder"), [((), "runs/x/weights"), (("rollout.sync_dir=/dev/shm/w",), "/dev/shm/w")]
)
def test_the_batch_plan_names_the_group_that_samples(tmp_path: Path, overrides: tuple[str, ...], folder: str) -> None:
    plan = batch_plan(load(tmp_path, "services.rollout.num_processes=2", *overrides)).splitlines()
    expected = "all responses are sampled by the rollout group on 2 ranks; the actor publishes weights in"
    assert plan[1] == f"rollout: {expected} {folder}"
    assert [line.partition(":")[0] for line in plan] == ["step", "rollout", "actor", "critic"]
    assert "rollout" not in batch_plan(load(tmp_path, *overrides))


def test_the_ranks_of_a_rollout_group_have_a_share_of_the_cores(tmp_path: Path) -> None:
    cores = PermittedCores(frozenset(range(8)), Fraction(8))
    config = load(tmp_path, "services.rollout.num_processes=2")
    resolved = resolve_run(config, None, cores)
    assert {role: group.threads for role, group in resolved.groups.items()} == dict.fromkeys(config.roles, 2)
    assert crowding(resolved, cores) is None
    crowded = resolve_run(load(tmp_path, "services.rollout={num_processes: 2, threads: 4}"), None, cores)
    assert "2 x services.rollout.threads (4) = 12 threads compute on 8 permitted cores" in str(crowding(crowded, cores))
