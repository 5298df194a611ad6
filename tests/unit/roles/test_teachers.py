"""The teachers in any group: equal numbers, each row by its own teacher, and requests that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from services.actor.role import ActorRole
from services.critic.role import CriticRole
from services.reward.role import RewardRole
from services.runtime.role import Role
from splitppo.batch import Batch
from splitppo.config.section import RoleName
from splitppo.v1 import teacher_pb2
from tests.support.adapters import OPTIONS, save_adapter
from tests.support.models import POSITIONS, VOCABULARY, save_policy
from tests.support.roles import command_of, context_of, ref_log_probs, rows_of, teacher_columns
from tests.support.seeds import shifted

pytestmark = pytest.mark.slow

ROLES: dict[RoleName, Any] = {"actor": ActorRole, "critic": CriticRole, "reward": RewardRole}
TEMPERATURE = 0.7
TOP = {"signal": "top_k", "top_k": 3}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a policy, a teacher, and another teacher of other sizes."""
    folder = tmp_path_factory.mktemp("models")
    save_policy(folder / "policy")
    save_policy(folder / "teacher", seed=7)
    save_policy(folder / "small", seed=8, hidden_size=16, num_hidden_layers=1, vocab_size=len(VOCABULARY) + 5)
    return folder


def build(models: Path, role: RoleName, host: RoleName, *, num_teachers: int = 1, **section: Any) -> Role:
    """A role of a run whose teachers are on the group of `host`; the policy's batching is another one."""
    several = {"models": {"b": str(models / "small")}} if num_teachers > 1 else {}
    teacher = {"model": str(models / "teacher"), "ppo_micro_batch_size_per_gpu": 3, **several, **section}
    context = context_of(
        role,
        rollout={"temperature": TEMPERATURE},
        actor={"model": str(models / "policy")},
        teacher=teacher,
        placement={"teacher": host},
    )
    built: Role = ROLES[role](context)
    return built


def rows(**columns: Any) -> Batch:
    rng = np.random.default_rng(shifted(0))
    draw = lambda low, high: [rng.integers(3, len(VOCABULARY), rng.integers(low, high)) for _ in range(8)]  # noqa: E731
    responses = draw(1, 7)
    responses[2] = responses[2][:0]
    return Batch.from_rows(prompts=draw(2, 9), responses=responses, **columns)


def by_transformers(model: Path) -> list[torch.Tensor]:
    """The log-probs of all tokens at each place of the responses in float64, one row at a time."""
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64).eval()
    found = []
    for prompt, response in zip(rows()["prompts"].rows(), rows()["responses"].rows(), strict=True):
        tokens = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))
        with torch.no_grad():
            log_softmax = torch.log_softmax(whole(tokens[None]).logits[0] / TEMPERATURE, -1)
        found.append(log_softmax[len(prompt) - 1 : -1])
    return found


def of_responses(log_softmax: list[torch.Tensor]) -> list[np.ndarray]:
    """The log-probs of the tokens that are in the responses."""
    return [
        log_softmax_TV.gather(-1, torch.from_numpy(response.astype(np.int64))[:, None])[:, 0].numpy()
        for log_softmax_TV, response in zip(log_softmax, rows()["responses"].rows(), strict=True)
    ]


