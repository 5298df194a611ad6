"""The table of the files of a run folder, compared to runs of the first release."""

from __future__ import annotations

from pathlib import Path

import pytest

from splitppo.run_folder.contents import ENTRIES
from splitppo.run_folder.events import KINDS, read_events
from tests.support.released_runs import RELEASED, released_run
from tests.support.table_of_files import entry_of


@pytest.mark.parametrize("name", RELEASED)
def test_every_file_and_every_event_of_a_run_is_in_the_tables(tmp_path: Path, name: str) -> None:
    folder, _ = released_run(name, tmp_path)
    files = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    assert [path for path in files if entry_of(path) is None] == ["samples.jsonl"]  # that release had it
    assert {event["kind"] for event in read_events(folder)} <= {kind for kinds in KINDS for kind in kinds}


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
