"""The section `teacher`, where `placement.teacher` puts the teachers, and what is refused in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from splitppo.config.phase_plan import phase_plan
from splitppo.config.resolve import resolve_run
from splitppo.config.sections.teacher import TeacherConfig
from splitppo.config.worker_digest import worker_digest, worker_sections
from splitppo.machine.cores import PermittedCores
from tests.support.configs import load, mistake
from tests.support.fake_services import make_config

TEACHER = "teacher.model=stronger"
RPP = "algorithm.adv_estimator=reinforce_plus_plus"
ONLY = (TEACHER, "teacher.only=true")
CORES = PermittedCores(frozenset({0}))


# The teachers.


def test_each_model_is_loaded_once_and_each_row_has_the_number_of_its_own() -> None:
    models = {"math": "m", "code": "c", "more code": "c", "chat": "general"}
    teacher = TeacherConfig(model="general", models=models)
    assert teacher.folders == ("general", "m", "c")
    numbers = {source: teacher.number_of(source) for source in (*models, "other")}
    assert numbers == {"math": 1, "code": 2, "more code": 2, "chat": 0, "other": 0}
    assert teacher.of("m").model == "m"


def test_without_a_model_for_all_others_a_row_may_have_no_teacher() -> None:
    teacher = TeacherConfig(models={"math": "m"})
    assert teacher.folders == ("m",)
    assert (teacher.number_of("math"), teacher.number_of("other")) == (0, None)


def test_without_a_teacher_nobody_hosts_one(tmp_path: Path) -> None:
    config = load(tmp_path)
    assert config.teacher.folders == ()
    assert config.teacher_host is None
    assert not load(tmp_path, "teacher.signal=top_k").teacher.is_in_loss
    assert "teacher" not in worker_sections(config, "critic")


@pytest.mark.parametrize(
    ("signal", "is_in_loss", "columns"),
    [
        ("advantage", False, ("teacher_log_probs",)),
        ("reward", False, ("teacher_log_probs",)),
        ("loss", True, ("teacher_log_probs",)),
        ("top_k", True, ("teacher_log_probs", "teacher_top_ids", "teacher_top_log_probs")),
    ],
)
def test_a_signal_says_what_the_teachers_compute_and_whether_the_actor_gets_it(
    tmp_path: Path, signal: str, is_in_loss: bool, columns: tuple[str, ...]
) -> None:
    config = load(tmp_path, TEACHER, f"teacher.signal={signal}", "algorithm.rollout_correction.bypass_mode=false")
    assert (config.teacher.is_in_loss, config.teacher.columns) == (is_in_loss, columns)
    assert config.needs_old_log_probs is not is_in_loss  # one update in each step needs none itself
    assert ("teacher" in worker_sections(config, "actor")) is is_in_loss


def test_log_probs_of_the_rollout_backend_serve_where_they_are_the_old_ones(tmp_path: Path) -> None:
    config = load(tmp_path, TEACHER, "algorithm.rollout_correction.bypass_mode=true")
    assert not config.needs_old_log_probs


# Placement.


@pytest.mark.parametrize(
    ("overrides", "host"),
    [
        ((), "critic"),
        ((RPP,), "actor"),
        ((RPP, "services.reward.threads=1"), "reward"),
        ((RPP, "reward_model.model=rm", "placement.reward_model=reward"), "reward"),
        (("reward_model.model=rm", "placement.reward_model=reward"), "critic"),
        (("placement.teacher=reward",), "reward"),
        (("placement.teacher=actor",), "actor"),
    ],
)
def test_teachers_go_where_they_compute_beside_generation(
    tmp_path: Path, overrides: tuple[str, ...], host: str
) -> None:
    config = load(tmp_path, TEACHER, *overrides)
    assert config.teacher_host == host
    assert ("reward" in config.roles) is ("reward" in (host, config.reward_model_host))
    for role in config.roles:
        assert ("teacher" in worker_sections(config, role)) is (role == host)


def test_a_reward_group_with_teachers_alone_has_the_batching_of_the_first_one(tmp_path: Path) -> None:
    config = load(tmp_path, TEACHER, "placement.teacher=reward", "teacher.ppo_micro_batch_size_per_gpu=3")
    model = config.model_of("reward")
    assert (model.model, model.ppo_micro_batch_size_per_gpu) == ("stronger", 3)
    both = load(tmp_path, TEACHER, "placement.teacher=reward", "reward_model.model=rm", "placement.reward_model=reward")
    assert both.model_of("reward").model == "rm"


def test_a_resumed_run_keeps_its_place_unless_another_is_given(tmp_path: Path) -> None:
    """Another group may have another number of ranks, and so other bits."""
    changes = {"teacher__model": "stronger", "algorithm__adv_estimator": "reinforce_plus_plus"}
    stored, resumed = make_config(tmp_path, **changes, services__reward__threads=1), make_config(tmp_path, **changes)
    assert (stored.teacher_host, resumed.teacher_host) == ("reward", "actor")
    assert resolve_run(resumed, stored, CORES).teacher_host == "reward"
    assert resolve_run(make_config(tmp_path, **changes, placement__teacher="actor"), stored, CORES).teacher_host == (
        "actor"
    )


def test_groups_that_others_start_resolve_it_themselves(tmp_path: Path) -> None:
    addresses = {f"services__{role}__address": f"localhost:{port}" for port, role in enumerate(("actor", "critic"), 1)}
    external = {"services__launch": "external", "teacher__model": "stronger", **addresses}
    stored = make_config(tmp_path, **external, placement__teacher="actor")
    assert resolve_run(make_config(tmp_path, **external), stored, CORES).teacher_host == "critic"


# The digest.


@pytest.mark.parametrize("override", ["teacher.signal=loss", "teacher.top_k=3", "teacher.model=other"])
def test_a_host_with_another_teacher_is_another_worker(tmp_path: Path, override: str) -> None:
    one, other = load(tmp_path, TEACHER), load(tmp_path, TEACHER, override)
    assert worker_digest(one, "critic") != worker_digest(other, "critic")


@pytest.mark.parametrize("override", ["teacher.coef=3", "teacher.kl_ctrl=adaptive", "teacher.kl_target=3"])
def test_the_weight_is_the_controllers(tmp_path: Path, override: str) -> None:
    signal = "teacher.signal=loss"
    one, other = load(tmp_path, TEACHER, signal), load(tmp_path, TEACHER, signal, override)
    for role in ("actor", "critic"):
        assert worker_digest(one, role) == worker_digest(other, role)


def test_an_actor_knows_the_signal_of_its_loss(tmp_path: Path) -> None:
    digests = {
        worker_digest(load(tmp_path, TEACHER, f"teacher.signal={signal}", "teacher.loss_type=mse"), "actor")
        for signal in ("advantage", "reward", "loss", "top_k")
    }
    assert len(digests) == 3  # advantage and reward are the controller's
    bounded = load(tmp_path, TEACHER, "teacher.signal=loss", "teacher.max_abs=3", "teacher.loss_type=mse")
    assert worker_digest(bounded, "actor") not in digests


# Phases.


def test_a_phase_has_a_weight_of_its_own_or_an_adaptive_one(tmp_path: Path) -> None:
    phases = [
        {"from_step": 1, "to_step": 2, "teacher_coef": 0.25},
        {"from_step": 3, "to_step": 4, "teacher_coef": "adaptive"},
    ]
    config = make_config(tmp_path, run__total_steps=6, teacher__model="t", teacher__coef=0.5, algorithm__phases=phases)
    teachers = [config.at_step(step).teacher for step in (1, 3, 5)]
    assert [(teacher.kl_ctrl, teacher.coef) for teacher in teachers] == [
        ("fixed", 0.25),
        ("adaptive", 0.5),
        ("fixed", 0.5),
    ]
    assert worker_digest(config, "actor") == worker_digest(make_config(tmp_path, teacher__model="t"), "actor")
    lines = phase_plan(config)
    assert [line.partition("teacher coef ")[2] for line in lines] == ["0.25", "adaptive", "0.5"]


@pytest.mark.parametrize(
    ("coef", "found"), [("-0.5", "-0.5"), ("fast", "'fast'"), (".inf", "inf"), (".nan", "nan"), ("true", "True")]
)
def test_a_weight_of_a_phase_that_makes_no_sense_is_refused(tmp_path: Path, coef: str, found: str) -> None:
    phase = f"algorithm.phases=[{{from_step: 1, teacher_coef: {coef}}}]"
    sentence = f"teacher_coef': expected at least 0, or adaptive, got {found}"
    assert sentence in mistake(tmp_path, TEACHER, phase)


def test_a_weight_of_a_phase_needs_a_teacher(tmp_path: Path) -> None:
    sentence = mistake(tmp_path, "algorithm.phases=[{from_step: 1, teacher_coef: 0.5}]")
    assert "teacher_coef is of no use without teacher.model: set teacher.model, or drop teacher_coef" in sentence


# What is refused.


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (("teacher.coef=-1",), "key 'teacher.coef': input should be greater than or equal to 0, got -1"),
        (("teacher.signal=rewards",), "key 'teacher.signal': input should be 'advantage', 'reward', 'loss' or 'top_k'"),
        (("teacher.top_k=0",), "key 'teacher.top_k': input should be greater than or equal to 1, got 0"),
        (("teacher.max_abs=0",), "key 'teacher.max_abs': input should be greater than 0, got 0"),
        (("teacher.log_prob_min=0",), "key 'teacher.log_prob_min': input should be less than 0, got 0"),
        (("teacher.kl_target=0",), "key 'teacher.kl_target': input should be greater than 0, got 0"),
        (("teacher.kl_horizon=0",), "key 'teacher.kl_horizon': input should be greater than or equal to 1, got 0"),
        (
            ("teacher.loss_type=k1",),
            "key 'teacher.loss_type': the gradient of k1 does not depend on the teacher: expected another estimator,"
            " or k1+",
        ),
        (
            ("teacher.models={math: ''}",),
            "key 'teacher.models': expected a model for each data_source, got an empty text",
        ),
        (
            ("teacher.only=true",),
            "key 'teacher.only': there is no teacher: set teacher.model or teacher.models",
        ),
        (
            (TEACHER, RPP, "placement.teacher=critic"),
            "placement.teacher is critic, but algorithm.adv_estimator reinforce_plus_plus needs no values and starts"
            " no critic: set placement.teacher to actor or reward, or take an estimator with a critic",
        ),
        (
            ONLY,
            "teacher.only has no scores, which algorithm.adv_estimator gae needs: set algorithm.adv_estimator to"
            " reinforce_plus_plus, or teacher.signal to reward",
        ),
        (
            (*ONLY, "algorithm.adv_estimator=remax"),
            "teacher.only has no scores, which algorithm.adv_estimator remax needs: set algorithm.adv_estimator to"
            " reinforce_plus_plus, or teacher.signal to reward",
        ),
        (
            (
                *ONLY,
                "teacher.signal=reward",
                "algorithm.adv_estimator=gdpo",
                "algorithm.gdpo_reward_keys=[right]",
            ),
            "teacher.only has no scores, which algorithm.adv_estimator gdpo needs: set algorithm.adv_estimator to"
            " reinforce_plus_plus",
        ),
        (
            (*ONLY, RPP, "algorithm.filter_groups.enable=true", "rollout.n=2"),
            "teacher.only has no scores, by which algorithm.filter_groups compares: set enable to false",
        ),
        (
            (*ONLY, RPP, "reward_model.model=rm", "placement.reward_model=reward"),
            "teacher.only has no scores: leave reward_model.model out, or set teacher.only to false",
        ),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path: Path, overrides: tuple[str, ...], sentence: str) -> None:
    assert sentence in mistake(tmp_path, *overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        (*ONLY, RPP),
        (*ONLY, "algorithm.adv_estimator=grpo", "rollout.n=2"),
        (*ONLY, "teacher.signal=reward"),  # a critic learns what the teacher will say
        (*ONLY, RPP, "teacher.signal=top_k"),
        ("teacher.models={math: m}", "teacher.only=true", RPP),
        (TEACHER, "teacher.loss_type=k1+"),
        (TEACHER, "teacher.max_abs=null", "teacher.log_prob_min=-20"),
    ],
)
def test_what_fits_together_is_taken(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    assert load(tmp_path, *overrides).teacher_host


# The columns of top_k.


@pytest.mark.parametrize(
    ("host", "key", "hint"),
    [
        ("critic", "max_batch_bytes", ", or set placement.teacher to actor, where they need not travel"),
        ("reward", "max_batch_bytes", ", or set placement.teacher to actor, where they need not travel"),
        ("actor", "max_held_bytes", ""),
    ],
)
def test_columns_of_likely_tokens_must_fit_into_a_service(tmp_path: Path, host: str, key: str, hint: str) -> None:
    sizes = ("data.train_batch_size=2048", "data.max_response_length=4096", "teacher.signal=top_k", "teacher.top_k=64")
    num_bytes = 2048 * 4096 * (64 * 8 + 4)
    fits = f"services.max_batch_bytes={num_bytes}"

    def told(*limits: str) -> str:
        return mistake(tmp_path, TEACHER, *sizes, f"placement.teacher={host}", *limits)

    load(tmp_path, TEACHER, *sizes, f"placement.teacher={host}", fits)
    less = f"services.{key}={num_bytes - 1}"
    small = () if key == "max_batch_bytes" else (f"services.max_batch_bytes={num_bytes - 1}",)
    assert told(less, *small) == (
        f"teacher.top_k (64) makes up to {num_bytes} bytes for 2048 responses of 4096 tokens, more than services.{key}"
        f" ({num_bytes - 1}): lower teacher.top_k or raise services.{key}{hint}"
    )
