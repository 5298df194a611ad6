"""The rollout role on one rank: it samples as the actor that has published the weights, and refuses other weights."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from services.actor.role import ActorRole
from services.rollout.role import RolloutRole
from services.runtime.role import Role
from splitppo.batch import Batch
from splitppo.rpc.errors import DataLoss, InvalidArgument, NotFound, StorageFailed, WireError, wire_error
from tests.support.checkpoints import DAMAGES
from tests.support.models import save_policy
from tests.support.roles import (
    build_actor,
    build_rollout,
    call,
    context_of,
    experience,
    generate_request,
    log_probs_request,
    prompts,
    publish,
    sync,
    update_request,
)


def sample(role: Role, version: int) -> Batch:
    outcome = call(role, "Generate", generate_request(base_step=version), prompts())
    assert outcome.columns is not None
    assert outcome.policy_version == version
    return outcome.columns


def assert_same(left: Batch, right: Batch) -> None:
    for name in ("prompts", "seeds", "responses", "rollout_log_probs"):
        np.testing.assert_array_equal(left[name].values, right[name].values, err_msg=name)


def update(actor: ActorRole, step: int) -> None:
    call(actor, "Update", update_request(step), experience(actor))


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def policy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy of random weights; its embeddings are its output layer, or not."""
    return save_policy(tmp_path_factory.mktemp("models") / "policy", tie_word_embeddings=request.param)


def test_it_samples_each_version_as_the_actor_did_bit_for_bit_and_in_any_order(policy: Path, tmp_path: Path) -> None:
    actor, rollout = build_actor(policy, weights=tmp_path, lr=0.05), build_rollout(policy, tmp_path)
    expected, digests = [], []
    for version in range(3):
        if version:
            update(actor, version)
        expected.append(sample(actor, version))
        digests.append(publish(actor, version))

    for version in (0, 1, 2, 1, 1, 2, 0):
        sync(rollout, version, digests[version])
        assert_same(sample(rollout, version), expected[version])

    assert len({made["rollout_log_probs"].values.tobytes() for made in expected}) == 3


def test_a_publication_changes_nothing_in_the_actor(model: Path, tmp_path: Path) -> None:
    actor, undisturbed = build_actor(model, weights=tmp_path), build_actor(model)
    publish(actor, 0)
    for role in (actor, undisturbed):
        update(role, 1)
    assert actor.compute_weights_digest() == undisturbed.compute_weights_digest()


