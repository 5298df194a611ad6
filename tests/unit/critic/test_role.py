"""The critic's commands on one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.critic.role import CriticRole
from services.engine import export
from splitppo.batch import Batch
from splitppo.v1 import batch_pb2, critic_pb2
from tests.support.engines import draw_new_head
from tests.support.models import VOCABULARY, save_policy
from tests.support.roles import call, context_of
from tests.support.seeds import shifted


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("models") / "policy")


def build(model: Path, **critic: Any) -> CriticRole:
    section = {"lr": 1e-2, "ppo_mini_batch_size": 4, **critic}
    return CriticRole(context_of("critic", actor={"model": str(model)}, critic=section))


def update_request(step: int, **changes: Any) -> critic_pb2.CriticUpdateRequest:
    slot = batch_pb2.Slot(kind=batch_pb2.SLOT_KIND_EXPERIENCE, step=step)
    return critic_pb2.CriticUpdateRequest(slot=slot, **changes)


def rows() -> Batch:
    rng = np.random.default_rng(shifted(0))
    draw = lambda low, high: [rng.integers(3, len(VOCABULARY), rng.integers(low, high)) for _ in range(8)]  # noqa: E731
    return Batch.from_rows(prompts=draw(2, 9), responses=draw(1, 7))


def with_targets(role: CriticRole, batch: Batch) -> Batch:
    values = call(role, "ComputeValues", critic_pb2.ComputeValuesRequest(), batch).columns
    assert values is not None
    returns = Batch.from_rows(returns=[np.full(length, 0.7) for length in batch["responses"].lengths])
    return batch.merge(values).merge(returns)


def test_there_is_one_value_per_response_token_and_it_does_not_see_the_token(model: Path) -> None:
    role, batch = build(model), rows()
    draw_new_head(role._engine)
    other = batch.merge(
        Batch.from_rows(responses=[[*row[:-1], (row[-1] + 1) % 40] for row in batch["responses"].rows()])
    )

    first = call(role, "ComputeValues", critic_pb2.ComputeValuesRequest(), batch).columns
    second = call(role, "ComputeValues", critic_pb2.ComputeValuesRequest(), other).columns

    assert first is not None
    assert second is not None
    assert first["values"].values.all()
    np.testing.assert_array_equal(first["values"].lengths, batch["responses"].lengths)
    np.testing.assert_allclose(first["values"].values, second["values"].values, atol=1e-6)


def test_ids_that_a_smaller_critic_lacks_are_read_as_its_last_and_those_of_prompts_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    last = len(VOCABULARY) - 1
    policy = save_policy(tmp_path / "policy", vocab_size=last + 11)
    section = {"model": str(save_policy(tmp_path / "smaller")), "ppo_mini_batch_size": 2}
    role = CriticRole(context_of("critic", actor={"model": str(policy)}, critic=section))
    sampled = [[5, 6], [7, last + 9, 8]]
    batch = Batch.from_rows(prompts=[[3, 4], [5]], responses=sampled)
    read = Batch.from_rows(prompts=[[3, 4], [5]], responses=[[5, 6], [7, last, 8]])
    digests = []
    for rows in (batch, read):
        learned = with_targets(role, rows)
        values = learned["values"].values.tobytes()
        call(role, "Update", update_request(1), learned)
        digests.append((values, role.compute_weights_digest()))
        role.load_checkpoint(None)
    assert digests[0] == digests[1]
    assert (
        f"1 sampled ids are none of this critic, such as {last + 9} in row 1: it reads them as its last" in caplog.text
    )
    assert [row.tolist() for row in batch["responses"].rows()] == sampled
    for wrong in ({"prompts": [[last + 1], [5]]}, {"responses": [[-1, 6], [7]]}, {"responses": [[last + 11], [7]]}):
        with pytest.raises(ValueError, match=r"row 0: expected a token id in"):
            call(role, "ComputeValues", critic_pb2.ComputeValuesRequest(), batch.merge(Batch.from_rows(**wrong)))


def test_updates_bring_the_values_to_the_returns(model: Path) -> None:
    role, batch = build(model, ppo_epochs=4), rows()

    losses = []
    for step in range(1, 9):
        metrics = call(role, "Update", update_request(step), with_targets(role, batch)).metrics
        losses.append(metrics["critic/vf_loss"])

    assert losses[-1] < 0.1 * losses[0]
    names = {f"critic/{name}" for name in ("vf_loss", "vf_clipfrac", "vpred_mean", "grad_norm", "lr")}
    assert names <= set(metrics)
    assert not any("mfu" in name for name in metrics)  # on a CPU
    assert metrics["critic/vpred_mean"] == pytest.approx(0.7, abs=0.2)


def test_two_runs_give_the_same_weights_bit_for_bit(model: Path) -> None:
    role, digests = build(model), []
    for _ in range(2):
        call(role, "Update", update_request(1), with_targets(role, rows()))
        digests.append(role.compute_weights_digest())
        role.load_checkpoint(None)

    assert digests[0] == digests[1] != role.compute_weights_digest()


def test_the_rate_of_a_step_follows_the_steps_of_the_run_that_the_request_says(model: Path) -> None:
    role = build(model, lr=1.0, lr_warmup_steps_ratio=0.5, lr_schedule="linear")
    rates = [
        call(role, "Update", update_request(step, total_steps=total), with_targets(role, rows())).metrics["critic/lr"]
        for step, total in ((1, 4), (2, 4), (3, 8), (4, 4))
    ]
    assert rates == [0.5, 1.0, 0.75, 0.5]  # for step 3 it was a run of 8 steps, with 4 of warm-up


def test_an_update_makes_as_many_passes_as_its_request_says_and_else_ppo_epochs(model: Path) -> None:
    digests = {}
    for ppo_epochs, num_epochs in ((1, 0), (1, 3), (3, 0), (3, 1)):
        role = build(model, ppo_epochs=ppo_epochs)
        call(role, "Update", update_request(1, num_epochs=num_epochs), with_targets(role, rows()))
        digests[ppo_epochs, num_epochs] = role.compute_weights_digest()
    assert digests[1, 3] == digests[3, 0] != digests[1, 0]
    assert digests[3, 1] == digests[1, 0]


def test_an_exported_critic_begins_in_another_run_with_the_values_that_it_ended_with(
    model: Path, tmp_path: Path
) -> None:
    role = build(model)
    for step in (1, 2):
        call(role, "Update", update_request(step), with_targets(role, rows()))
    role.save_checkpoint(tmp_path / "critic", b"", with_hf_model=False).result(60)
    assert export.main(["--checkpoint", str(tmp_path / "critic"), "--output", str(tmp_path / "exported")]) == 0
    given = build(tmp_path / "exported")
    values = [call(one, "ComputeValues", critic_pb2.ComputeValuesRequest(), rows()).columns for one in (role, given)]
    assert np.any(values[0]["values"].values)
    np.testing.assert_array_equal(values[0]["values"].values, values[1]["values"].values)


@pytest.mark.parametrize("num_epochs", [-1, 1001])
def test_an_impossible_number_of_passes_is_refused(model: Path, num_epochs: int) -> None:
    role = build(model)
    with pytest.raises(ValueError, match=f"num_epochs: expected 1 to 1000 passes .* got {num_epochs}$"):
        call(role, "Update", update_request(1, num_epochs=num_epochs), with_targets(role, rows()))


@pytest.mark.parametrize(
    ("keys", "total"), [({"lr_warmup_steps_ratio": 0.5}, 0), ({"lr_schedule": "cosine"}, 0), ({}, -1)]
)
def test_an_update_that_does_not_say_the_steps_which_its_rate_needs_is_refused(
    model: Path, keys: dict[str, Any], total: int
) -> None:
    role = build(model, **keys)
    with pytest.raises(ValueError, match=f"total_steps: expected the number of steps of the run, .* got {total}"):
        call(role, "Update", update_request(1, total_steps=total), with_targets(role, rows()))


def test_rows_that_do_not_fit_the_model_are_refused(model: Path) -> None:
    role, request = build(model), critic_pb2.ComputeValuesRequest()

    with pytest.raises(ValueError, match="the prompt of row 1 is empty"):
        call(role, "ComputeValues", request, Batch.from_rows(prompts=[[5], []], responses=[[6], [7]]))
    with pytest.raises(ValueError, match="column 'responses', row 0: expected a token id in"):
        call(role, "ComputeValues", request, Batch.from_rows(prompts=[[5]], responses=[[500]]))
    with pytest.raises(ValueError, match="row 0 has 601 tokens of prompt and response, the model takes 512"):
        call(role, "ComputeValues", request, Batch.from_rows(prompts=[[5]], responses=[[6] * 600]))
    with pytest.raises(ValueError, match="3 rows do not divide into mini-batches of 4"):
        call(role, "Update", update_request(1), with_targets(role, rows()).take(np.arange(3)))
