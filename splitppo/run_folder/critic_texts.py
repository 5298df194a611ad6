"""`rollouts/critic/N.jsonl`: what the critic alone has read of step N (`critic.privileged_prompt`), for its own page.

Each line has a text and the rows of the responses before which it stood: {"text": "Answer: 5", "rows": [0, 1]}.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from splitppo.run_folder.files import RunDir, Unreadable, json_object
from splitppo.run_folder.rollout_lines import write_rollouts

FOLDER = "critic"  # in rollouts/
MAX_BYTES = 16 << 20


def write_critic_texts(rollouts: Path, step: int, texts: Mapping[int, str]) -> None:
    """Writes the texts of some responses of a step, by row."""
    rows: dict[str, list[int]] = {}
    for row, text in texts.items():
        rows.setdefault(text, []).append(row)
    write_rollouts(rollouts / FOLDER, step, ({"text": text, "rows": own} for text, own in rows.items()))


def cut_back(rollouts: Path, restored_step: int) -> None:
    """Removes the files of steps after the restored step."""
    for file in (rollouts / FOLDER).glob("*.jsonl"):
        if file.stem.isdigit() and int(file.stem) > restored_step:
            file.unlink(missing_ok=True)


def has_critic_texts(folder: RunDir) -> bool:
    """Returns True if the critic of a run has read texts that were recorded."""
    return folder.path.joinpath("rollouts", FOLDER).is_dir()


def read_critic_texts(folder: RunDir, step: int) -> dict[str, Any]:
    """Reads what the critic alone has read of a step: {"step", "row": [...], "text": [...]}, in the order of the rows.

    Raises:
        Unreadable: the file cannot be read, or has something else than texts and rows.
    """
    names = ("rollouts", FOLDER, f"{step}.jsonl")
    place = "/".join(names)
    found: dict[int, str] = {}
    with folder.open(*names, max_bytes=MAX_BYTES) as file:
        for line in file.read().splitlines():
            entry = json_object(line, place)
            text = entry.get("text")
            rows = entry.get("rows")
            if not isinstance(text, str) or not isinstance(rows, list) or not all(type(row) is int for row in rows):
                raise Unreadable(f"{place} has a line without a text and rows.")
            found |= dict.fromkeys(rows, text)
    ordered = dict(sorted(found.items()))
    return {"step": step, "row": [*ordered], "text": [*ordered.values()]}
