"""PPO steps over real gRPC on real torchrun groups, of one rank, and of two with the reference beside the critic.

The groups also save a checkpoint, one rank at a time, and the actor keeps its weights as a Hugging Face folder.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from socket import gethostname
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from controller.workers.clients import ActorClient, Caller, CriticClient
from controller.workers.worker_groups import Workers
from services.engine.weights_digest import weights_digest
from services.rollout.hf_backend.backend import HfRollout
from services.rollout.protocol import Sampling
from services.rollout.stopping import StopRule
from services.rollout.streamed_parts import response_rows
from splitppo.batch import Batch
from splitppo.config import Config, dump_config
from splitppo.config.load import validate
from splitppo.config.worker_digest import worker_digest
from splitppo.rpc.errors import InvalidArgument, WireError, WrongState
from splitppo.v1 import actor_pb2, batch_pb2
from tests.support.engines import load_model
from tests.support.groups import Group
from tests.support.models import EOS, VOCABULARY, save_policy
from tests.support.seeds import shifted

NUM_PROMPTS, NUM_SAMPLES, NUM_STEPS, MAX_RESPONSE = 6, 4, 2, 8
RUN_ID, NONCE = "test", "nonce"
SAMPLING = actor_pb2.SamplingParams(temperature=0.8, top_p=1.0, top_k=0, max_response_length=MAX_RESPONSE)


@dataclass
class Step:
    """The results of one PPO step."""

    experience: Batch
    actor_metrics: Mapping[str, float]
    critic_metrics: Mapping[str, float]
    recorded: Batch | None  # of every other row, in the first run alone


@dataclass
class Session:
    """Two runs from the initial models over the same prompts and seeds, and what was refused in between."""

    runs: list[list[Step]] = field(default_factory=list)
    digests: list[tuple[str, str]] = field(default_factory=list)
    initial_digests: tuple[str, str] = ("", "")
    warm_up_digests: tuple[str, str] = ("", "")
    loaded_digests: tuple[str, str] = ("", "")
    refusals: dict[str, WireError] = field(default_factory=dict)
    num_ranks: int = 1
    run_dir: Path = Path()


def make_config(run_dir: Path, model: Path, num_ranks: int) -> Config:
    return validate(
        {
            "run": {"dir": str(run_dir), "total_steps": 10},
            "data": {"train_files": "unused", "train_batch_size": NUM_PROMPTS, "max_response_length": MAX_RESPONSE},
            "rollout": {"n": NUM_SAMPLES, "temperature": 0.8, "max_batch_size": 8},
            "actor": {
                "model": str(model),
                "lr": 1e-3,
                "ppo_mini_batch_size": NUM_PROMPTS,
                "ppo_max_token_len_per_gpu": 560,
                "use_kl_loss": True,
            },
            "critic": {"lr": 1e-3, "ppo_mini_batch_size": 3, "ppo_epochs": 2, "shuffle": True},
            "placement": {"reference": "actor" if num_ranks == 1 else "critic"},
            "checkpoint": {"max_writers": 1},
            "services": {role: {"num_processes": num_ranks} for role in ("actor", "critic")},
        },
        "test",
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("models") / "policy")


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.extended), 2], ids=["1-rank", "2-ranks"])
def session(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    run_dir = tmp_path_factory.mktemp("run")
    config = make_config(run_dir, model, request.param)
    config_file = run_dir / "config.yaml"
    config_file.write_text(dump_config(config))
    (run_dir / NONCE).touch()
    groups = [
        Group(f"services.{role}", config_file, run_dir, role, num_processes=request.param)
        for role in ("actor", "critic")
    ]
    try:
        addresses = [group.wait_ready().address for group in groups]
        yield asyncio.run(record(config, *addresses))
    finally:
        for group in groups:
            group.stop()


async def record(config: Config, actor_address: str, critic_address: str) -> Session:
    actor = ActorClient(actor_address, Caller(RUN_ID, 1, worker_digest(config, "actor"), NONCE))
    critic = CriticClient(critic_address, Caller(RUN_ID, 1, worker_digest(config, "critic"), NONCE))
    await asyncio.gather(actor.handshake(30), critic.handshake(30))
    session = Session(
        initial_digests=await digests(actor, critic),
        num_ranks=config.services.actor.num_processes,
        run_dir=config.run.dir,
    )
    for records in (True, False):
        await asyncio.gather(actor.load_checkpoint(0), critic.load_checkpoint(0))
        workers = Workers.of(config, actor, critic)
        session.runs.append([await ppo_step(workers, step, records=records) for step in range(1, NUM_STEPS + 1)])
        session.digests.append(await digests(actor, critic))
    await asyncio.gather(
        actor.save_checkpoint(base_step=NUM_STEPS, with_hf_model=False),
        critic.save_checkpoint(base_step=NUM_STEPS, with_hf_model=True),
        actor.publish_weights(base_step=NUM_STEPS, keep_from=0, save_hf_model=True),
    )
    session.refusals = await refusals(workers)
    await actor.update(slot(NUM_STEPS + 1), base_step=NUM_STEPS, advance_only=True)
    session.warm_up_digests = await digests(actor, critic)
    await asyncio.gather(actor.load_checkpoint(NUM_STEPS), critic.load_checkpoint(NUM_STEPS))
    session.loaded_digests = await digests(actor, critic)
    await asyncio.gather(actor.close(), critic.close())
    return session


async def digests(actor: ActorClient, critic: CriticClient) -> tuple[str, str]:
    first, second = await asyncio.gather(actor.compute_weights_digest(), critic.compute_weights_digest())
    return first, second


def slot(step: int) -> batch_pb2.Slot:
    return batch_pb2.Slot(kind=batch_pb2.SLOT_KIND_EXPERIENCE, step=step)


def prompts_of(step: int) -> Batch:
    rng = np.random.default_rng(shifted(step))
    rows = [rng.integers(3, len(VOCABULARY), rng.integers(2, 12)) for _ in range(NUM_PROMPTS)]
    return Batch.from_rows(prompts=rows, seeds=rng.integers(-(2**62), 2**62, (NUM_PROMPTS, NUM_SAMPLES)))


async def ppo_step(workers: Workers, step: int, *, records: bool) -> Step:
    """One step as the controller does it; the advantages are made up."""
    actor, critic, host = workers.actor, workers.critic, workers.reference
    assert critic is not None
    assert host is not None
    here, base = slot(step), step - 1
    await actor.put_batch(here, prompts_of(step))
    await actor.generate(here, SAMPLING, base_step=base)
    rows = await actor.get_batch(here, ["prompts", "responses", "rollout_log_probs"])
    await critic.put_batch(here, rows.select(["prompts", "responses"]))
    await actor.compute_log_probs(here, base_step=base)
    await host.compute_ref_log_probs(here, base_step=base)
    await critic.compute_values(here, base_step=base)
    rows = rows.merge(await actor.get_batch(here, ["old_log_probs"]))
    rows = rows.merge(reference := await host.get_batch(here, ["ref_log_probs"]))
    rows = rows.merge(await critic.get_batch(here, ["values"]))

    rng = np.random.default_rng(shifted(100 + step))
    draws = {name: [rng.normal(size=n) for n in rows["responses"].lengths] for name in ("advantages", "returns")}
    advantages = Batch.from_rows(advantages=draws["advantages"])
    await actor.put_batch(here, advantages if host is actor else advantages.merge(reference))
    await critic.put_batch(here, Batch.from_rows(returns=draws["returns"]))
    if records:
        await actor.put_batch(here, Batch.from_rows(recorded=[[row % 2] for row in range(rows.num_rows)]))
    trained, critic_trained = await asyncio.gather(
        actor.update(here, base_step=base), critic.update(here, base_step=base)
    )
    recorded = await actor.get_batch(here, ["update_log_probs", "update_entropy"]) if records else None
    return Step(rows, trained.result.metrics, critic_trained.result.metrics, recorded)


async def refusals(workers: Workers) -> dict[str, WireError]:
    """Requests that must be refused; afterwards the actor's next slot is as after Generate."""
    actor, critic = workers.actor, workers.critic
    assert critic is not None
    other = critic if workers.reference is actor else actor
    here, base = slot(NUM_STEPS + 1), NUM_STEPS
    await actor.put_batch(here, prompts_of(1))
    found: dict[str, WireError] = {}

    async def attempt(name: str, call: Any) -> None:
        try:
            await call
        except WireError as error:
            found[name] = error

    bad = actor_pb2.SamplingParams(temperature=-1.0, top_p=1.0, max_response_length=4)
    await attempt("sampling", actor.generate(here, bad, base_step=base))
    await actor.generate(here, SAMPLING, base_step=base)
    await attempt("reference", other.compute_ref_log_probs(here, base_step=base))
    await attempt("columns", actor.update(here, base_step=base))
    return found


