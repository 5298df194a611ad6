"""`rollout.share`: which groups sample, what `auto` is, devices in turns, their threads, and what is refused."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest

from splitppo.config import Config
from splitppo.config.batch_plan import batch_plan
from splitppo.config.resolve import resolve_run
from splitppo.config.threads import crowding
from splitppo.machine.cores import PermittedCores
from tests.support.configs import load, mistake

GROUP = "services.rollout.num_processes=1"
HALF = "rollout.share=0.5"
STALE = ("rollout.staleness=1", "algorithm.rollout_correction.rollout_is=token")
EXTERNAL, SHARED = "services.launch=external", "services.allow_shared_devices=true"


def gpus(**devices: list[int]) -> tuple[str, ...]:
    """One rank for each GPU."""
    return tuple(f"services.{role}={{num_processes: {len(own)}, devices: {own}}}" for role, own in devices.items())


ON_CRITIC = gpus(actor=[0, 1], critic=[2, 3], rollout=[2, 3])
ON_CORES = ("services.actor.cpus=[0]", "services.critic.cpus=[1]", "services.rollout.cpus=[1]")


@pytest.mark.parametrize(
    ("overrides", "samplers"),
    [
        ((), ("actor",)),
        (("rollout.share=0",), ("actor",)),
        ((GROUP,), ("rollout",)),
        ((GROUP, "rollout.share=1"), ("rollout",)),
        ((GROUP, "rollout.share=0"), ("actor",)),
        ((GROUP, HALF), ("actor", "rollout")),
        ((GROUP, HALF, "algorithm.adv_estimator=reinforce_plus_plus"), ("actor", "rollout")),
    ],
)
def test_the_share_says_which_groups_sample(
    tmp_path: Path, overrides: tuple[str, ...], samplers: tuple[str, ...]
) -> None:
    config = load(tmp_path, *overrides)
    assert config.sampling_roles == samplers
    assert ("rollout" in config.roles) == ("rollout" in samplers)


@pytest.mark.parametrize(
    ("overrides", "level"),
    [
        pytest.param((), 2, id="the actor's own engine"),
        pytest.param(("rollout.vllm.sleep_level=1",), 1, id="a level that is given"),
        pytest.param((*ON_CRITIC, "rollout.share=1"), 1, id="a rollout group"),
        pytest.param(ON_CRITIC, 2, id="both"),
        pytest.param((*ON_CRITIC, "rollout.share=0"), 2, id="a rollout group that is not started"),
    ],
)
def test_an_engine_that_gets_new_weights_before_it_generates_drops_its_old_ones(
    tmp_path: Path, overrides: tuple[str, ...], level: int
) -> None:
    assert load(tmp_path, "rollout.backend=vllm", *overrides).rollout.vllm.sleep_level == level


@pytest.mark.parametrize(
    ("overrides", "share"),
    [
        pytest.param((), 1.0, id="no group"),
        pytest.param(gpus(actor=[0], critic=[1], rollout=[2]), 1.0, id="GPUs of its own"),
        pytest.param(ON_CRITIC, 0.5, id="the critic's GPUs"),
        pytest.param(gpus(actor=[0, 1], critic=[2, 3], rollout=[3]), 1 / 3, id="one of the critic's GPUs"),
        pytest.param(ON_CORES, 0.5, id="the critic's cores"),
        pytest.param((*ON_CRITIC, "rollout.share=auto"), 0.5, id="auto by name"),
        pytest.param((*ON_CRITIC, "rollout.share=0.25"), 0.25, id="a number"),
        pytest.param(gpus(actor=[0, 1], critic=[2], rollout=[2]), 0.0, id="a critic that is late"),
        pytest.param((*ON_CRITIC, "critic.ppo_epochs=2"), 0.0, id="a critic with more epochs"),
        pytest.param((*ON_CRITIC, "algorithm.adv_estimator=reinforce_plus_plus"), 1.0, id="no critic"),
        pytest.param((*ON_CRITIC, EXTERNAL), 1.0, id="equal numbers on other machines"),
        pytest.param((*ON_CRITIC, EXTERNAL, SHARED), 0.5, id="groups that others start, on the same GPUs"),
        pytest.param(
            (*gpus(actor=[0], critic=[1], rollout=[2]), "services.critic.cpus=[5]", "services.rollout.cpus=[5]"),
            1.0,
            id="GPUs of its own, fed by the same core",
        ),
    ],
)
def test_auto_is_the_share_of_the_ranks_on_the_critics_devices_and_else_everything(
    tmp_path: Path, overrides: tuple[str, ...], share: float
) -> None:
    assert load(tmp_path, *overrides).rollout.share == share


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (("rollout.share=1.5",), "key 'rollout.share': expected auto, or a number from 0 to 1, got 1.5"),
        (("rollout.share=-0.1",), "key 'rollout.share': expected auto, or a number from 0 to 1, got -0.1"),
        (("rollout.share=.nan",), "key 'rollout.share': expected auto, or a number from 0 to 1, got nan"),
        (("rollout.share=half",), "key 'rollout.share': expected auto, or a number from 0 to 1, got 'half'"),
        (("rollout.share=true",), "key 'rollout.share': expected auto, or a number from 0 to 1, got True"),
        (("rollout.share=null",), "key 'rollout.share': expected auto, or a number from 0 to 1, got None"),
        ((HALF,), "rollout.share (0.5) is the share of a rollout group: expected services.rollout, e.g."),
        (
            (GROUP, HALF, *STALE),
            "rollout.share (0.5) and rollout.staleness 1 exclude each other: the actor's group learns while the"
            " responses of the next step are sampled; set rollout.share to 1 or 0",
        ),
        (
            (*ON_CRITIC, *STALE),
            "rollout.staleness 1 samples while the critic learns, and services.rollout has devices or cpus of"
            " services.critic: give the rollout group its own, or set rollout.staleness to 0",
        ),
        (
            (*gpus(actor=[0], critic=[1], rollout=[0]), HALF),
            "services.actor.devices [0] and services.rollout.devices [0] overlap, and the groups of actor and rollout"
            " work at the same time",
        ),
        (
            (*ON_CRITIC, "rollout={backend: vllm, vllm: {sleep_level: 0}}"),
            "rollout.vllm.sleep_level 0 keeps vLLM's memory while the critic computes, and services.critic.devices"
            " [2, 3] and services.rollout.devices [2, 3] overlap: set it to 1 or 2, or give each group its own GPUs",
        ),
        (
            (*ON_CRITIC, "rollout={backend: vllm, share: 1, vllm: {sleep_level: 0}}", EXTERNAL, SHARED),
            "rollout.vllm.sleep_level 0 keeps vLLM's memory while the critic computes",
        ),
        (
            (
                "services={actor: {num_processes: 3}, rollout: {num_processes: 2}}",
                "rollout={backend: vllm, vllm: {tensor_model_parallel_size: 2}, share: 0.5}",
            ),
            "services.actor.num_processes (3) must be a multiple of rollout.vllm.tensor_model_parallel_size (2)",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_the_keys_to_change(
    tmp_path: Path, overrides: tuple[str, ...], sentence: str
) -> None:
    assert mistake(tmp_path, *overrides).startswith(sentence)


@pytest.mark.parametrize(
    "overrides",
    [
        (*gpus(actor=[0], critic=[1], rollout=[2]), "rollout={backend: vllm, vllm: {sleep_level: 0}}"),
        (*ON_CRITIC, "rollout={backend: vllm, share: 0, vllm: {sleep_level: 0}}"),
        (*ON_CORES, "rollout={backend: vllm, vllm: {sleep_level: 0}}"),
        ("services.actor.cpus=[0, 1]", "services.rollout.cpus=[1]", HALF),
    ],
    ids=["GPUs of its own", "a group that is not started", "cores", "cores of actor and rollout group"],
)
def test_what_fits_is_not_refused(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    load(tmp_path, *overrides)


def test_gpus_in_turns_are_shared_on_purpose_and_those_of_a_third_group_are_not(tmp_path: Path) -> None:
    config = load(tmp_path, *gpus(actor=[0, 1], critic=[2, 3], rollout=[3, 4]))
    assert (config.gpus_in_turns, config.shared_devices) == ({3}, ())
    assert load(tmp_path, *ON_CRITIC, "rollout.share=0").gpus_in_turns == frozenset()
    reward = ("services.reward.devices=[3]", "reward_model.model=rm", "placement.reward_model=reward")
    sentence = mistake(tmp_path, *ON_CRITIC, *reward)
    assert sentence.startswith(
        "services.critic.devices [2, 3] and services.reward.devices [3] and services.rollout.devices [2, 3] overlap;"
        " give each group its own GPUs, or set services.allow_shared_devices"
    )
    assert load(tmp_path, *ON_CRITIC, *reward, SHARED).shared_devices == (3,)


def test_auto_keeps_the_reference_away_from_devices_in_turns(tmp_path: Path) -> None:
    streamed = ("rollout.stream_groups=2", "algorithm.use_kl_in_reward=true")
    assert load(tmp_path, *gpus(actor=[0, 1], critic=[2, 3]), *streamed).reference_host == "critic"
    assert load(tmp_path, *ON_CRITIC, *streamed).reference_host == "actor"
    assert load(tmp_path, *ON_CRITIC, *streamed, "rollout.share=0").reference_host == "critic"


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ON_CRITIC,
            "rollout: 4 of 8 prompts (rollout.share 0.5) are answered by the rollout group on 2 ranks, in turns with"
            " the critic, the others by the actor's group",
        ),
        (
            (*ON_CRITIC, "rollout.share=1"),
            "rollout: all responses are sampled by the rollout group on 2 ranks, in turns",
        ),
        (
            (*ON_CRITIC, "critic.ppo_epochs=2"),
            "rollout: the actor's group samples all responses, and services.rollout is not started, because"
            " rollout.share is 0",
        ),
    ],
)
def test_the_batch_plan_says_who_answers_how_many_prompts(
    tmp_path: Path, overrides: tuple[str, ...], sentence: str
) -> None:
    plan = batch_plan(load(tmp_path, "data.train_batch_size=8", *overrides)).splitlines()
    [line] = [line for line in plan if line.startswith("rollout")]
    assert line.startswith(sentence)


# Cores.


def threads(config: Config, cores: PermittedCores) -> list[int | str]:
    return [group.threads for group in resolve_run(config, None, cores).groups.values()]


def cores(number: int, quota: int | None = None) -> PermittedCores:
    return PermittedCores(frozenset(range(number)), None if quota is None else Fraction(quota))


@pytest.mark.parametrize(
    ("overrides", "permitted", "expected"),
    [
        pytest.param(ON_CORES, cores(2), [1, 1, 1], id="the critic's core"),
        pytest.param(
            ("services.actor.cpus=[0, 1]", "services.critic.cpus=[2, 3]", "services.rollout.cpus=[2, 3]"),
            cores(4),
            [2, 2, 2],
            id="both of the critic's cores",
        ),
        pytest.param(
            ("services.critic.cpus=[2, 3]", "services.rollout.cpus=[3, 4]", "services.actor.cpus=[0]"),
            cores(5),
            [1, 2, 2],
            id="one of the critic's cores",
        ),
        pytest.param(
            (*ON_CORES, "services.critic.cpus=[1, 2]", "services.rollout={cpus: [1, 2], num_processes: 2}"),
            cores(3),
            [1, 1, 1],
            id="the group with more ranks counts",
        ),
        pytest.param(ON_CRITIC, cores(24), [6, 6, 6], id="the critic's GPUs"),
        pytest.param(ON_CRITIC, cores(24, 12), [3, 3, 3], id="a quota"),
        pytest.param(gpus(actor=[0, 1], critic=[2, 3], rollout=[4, 5]), cores(24), [4, 4, 4], id="GPUs of its own"),
    ],
)
def test_groups_in_turns_count_once(
    tmp_path: Path, overrides: tuple[str, ...], permitted: PermittedCores, expected: list[int]
) -> None:
    config = load(tmp_path, *overrides)
    assert threads(config, permitted) == expected
    assert crowding(resolve_run(config, None, permitted), permitted) is None


def test_too_many_threads_of_groups_in_turns_are_named_with_what_to_set(tmp_path: Path) -> None:
    on_cores = ("services.actor.cpus=[0]", "services.critic.cpus=[1, 2]", "services.rollout.cpus=[1, 2]")
    given = ("services.actor.threads=1", "services.critic.threads=4", "services.rollout.threads=3")
    assert crowding(load(tmp_path, *on_cores, *given), cores(8)) == (
        "1 x services.actor.threads (1) + 1 x services.critic.threads (4) = 5 threads compute on 3 permitted cores and"
        " wait for each other, which can take several times as long: set services.critic.threads to 2 and"
        " services.rollout.threads to 2"
    )
    lowered = (*given[:1], "services.critic.threads=2", "services.rollout.threads=2")
    assert crowding(load(tmp_path, *on_cores, *lowered), cores(8)) is None
