"""Estimators in the configuration: the keys that each needs, and one sentence per mistake."""

from pathlib import Path

import pytest

from splitppo.config.batch_plan import batch_plan
from splitppo.config.subsections.estimator import NEEDS
from tests.support.configs import load, mistake

GROUPS = [name for name, needs in NEEDS.items() if "groups_B" in needs]
FILE = """
raise RuntimeError("nobody who reads a configuration runs this file")

def with_values(rewards_BT, values_BT, mask_BT, *, gamma, mine=1): ...

def alone(rewards_BT, mask_BT): ...

def compares(rewards_BT, mask_BT, groups_B): ...

def by_turn(rewards_BT, mask_BT, turns_BT, *, turn_gamma): ...

def wants_more(rewards_BT, colour, *, taste): ...
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(FILE)
    return tmp_path / "mine.py"


def test_estimators_that_compare_samples_are_refused_with_one_sample(tmp_path: Path) -> None:
    assert set(NEEDS) - set(GROUPS) == {"gae", "reinforce_plus_plus", "remax"}
    for name in set(GROUPS) - {"grpo", "rloo"}:
        keys = [f"algorithm.adv_estimator={name}"]
        keys += ["algorithm.gdpo_reward_keys=[acc]"] if name == "gdpo" else []
        assert mistake(tmp_path, *keys) == (
            f"algorithm.adv_estimator {name} compares the samples of a prompt: expected rollout.n of at least 2, got 1"
        )
        assert load(tmp_path, *keys, "rollout.n=2").roles == ("actor",)


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_without_a_second_sample_the_advantages_are_the_scores_as_the_plan_says(tmp_path: Path, name: str) -> None:
    config = load(tmp_path, f"algorithm.adv_estimator={name}")
    assert f"{name}: a prompt has one sample to compare: advantages are the scores" in batch_plan(config)


@pytest.mark.parametrize("name", ["gae", "reinforce_plus_plus", "remax"])
def test_the_others_take_one_sample(tmp_path: Path, name: str) -> None:
    config = load(tmp_path, f"algorithm.adv_estimator={name}")
    assert config.uses_critic == (name == "gae")
    assert config.algorithm.needs_greedy_scores == (name == "remax")


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["adv_estimator=gpro"],
            f"key 'algorithm.adv_estimator': expected one of {', '.join(NEEDS)}, got 'gpro' (did you mean grpo?)",
        ),
        (["adv_estimator=gdpo"], "key 'algorithm': adv_estimator gdpo learns from the components of the scores, but"),
        (["gdpo_reward_keys=[acc]"], "key 'algorithm': adv_estimator gae reads no components, but there are"),
        (
            ["adv_estimator=gdpo", "gdpo_reward_keys=[a, b]", "gdpo_reward_weights=[1]"],
            "key 'algorithm.gdpo_reward_weights': expected one for each of the 2 gdpo_reward_keys, got 1",
        ),
        (
            ["adv_estimator=gdpo", "gdpo_reward_keys=[a]", "use_kl_in_reward=true"],
            "key 'algorithm': gdpo learns from the components of the scores and not from rewards, so use_kl_in_reward",
        ),
        (["lam_critic=1.5"], "key 'algorithm.lam_critic': input should be less than or equal to 1, got 1.5"),
        (["adaptive_lam_alpha=0"], "key 'algorithm.adaptive_lam_alpha': input should be greater than 0, got 0"),
        (["turn_lam=1.5"], "key 'algorithm.turn_lam': input should be less than or equal to 1, got 1.5"),
        (
            ["adv_estimator=grpo", "turn_gamma=0.9"],
            "key 'algorithm.turn_gamma': adv_estimator grpo does not read it: set it to null, or use gae",
        ),
        (
            ["adv_estimator=reinforce_plus_plus", "turn_lam=0.9"],
            "key 'algorithm.turn_lam': adv_estimator reinforce_plus_plus does not read it",
        ),
        (["custom_path=none.py"], "key 'algorithm.custom_path': there is no file none.py"),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path: Path, overrides: list[str], sentence: str) -> None:
    assert mistake(tmp_path, "rollout.n=2", *(f"algorithm.{override}" for override in overrides)).startswith(sentence)


def test_what_a_function_of_a_file_takes_says_what_the_run_needs(tmp_path: Path, file: Path) -> None:
    def roles(name: str) -> tuple[str, ...]:
        return load(tmp_path, f"algorithm.custom_path={file}", f"algorithm.adv_estimator={name}").roles

    assert roles("with_values") == ("actor", "critic")
    assert roles("alone") == ("actor",)
    sentence = mistake(tmp_path, f"algorithm.custom_path={file}", "algorithm.adv_estimator=compares")
    assert sentence.startswith("algorithm.adv_estimator compares compares the samples of a prompt: expected rollout.n")


def test_a_function_of_a_file_has_the_rates_between_turns_that_it_takes(tmp_path: Path, file: Path) -> None:
    mine = [f"algorithm.custom_path={file}", "algorithm.adv_estimator=by_turn"]
    assert load(tmp_path, *mine, "algorithm.turn_gamma=0.5").algorithm.turn_gamma == 0.5
    sentence = (
        "key 'algorithm.turn_lam': adv_estimator by_turn does not read it: set it to null, or let the function take it"
    )
    assert mistake(tmp_path, *mine, "algorithm.turn_lam=0.5").startswith(sentence)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("alon", "has no function 'alon' (did you mean alone?)"),
        ("gae", "has no function 'gae'"),
        ("wants_more", "takes colour, taste, which no estimator is given; expected some of rewards_BT, mask_BT"),
    ],
)
def test_a_function_that_does_not_fit_is_refused_without_running_the_file(
    tmp_path: Path, file: Path, name: str, sentence: str
) -> None:
    said = mistake(tmp_path, f"algorithm.custom_path={file}", f"algorithm.adv_estimator={name}")
    assert said.startswith("key 'algorithm.adv_estimator': ")
    assert sentence in said


def test_a_file_that_is_not_python_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def broken(:")
    sentence = mistake(tmp_path, f"algorithm.custom_path={tmp_path / 'mine.py'}", "algorithm.adv_estimator=broken")
    assert sentence.startswith(
        f"key 'algorithm.custom_path': {tmp_path / 'mine.py'} is not a Python file: SyntaxError:"
    )


def test_the_critics_lambda_is_another_one_in_its_warm_up(tmp_path: Path) -> None:
    config = load(tmp_path, "critic.warmup_steps=2", "algorithm.lam=0.9", "algorithm.lam_critic_warmup=1")
    assert [config.at_step(step).algorithm.lam_critic for step in (1, 2, 3)] == [1.0, 1.0, None]
    config = load(tmp_path, "critic.warmup_steps=2", "algorithm.lam_critic=0.95")
    assert [config.at_step(step).algorithm.lam_critic for step in (2, 3)] == [0.95, 0.95]
