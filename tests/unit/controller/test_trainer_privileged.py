"""What the value model alone reads is sent to the critic's group, and to no other one."""

import json
from pathlib import Path
from typing import Any

import pytest

from controller.data.privileged_prompts import PRIVILEGED, PrivilegedPrompts
from controller.data.tokenizer import load_tokenizer
from splitppo.config import Schedule
from splitppo.v1.batch_pb2 import SLOT_KIND_EXPERIENCE, Slot
from tests.support import models
from tests.support.fake_run import FakeRun, make_run

pytestmark = pytest.mark.usefixtures("no_task_is_left")

PROMPT = "{ground_truth}"
EVERY_GROUP: dict[str, Any] = {
    "reward_model__model": "models/reward",
    "teacher__model": "models/teacher",
    "algorithm__use_kl_in_reward": True,
}


async def privileged_run(folder: Path, **changes: Any) -> tuple[FakeRun, PrivilegedPrompts]:
    """Trains two steps whose critic reads the ground truth; returns the run and what makes its texts."""
    run = make_run(folder / "run", run__total_steps=2, critic__privileged_prompt=PROMPT, **changes)
    models.save_tokenizer(folder / "model")
    texts = run.trainer.privileged = PrivilegedPrompts(PROMPT, 16, load_tokenizer(str(folder / "model")))
    await run.trainer.fit()
    return run, texts


@pytest.mark.parametrize("schedule", ["serial", "gather", "overlap"])
@pytest.mark.parametrize("placement", ["critic", "reward"])
async def test_only_the_critics_group_gets_it(tmp_path: Path, schedule: Schedule, placement: str) -> None:
    run, _ = await privileged_run(
        tmp_path,
        run__schedule=schedule,
        rollout__stream_groups=2,
        placement__reward_model=placement,
        placement__teacher=placement,
        placement__reference="critic",
        **EVERY_GROUP,
    )
    sent = {
        client.role: [PRIVILEGED in names for _, names in client.puts] for client in (run.actor, run.critic, run.reward)
    }
    assert sent.pop("critic").count(True) == 4  # both parts of both steps, once each
    assert not any(any(names) for names in sent.values())


@pytest.mark.parametrize(
    "changes",
    [
        {"rollout__stream_groups": 2},
        {"rollout__staleness": 1, "algorithm__rollout_correction": {"rollout_is": "token", "bypass_mode": False}},
        {"algorithm__filter_groups__enable": True, "algorithm__filter_groups__metric": "score"},
        {"rollout__max_step_tokens": 1, "algorithm__rollout_correction": {"rollout_is": "token", "bypass_mode": False}},
    ],
    ids=["parts", "ahead", "dynamic sampling", "partial"],
)
async def test_each_response_has_the_text_of_its_own_row(tmp_path: Path, changes: dict[str, Any]) -> None:
    run, texts = await privileged_run(tmp_path, tracking__dump_rollouts=True, **changes)
    for step in (1, 2):
        columns = [PRIVILEGED, "responses", "returns"]
        sent = await run.critic.get_batch(Slot(kind=SLOT_KIND_EXPERIENCE, step=step), columns)
        dumped = [json.loads(line) for line in (tmp_path / f"run/rollouts/train/{step}.jsonl").open()]
        shown = [texts.tokenizer.decode(tokens.tolist()) for tokens in sent[PRIVILEGED].rows()]
        assert shown == [one["ground_truth"] for one in dumped]
        assert len(set(shown)) > 1
        assert sent["responses"].lengths.tolist() == sent["returns"].lengths.tolist()
