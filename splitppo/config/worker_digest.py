"""Computes a digest of configuration keys, by which a controller and a worker check that they have the same settings.

The digest covers the keys that shape what the worker's models compute: model, training and sampling.
"""

import hashlib
import json

from splitppo.config.keys import KEYS
from splitppo.config.schema import Config
from splitppo.config.section import RoleName


def worker_digest(config: Config, role: RoleName) -> str:
    """Computes the sha256 (hex) of the configuration keys that shape the models of a role, see `worker_sections`.

    The length of a run, addresses and the schedule do not change the digest.
    """
    return hashlib.sha256(json.dumps(worker_sections(config, role), sort_keys=True).encode()).hexdigest()


def worker_sections(config: Config, role: RoleName) -> dict[str, object]:
    """Returns the settings that decide what the models of a role compute and learn, as JSON values by key.

    A group that only hosts the reference has the actor's model, one that samples has its own view of it; the reward
    group has nothing of its own but its reward model.
    """
    sections: dict[str, object] = {}
    if role != "reward":
        sections = {
            "seed": config.run.seed,
            "actor" if role == "rollout" else role: config.model_of(role).model_dump(mode="json"),
            "rollout.n": config.rollout.n,
            "data.max_response_length": config.data.max_response_length,
        }
    if role in ("actor", "rollout"):
        sections["rollout"] = _shaping(config, "rollout")
        sections["data.tokenizer"] = config.data.tokenizer
        sections["rollout.multi_turn.max_context_length"] = config.rollout.multi_turn.max_context_length
    if role == "actor":
        sections["reference"] = config.reference_host == role
    elif config.reference_host == role:
        sections["actor"] = config.actor.model_dump(mode="json")
        sections["rollout.temperature"] = config.rollout.temperature
    if config.reward_model_host == role:
        sections["reward_model"] = _shaping(config, "reward_model")
    if config.teacher_host == role or (role == "actor" and config.teacher.is_in_loss):
        sections["teacher"] = _shaping(config, "teacher")
        sections["rollout.temperature"] = config.rollout.temperature
    return sections


def _shaping(config: Config, section: str) -> dict[str, object]:
    """Returns the keys and values of one section without the keys that only the controller reads."""
    tree: dict[str, object] = getattr(config, section).model_dump(mode="json")
    return {name: value for name, value in tree.items() if KEYS[f"{section}.{name}"].shapes_worker}
