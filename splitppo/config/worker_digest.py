"""The digest of what shapes a worker: equal digests mean that controller and worker were given the same model."""

import hashlib
import json

from splitppo.config.schema import Config
from splitppo.config.section import RoleName

# Keys of the rollout section that only the controller reads.
_CONTROLLERS = {"stream_groups", "check_freq", "max_log_prob_diff"}
# Keys of the reward model that only the controller reads.
_OF_REWARD_ROWS = {"tokenizer", "chat_template", "max_length", "coef"}


def worker_digest(config: Config, role: RoleName) -> str:
    """sha256 over `worker_sections`: a longer run, another address or another schedule leaves it unchanged."""
    return hashlib.sha256(json.dumps(worker_sections(config, role), sort_keys=True).encode()).hexdigest()


def worker_sections(config: Config, role: RoleName) -> dict[str, object]:
    """The sections that shape what this role's models compute and learn, and nothing else, as JSON has them."""
    sections: dict[str, object] = {}
    if role != "reward":
        sections = {
            "seed": config.run.seed,
            role: config.model_of(role).model_dump(mode="json"),
            "rollout.n": config.rollout.n,
            "data.max_response_length": config.data.max_response_length,
        }
    if role == "actor":
        sections["rollout"] = config.rollout.model_dump(mode="json", exclude=_CONTROLLERS)
        sections["data.tokenizer"] = config.data.tokenizer
        sections["reference"] = config.reference_host == role
    elif config.reference_host == role:
        sections["actor"] = config.actor.model_dump(mode="json")
        sections["rollout.temperature"] = config.rollout.temperature
    if config.reward_model_host == role:
        sections["reward_model"] = config.reward_model.model_dump(mode="json", exclude=_OF_REWARD_ROWS)
    return sections
