"""The scorers of a data source: names, defaults, weights, and the sentences about those that cannot be used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from controller.conversations.conversation import Conversation
from rewards.manager import weighted_sum
from rewards.returned import LARGEST, score_and_fields
from rewards.samples import Failure, Scored
from rewards.terms import check_scorers, scored_sources, terms_of
from splitppo.config import ConfigError, RewardConfig
from splitppo.config.sections.reward import Term
from tests.support.configs import load, mistake


def config(**keys: Any) -> RewardConfig:
    return RewardConfig.model_validate(keys)


def scorers(**named: list[str]) -> dict[str, Any]:
    return {"scorers": {source: [{"name": name} for name in names] for source, names in named.items()}}


JUDGE = {"judge": {"url": "http://127.0.0.1:1/v1", "model": "m"}}


def names(reward: RewardConfig, data_source: str) -> list[str]:
    return [term.name for term in terms_of(reward, data_source)]


def test_without_scorers_the_table_decides_and_a_users_function_judges_all() -> None:
    assert terms_of(config(), "openai/gsm8k/main") == (Term(name="openai/gsm8k", weight=1.0),)
    assert names(config(custom_function_path="mine.py"), "openai/gsm8k") == ["custom"]


def test_scorers_are_named_for_a_data_source_its_parts_or_all_the_others() -> None:
    reward = config(**scorers(math=["math", "judge"], default=["judge"]), **JUDGE)
    assert names(reward, "math/algebra") == ["math", "judge"]
    assert names(reward, "gsm8k") == ["judge"]
    assert names(config(**scorers(math=["math", "judge"]), **JUDGE), "gsm8k") == ["gsm8k"]
    mixed = config(custom_function_path="mine.py", **scorers(math=["math", "custom"]))
    assert names(mixed, "math") == ["math", "custom"]
    assert names(mixed, "essays") == ["custom"]


def test_sources_are_scored_that_have_any_scorer() -> None:
    sources = ["essays", "math", "poems"]
    assert scored_sources(config(), sources) == {"math"}
    assert scored_sources(config(**scorers(poems=["judge"]), **JUDGE), sources) == {"math", "poems"}
    assert scored_sources(config(**scorers(default=["judge"]), **JUDGE), sources) == set(sources)


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        (
            scorers(math=["gsm8"]),
            "key 'reward.scorers': math asks for 'gsm8', which is no scorer (did you mean gsm8k?)",
        ),
        (scorers(math=["xyz"]), "key 'reward.scorers': math asks for 'xyz', which is no scorer; known: gsm8k, "),
        (scorers(math=["custom"]), "math asks for 'custom', but reward.custom_function_path is not set"),
        (scorers(other=["judge"]), "other asks for 'judge', but reward.judge.url is not set"),
        (
            {**scorers(math=["judge"]), "judge": {**JUDGE["judge"], "prompt_template": "/nowhere"}},
            "judge.prompt_template",
        ),
        ({**scorers(math=["judge"]), "judge": {**JUDGE["judge"], "api_key_env": "NO_SUCH_KEY"}}, "judge.api_key_env"),
    ],
)
def test_a_scorer_that_is_not_there_costs_one_sentence(keys: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_scorers(config(**keys), ["math"])
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("reward.scorers={math: []}", "key 'reward.scorers.math': expected at least one scorer, got []"),
        ("reward.scorers={math: [{name: a}, {name: a}]}", "expected each scorer once, 'a' stands there 2 times"),
        ("reward.scorers={math: [{weight: 1}]}", "key 'reward.scorers.math.0.name' is missing"),
        ("reward.scorers={math: [{name: a, weight: x}]}", "'reward.scorers.math.0.weight': "),
        ("reward.custom_function_kwargs={a: 1}", "custom_function_kwargs is given, but no custom_function_path"),
        ("reward.max_error_rate=2", "key 'reward.max_error_rate': "),
        ("reward.overlong_buffer={enable: true}", "key 'reward.overlong_buffer': enable needs len, in tokens"),
        (
            "reward.overlong_buffer={enable: true, len: 100000}",
            "reward.overlong_buffer.len (100000) must not exceed data.max_response_length (",
        ),
        (
            "reward.shaping.clip_range=[5, -5]",
            "clip_range': expected a number, then a higher one, got [5,",
        ),
        ("reward.shaping.scale=0", "key 'reward.shaping.scale': "),
        ("reward.judge={url: 'http://x/v1'}", "key 'reward.judge': url is given, but not model"),
        ("reward.judge={model: m}", "key 'reward.judge': model is given, but not url"),
        ("reward.judge={url: 'localhost:80', model: m}", "key 'reward.judge.url': expected http://HOST:PORT/v1"),
        ("reward.judge={url: 'http://me:pass@x', model: m}", "key 'reward.judge.url': expected no password"),
        (
            "reward.judge.score_pattern='Score: (.*'",
            "'reward.judge.score_pattern': 'Score: (.*' is not a regular expression",
        ),
        ("reward.judge.score_pattern='Score'", "expected one group, around the mark, found 0"),
        ("reward.judge.score_range=[1, 1]", "'reward.judge.score_range': expected a number, then a higher one"),
    ],
)
def test_a_mistake_in_the_section_costs_one_sentence(tmp_path: Path, override: str, sentence: str) -> None:
    assert sentence in mistake(tmp_path, override)


# The sum.


def test_one_scorer_of_weight_1_is_left_as_it_is() -> None:
    scored = Scored(0.5, {"acc": True})
    assert weighted_sum((Term(name="math"),), [scored]) is scored


def test_scores_are_added_with_their_weights_and_each_is_kept() -> None:
    terms = (Term(name="math", weight=1.0), Term(name="judge", weight=0.25))
    scored = weighted_sum(terms, [Scored(1.0, {"acc": True, "pred": "7"}), Scored(0.8, {"pred": "x", "why": "short"})])
    assert scored.score == pytest.approx(1.2)
    assert scored.extra == {"acc": True, "pred": "7", "why": "short", "math_score": 1.0, "judge_score": 0.8}
    assert scored.failure is None


def test_a_weight_alone_counts_too() -> None:
    assert weighted_sum((Term(name="math", weight=-2.0),), [Scored(0.5)]) == Scored(-1.0, {"math_score": 0.5})


def test_a_scorer_that_failed_adds_nothing_and_the_sample_counts_as_failed() -> None:
    terms = tuple(Term(name=name) for name in ("math", "judge", "custom"))
    failed = [Scored(0.0, failure=kind, message=kind.name) for kind in (Failure.TIMEOUT, Failure.ERROR)]
    scored = weighted_sum(terms, [Scored(1.0), *failed])
    assert (scored.score, scored.failure, scored.message) == (1.0, Failure.TIMEOUT, "TIMEOUT")


def test_the_section_reads_verls_keys(tmp_path: Path) -> None:
    keys = "{enable: true, len: 4, penalty_factor: 1.0, log: true}"
    assert load(tmp_path, f"reward.overlong_buffer={keys}").reward.overlong_buffer.len == 4


def test_sums_of_the_largest_scores_of_tokens_turns_and_scorers_are_finite_in_float32() -> None:
    score, _ = score_and_fields(LARGEST)
    terms = [Term(name=name, weight=1e6) for name in ("gsm8k", "custom", "judge")]
    summed = weighted_sum(terms, [Scored(score, token_scores=[score] * 10_000)] * 3)
    talk = Conversation(turn_rewards=[score] * 1000, turn_ends=range(1000), end_score=score)
    assert np.isfinite(np.float32(talk.added_to(summed, 10_000).total))
    with pytest.raises(ValueError, match=r"returned 3.4e\+38; expected a number from -1e\+12 to 1e\+12"):
        score_and_fields({"score": 3.4e38})
