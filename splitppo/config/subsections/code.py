"""The configuration section `reward.code`: limits of the sandboxes in which a policy's programs are tested."""

from typing import Annotated

from pydantic import Field

from splitppo.config.section import FIXED, NumberOrAuto, PositiveInt, Section


class CodeConfig(Section):
    """Code answers: programs in responses, which run in sandboxes against test cases of the data set.

    The limits also hold for programs that the policy runs by the tool `python`.
    """

    continuous: Annotated[bool, FIXED] = False
    """If true, the score is the share of the tests that pass. If false, it is 1 if all tests pass, else 0."""

    timeout_s: float = Field(10.0, gt=0.0)
    """The CPU time of an answer, in seconds, over all its tests and processes. On the clock an answer has three times
    as long."""

    memory_mb: int = Field(1024, ge=64)
    """The memory of an answer, in MiB, over all its processes and files."""

    max_processes: PositiveInt = 32
    """The largest number of processes and threads that an answer has at the same time."""

    max_output_bytes: PositiveInt = 32 << 20
    """The largest number of bytes that an answer may print, over all its tests."""

    num_sandboxes: NumberOrAuto = "auto"
    """The number of answers that run at the same time. auto: one for each core."""

    unsafe: bool = False
    """If true, programs run without a sandbox, with the rights of the controller."""
