"""The section `reward.code`."""

from pydantic import Field

from splitppo.config.section import NumberOrAuto, PositiveInt, Section


class CodeConfig(Section):
    """Code answers: programs, run in sandboxes against the test cases of their rows."""

    continuous: bool = Field(False, description="score by the share of the tests that are passed, not 1 for all or 0")
    timeout_s: float = Field(
        10.0, gt=0.0, description="CPU seconds per answer, over all tests and processes; three times that on the clock"
    )
    memory_mb: int = Field(1024, ge=64, description="MiB per answer, of all its processes and files together")
    max_processes: PositiveInt = Field(32, description="processes and threads of an answer at a time")
    max_output_bytes: PositiveInt = Field(32 << 20, description="bytes that an answer may print, all tests together")
    num_sandboxes: NumberOrAuto = Field("auto", description="answers that run at a time; auto: one per core")
    unsafe: bool = Field(False, description="run programs without a sandbox, with the rights of the controller")
