"""python -m tests.rehearsal [-m EXPRESSION] [pytest's arguments]: what is for GPUs, on the pretended CUDA device.

They are tests/gpu and the rehearsals, on a machine with four GPUs, and the tests of engines and roles that `ON_DEVICE`
names, which otherwise run on the CPU. With paths only these are run. With --exec, the arguments are instead those of a
Python that has the device: `python -m tests.rehearsal --exec -m benchmarks.gpu_proof`; CUDA_VISIBLE_DEVICES narrows its
four GPUs. Where the device cannot be compiled, one sentence says why; the exit status is then 0, but in CI 1.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.rehearsal.build import NoDevice, environment

TESTS = Path(__file__).parents[1]
NUM_GPUS = 4
BY_DEFAULT = "not extended and not vllm"
# Tests that compute on `DEVICE` of tests/support/engines.py, whatever that is.
ON_DEVICE = [
    *("engine/test_train_engine.py", "engine/test_checkpoint.py"),
    *("actor/test_role.py", "critic/test_role.py", "roles", "rollout/test_role.py"),
]
# Tests of these files that need a CPU: a loss of their own makes tensors there, or they count kernels by name.
NEED_A_CPU = [
    "engine/test_train_engine.py::test_a_loss_over_sequences_sees_whole_rows_however_they_are_split",
    "engine/test_train_engine.py::test_selective_checkpointing_has_the_same_bits_and_computes_attention_once",
]
NO_TESTS = 5


def main() -> int:
    """Runs the tests; returns 1 if one of them failed or none was run, or in CI if there is no device."""
    try:
        with_device = environment(NUM_GPUS)
        # A GPU that no table knows: tests compare metrics, and a share of the peak is never the same twice.
        as_in_tests = environment(1, gpu_name="pretended") | {"SPLITPPO_TEST_DEVICE": "cuda:0"}
    except NoDevice as error:
        sys.stdout.write(f"SKIPPED the rehearsal on pretended GPUs: {error}\n")
        return 1 if os.environ.get("CI") else 0
    if sys.argv[1:2] == ["--exec"]:
        visible = {name: value for name, value in os.environ.items() if name == "CUDA_VISIBLE_DEVICES"}
        return subprocess.run([sys.executable, *sys.argv[2:]], env=with_device | visible, check=False).returncode
    parser = argparse.ArgumentParser(prog="tests.rehearsal", description=__doc__, allow_abbrev=False)
    parser.add_argument("-m", dest="expression", default=BY_DEFAULT, help="which tests, by their marks")
    options, arguments = parser.parse_known_args()
    on_device = [str(TESTS / "unit" / file) for file in ON_DEVICE]
    on_device += [f"--deselect=tests/unit/{test}" for test in NEED_A_CPU]
    whole_runs = str(TESTS / "rehearsal" / "test_runs.py")
    others = [str(TESTS / "gpu"), str(TESTS / "rehearsal"), f"--ignore={whole_runs}"]
    stages = [(with_device, [whole_runs]), (with_device, others), (as_in_tests, on_device)]
    if any(not argument.startswith("-") for argument in arguments):
        stages = [(with_device, [])]

    def run(stage: tuple[dict[str, str], list[str]]) -> int:
        variables, paths = stage
        return run_pytest(options.expression, [*paths, *arguments], variables)

    with ThreadPoolExecutor(len(stages)) as pool:  # at once: runs wait for ranks, and all of them begin with imports
        codes = [*pool.map(run, stages)]
    return 0 if all(code in (0, NO_TESTS) for code in codes) and 0 in codes else 1


def run_pytest(expression: str, arguments: list[str], variables: dict[str, str]) -> int:
    """Runs pytest in an environment, and shows at the end what it has said; returns its exit status."""
    command = [sys.executable, "-m", "pytest", "-m", expression, "--durations", "10", *arguments]
    environment = {"OMP_NUM_THREADS": "1"} | variables
    done = subprocess.run(
        command,
        cwd=TESTS.parent,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    sys.stdout.write(done.stdout)
    sys.stdout.flush()
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
