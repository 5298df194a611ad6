"""The digest of what shapes a worker: equal digests mean that controller and worker were given the same model."""

from __future__ import annotations

import hashlib
import json
from typing import Literal

from splitppo.config.schema import Config

# Keys of the rollout section that only the controller reads.
_CONTROLLERS = {"stream_groups", "check_freq", "max_log_prob_diff"}


def worker_digest(config: Config, role: Literal["actor", "critic"]) -> str:
    """sha256 over the sections that shape this role's weights and samples, and nothing else.

    A longer run, another address or another schedule leaves it unchanged.
    """
    sections: dict[str, object] = {"seed": config.run.seed, role: getattr(config, role).model_dump(mode="json")}
    sections["rollout.n"] = config.rollout.n
    sections["data.max_response_length"] = config.data.max_response_length
    if role == "actor":
        sections["rollout"] = config.rollout.model_dump(mode="json", exclude=_CONTROLLERS)
        sections["data.tokenizer"] = config.data.tokenizer
        sections["reference"] = config.uses_reference
    return hashlib.sha256(json.dumps(sections, sort_keys=True).encode()).hexdigest()
