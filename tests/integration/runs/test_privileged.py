"""What the critic alone reads, in whole runs: who gets it, and that no schedule, resume or lost group changes it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import tokenizers

from tests.support.external import ExternalGroups, external_groups
from tests.support.runs import EACH_STEP, RunFolder
from tests.support.user_tools import write

pytestmark = pytest.mark.timeout(900)

# 24 letters in an order that no prompt, response or random number has.
SECRET = "jihgfedcbajihgfedcbajihg"
HIDDEN = f'''
class Hidden:
    def reset(self, *, seed):
        self.seed = seed

    def privileged(self):
        return {{"hidden": "{SECRET}" + "abcdefgh"[self.seed % 8]}}

    def step(self, text):
        return "ab"
'''
TURNS = ("rollout.multi_turn.max_turns=2", "rollout.multi_turn.max_turn_length=4")


@pytest.fixture(scope="module")
def privileged(config: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExternalGroups]:
    """One actor rank, and one critic rank that hosts the reference, whose critic reads what an environment names."""
    path = write(tmp_path_factory.mktemp("hidden"), HIDDEN)
    critic = {**config["critic"], "privileged_prompt": "{hidden}", "max_privileged_length": 32}
    multi_turn = {"environments": {"default": {"path": str(path), "name": "Hidden"}}}
    own = {
        **config,
        "critic": critic,
        "rollout": {**config["rollout"], "multi_turn": multi_turn},
        "placement": {"reference": "critic"},
        "tracking": {**config["tracking"], "dump_rollouts": True},
        "checkpoint": {**config["checkpoint"], "save_hf_model": True},
    }
    with external_groups(own, tmp_path_factory.mktemp("privileged") / "run") as groups:
        yield groups


def folders_with_secret(run: RunFolder) -> set[str]:
    """Returns the folders, below a run folder, of the files that have the secret, as a text or as token ids."""
    backend = tokenizers.Tokenizer.from_file(str(next(run.path.rglob("tokenizer.json"))))
    ids = str(backend.encode(SECRET, add_special_tokens=False).ids)[1:-1]
    found = set()
    for file in filter(Path.is_file, run.path.rglob("*")):
        if file.suffix == ".parquet":
            content = repr(pq.read_table(file).to_pylist())
        else:
            content = file.read_bytes().decode("latin")
        if SECRET in content or ids in content:
            found.add("/".join(file.relative_to(run.path).parts[:2]))
    return found


def test_only_the_page_of_the_critic_has_it_and_every_way_through_the_run_ends_with_the_same_weights(
    privileged: ExternalGroups, tmp_path: Path
) -> None:
    runs = {
        "overlap": ("run.schedule=overlap",),
        "serial": ("run.schedule=serial",),
        "lost": (EACH_STEP, "run.stop_after_step=2"),
        "resumed": (EACH_STEP,),
    }
    folders: dict[str, RunFolder] = {}
    for name, options in runs.items():
        if name != "resumed":
            privileged.empty()
        with privileged.started(*TURNS, *options) as controller:
            controller.complete()
        folders[name] = privileged.keep(tmp_path / name) if name != "lost" else controller.folder
    digests = [folders[name].summary["weights_sha256"] for name in ("overlap", "serial", "resumed")]
    assert digests == digests[:1] * 3
    run = folders["overlap"]
    assert folders_with_secret(run) == {"rollouts/critic"}
    lines = [json.loads(line) for line in (run.path / "rollouts/critic/2.jsonl").open()]
    assert {line["text"][:-1].replace(" ", "") for line in lines} == {SECRET}
    assert len({line["text"] for line in lines}) > 1