def test_generate_gives_every_prompt_its_samples(session: Session) -> None:
    for step, made in enumerate(session.runs[0], start=1):
        rows, prompts = made.experience, prompts_of(step)["prompts"].rows()
        assert rows.num_rows == NUM_PROMPTS * NUM_SAMPLES
        for index, prompt in enumerate(rows["prompts"].rows()):
            np.testing.assert_array_equal(prompt, prompts[index // NUM_SAMPLES])
        for response in rows["responses"].rows():
            assert len(response) == MAX_RESPONSE or response[-1] == EOS


def test_training_and_rollout_agree_on_the_log_probs_of_every_token(session: Session) -> None:
    for made in session.runs[0]:
        rollout, old = made.experience["rollout_log_probs"].values, made.experience["old_log_probs"].values
        np.testing.assert_allclose(rollout, old, atol=2e-5)


def test_the_reference_is_the_initial_policy_and_stays_behind(session: Session) -> None:
    first, second = (made.experience for made in session.runs[0])

    np.testing.assert_allclose(first["ref_log_probs"].values, first["old_log_probs"].values, atol=1e-6)
    assert np.abs(second["ref_log_probs"].values - second["old_log_probs"].values).max() > 1e-3


def test_in_the_only_mini_batch_of_a_step_the_ratio_is_one(session: Session) -> None:
    for made in session.runs[0]:
        assert made.actor_metrics["actor/ppo_kl"] == pytest.approx(0.0, abs=1e-6)
        assert made.actor_metrics["actor/pg_clipfrac"] == 0.0


def test_columns_of_the_update_come_in_the_order_of_the_rows_from_every_rank(
    session: Session,
) -> None:
    for made in session.runs[0]:
        assert made.recorded is not None
        expected = made.experience["old_log_probs"].rows()
        log_probs, entropies = (column.rows() for column in made.recorded.columns.values())
        for row, (seen, entropy) in enumerate(zip(log_probs, entropies, strict=True)):
            assert len(seen) == len(entropy) == (len(expected[row]) if row % 2 else 0)
            np.testing.assert_allclose(seen, expected[row] if row % 2 else [], atol=1e-6)


def test_both_updates_report_what_they_did(session: Session) -> None:
    for made in session.runs[0]:
        assert made.actor_metrics["actor/lr"] == made.critic_metrics["critic/lr"] == 1e-3
        for name in ("actor/pg_loss", "actor/entropy", "actor/kl_loss", "actor/grad_norm"):
            assert np.isfinite(made.actor_metrics[name])
        for name in ("critic/vf_loss", "critic/vf_clipfrac", "critic/vpred_mean", "critic/grad_norm"):
            assert np.isfinite(made.critic_metrics[name])


def test_two_runs_give_identical_experience_and_identical_weights(session: Session) -> None:
    assert session.digests[0] == session.digests[1]
    assert all(after != before for after, before in zip(session.digests[0], session.initial_digests, strict=True))
    for first, second in zip(*session.runs, strict=True):
        for name in first.experience.columns:
            np.testing.assert_array_equal(first.experience[name].values, second.experience[name].values)


def test_a_warm_up_step_advances_the_actor_and_leaves_its_weights(session: Session) -> None:
    assert session.warm_up_digests == session.digests[1]


def test_checkpoints_written_by_one_rank_at_a_time_are_whole(session: Session) -> None:
    assert [file.name for file in (session.run_dir / "services").glob("writer_*")] == [f"writer_{gethostname()}_0.lock"]
    assert session.loaded_digests == session.digests[1]


def test_the_actor_keeps_its_weights_as_a_folder_with_a_file_of_each_rank(session: Session) -> None:
    folder = session.run_dir / "huggingface" / f"global_step_{NUM_STEPS}"
    assert len([*folder.glob("*.safetensors")]) == session.num_ranks
    assert weights_digest(AutoModelForCausalLM.from_pretrained(folder)) == session.digests[1][0]
    assert weights_digest(load_model(str(folder))) == session.digests[1][0]


@pytest.mark.parametrize(
    ("name", "error", "sentence"),
    [
        ("sampling", InvalidArgument, "temperature must be 0 (greedy) or at least"),
        ("reference", InvalidArgument, " holds no reference: placement.reference is "),
        ("columns", WrongState, "Update needs advantages, ref_log_probs, which the slot lacks"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_in_a_sentence(
    session: Session, name: str, error: type[WireError], sentence: str
) -> None:
    assert isinstance(session.refusals[name], error)
    assert sentence in session.refusals[name].message


def test_responses_do_not_depend_on_the_number_of_ranks(session: Session, model: Path) -> None:
    """The first step's tokens equal those of a rollout in this process."""
    policy = AutoModelForCausalLM.from_pretrained(model).eval()
    backend = HfRollout(
        lambda: nullcontext(policy), stop_rule=StopRule([EOS]), max_batch_size=64, device=torch.device("cpu")
    )
    sampling = Sampling(SAMPLING.temperature, 1.0, 0, MAX_RESPONSE)

    ended = (response for step in backend.generate(prompts_of(1), sampling, lambda: False) for response in step.ended)

    expected = session.runs[0][0].experience["responses"].values
    np.testing.assert_array_equal(response_rows(ended)["responses"].values, expected)