def test_all_groups_compute_the_bits_of_a_direct_forward_pass(models: Path) -> None:
    found = [teacher_columns(build(models, role, role, **TOP), rows()) for role in ROLES]
    for columns in found[1:]:
        for name, column in columns.columns.items():
            assert column.values.tobytes() == found[0][name].values.tobytes(), name
    log_softmax = by_transformers(models / "teacher")
    assert list(found[0].columns) == ["teacher_log_probs", "teacher_top_ids", "teacher_top_log_probs"]
    expected = {
        "teacher_log_probs": of_responses(log_softmax),
        "teacher_top_ids": [each.topk(3).indices.flatten().numpy() for each in log_softmax],
        "teacher_top_log_probs": [each.topk(3).values.flatten().numpy() for each in log_softmax],
    }
    for name, wanted in expected.items():
        for row, values in zip(found[0][name].rows(), wanted, strict=True):
            np.testing.assert_allclose(row, values, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("signal", ["advantage", "reward", "loss"])
def test_only_top_k_has_columns_of_likely_tokens(models: Path, signal: str) -> None:
    assert list(teacher_columns(build(models, "critic", "critic", signal=signal), rows()).columns) == [
        "teacher_log_probs"
    ]


def test_a_teacher_that_is_the_policys_start_has_the_bits_of_the_reference(models: Path) -> None:
    placed = {"placement": {"teacher": "critic", "reference": "critic"}}
    policy = {"model": str(models / "policy")}
    role = CriticRole(context_of("critic", actor={**policy, "use_kl_loss": True}, teacher=policy, **placed))
    found = teacher_columns(role, rows())["teacher_log_probs"].values
    assert found.tobytes() == ref_log_probs(role, rows())["ref_log_probs"].values.tobytes()


def test_the_teacher_of_a_policy_with_adapters_is_no_base_of_it(models: Path, tmp_path: Path) -> None:
    adapter = {"lora_adapter_path": str(save_adapter(tmp_path / "adapter", models / "policy", "policy"))}
    actor: Any = ActorRole(
        context_of(
            "actor",
            rollout={"temperature": TEMPERATURE},
            actor={"model": str(models / "policy"), **OPTIONS, **adapter},
            teacher={"model": str(models / "teacher"), "ppo_micro_batch_size_per_gpu": 3},
            placement={"teacher": "actor"},
        )
    )
    expected = teacher_columns(build(models, "reward", "reward"), rows())["teacher_log_probs"].values
    assert teacher_columns(actor, rows())["teacher_log_probs"].values.tobytes() == expected.tobytes()


def test_only_known_ids_are_likely(models: Path) -> None:
    role = build(models, "reward", "reward", **TOP)
    assert teacher_columns(role, rows(), num_ids=20)["teacher_top_ids"].values.max() < 20
    assert teacher_columns(role, rows())["teacher_top_ids"].values.max() >= 20


# Several teachers.

NUMBERS = [0, 1, 1, 0, 1, 0, 0, 1]


@pytest.mark.parametrize("numbers", [NUMBERS, [1] * 8, None])
def test_each_row_goes_through_its_own_teacher(models: Path, numbers: list[int] | None) -> None:
    batch = rows() if numbers is None else rows(teachers=[[number] for number in numbers])
    found = teacher_columns(build(models, "critic", "critic", num_teachers=2, **TOP), batch)
    each = [by_transformers(models / name) for name in ("teacher", "small")]
    for row, number in enumerate(numbers or [0] * 8):
        one = each[number][row]
        expected = of_responses(each[number])[row]
        np.testing.assert_allclose(found["teacher_log_probs"].rows()[row], expected, atol=2e-5)
        top = one[:, : len(VOCABULARY)].topk(3)
        assert found["teacher_top_ids"].rows()[row].tolist() == top.indices.flatten().tolist()
        np.testing.assert_allclose(found["teacher_top_log_probs"].rows()[row], top.values.flatten().numpy(), atol=2e-5)


# Requests that are refused.


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("host", ROLES)
def test_another_group_says_who_has_it(models: Path, role: RoleName, host: RoleName) -> None:
    if role == host:
        return
    with pytest.raises(
        ValueError, match=rf"the {role} group holds no teacher: placement\.teacher is {host}, call that"
    ):
        teacher_columns(build(models, role, host), rows())


@pytest.mark.parametrize("role", ROLES)
def test_without_a_teacher_no_group_has_one(models: Path, role: RoleName) -> None:
    with pytest.raises(
        ValueError, match=f"the {role} group holds no teacher: neither teacher.model nor teacher.models is set"
    ):
        teacher_columns(build(models, role, "critic", model=""), rows())


@pytest.mark.parametrize("numbers", [[[0], [1], [2], [0]], [[0], [-1], [1], [0]]])
def test_numbers_of_teachers_that_make_no_sense_are_refused(models: Path, numbers: list[list[int]]) -> None:
    batch = Batch.from_rows(prompts=[[5]] * 4, responses=[[6]] * 4, teachers=numbers)
    with pytest.raises(ValueError, match=r"^column 'teachers': expected one number from 0 to 1 for each row$"):
        prepare(build(models, "critic", "critic", num_teachers=2), batch)


def prepare(role: Role, batch: Batch) -> None:
    """Checks rows as rank 0 does before other ranks hear of the command."""
    command = command_of(role, "ComputeTeacherLogProbs")
    command.rows.prepare(teacher_pb2.ComputeTeacherLogProbsRequest(), rows_of(command, batch))


@pytest.mark.parametrize("num_ids", [0, 2, len(VOCABULARY) + 1])
def test_a_number_of_ids_that_makes_no_sense_is_refused(models: Path, num_ids: int) -> None:
    sentence = rf"^num_ids: expected 3 \(teacher\.top_k\) to {len(VOCABULARY)}, got {num_ids}$"
    with pytest.raises(ValueError, match=sentence):
        teacher_columns(build(models, "critic", "critic", num_teachers=2, **TOP), rows(), num_ids=num_ids)
    teacher_columns(build(models, "critic", "critic"), rows(), num_ids=num_ids)  # nobody asks for likely tokens


def test_the_smallest_teacher_bounds_the_number_of_ids(models: Path) -> None:
    own = {"model": str(models / "small"), **TOP}
    teacher_columns(build(models, "critic", "critic", **own), rows(), num_ids=len(VOCABULARY) + 5)
    with pytest.raises(ValueError, match=f"to {len(VOCABULARY)}, got {len(VOCABULARY) + 5}"):
        teacher_columns(build(models, "critic", "critic", num_teachers=2, **TOP), rows(), num_ids=len(VOCABULARY) + 5)


@pytest.mark.parametrize("num_teachers", [1, 2])
@pytest.mark.parametrize(
    ("prompts", "responses", "sentence"),
    [
        ([[5], []], [[6], [7]], "the prompt of row 1 is empty"),
        ([[5], [5]], [[6], [len(VOCABULARY) + 9]], "column 'responses', row 1: expected a token id in"),
        ([[5], [5] * POSITIONS], [[6], [7]], f"has {POSITIONS + 1} tokens of prompt and response, the model takes"),
    ],
)
def test_rows_that_do_not_fit_a_teacher_are_refused(
    models: Path, num_teachers: int, prompts: Any, responses: Any, sentence: str
) -> None:
    role = build(models, "critic", "critic", num_teachers=num_teachers)
    with pytest.raises(ValueError, match=sentence):
        prepare(role, Batch.from_rows(prompts=prompts, responses=responses, teachers=[[0], [1]]))


def test_the_critic_keeps_its_weights_and_its_architecture(models: Path) -> None:
    alone, hosting = build(models, "critic", "actor"), build(models, "critic", "critic", num_teachers=2)
    teacher_columns(hosting, rows())
    assert hosting.compute_weights_digest() == alone.compute_weights_digest()
    assert (hosting.model, hosting.num_parameters) == (alone.model, alone.num_parameters)
