"""The cases of benchmarks.gpu_proof by name: what each one runs, how long it may take, and which of them are quick."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

# The first part of a case's name, and the heading of its figures.
GROUPS = {
    "tests": "The tests of the GPU",
    "basics": "What the code relies on",
    "run": "PPO runs, actor and critic on the same GPU",
    "update": "Updates, two micro-batches of 16k tokens",
    "row": "Long rows",
    "repeat": "The same two updates, twice",
    "sanitizer": "Streams that do not wait for each other",
}
QUICK_LIMIT_S = 540.0
# What must be known first comes first.
_QUICK = (
    *("tests/gpu", "basics/ceilings", "basics/attention", "basics/adamw", "run/0.5B-killed-critic"),
    *("update/1.5B-full-checkpointing", "update/1.5B-full-moments-offloaded", "update/1.5B-full-all-offloaded"),
    *("row/7B-lora-32k", "repeat/1.5B-default", "repeat/1.5B-deterministic", "sanitizer/buckets-and-rest"),
)
_CHECKPOINTING: Mapping[str, Any] = {"gradient_checkpointing": True}
# Keys of the actor's section, by the last part of the name of an update.
_SWITCHES: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "checkpointing": _CHECKPOINTING,
    "selective": {"gradient_checkpointing": "selective"},
    "bf16-logits": {**_CHECKPOINTING, "fp32_lm_head": False},
    "bf16-moments": {**_CHECKPOINTING, "optimizer_state_dtype": "bf16"},
    "moments-offloaded": {**_CHECKPOINTING, "optimizer_offload": True},
    "all-offloaded": {**_CHECKPOINTING, "optimizer_offload": True, "param_offload": True},
    "compiled": {**_CHECKPOINTING, "compile": True},
    "bf16-moments-offloaded": {**_CHECKPOINTING, "optimizer_offload": True, "optimizer_state_dtype": "bf16"},
}
_UPDATES = {
    ("0.5B", "full"): ("plain", "checkpointing", "compiled"),
    ("0.5B", "lora"): ("plain", "checkpointing"),
    ("1.5B", "full"): tuple(name for name in _SWITCHES if name != "bf16-moments-offloaded"),
    ("1.5B", "lora"): ("plain", "checkpointing"),
    ("7B", "full"): ("plain", "checkpointing", "bf16-moments-offloaded"),
    ("7B", "lora"): ("plain", "checkpointing"),
}
_WITH_KERNELS = "update/1.5B-full-checkpointing"
_ROWS = {"4k": 4096, "8k": 8192, "16k": 16_384, "32k": 32_768, "64k": 65_536}
# cuBLAS wants it before its first product for results that repeat.
_DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


class Case(NamedTuple):
    """One measurement: a function of `benchmarks.gpu_cases`, its arguments, the seconds that it may take at most, and
    environment variables that its process needs.
    """

    name: str
    function: str
    arguments: Mapping[str, Any] = {}
    limit_s: float = 120.0
    environment: Mapping[str, str] = {}

    @property
    def group(self) -> str:
        """The first part of the name."""
        return self.name.partition("/")[0]


def all_cases() -> list[Case]:
    """Returns every case, in the order in which they run."""
    return [
        Case("tests/gpu", "tests", limit_s=180.0),
        Case("tests/vllm", "vllm_tests", limit_s=900.0),
        Case("basics/ceilings", "ceilings", limit_s=45.0),
        Case("basics/attention", "attention", limit_s=45.0),
        Case("basics/adamw", "adamw", limit_s=45.0),
        *_updates(),
        *_repeats(),
        *_rows(),
        *_runs(),
        Case("sanitizer/buckets-and-rest", "sanitizer", limit_s=240.0),
    ]


def quick_cases() -> list[Case]:
    """Returns the cases of eight minutes, in their own order."""
    by_name = {case.name: case for case in all_cases()}
    return [by_name[name] for name in _QUICK]


def _updates() -> Iterator[Case]:
    for (size, mode), switches in _UPDATES.items():
        for switch in switches:
            is_slow = size == "7B" or "compile" in _SWITCHES[switch]
            name = f"update/{size}-{mode}-{switch}"
            num_kernels = 15 if name == _WITH_KERNELS else 0
            arguments = {"size": size, "mode": mode, "keys": _SWITCHES[switch], "num_kernels": num_kernels}
            yield Case(name, "update", arguments, limit_s=240.0 if is_slow else 120.0)


def _repeats() -> Iterator[Case]:
    yield Case("repeat/1.5B-default", "repeat", {"size": "1.5B", "deterministic": False})
    arguments = {"size": "1.5B", "deterministic": True}
    yield Case("repeat/1.5B-deterministic", "repeat", arguments, environment=_DETERMINISTIC)


def _rows() -> Iterator[Case]:
    for size, mode in (("1.5B", "full"), ("7B", "lora")):
        for length, tokens in _ROWS.items():
            arguments = {"size": size, "mode": mode, "tokens": tokens}
            yield Case(f"row/{size}-{mode}-{length}", "row", arguments, limit_s=300.0 if length == "64k" else 180.0)
        arguments = {"size": size, "mode": mode, "tokens": _ROWS["32k"], "checkpointing": "selective"}
        yield Case(f"row/{size}-{mode}-32k-selective", "row", arguments, limit_s=180.0)


def _runs() -> Iterator[Case]:
    yield Case("run/0.5B-killed-critic", "killed_critic", {"size": "0.5B", "mode": "full"}, limit_s=180.0)
    for mode in ("full", "lora"):
        yield Case(f"run/0.5B-{mode}-resumed", "resumed_run", {"size": "0.5B", "mode": mode}, limit_s=420.0)


def chosen(cases: Sequence[Case], only: Sequence[str], skip: Sequence[str]) -> list[Case]:
    """Returns those of the cases that are asked for, in their order.

    `only` (all, if it is empty) and `skip` hold names, groups (`row`), or patterns (`row/7B*`).

    Raises:
        ValueError: none of the cases has such a name.
    """
    for choice in (*only, *skip):
        if not any(_is_meant(case, choice) for case in cases):
            raise ValueError(f"no case is named {choice}: expected a name that --list shows, a pattern, or a group")
    wanted = [case for case in cases if not only or any(_is_meant(case, choice) for choice in only)]
    return [case for case in wanted if not any(_is_meant(case, choice) for choice in skip)]


def _is_meant(case: Case, choice: str) -> bool:
    return case.group == choice or fnmatchcase(case.name, choice)
