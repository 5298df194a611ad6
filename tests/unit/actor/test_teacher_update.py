"""Updates of the actor with a teacher's signal in the loss: what they need, what they refuse, and their weight."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.actor.role import ActorRole
from splitppo.batch import Batch, Column
from splitppo.rpc.errors import WrongState
from splitppo.run_folder.metrics import check_declared
from splitppo.v1 import actor_pb2
from tests.support.models import VOCABULARY, save_policy
from tests.support.roles import N_SAMPLES, call, context_of, experience, teacher_columns, update_request

TERMS = {"loss_mode": "vanilla", "entropy_coeff": 0.0, "use_kl_loss": False, "kl_loss_coef": 0.001}
TOP_K = {"signal": "top_k", "top_k": 3}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("models") / "teacher", seed=7)


def build(model: Path, teacher: Path | str, *, host: str = "actor", lr: float = 1e-2, **section: Any) -> ActorRole:
    """An actor with two mini-batches; by default it hosts the teacher."""
    return ActorRole(
        context_of(
            "actor",
            rollout={"n": N_SAMPLES},
            actor={"model": str(model), "lr": lr, "ppo_mini_batch_size": 2},
            teacher={"model": str(teacher), **section},
            placement={"teacher": host},
        )
    )


def taught(role: ActorRole) -> Batch:
    """Rows for an update, with the columns of the teacher that this group hosts."""
    rows = experience(role)
    return rows.merge(teacher_columns(role, rows))


def asked_for(coef: float | None) -> actor_pb2.ActorUpdateRequest:
    return update_request(loss_terms=actor_pb2.LossTerms(**TERMS, teacher_coef=coef))


@pytest.mark.promise("a teacher")
@pytest.mark.parametrize("section", [{"signal": "loss", "loss_type": "mse"}, TOP_K])
def test_updates_bring_the_policy_closer_to_the_teacher(model: Path, teacher: Path, section: dict[str, Any]) -> None:
    # So small a step goes downhill from every random model.
    role, losses = build(model, teacher, lr=1e-3, **section, coef=5.0), []
    rows = taught(role)
    still = Column(np.zeros_like(rows["advantages"].values), rows["advantages"].lengths)
    rows = rows.merge(Batch(rows.num_rows, {"advantages": still}))
    for step in (1, 2, 3):
        metrics = call(role, "Update", update_request(step), rows).metrics
        losses.append(metrics["distillation/loss"])
        assert metrics["distillation/coef"] == 5.0
        check_declared(metrics)
    assert losses == sorted(losses, reverse=True)
    assert losses[2] < losses[0]
    masses = {name: value for name, value in metrics.items() if name.endswith("_mass")}
    if section is TOP_K:
        assert all(0.0 < mass <= 1.0 for mass in masses.values())
        assert len(masses) == 2
    else:
        assert masses == {}


def test_the_weight_of_an_update_is_the_requests_or_else_the_configurations(model: Path, teacher: Path) -> None:
    digests = {}
    for configured, asked in ((0.5, None), (9.0, 0.5), (0.0, 0.5), (0.5, 0.0)):
        role = build(model, teacher, signal="loss", coef=configured)
        metrics = call(role, "Update", asked_for(asked), taught(role)).metrics
        assert metrics["distillation/coef"] == (configured if asked is None else asked)
        digests[configured, asked] = role.compute_weights_digest()
    assert digests[0.5, None] == digests[9.0, 0.5] == digests[0.0, 0.5] != digests[0.5, 0.0]


@pytest.mark.parametrize("signal", ["advantage", "reward"])
def test_a_signal_of_the_controller_is_no_term_of_the_loss(model: Path, teacher: Path, signal: str) -> None:
    alone, role = build(model, ""), build(model, teacher, signal=signal)
    rows = experience(role)
    metrics = call(role, "Update", asked_for(3.0), rows).metrics
    call(alone, "Update", asked_for(None), rows)
    assert role.compute_weights_digest() == alone.compute_weights_digest()
    assert not any(name.startswith("distillation/") for name in metrics)


def test_the_columns_of_a_teacher_elsewhere_serve_as_well(model: Path, teacher: Path) -> None:
    own, other = build(model, teacher, **TOP_K), build(model, teacher, host="critic", **TOP_K)
    rows = taught(own)
    for role in (own, other):
        call(role, "Update", update_request(), rows)
    assert other.compute_weights_digest() == own.compute_weights_digest()


@pytest.mark.parametrize(
    ("section", "missing"),
    [
        ({"signal": "loss"}, ["teacher_log_probs"]),
        (TOP_K, ["teacher_top_ids"]),
        (TOP_K, ["teacher_log_probs", "teacher_top_ids", "teacher_top_log_probs"]),
    ],
)
def test_an_update_without_the_teachers_columns_is_refused(
    model: Path, teacher: Path, section: dict[str, Any], missing: list[str]
) -> None:
    role = build(model, teacher, **section)
    rows, before = taught(role), role.compute_weights_digest()
    rows = rows.select(name for name in rows.columns if name not in missing)
    with pytest.raises(WrongState, match=rf"^Update needs {', '.join(missing)}, which the slot lacks$"):
        call(role, "Update", update_request(), rows)
    assert role.compute_weights_digest() == before


def changed(rows: Batch, name: str, values: np.ndarray, lengths: np.ndarray) -> Batch:
    return rows.merge(Batch(rows.num_rows, {name: Column(values, lengths.astype(np.int32))}))


@pytest.mark.parametrize("name", ["teacher_top_ids", "teacher_top_log_probs"])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_another_number_of_likely_tokens_is_refused(model: Path, teacher: Path, name: str, width: int) -> None:
    role = build(model, teacher, **TOP_K)
    rows, before = taught(role), role.compute_weights_digest()
    lengths = rows["responses"].lengths * width
    values = np.zeros(lengths.sum(), rows[name].values.dtype)
    sentence = rf"^column '{name}': expected 3 values \(teacher\.top_k\) for each response token$"
    with pytest.raises(ValueError, match=sentence):
        call(role, "Update", update_request(), changed(rows, name, values, lengths))
    assert role.compute_weights_digest() == before


def test_likely_tokens_of_another_row_are_refused(model: Path, teacher: Path) -> None:
    """The number of all of them is right."""
    role = build(model, teacher, **TOP_K)
    rows = taught(role)
    name, lengths = "teacher_top_ids", rows["teacher_top_ids"].lengths.copy()
    lengths[0], lengths[1] = lengths[0] + 1, lengths[1] - 1
    with pytest.raises(ValueError, match=r"^column 'teacher_top_ids' must have equally many values per response token"):
        call(role, "Update", update_request(), changed(rows, name, rows[name].values, lengths))


@pytest.mark.parametrize("token", [-1, len(VOCABULARY)])
def test_a_likely_token_outside_the_vocabulary_is_refused(model: Path, teacher: Path, token: int) -> None:
    role = build(model, teacher, **TOP_K)
    rows, before = taught(role), role.compute_weights_digest()
    values = rows["teacher_top_ids"].values.copy()
    values[0] = token
    with pytest.raises(ValueError, match=rf"^column 'teacher_top_ids', row 0: expected a token id in .*, got {token}$"):
        call(
            role, "Update", update_request(), changed(rows, "teacher_top_ids", values, rows["teacher_top_ids"].lengths)
        )
    assert role.compute_weights_digest() == before


@pytest.mark.parametrize("name", ["teacher_log_probs", "teacher_top_log_probs"])
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_log_probs_of_a_teacher_that_are_not_finite_are_refused(
    model: Path, teacher: Path, name: str, value: float
) -> None:
    role = build(model, teacher, **TOP_K)
    rows, before = taught(role), role.compute_weights_digest()
    values = rows[name].values.copy()
    values[0] = value
    with pytest.raises(ValueError, match=rf"^column '{name}', row 0: expected a finite number, got {value}$"):
        call(role, "Update", update_request(), changed(rows, name, values, rows[name].lengths))
    assert role.compute_weights_digest() == before


@pytest.mark.parametrize("coef", [math.nan, math.inf, -0.5])
def test_a_weight_that_makes_no_sense_is_refused(model: Path, teacher: Path, coef: float) -> None:
    role = build(model, teacher, signal="loss")
    rows, before = taught(role), role.compute_weights_digest()
    with pytest.raises(ValueError, match=rf"^loss_terms\.teacher_coef: .*, got {coef}$"):
        call(role, "Update", asked_for(coef), rows)
    assert role.compute_weights_digest() == before


def test_a_row_without_a_response_has_no_likely_tokens(model: Path, teacher: Path) -> None:
    role = build(model, teacher, **TOP_K)
    rows = experience(role)
    empty = {name: [row.copy() for row in rows[name].rows()] for name in rows.columns}
    for name in ("responses", "rollout_log_probs", "advantages"):
        empty[name][0] = empty[name][0][:0]
    rows = Batch.from_rows(**empty)
    rows = rows.merge(teacher_columns(role, rows))
    assert rows["teacher_top_ids"].lengths[0] == 0
    assert math.isfinite(call(role, "Update", update_request(), rows).metrics["distillation/loss"])
