"""Mistakes that only a GPU would show are found by the rehearsal, which names them.

Each is made in a copy of the project, in which one test must then fail with the words of the mistake.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.groups import PROJECT

PRETENDED = "REHEARSAL_LIBRARY" in os.environ
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.extended,
    pytest.mark.skipif(not PRETENDED, reason="needs the pretended CUDA device: make rehearse-gpu"),
]
MIXED = "Expected all tensors to be on the same device, but found at least two devices"
NOT_IN_THE_COPY = (".*", "build", "runs", "docs", "__pycache__", "node_modules")
GPU = "tests/gpu/test_engine_gpu.py"
WAITS = "tests/rehearsal/test_host_waits.py::test_an_update_waits_as_often_whatever_the_number_of_micro_batches"
RANKS = "tests/rehearsal/test_several_ranks.py::test_ranks_have_the_gradient_of_one"
RUNS = "tests/rehearsal/test_runs.py"
ENGINE = "services/engine"


@dataclass(frozen=True)
class Mutation:
    """A mistake: text of a file is replaced, and the test must then say these words."""

    file: str
    before: str
    after: str
    test: str
    words: tuple[str, ...]


MUTATIONS = {
    "targets stay on the CPU": Mutation(
        f"{ENGINE}/batching/packing.py",
        "targets=tensor(responses.values.astype(np.int64))",
        "targets=torch.from_numpy(responses.values.astype(np.int64))",
        f"{GPU}::test_fp32_packed_gradient_equals_padded[policy]",
        (MIXED,),
    ),
    "tokens stay on the CPU": Mutation(
        "services/rollout/hf_backend/decoding.py",
        "return torch.from_numpy(values).to(self._device)",
        "return torch.from_numpy(values)",
        "tests/gpu/test_rollout_gpu.py",
        (MIXED,),
    ),
    "moments stay in main memory": Mutation(
        f"{ENGINE}/optimizer.py",
        "return values.to(self._device, non_blocking=True, copy=self._in_main_memory).float()",
        "return values.clone().float()",
        f"{GPU}::test_a_bucketed_step_has_the_bits_of_torch",
        (MIXED,),
    ),
    "a collective gets a tensor of the CPU": Mutation(
        f"{ENGINE}/model/sequence_parallel.py",
        "received = torch.empty_like(parts)",
        "received = torch.empty(parts.shape, dtype=parts.dtype)",
        f"{RANKS}[divided positions]",
        ("all_to_all_single: Tensors must be CUDA and dense",),
    ),
    "a collective gets a tensor with gaps": Mutation(
        f"{ENGINE}/model/sequence_parallel.py",
        "parts = parts.contiguous()",
        "parts = parts + 0",
        f"{RANKS}[divided positions]",
        ("all_to_all_single: Tensors must be contiguous",),
    ),
    "the index of a device is one too high": Mutation(
        "services/runtime/group/process_group.py",
        'return torch.device("cuda", index)',
        'return torch.device("cuda", index + 1)',
        f"{RUNS}::test_actor_and_critic_learn_on_two_gpus_in_bf16",
        ("device_id cuda:1 is out of range",),
    ),
    "all ranks take the first device": Mutation(
        "services/runtime/group/process_group.py",
        "torch.cuda.set_device(index)",
        "torch.cuda.set_device(index := 0)",
        f"{RUNS}::test_a_run_ends_well[FSDP2 on two ranks, with LoRA]",
        ("Duplicate GPU detected",),
    ),
    "a number is read in each micro-batch": Mutation(
        f"{ENGINE}/train_engine.py",
        "            report()\n",
        "            output.loss.item()\n            report()\n",
        f"{WAITS}[64-bf16-policy]",
        ("aten::_local_scalar_dense", "services/engine/train_engine.py TrainEngine.accumulate_gradients"),
    ),
    "the device is waited for in each micro-batch": Mutation(
        f"{ENGINE}/train_engine.py",
        "            report()\n",
        "            torch.cuda.synchronize()\n            report()\n",
        f"{WAITS}[64-bf16-value]",
        ("synchronize the device", "services/engine/train_engine.py TrainEngine.accumulate_gradients"),
    ),
    "micro-batches are copied from pageable memory": Mutation(
        f"{ENGINE}/batching/on_device.py",
        "tensor = tensor.pin_memory()",
        "pass",
        f"{WAITS}[64-bf16-policy]",
        ("copy to the device from pageable memory", "services/engine/batching/on_device.py on_device"),
    ),
    "tokens are taken by a mask": Mutation(
        f"{ENGINE}/token_metrics.py",
        "torch.where(mask_N, x_N, 0.0).sum()",
        "x_N[mask_N].sum()",
        f"{WAITS}[64-bf16-policy]",
        ("index with a mask", "services/engine/token_metrics.py MetricSums.of"),
    ),
    "weights rest in memory that is not pinned": Mutation(
        f"{ENGINE}/rest.py",
        "pinned=is_cuda), strict=True",
        "pinned=False), strict=True",
        f"{WAITS}[64-offloaded-policy]",
        ("copy to the host", "services/engine/rest.py Rest.rest"),
    ),
    "sums begin in memory that nobody has written": Mutation(
        f"{ENGINE}/model/log_probs.py",
        "torch.zeros_like(weight_VD, dtype=wide)",
        "torch.empty_like(weight_VD, dtype=wide)",
        f"{GPU}::test_bf16_varlen_gradient_is_as_near_to_fp32_as_padded_bf16[policy]",
        ("assert nan <=",),
    ),
    "an import uses the device, and ranks are forked": Mutation(
        f"{ENGINE}/parallel.py",
        "def num_ranks() -> int:",
        'torch.zeros(1, device="cuda")\n\n\ndef num_ranks() -> int:',
        f"{RANKS}[ddp]",
        ("Cannot re-initialize CUDA in forked subprocess",),
    ),
}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project's Python files."""
    copy = tmp_path_factory.mktemp("mutated") / "project"
    shutil.copytree(PROJECT, copy, ignore=shutil.ignore_patterns(*NOT_IN_THE_COPY))
    return copy


@pytest.fixture
def mutation(request: pytest.FixtureRequest, project: Path) -> Iterator[Mutation]:
    """A mutation, which is made in the copy."""
    made = MUTATIONS[request.param]
    file = project / made.file
    text = file.read_text()
    assert text.count(made.before) == 1, "what is to be replaced is not there"
    file.write_text(text.replace(made.before, made.after))
    yield made
    file.write_text(text)


@pytest.mark.parametrize("mutation", MUTATIONS, indirect=True)
def test_a_mistake_is_found_and_named(mutation: Mutation, project: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-vv", mutation.test]
    done = subprocess.run(
        command, cwd=project, env={**os.environ, "CI": ""}, capture_output=True, text=True, check=False
    )
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout
    assert [words for words in mutation.words if words not in done.stdout] == [], done.stdout
