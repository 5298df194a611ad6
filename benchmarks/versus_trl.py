"""A PPO step here and in TRL on the same two cores, measured in one run (`make bench-trl`).

    python -m benchmarks.versus_trl --trl PYTHON [--lengths varied|fixed] [--rounds 3] [--steps 5] [--dtype fp32]

A random Qwen2 (hidden 256, 4 layers: 3.2 M parameters), 64 prompts of 64 tokens, responses of 8 to 128 tokens (varied)
or 128 (fixed), 4 mini-batches, one epoch, KL in the reward. Lengths are forced, row by row the same on both sides; no
stop token ends a response. TRL is the last version with PPO, with two threads; here each group has one, schedule
overlap, once for every placement of the frozen reference and number of streamed parts, once with a rollout group on the
critic's core that samples half of the responses ("both pools"), and once critic-free. Blocks of steps alternate; the
first step of each is left out. Learning rates are 0 (TRL: 1e-9) and every step gets the same prompts. Figures are
medians; only ratios within one run mean anything on a shared machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.forced_lengths import (
    CRITIC_FREE,
    MINI_BATCHES,
    Variant,
    make_configs,
    make_inputs,
    started,
)
from benchmarks.overlap import Row, median
from splitppo.config.resolve import AUTO_PARTS

MAX_RESPONSE = 128
LENGTHS = {
    "varied": {"kind": "uniform", "low": 8, "high": MAX_RESPONSE},
    "fixed": {"kind": "uniform", "low": MAX_RESPONSE, "high": MAX_RESPONSE},
}
VARIANTS = {
    **{
        f"{host}{parts}": Variant(f"reference: {host}", parts)
        for host in ("actor", "critic")
        for parts in (1, 4, AUTO_PARTS)
    },
    **{f"both{parts}": Variant("both pools", parts, share=0.5) for parts in (1, AUTO_PARTS)},
    "critic-free": CRITIC_FREE,
}


class Trl:
    """TRL's trainer in a process of its own, which works only when it is asked to.

    Args:
        python: of the environment that has TRL.
        task: see benchmarks/trl_ppo.py.
    """

    def __init__(self, python: str, task: Mapping[str, Any]) -> None:
        threads = {"OMP_NUM_THREADS": str(task["threads"]), "MKL_NUM_THREADS": str(task["threads"])}
        mixed = {"ACCELERATE_MIXED_PRECISION": "bf16" if task["dtype"] == "bf16" else "no"}
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self._process = subprocess.Popen(
            [python, str(Path(__file__).with_name("trl_ppo.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**environment, **threads, **mixed, "HF_HUB_OFFLINE": "1"},
            text=True,
        )
        self._tell(json.dumps(task))

    def steps(self, count: int) -> list[float]:
        """Returns the seconds of so many steps."""
        self._tell(str(count))
        assert self._process.stdout is not None
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"TRL's trainer has ended, exit status {self._process.wait()}")
        seconds: list[float] = json.loads(answer)
        return seconds

    def close(self) -> None:
        """Lets the process end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()


def make_models(folder: Path, hidden: int = 256, layers: int = 4) -> None:
    """Makes the models of this benchmark, prompts, and a reward function."""
    make_inputs(
        folder,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_key_value_heads=max(1, hidden // 128),
        max_position_embeddings=512,
    )


async def measure(folder: Path, options: argparse.Namespace) -> None:
    """Runs all blocks; prints the table of those so far after each round."""
    variants = [VARIANTS[name] for name in options.variants]
    groups = sorted({variant.groups for variant in variants})
    configs = make_configs(folder, groups, LENGTHS[options.lengths], MAX_RESPONSE, {"dtype": options.dtype})
    trl_s: list[float] = []
    rows: dict[Variant, list[Row]] = defaultdict(list)
    async with started(configs) as blocks:
        config = configs[groups[0]]
        first = blocks.prompts.batch_at(1).to_batch(config.run.seed, 1, 1)
        lengths = config.debug.response_lengths
        assert lengths is not None
        task = {
            "model": config.actor.model,
            "folder": str(folder / "trl"),
            "threads": 2,
            "dtype": options.dtype,
            "mini_batches": MINI_BATCHES,
            "prompts": [row.tolist() for row in first["prompts"].rows()],
            "lengths": [lengths.of(int(seed)) for seed in first["seeds"].values],
        }
        with closing(Trl(options.trl, task)) as trl:
            trl.steps(1)
            for _ in range(options.rounds):
                trl_s += trl.steps(options.steps)[1:]
                for variant in variants:
                    rows[variant] += (await blocks.run(variant, options.steps)).rows
                print(f"{options.lengths} lengths, {options.dtype}\n{report(trl_s, rows)}\n", flush=True)


def report(trl_s: Sequence[float], rows: Mapping[Variant, Sequence[Row]]) -> str:
    """Returns the table, and the ratios at the best placement, with the actor alone and with both pools sampling."""
    names = ("step", "gen", "old_log_prob", "ref", "values", "update_actor", "update_critic")
    idle = ("bubble_actor", "bubble_critic")
    lines = ["median seconds".ljust(36) + "steps".rjust(6) + "".join(f"{name:>14}" for name in (*names, *idle))]
    trl_step_s = statistics.median(trl_s)
    lines.append("TRL, 2 threads".ljust(36) + f"{len(trl_s):>6}{trl_step_s:>14.2f}")
    for variant, found in rows.items():
        figures = [median(found, f"timing_s/{name}") for name in names]
        figures += [median(found, f"overlap/{name}") for name in idle]
        lines.append(str(variant).ljust(36) + f"{len(found):>6}" + "".join(f"{value:>14.2f}" for value in figures))
    steps = {variant: median(found, "timing_s/step") for variant, found in rows.items()}
    lines.append("")
    for samples_in_both in (False, True):
        fitting = [variant for variant in steps if variant.has_critic and (variant.share > 0.0) == samples_in_both]
        if not fitting:
            continue
        best = min(fitting, key=steps.__getitem__)
        lines.append(f"TRL's step / ours ({best}): {trl_step_s / steps[best]:.2f}")
        if CRITIC_FREE in steps:
            lines.append(f"ours ({best}) / critic-free: {steps[best] / steps[CRITIC_FREE]:.2f}")
    return "\n".join(lines)


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", required=True, metavar="PYTHON", help="of an environment with TRL")
    parser.add_argument("--lengths", choices=list(LENGTHS), default="varied", help="of the responses")
    parser.add_argument("--rounds", type=int, default=3, help="blocks of each side")
    parser.add_argument("--steps", type=int, default=5, help="steps per block; the first is left out")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="compute, on both sides")
    parser.add_argument("--hidden", type=int, default=256, help="of the models, a multiple of 64")
    parser.add_argument("--layers", type=int, default=4, help="of the models")
    parser.add_argument(
        "--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS), help="the reference's host, parts"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        make_models(Path(name), options.hidden, options.layers)
        asyncio.Runner(loop_factory=uvloop.new_event_loop).run(measure(Path(name), options))


if __name__ == "__main__":
    main()
