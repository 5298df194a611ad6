"""The table of the files of a run folder, compared to runs of the first release."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

from splitppo.run_folder.contents import ENTRIES, entry_of
from splitppo.run_folder.events import KINDS

RELEASED = Path(__file__).parents[1] / "viewer" / "released"


@pytest.mark.parametrize("file", sorted(RELEASED.glob("*.tar.gz")), ids=lambda file: file.name)
def test_every_file_and_every_event_of_a_run_is_in_the_tables(file: Path) -> None:
    with tarfile.open(file) as packed:
        names = [name for name in packed.getnames() if name != "answers.json"]
        folder = names[0].partition("/")[0]
        events = packed.extractfile(f"{folder}/events.jsonl")
        assert events is not None
        kinds = {json.loads(line)["kind"] for line in events}
    unknown = [name for name in names if entry_of(name.removeprefix(f"{folder}/")) is None]
    assert unknown == [f"{folder}/samples.jsonl"]  # that release had it
    assert kinds <= {kind for kinds in KINDS for kind in kinds}


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("rollouts/val_only/12.parquet", "rollouts/train/N.parquet"),
        ("checkpoints/global_step_3/actor/manifest.json", "checkpoints/global_step_N/"),
        ("services/actor.end.json", "services/{role}.failure.json"),
        ("services/writer_node-1.example_0.lock", "services/writer_{host}_N.lock"),
        ("logs/actor_1.log.old", "logs/controller_0.log"),
        ("logs/actor_critic_template.log", "logs/{roles}_template.log"),
        ("nonce-0a1b", "controller.lock"),
    ],
)
def test_a_file_is_found_by_its_path(path: str, expected: str) -> None:
    entry = entry_of(path)
    assert entry is not None
    assert entry.paths[0] == expected


def test_other_files_are_in_no_row() -> None:
    for path in ("metrics.jsonl.gz", "rollouts/train/x.parquet", "checkpoints/global_step_3", "services/actor.jsonl"):
        assert entry_of(path) is None
    assert len({path for entry in ENTRIES for path in entry.paths}) == sum(len(entry.paths) for entry in ENTRIES)
