"""The process in which benchmarks.gpu_proof measures: python -m benchmarks.gpu_cases FOLDER [--tiny].

It reads cases as lines of JSON (function, arguments), and prints the result of each one as a line of JSON: "values"
(figures by name), "failed" or "skipped" (a sentence). What else there is to know about a failure goes to stderr.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn.attention.varlen import varlen_attn

from benchmarks import gpu_engine, gpu_run
from benchmarks.gpu_engine import NOT_ON_A_CPU, Place, Skipped, Values, median_s, relative_error
from benchmarks.gpu_run import said_by
from services.engine.model.attention import causal_attention
from splitppo.config.rollout_packages import installed_version
from splitppo.machine.children.parent import end_with

ROOT = Path(__file__).resolve().parents[1]
_NUM_NAMED = 5  # tests that failed
# Two streams write the same memory, and neither waits for the other.
_RACE = """
import torch
values = torch.zeros(1000, device="cuda")
with torch.cuda.stream(torch.cuda.Stream()):
    values.add_(1)
"""


def main() -> None:
    """Runs cases until there are no more."""
    end_with(os.getppid())
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    place = Place(device, Path(sys.argv[1]), "--tiny" in sys.argv)
    for name, arguments in map(json.loads, sys.stdin):
        result: dict[str, Any] = {}
        try:
            result["values"] = FUNCTIONS[name](place, **arguments)
            result |= {"failed": result["values"].pop("failed")} if "failed" in result["values"] else {}
        except Skipped as reason:
            result["skipped"] = str(reason)
        except Exception as error:  # noqa: BLE001 # of any kind: it is the result
            traceback.print_exc()
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            result["failed"] = f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
        print(json.dumps(result), file=results, flush=True)


def machine(place: Place) -> Values:
    """Returns what the figures depend on: hardware, driver, versions, commit."""
    values: Values = {"device": "CPU", "cores": len(os.sched_getaffinity(0))}
    if place.device.type == "cuda":
        properties = torch.cuda.get_device_properties(place.device)
        name = properties.name if place.has_kernels else f"pretended by torch on a CPU, as {properties.name}"
        values |= {"device": name, "memory GiB": properties.total_memory / 2**30}
        values |= {"driver": _driver(), "CUDA": torch.version.cuda}
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = "unknown"
    values |= {"Python": sys.version.split()[0], "torch": torch.__version__}
    return values | {"transformers": transformers.__version__, "commit": commit}


def _driver() -> str:
    import pynvml

    try:
        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return "unknown"


def tests(place: Place) -> Values:
    """Runs tests/gpu without those of vLLM; a test that fails fails the case."""
    if place.device.type == "cpu":
        raise Skipped(NOT_ON_A_CPU)
    return _tested(["-m", "not vllm"], {})


def vllm_tests(place: Place) -> Values:
    """Runs the tests of vLLM in tests/gpu, if this Python has vLLM for GPUs."""
    if not place.has_kernels:
        raise Skipped(NOT_ON_A_CPU)
    if installed_version("vllm") is None:
        raise Skipped("without vLLM: make setup VLLM=1 LOCK=cuda makes an environment with it")
    return _tested(["-m", "vllm"], {})


def sanitizer(place: Place) -> Values:
    """Runs the tests of buckets and of rest with torch's sanitizer, which fails at accesses of two streams to the same
    memory that nothing has put in order; first looks whether it finds such an access.
    """
    if place.device.type == "cpu":
        raise Skipped(NOT_ON_A_CPU)
    switch = {"TORCH_CUDA_SANITIZER": "1"}
    code, said = said_by([sys.executable, "-c", _RACE], switch)
    if code == 0 or "CUDASanitizerErrors" not in said:
        raise RuntimeError(f"the sanitizer found no race where there is one; exit status {code}")
    return _tested(["-m", "not vllm", "-k", "bucket or rest"], switch)


def _tested(arguments: list[str], environment: Mapping[str, str]) -> Values:
    """Runs tests of tests/gpu; returns their numbers, or fails with the first tests that failed."""
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "tests/gpu", *arguments]
    code, said = said_by(command, {"CI": "", "COLUMNS": "200", **environment})
    last = (said.strip().splitlines() or ["pytest said nothing"])[-1]
    if code != 0:
        failed = re.findall(r"^(?:FAILED|ERROR) (.+)$", said, re.MULTILINE)
        raise RuntimeError("; ".join([last.strip(" ="), *failed[:_NUM_NAMED]]))
    return {name: int(number) for number, name in re.findall(r"(\d+) (passed|skipped)", last)}


def ceilings(place: Place) -> Values:
    """Measures the highest rates of a copy on the device and of a bf16 matrix product, and the error of a product."""
    source = torch.randn(1 << (18 if place.tiny else 28), device=place.device)
    target = torch.empty_like(source)
    copy_s = median_s(lambda: target.copy_(source), place, 3, 10)
    size = 128 if place.tiny else 8192
    left, right = (torch.randn(size, size, device=place.device, dtype=torch.bfloat16) for _ in range(2))
    product_s = median_s(lambda: left @ right, place, 3, 10)
    found = left[:64] @ right
    exact = left[:64].double() @ right.double()
    if place.device.type == "cuda":  # a CPU has no such product
        found = torch.mm(left[:64], right, out_dtype=torch.float32)
    return {
        "copy GB/s, read and written": 8e-9 * source.numel() / copy_s,
        "bf16 product TFLOP/s": 2e-12 * size**3 / product_s,
        "error of a bf16 product (on a GPU with out_dtype fp32)": relative_error(found, exact),
    }


def attention(place: Place) -> Values:
    """Compares attention of packed bf16 rows, and its gradient, with that of each row by itself in fp32."""
    values: Values = {"varlen_attn": ", ".join(inspect.signature(varlen_attn).parameters)}
    lengths = (33, 1, 30) if place.tiny else (700, 1, 1347)
    starts = torch.tensor([0, *lengths], device=place.device).cumsum(0).to(torch.int32)
    for heads, key_value_heads, width, window in ((14, 2, 64, None), (28, 4, 128, None), (14, 2, 64, 16)):
        module = nn.Module()
        options = {"scaling": width**-0.5, "sliding_window": window}
        module.num_key_value_groups = heads // key_value_heads
        sizes = (heads, key_value_heads, key_value_heads)
        inputs = [torch.randn(1, size, sum(lengths), width, device=place.device).bfloat16() for size in sizes]
        found = []
        for dtype, packed in (
            (torch.bfloat16, {"cu_seq_lens_q": starts, "max_length_q": max(lengths)}),
            (torch.float32, {}),
        ):
            leaves = [tensor.to(dtype, copy=True).requires_grad_() for tensor in inputs]
            pieces = [leaves] if packed else zip(*(leaf.split(lengths, dim=2) for leaf in leaves), strict=True)
            made = torch.cat([causal_attention(module, *piece, None, **options, **packed)[0] for piece in pieces], 1)
            found.append([made.detach(), *torch.autograd.grad(made.square().sum(), leaves)])
        errors = [relative_error(*pair) for pair in zip(*found, strict=True)]
        name = f"{heads} heads of {width}{f', window {window}' if window else ''}"
        values |= {f"{name}: output error": errors[0], f"{name}: gradient error": max(errors[1:])}
    return values


def adamw(place: Place) -> Values:
    """Compares twenty steps of the fused AdamW in fp32 with steps of the plain one in fp64 on the CPU."""
    torch.manual_seed(0)
    start = torch.randn(1000, dtype=torch.float64)
    gradients = torch.randn(20, 1000, dtype=torch.float64)
    ends = []
    for dtype, device, fused in ((torch.float32, place.device, True), (torch.float64, "cpu", False)):
        weight = nn.Parameter(start.to(device, dtype, copy=True))
        optimizer = torch.optim.AdamW([weight], lr=1e-2, weight_decay=0.01, fused=fused, foreach=False)
        for gradient in gradients:
            weight.grad = gradient.to(device, dtype)
            optimizer.step()
        ends.append(weight.detach().cpu().double() - start)
    return {"error of the change of weights": relative_error(*ends)}


FUNCTIONS = {
    "machine": machine,
    "tests": tests,
    "vllm_tests": vllm_tests,
    "ceilings": ceilings,
    "attention": attention,
    "adamw": adamw,
    "update": gpu_engine.update,
    "row": gpu_engine.row,
    "repeat": gpu_engine.repeat,
    "killed_critic": gpu_run.killed_critic,
    "resumed_run": gpu_run.resumed_run,
    "sanitizer": sanitizer,
}

if __name__ == "__main__":
    main()
