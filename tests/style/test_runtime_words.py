"""The runtime of a worker group treats commands by their effect: it names no command, column or idea of a role."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from splitppo.columns import COLUMNS
from splitppo.v1 import (
    actor_pb2,
    critic_pb2,
    reference_pb2,
    reward_model_pb2,
    rollout_pb2,
    teacher_pb2,
)

SERVICES = Path(__file__).parents[2] / "services"
# The column by which the runtime puts parts together is its own.
COLUMNS_OF_ROLES = [f'"{column}"' for column in COLUMNS if column != "places"]
IDEAS = ["conversations?", "turns? of", "teachers?", "prompts?", "advantages?", "max_response_length"]


def methods_of_roles() -> Iterator[str]:
    for file in (actor_pb2, critic_pb2, reference_pb2, reward_model_pb2, rollout_pb2, teacher_pb2):
        for service in file.DESCRIPTOR.services_by_name.values():
            yield from (method.name for method in service.methods)


def words_in(folder: Path) -> set[str]:
    """The names of commands, columns and ideas of roles in the code of a folder, comments included."""
    names = "|".join([*(rf"\b{method}\b" for method in methods_of_roles()), *COLUMNS_OF_ROLES])
    ideas = "|".join(rf"\b{idea}\b" for idea in IDEAS)
    text = "\n".join(file.read_text() for file in folder.rglob("*.py"))
    return {*re.findall(names, text), *re.findall(ideas, text, re.IGNORECASE)}


def test_the_runtime_has_no_word_of_a_role() -> None:
    assert words_in(SERVICES / "runtime") == set()


def test_the_roles_have_such_words() -> None:
    assert {"Generate", '"prompts"', "prompt"} <= words_in(SERVICES / "rollout")
    assert {"Update", "PublishWeights", '"advantages"'} <= words_in(SERVICES / "actor")