@pytest.fixture
def group_of_one() -> Iterator[None]:
    """A process group, which a sharded model needs."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group_of_one")
def test_in_bf16_it_samples_near_what_the_actor_computes(model: Path, tmp_path: Path) -> None:
    actor = build_actor(model, weights=tmp_path, dtype="bf16")
    rollout = build_rollout(model, tmp_path, dtype="bf16")
    sync(rollout, 0, publish(actor, 0))

    sampled = sample(rollout, 0)

    computed = call(actor, "ComputeLogProbs", log_probs_request(), sampled).columns
    assert computed is not None
    np.testing.assert_allclose(sampled["rollout_log_probs"].values, computed["old_log_probs"].values, atol=0.1)


def test_it_tells_how_long_a_sync_took(model: Path, tmp_path: Path) -> None:
    rollout = build_rollout(model, tmp_path)
    synced = sync(rollout, 0, publish(build_actor(model, weights=tmp_path), 0))
    assert synced.metrics["timing_s/sync"] > 0
    assert call(rollout, "Generate", generate_request(), prompts()).metrics == {}


@contextmanager
def no_open_files() -> Iterator[None]:
    """Lets this process open no file, as on a storage that cannot be reached."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def check_refused(rollout: RolloutRole, version: int, digest: str, *, run_id: str = "run") -> WireError:
    """Returns the error that a caller gets for a version."""
    with pytest.raises((WireError, ValueError)) as caught:
        sync(rollout, version, digest, run_id=run_id)
    error = wire_error(caught.value)
    assert "\n" not in error.message
    return error


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["weights-0.safetensors", "manifest.json"])
def test_a_damaged_version_is_lost_data_and_the_one_before_stays(
    model: Path, tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    actor, rollout = build_actor(model, weights=tmp_path), build_rollout(model, tmp_path)
    sync(rollout, 0, publish(actor, 0))
    before = sample(rollout, 0)
    update(actor, 1)
    digest = publish(actor, 1)
    damage(tmp_path / "splitppo-run" / "version_1" / name)

    error = check_refused(rollout, 1, digest)

    assert isinstance(error, DataLoss)
    assert str(tmp_path / "splitppo-run" / "version_1" / name) in error.message
    assert_same(sample(rollout, 0), before)


def test_a_version_that_does_not_lie_there_is_not_found(model: Path, tmp_path: Path) -> None:
    error = check_refused(build_rollout(model, tmp_path), 1, "0" * 64)
    assert isinstance(error, NotFound)
    assert error.message == (
        f"there is no {tmp_path}/splitppo-run/version_1: the version was never published here, or was removed"
    )


def test_weights_of_another_run_dtype_or_model_are_the_callers_mistake(model: Path, tmp_path: Path) -> None:
    digest = publish(build_actor(model, weights=tmp_path), 0)
    wide = save_policy(tmp_path / "wide", intermediate_size=96)
    (tmp_path / "splitppo-other").symlink_to(tmp_path / "splitppo-run")
    refused = {
        "holds weights of run run, expected other": check_refused(
            build_rollout(model, tmp_path), 0, digest, run_id="other"
        ),
        "holds weights of dtype F32, expected BF16": check_refused(
            build_rollout(model, tmp_path, dtype="bf16"), 0, digest
        ),
        "holds weights of model qwen2 with hidden_size 32": check_refused(build_rollout(wide, tmp_path), 0, digest),
    }
    for sentence, error in refused.items():
        assert isinstance(error, InvalidArgument)
        assert sentence in error.message


@pytest.mark.parametrize("run_id", ["../run", "/run", "..", "a run", "läuft"])
def test_whatever_its_id_a_run_has_one_folder_inside_the_one_that_runs_share(
    model: Path, tmp_path: Path, run_id: str
) -> None:
    shared = tmp_path / "shared"
    actor, rollout = build_actor(model, weights=shared), build_rollout(model, shared)
    sync(rollout, 0, publish(actor, 0, run_id=run_id), run_id=run_id)
    assert len(list(shared.iterdir())) == len(list(tmp_path.iterdir())) == 1


def test_storage_that_cannot_be_read_is_named_and_no_damage(model: Path, tmp_path: Path) -> None:
    rollout = build_rollout(model, tmp_path)
    digest = publish(build_actor(model, weights=tmp_path), 0)
    with no_open_files():
        error = check_refused(rollout, 0, digest)
    assert isinstance(error, StorageFailed)
    assert error.message == f"Too many open files: {tmp_path}/splitppo-run/version_0/manifest.json"
    sync(rollout, 0, digest)


def test_an_actor_that_shares_the_prompts_with_a_rollout_group_samples_as_that_group_does(
    model: Path, tmp_path: Path
) -> None:
    sections = {"rollout": {"n": 3, "share": 0.5, "sync_dir": str(tmp_path)}, "services": {"rollout": {}}}
    actor = ActorRole(context_of("actor", actor={"model": str(model)}, **sections))
    rollout = RolloutRole(context_of("rollout", actor={"model": str(model)}, **sections))
    sync(rollout, 0, publish(actor, 0))
    assert_same(sample(actor, 0), sample(rollout, 0))


def test_an_actor_beside_a_rollout_group_that_answers_all_prompts_samples_nothing(model: Path) -> None:
    actor = ActorRole(context_of("actor", actor={"model": str(model)}, services={"rollout": {}}))
    with pytest.raises(ValueError, match=r"the actor group samples nothing: services\.rollout has a group of its own"):
        call(actor, "Generate", generate_request(), prompts())
