"""The process in which benchmarks.gpu_proof measures: python -m benchmarks.gpu_cases FOLDER [--tiny].

It reads cases as lines of JSON (function, arguments), and prints the result of each one as a line of JSON: "values"
(figures by name), "failed" or "skipped" (a sentence).
"""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn.attention.varlen import varlen_attn

from benchmarks import gpu_engine, gpu_run
from benchmarks.gpu_engine import Place, Skipped, median_s, relative_error
from services.engine.model.attention import causal_attention

ROOT = Path(__file__).resolve().parents[1]
Values = dict[str, Any]


def main() -> None:
    """Runs cases until there are no more."""
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints
    is_tiny = "--tiny" in sys.argv
    place = Place(torch.device("cpu" if is_tiny else "cuda"), Path(sys.argv[1]), is_tiny)
    for name, arguments in map(json.loads, sys.stdin):
        result: dict[str, Any] = {}
        try:
            result["values"] = FUNCTIONS[name](place, **arguments)
            result |= {"failed": result["values"].pop("failed")} if "failed" in result["values"] else {}
        except Skipped as reason:
            result["skipped"] = str(reason)
        except Exception as error:  # noqa: BLE001 # of any kind: it is the result
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            result["failed"] = f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
        print(json.dumps(result), file=results, flush=True)


def machine(place: Place) -> Values:
    """Returns what the figures depend on: hardware, driver, versions, commit."""
    values: Values = {"device": "CPU", "cores": len(os.sched_getaffinity(0))}
    if not place.tiny:
        import pynvml

        pynvml.nvmlInit()
        properties = torch.cuda.get_device_properties(place.device)
        values |= {"device": properties.name, "memory GiB": properties.total_memory / 2**30}
        values |= {"driver": pynvml.nvmlSystemGetDriverVersion(), "CUDA": torch.version.cuda}
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = "unknown"
    values |= {"Python": sys.version.split()[0], "torch": torch.__version__}
    return values | {"transformers": transformers.__version__, "commit": commit}


def tests(_: Place) -> Values:
    """Runs tests/gpu; a test that fails fails the case."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu"]
    ended = subprocess.run(command, cwd=ROOT, env=os.environ | {"CI": ""}, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        failed = re.findall(r"^(?:FAILED|ERROR) (.+)$", ended.stdout, re.MULTILINE)
        raise RuntimeError("; ".join(failed) or f"pytest: {[*ended.stdout.splitlines(), ended.stderr][-1]}")
    return {name: int(number) for number, name in re.findall(r"(\d+) (passed|skipped)", ended.stdout)}


def ceilings(place: Place) -> Values:
    """Measures the highest rates of a copy on the device and of a bf16 matrix product, and the error of a product."""
    source = torch.randn(1 << (18 if place.tiny else 28), device=place.device)
    target = torch.empty_like(source)
    copy_s = median_s(lambda: target.copy_(source), place, 3, 10)
    size = 128 if place.tiny else 8192
    left, right = (torch.randn(size, size, device=place.device, dtype=torch.bfloat16) for _ in range(2))
    product_s = median_s(lambda: left @ right, place, 3, 10)
    found, exact = left[:64] @ right, left[:64].double() @ right.double()
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
        module, options = nn.Module(), {"scaling": width**-0.5, "sliding_window": window}
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


def fused_adamw(place: Place) -> Values:
    """Compares twenty steps of the fused AdamW in fp32 with steps of the plain one in fp64 on the CPU."""
    torch.manual_seed(0)
    start, gradients = torch.randn(1000, dtype=torch.float64), torch.randn(20, 1000, dtype=torch.float64)
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
    "tests/gpu": tests,
    "ceilings": ceilings,
    "attention": attention,
    "fused AdamW": fused_adamw,
    "update": gpu_engine.update,
    "row": gpu_engine.row,
    "repeat": gpu_engine.repeat,
    "run": gpu_run.run,
}

if __name__ == "__main__":
    main()
