"""Runs on services that are started and restarted from outside, behind mutual TLS and a token."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from splitppo.manifest import read_manifest
from tests.support.certificates import TOKEN, expire, secure
from tests.support.checkpoints import flip
from tests.support.external import ExternalGroups
from tests.support.meetings import PAUSE_POINT, let_go
from tests.support.runs import NUM_STEPS, Inputs, RunFolder, started

pytestmark = pytest.mark.timeout(900)

Completed = Callable[[str, int], RunFolder]


def digest_of_folder(folder: Path) -> str:
    """sha256 over the sorted parameters of a Hugging Face folder, little-endian fp32 values only."""
    tensors = load_file(folder / "model.safetensors")
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(tensors[name].astype("<f4").tobytes())
    return digest.hexdigest()


@pytest.fixture(scope="module")
def one_step(one_rank: ExternalGroups, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFolder, str]:
    """Returns the files and the output of a run of one step."""
    one_rank.empty()
    with one_rank.started("checkpoint.save_freq=1", "run.stop_after_step=1") as controller:
        controller.complete()
    return one_rank.keep(tmp_path_factory.mktemp("one_step") / "run"), controller.output


def test_nothing_that_a_run_leaves_or_prints_holds_the_token(one_step: tuple[RunFolder, str]) -> None:
    folder, output = one_step
    written = [file for file in folder.path.rglob("*") if file.is_file()]
    assert len(written) > 10
    assert [file for file in written if TOKEN.encode() in file.read_bytes()] == []
    assert TOKEN not in output


@pytest.mark.promise("tls and tokens")
def test_strangers_are_refused_in_one_sentence(groups: ExternalGroups, tmp_path: Path) -> None:
    wrong_token = tmp_path / "wrong"
    wrong_token.write_text("not-the-token-of-these-services")
    strangers = secure(tmp_path / "strangers")
    security = groups.config["services"]["security"]
    cases = {
        "wrong token: this service wants a bearer token": {**security, "token_file": str(wrong_token)},
        "is not trusted: its certificate is not accepted": {**strangers, "token_file": security["token_file"]},
        "is not signed by any authority": {**strangers, "ca_file": security["ca_file"]},
    }
    for sentence, changed in cases.items():
        config = {**groups.config, "services": {**groups.config["services"], "security": changed}}
        with started(config, groups.folder.path, beside=tmp_path) as controller:
            assert controller.wait() == 2, controller.output
        assert sentence in controller.output
        assert "Traceback" not in controller.output


def test_services_outlive_a_killed_controller_and_one_restarted_between_two_calls_is_restored(
    completed: Completed, groups: ExternalGroups
) -> None:
    """Past a checkpoint that has been damaged in the meantime, too."""
    with groups.started("checkpoint.save_freq=1") as first:
        first.wait_until(lambda folder: folder.steps, "the line of step 0")
        first.process.kill()
    before, newest = groups.instance_ids, 2
    groups.empty(armed=[PAUSE_POINT])
    let_go(groups.folder.path, newest)
    with groups.started("checkpoint.save_freq=1") as second:
        second.wait_until(lambda folder: newest in folder.committed_steps, "the checkpoint of step 2")
        os.kill(second.process.pid, signal.SIGSTOP)
        try:
            flip(groups.folder.checkpoint(newest) / "actor" / "__0_0.distcp")
            groups.restart("critic")
            let_go(groups.folder.path, newest + 1)
        finally:
            os.kill(second.process.pid, signal.SIGCONT)
        folder = second.complete()
    assert groups.instance_ids[0] == before[0]
    assert f"global_step_{newest}/actor/__0_0.distcp: expected sha256" in second.output
    assert folder.summary["weights_sha256"] == completed("gather", 1).summary["weights_sha256"]
    assert folder.steps == list(range(NUM_STEPS + 1))


@pytest.mark.promise("the same command resumes")
def test_sigterm_finishes_the_step_saves_and_leaves(completed: Completed, groups: ExternalGroups) -> None:
    groups.empty(armed=[PAUSE_POINT])
    with groups.started("run.total_steps=1000", "checkpoint.save_freq=-1") as controller:
        controller.wait_until(lambda folder: 1 in folder.steps, "the line of step 1")
        controller.signal(signal.SIGTERM)
        controller.wait_until(lambda _: "finishing step 2" in controller.output, "an answer")
        let_go(groups.folder.path, 2)
        assert controller.wait() == 143, controller.output
    folder = controller.folder
    assert folder.summary["exit_reason"] == "interrupted"
    assert folder.committed_steps == [folder.summary["global_step"]] == [2]
    assert None not in folder.summary["weights_sha256"].values()
    for line, undisturbed in zip(folder.metrics[1:], completed("gather", 1).metrics[1:3], strict=True):
        assert line.get("actor/loss") == undisturbed.get("actor/loss")
        assert line["critic/loss"] == undisturbed["critic/loss"]


def test_critic_warm_up_trains_the_critic_only(one_step: tuple[RunFolder, str], inputs: Inputs) -> None:
    folder, _ = one_step
    digests = {role: read_manifest(folder.checkpoint(1) / role).weights_sha256 for role in ("actor", "critic")}
    assert folder.summary["weights_sha256"] == digests
    assert digests["actor"] == digest_of_folder(inputs.folder / "policy")
    assert digests["critic"] != digest_of_folder(inputs.folder / "value")


def test_a_run_under_its_least_accuracy_is_completed_and_fails(groups: ExternalGroups) -> None:
    with groups.started("run.stop_after_step=1", "evaluation.min_accuracy=1") as controller:
        assert controller.wait() == 1, controller.output
    assert controller.folder.summary["exit_reason"] == "completed"
    (error,) = controller.errors
    assert error.endswith("expected evaluation.min_accuracy (1) or more")


def test_a_rollout_engine_that_differs_ends_the_run_with_one_sentence(groups: ExternalGroups) -> None:
    # No two programs agree to 1e-12 nats.
    with groups.started("rollout.check_freq=1", "rollout.max_log_prob_diff=1e-12") as controller:
        assert controller.wait() == 1
    assert "error: step 1: log-probs of the rollout backend and the trainer differ by up to" in controller.output
    assert "rollout.max_log_prob_diff" in controller.output
    assert "Traceback" not in controller.output
    assert controller.folder.summary["exit_reason"] == "failed"
    assert not controller.folder.metrics[1:]


def test_rollouts_are_corrected_in_a_run(groups: ExternalGroups) -> None:
    correction = '{rollout_is: token, rollout_rs: "token_k1,seq_mean_k3", rollout_rs_threshold: "0.5_2.0,0.1"}'
    overrides = (f"algorithm.rollout_correction={correction}", "rollout.check_freq=1", "run.stop_after_step=2")
    with groups.started(*overrides) as controller:
        metrics = controller.complete().metrics[-1]
    # The engine is the policy itself: it differs by rounding only.
    assert 0.0 < metrics["training/rollout_log_probs_diff_max"] < 1e-3
    assert abs(metrics["rollout_corr/rollout_is_mean"] - 1.0) < 1e-4
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == 0.0
    assert metrics["actor/grad_norm"] > 0.0


def test_a_controller_with_an_expired_certificate_says_so_at_start(config: dict[str, Any], tmp_path: Path) -> None:
    security = secure(tmp_path / "certs")
    expire(tmp_path / "certs", "controller")
    with started({**config, "services": {"security": security}}, tmp_path / "run") as controller:
        assert controller.wait() == 2
    assert f"the certificate in {tmp_path / 'certs' / 'controller.pem'} has expired" in controller.output
    assert "Traceback" not in controller.output
