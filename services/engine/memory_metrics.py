"""Measures memory use of GPU and machine, which the actor reports with the metrics of its update."""

import psutil
import torch


def memory_metrics(device: torch.device) -> dict[str, float]:
    """Returns metrics in GiB: this rank's peak GPU memory since start, and the main memory in use on its machine."""
    main_memory = psutil.virtual_memory()
    metrics = {"perf/cpu_memory_used_gb": (main_memory.total - main_memory.available) / 2**30}
    if device.type == "cuda":
        metrics["perf/max_memory_allocated_gb"] = torch.cuda.max_memory_allocated(device) / 2**30
        metrics["perf/max_memory_reserved_gb"] = torch.cuda.max_memory_reserved(device) / 2**30
    return metrics
