"""The frozen reference in either group: equal numbers, and a refusal by the group that does not host it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from services.actor.role import ActorRole
from services.critic.role import CriticRole
from services.runtime.role import Role
from splitppo.batch import Batch
from tests.support.adapters import OPTIONS, save_adapter
from tests.support.models import VOCABULARY, save_policy
from tests.support.roles import call, context_of, log_probs_request, ref_log_probs
from tests.support.seeds import shifted

ROLES: dict[Literal["actor", "critic"], Any] = {"actor": ActorRole, "critic": CriticRole}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("models") / "policy")


def build(role: Literal["actor", "critic"], model: Path, host: str, *, use_kl_loss: bool = True, **actor: Any) -> Role:
    """A role of a run whose reference is placed on `host`; the critic's own settings are others than the actor's."""
    context = context_of(
        role,
        rollout={"temperature": 0.7},
        actor={"model": str(model), "use_kl_loss": use_kl_loss, "ppo_micro_batch_size_per_gpu": 3, **actor},
        critic={"ppo_micro_batch_size_per_gpu": 2},
        placement={"reference": host},
    )
    built: Role = ROLES[role](context)
    return built


def rows() -> Batch:
    rng = np.random.default_rng(shifted(0))
    draw = lambda low, high: [rng.integers(3, len(VOCABULARY), rng.integers(low, high)) for _ in range(8)]  # noqa: E731
    return Batch.from_rows(prompts=draw(2, 9), responses=draw(1, 7))


def test_both_groups_compute_the_same_bits(model: Path) -> None:
    actors, critics = (ref_log_probs(build(role, model, role), rows()) for role in ROLES)
    assert list(actors.columns) == ["ref_log_probs"]
    assert actors["ref_log_probs"].values.tobytes() == critics["ref_log_probs"].values.tobytes()
    assert actors["ref_log_probs"].lengths.tolist() == rows()["responses"].lengths.tolist()


@pytest.mark.parametrize(("role", "host"), [("actor", "critic"), ("critic", "actor")])
def test_the_other_group_says_who_has_it(model: Path, role: Literal["actor", "critic"], host: str) -> None:
    sentence = f"the {role} group holds no reference: placement.reference is {host}, call that group"
    with pytest.raises(ValueError, match=sentence):
        ref_log_probs(build(role, model, host), rows())


@pytest.mark.parametrize("role", ROLES)
def test_without_kl_no_group_has_one(model: Path, role: Literal["actor", "critic"]) -> None:
    sentence = f"the {role} group holds no reference: neither algorithm.use_kl_in_reward nor actor.use_kl_loss is set"
    with pytest.raises(ValueError, match=sentence):
        ref_log_probs(build(role, model, "critic", use_kl_loss=False), rows())


def test_rows_that_do_not_fit_the_model_are_refused(model: Path) -> None:
    critic = build("critic", model, "critic")
    with pytest.raises(ValueError, match="the prompt of row 1 is empty"):
        ref_log_probs(critic, Batch.from_rows(prompts=[[5], []], responses=[[6], [7]]))


def test_the_critic_keeps_its_weights_and_its_architecture(model: Path) -> None:
    alone, hosting = build("critic", model, "actor"), build("critic", model, "critic")
    ref_log_probs(hosting, rows())
    assert hosting.compute_weights_digest() == alone.compute_weights_digest()
    assert (hosting.model, hosting.num_parameters) == (alone.model, alone.num_parameters)


def test_the_reference_of_a_policy_with_adapters_is_its_base_and_no_second_model(model: Path, tmp_path: Path) -> None:
    adapter = {"lora_adapter_path": str(save_adapter(tmp_path / "adapter", model, "policy"))}
    expected = ref_log_probs(build("critic", model, "critic"), rows())
    actor: Any = build("actor", model, "actor", **OPTIONS, **adapter)
    before = actor.compute_weights_digest()
    found = ref_log_probs(actor, rows())
    assert found["ref_log_probs"].values.tobytes() == expected["ref_log_probs"].values.tobytes()
    assert actor._frozen.num_parameters == 0
    assert actor.compute_weights_digest() == before
    own = call(actor, "ComputeLogProbs", log_probs_request(), rows()).columns
    assert own["old_log_probs"].values.tobytes() != expected["ref_log_probs"].values.tobytes()
