"""The section `reward.code`."""

from typing import Annotated

from pydantic import Field

from splitppo.config.section import FIXED, NumberOrAuto, PositiveInt, Section


class CodeConfig(Section):
    """Code answers: programs, run in sandboxes against the test cases of their rows."""

    continuous: Annotated[bool, FIXED] = False
    """score by the share of the tests that are passed, not 1 for all or 0"""

    timeout_s: float = Field(10.0, gt=0.0)
    """CPU seconds per answer, over all tests and processes; three times that on the clock"""

    memory_mb: int = Field(1024, ge=64)
    """MiB per answer, of all its processes and files together"""

    max_processes: PositiveInt = 32
    """processes and threads of an answer at a time"""

    max_output_bytes: PositiveInt = 32 << 20
    """bytes that an answer may print, all tests together"""

    num_sandboxes: NumberOrAuto = "auto"
    """answers that run at a time; auto: one per core"""

    unsafe: bool = False
    """run programs without a sandbox, with the rights of the controller"""
