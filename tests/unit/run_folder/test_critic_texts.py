"""rollouts/critic/N.jsonl: what the critic alone has read, written and read back."""

from pathlib import Path

import pytest

from splitppo.run_folder.critic_texts import cut_back, has_critic_texts, read_critic_texts, write_critic_texts
from splitppo.run_folder.files import RunDir, Unreadable

TEXTS = {0: "a", 1: "a", 5: "<img src=x onerror=alert(1)>\u202e", 4: "a"}


def test_texts_are_read_back_by_row(tmp_path: Path) -> None:
    folder = RunDir(tmp_path)
    assert not has_critic_texts(folder)
    write_critic_texts(tmp_path / "rollouts", 3, TEXTS)
    assert has_critic_texts(folder)
    ordered = [TEXTS[row] for row in (0, 1, 4, 5)]
    assert read_critic_texts(folder, 3) == {"step": 3, "row": [0, 1, 4, 5], "text": ordered}


def test_a_way_back_removes_those_of_later_steps(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write_critic_texts(tmp_path / "rollouts", step, TEXTS)
    cut_back(tmp_path / "rollouts", 1)
    assert [file.name for file in (tmp_path / "rollouts/critic").iterdir()] == ["1.jsonl"]


@pytest.mark.parametrize(
    "line", ["3", "{", '{"text": 1, "rows": []}', '{"text": "a"}', '{"text": "a", "rows": ["1"]}', '{"rows": [true]}']
)
def test_a_line_that_is_something_else_is_one_sentence(tmp_path: Path, line: str) -> None:
    write_critic_texts(tmp_path / "rollouts", 3, TEXTS)
    with (tmp_path / "rollouts/critic/3.jsonl").open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(Unreadable, match=r"^rollouts/critic/3\.jsonl "):
        read_critic_texts(RunDir(tmp_path), 3)


def test_a_step_without_texts_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(Unreadable, match=r"^rollouts/critic/3\.jsonl cannot be read"):
        read_critic_texts(RunDir(tmp_path), 3)
