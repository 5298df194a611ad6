"""The tool `python`: runs programs of the model, each in a sandbox of its own."""

import asyncio
from dataclasses import replace
from functools import cache

from environments.tools import Tool
from rewards.code.bubblewrap import HINT, NoSandbox
from rewards.code.runner import try_out
from rewards.code.sandbox import Sandbox
from splitppo.config.subsections.code import CodeConfig
from splitppo.config_error import config_errors

_MAX_OUTPUT_BYTES = 1 << 18  # less than a message may have


@cache
def load_python(config: CodeConfig) -> Tool:
    """Returns the tool, with the limits of `reward.code`; ConfigError: programs cannot be run here."""
    limits = config.model_copy(update={"max_output_bytes": min(config.max_output_bytes, _MAX_OUTPUT_BYTES)})

    def python(code: str) -> str:
        """Runs a Python program and returns what it prints. Nothing is left of the programs before.

        Args:
            code: the program.
        """
        with Sandbox(limits) as sandbox:
            return sandbox.execute(code)

    problem = "rollout.multi_turn.environments: the tool python cannot run programs here: "
    with config_errors(NoSandbox, before=problem, after="" if config.unsafe else f" ({HINT})"):
        try_out(limits)
    return replace(Tool.of(python), places=asyncio.Semaphore(int(config.num_sandboxes)))
