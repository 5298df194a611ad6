"""The marks of keys: every key has its marks, and the code that reads them agrees with them."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from splitppo.config import Config
from splitppo.config.keys import KEYS, may_change, step_work
from splitppo.config.resolve import OPEN_KEYS
from splitppo.config.section import Key, Section
from splitppo.config.worker_digest import worker_sections
from tests.support.configs import load
from tools.docs import descriptions

# With every model that a run can have, each where it counts.
PLACEMENTS = (
    ("actor.use_kl_loss=true", "placement.reference=critic", "reward_model.model=rm"),
    ("reward_model.model=rm", "placement.reward_model=reward"),
    ("teacher.model=stronger", "teacher.signal=top_k"),
)


def section_of(path: str) -> type[Section]:
    section: type[Section] = Config
    for name in path.split(".")[:-1]:
        annotation = section.model_fields[name].annotation
        assert annotation is not None
        section = annotation
    return section


def test_every_section_says_what_its_keys_are() -> None:
    for name, field in Config.model_fields.items():
        [marks] = [mark for mark in field.metadata if isinstance(mark, Key)]
        assert None not in [getattr(marks, mark.name) for mark in fields(Key)], name


def test_every_key_has_a_description_and_all_marks() -> None:
    for path, marks in KEYS.items():
        if not path:
            continue
        section, name = section_of(path), path.rpartition(".")[2]
        field = section.model_fields[name]
        is_section = isinstance(field.annotation, type) and issubclass(field.annotation, Section)
        assert is_section or descriptions(section).get(name), path
        assert None not in (marks.may_change, marks.shapes_worker, marks.is_work), path


def test_a_key_shapes_a_worker_exactly_where_it_is_in_a_digest(tmp_path: Path) -> None:
    short = {"seed": "run.seed", "reference": ""}  # the latter is no key
    names: set[str] = set()
    for placement in PLACEMENTS:
        config = load(tmp_path, *placement)
        for role in config.roles:
            for name, value in worker_sections(config, role).items():
                inner = value if isinstance(value, dict) and name in Config.model_fields else None
                names |= {f"{name}.{key}" for key in inner} if inner is not None else {short.get(name, name)}
    of_conversations = "rollout.multi_turn.max_context_length"  # the others are the controller's alone
    tops = {path for path in KEYS if path.count(".") == 1 or path == of_conversations}
    assert names - {""} == {path for path in tops if KEYS[path].shapes_worker}


@pytest.mark.parametrize(
    ("path", "is_free"),
    [
        ("run.schedule", True),
        ("checkpoint.weights_save_freq", True),
        ("checkpoint.max_writers", True),
        ("run.seed", False),
        ("actor.lr", True),
        ("critic.lr", True),
        ("critic.gradient_checkpointing", True),
        ("critic.compile", True),
        ("reward_model.use_remove_padding", True),
        ("teacher.use_remove_padding", True),
        ("teacher.coef", False),
        ("teacher.model", False),
        ("teacher.models.math", False),
        ("teacher.signal", False),
        ("teacher.loss_type", False),
        ("actor.betas", False),
        ("rollout.max_batch_size", True),
        ("rollout.vllm.max_num_seqs", False),
        ("reward.timeout_s", True),
        ("reward.judge.url", True),
        ("reward.judge.model", False),
        ("reward.code.num_sandboxes", True),
        ("reward.code.continuous", False),
        ("reward_model.coef.hh", False),  # inside the value of a key
        ("services.security.tls", True),
        ("debug.failpoints.actor.update", True),
        ("data.forgotten", False),  # of another version
        ("forgotten.key", False),
    ],
)
def test_a_resumed_run_may_have_another_value_of_some_keys(path: str, is_free: bool) -> None:
    assert may_change(path) is is_free


@pytest.mark.parametrize(
    ("override", "is_other"),
    [
        ("data.train_batch_size=16", True),
        ("rollout.n=2", True),
        ("actor.ppo_epochs=2", True),
        ("critic.dtype=bf16", True),
        ("reward_model.model=rm", True),
        ("teacher.model=stronger", True),
        ("algorithm.gamma=0.5", True),
        ("actor.lr=1", False),
        ("rollout.stream_groups=2", False),
        ("services.actor.num_processes=2", False),
    ],
)
def test_the_work_of_a_step_is_what_it_computes_wherever_it_does(tmp_path: Path, override: str, is_other: bool) -> None:
    assert (step_work(load(tmp_path)) != step_work(load(tmp_path, override))) is is_other


def test_a_loaded_configuration_has_no_open_key_and_none_counts_as_given(tmp_path: Path) -> None:
    config = load(tmp_path)
    for key in OPEN_KEYS:
        assert key.of(config) not in (None, "", "auto"), key
        assert not key.is_given(config), key
