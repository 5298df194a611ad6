"""python -m tools.architectures [TYPE ...]: compares every causal language model of transformers with the engine.

Each architecture is built small and random, in a process of its own, and compared by `comparison.compare`. With
`--mutations N` N random changes of the configurations of --of architectures are compared in place of the defaults.
`--output FILE` adds a line of JSON for each comparison, `--page FILE` writes the table of docs/architectures.md from
such a file. The exit code is 1 if anything is neither exact nor refused.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tools.architectures.page import write_page

# Of different families: multipliers, caps, windows, sinks, chunks, experts, latent attention, state spaces.
MUTATED = (
    *("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text", "granite", "granitemoe"),
    *("cohere2", "phi3", "glm4_moe", "gpt_oss", "olmo2", "deepseek_v3", "falcon_h1", "smollm3", "minicpm3", "mixtral"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the comparisons that the command line asks for; returns the exit code."""
    parser = argparse.ArgumentParser(prog="tools.architectures", description=__doc__)
    parser.add_argument("types", nargs="*", metavar="TYPE", help="model types of transformers; default: all")
    parser.add_argument("--mutations", type=int, default=0, metavar="N", help="compare N random changes instead")
    parser.add_argument("--seed", type=int, default=0, help="of the changes")
    parser.add_argument("--limit-s", type=int, default=120, metavar="S", help="seconds for one comparison")
    parser.add_argument("--output", type=Path, help="adds a line of JSON for each comparison")
    parser.add_argument("--page", type=Path, help="writes the table of the lines in --output, and compares nothing")
    options = parser.parse_args(arguments)
    if options.page:
        write_page(options.page, [json.loads(line) for line in options.output.read_text().splitlines()])
        return 0
    counts: Counter[str] = Counter()
    for model_type, changes in _asked(options):
        found = _in_own_process(model_type, changes, options.limit_s)
        line = json.dumps(found)
        if options.output:
            with options.output.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
        counts[_outcome(found)] += 1
    sys.stdout.write(", ".join(f"{number} {outcome}" for outcome, number in sorted(counts.items())) + "\n")
    return 1 if counts["WRONG"] else 0


def _asked(options: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the model types to compare, each with the fields of its configuration that change."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if not options.mutations:
        yield from ((model_type, {}) for model_type in options.types or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
        return
    from tools.architectures.tiny_configs import mutation

    rng = random.Random(options.seed)
    types = options.types or MUTATED
    for number in range(options.mutations):
        model_type = types[number % len(types)]
        yield model_type, mutation(model_type, rng)


def _outcome(found: dict[str, Any]) -> str:
    if found["reason"]:
        return "not comparable"
    results = found["results"].values()
    if any(result.startswith("WRONG") for result in results):
        return "WRONG"
    return "exact" if found["results"]["packed"] == "exact" or found["results"]["padded"] == "exact" else "refused"


def _in_own_process(model_type: str, changes: dict[str, Any], limit_s: int) -> dict[str, Any]:
    """Compares one architecture in a child process, which a crash or the time limit may end."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(model_type, changes, sender))
    child.start()
    sender.close()
    found = {"model_type": model_type, "results": {}, "reason": f"took over {limit_s} s", "changes": changes}
    try:
        if receiver.poll(limit_s):
            found = receiver.recv()
    except EOFError:
        found["reason"] = "its process ended"
    child.kill()
    child.join()
    return found


def _child(model_type: str, changes: dict[str, Any], sender: Connection) -> None:
    import torch

    from tools.architectures.comparison import Verdict, compare
    from tools.architectures.tiny_configs import tiny_config

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    with tempfile.TemporaryDirectory() as folder:
        try:
            config = tiny_config(model_type, changes)
        except Exception as error:  # noqa: BLE001 - a configuration class may raise anything
            verdict = Verdict(model_type, reason=f"cannot be built small: {' '.join(str(error).split())}")
        else:
            verdict = compare(model_type, config, Path(folder))
    verdict.changes = changes
    sender.send(asdict(verdict))


if __name__ == "__main__":
    sys.exit(main())
