"""A rank that writes what it finds in its process; run by torchrun as `-m tests.integration.runtime.probe FOLDER`."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist


def main() -> None:
    rank = int(os.environ["RANK"])
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    facts = {
        "parent": os.getppid(),
        "is_session_leader": os.getsid(0) == os.getpid(),
        "command": Path("/proc/self/cmdline").read_bytes().rstrip(b"\0").decode(),
        "arguments": sys.argv[1:],
        "signals": handlers == [signal.SIG_DFL, signal.default_int_handler],
        "descriptors": sorted(int(file.name) for file in Path("/proc/self/fd").iterdir())[:-1],
        "random": [random.random(), float(np.random.random())],  # noqa: NPY002 - the state of the process
        "torch_seed": torch.initial_seed(),
        "kept_memory": os.environ["MALLOC_TRIM_THRESHOLD_"],
        "only_at_import": [name for name in ("OPENBLAS_NUM_THREADS",) if name in os.environ],
        "cuda": torch.cuda.is_initialized(),
    }
    torch.set_num_threads(2)
    product = torch.ones(300, 300) @ torch.ones(300, 300)  # in threads of this process
    linear = torch.nn.Linear(300, 300)
    linear(product).sum().backward()
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    facts["sum"] = float(total)
    (Path(sys.argv[1]) / f"rank_{rank}.json").write_text(json.dumps(facts))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # as our ranks do


if __name__ == "__main__":
    main()
