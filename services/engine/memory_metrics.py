"""What the actor measures beside its loss: memory."""

from pathlib import Path

import torch


def memory_metrics(device: torch.device) -> dict[str, float]:
    """Peak GPU memory of this rank since its start, and main memory in use on its machine, GiB."""
    metrics: dict[str, float] = {}
    if device.type == "cuda":
        metrics["perf/max_memory_allocated_gb"] = torch.cuda.max_memory_allocated(device) / 2**30
        metrics["perf/max_memory_reserved_gb"] = torch.cuda.max_memory_reserved(device) / 2**30
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        kib = {line.split(":")[0]: int(line.split()[1]) for line in meminfo.read_text().splitlines()}
        metrics["perf/cpu_memory_used_gb"] = (kib["MemTotal"] - kib["MemAvailable"]) / 2**20
    return metrics
