"""Measures what streaming by completion brings if few responses are long: step times, in one run.

    python -m benchmarks.streaming [--reward-model] [--rounds 3] [--steps 3] [--parts 4 6] [--hidden 128] [--layers 4]

Random Qwen2 models, one thread per group, schedule overlap; response lengths are forced, log-normal (median 40, at most
512). Two pairs of groups are started, the frozen reference beside the policy in one and beside the critic in the other;
with --reward-model a model of the policy's size scores in the critic's group. Blocks of steps alternate between both
placements, unstreamed and in different numbers of parts, and a critic-free step (GRPO with the same KL); the first step
of each block is left out. Learning rates are 0 and every step gets the same prompts and seeds, so all steps work on the
same rollouts. Figures are medians, "least" the shortest step: other work on the machine only adds time. Only ratios
within one run mean anything on a shared machine.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import uvloop

from benchmarks.forced_lengths import CRITIC_FREE, Variant, make_configs, make_inputs, started
from benchmarks.overlap import Row, median
from splitppo.config.sections.reward_model import RewardModelConfig

MAX_RESPONSE = 512
LENGTHS = {"kind": "log_normal", "median": 40, "max": MAX_RESPONSE}
MODEL = {"ppo_max_token_len_per_gpu": 2048}


def make_models(folder: Path, hidden: int = 128, layers: int = 4) -> None:
    """Makes the models of this benchmark, prompts, and a reward function."""
    make_inputs(
        folder,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=2048,
    )


async def measure(folder: Path, options: argparse.Namespace) -> Mapping[Variant, Sequence[Row]]:
    """Runs all blocks; returns the metrics lines of each variant, without the first step of each block."""
    groups = ("reference: actor", "reference: critic")
    configs = make_configs(folder, groups, LENGTHS, MAX_RESPONSE, MODEL)
    if options.reward_model:
        scorer_of = RewardModelConfig(model=str(folder / "reward"))
        configs = {name: config.model_copy(update={"reward_model": scorer_of}) for name, config in configs.items()}
    variants = [Variant(name, parts) for parts in (1, *options.parts) for name in groups]
    if not options.reward_model:
        variants.append(CRITIC_FREE)
    rows: dict[Variant, list[Row]] = defaultdict(list)
    async with started(configs, shuffle=True) as blocks:
        for _ in range(options.rounds):
            for variant in variants:
                measured = (await blocks.run(variant, options.steps)).rows
                rows[variant] += measured
                print(f"{variant}: {median(measured, 'timing_s/step'):.2f} s", flush=True)
    return rows


def report(rows: Mapping[Variant, Sequence[Row]]) -> str:
    """Returns the table.

    It compares each number of parts at its best with unstreamed steps, and the best of all with a critic-free step.
    """
    names = ("step", "gen", "old_log_prob", "ref", "values", "reward_model", "update_actor", "update_critic")
    lines = ["seconds".ljust(36) + "".join(f"{name:>14}" for name in ("least", *names))]
    steps = {variant: median(found, "timing_s/step") for variant, found in rows.items()}
    least = {variant: min(row["timing_s/step"] for row in found) for variant, found in rows.items()}
    for variant, found in rows.items():
        seconds = [least[variant], *(median(found, f"timing_s/{name}") for name in names)]
        lines.append(str(variant).ljust(36) + "".join(f"{value:>14.2f}" for value in seconds))
    for title, seconds_of in (("medians", steps), ("least", least)):
        with_critic = [variant for variant in steps if variant.has_critic]
        best = {
            parts: min((v for v in with_critic if v.num_parts == parts), key=seconds_of.__getitem__)
            for parts in sorted({variant.num_parts for variant in with_critic})
        }
        lines += [
            f"{title}: ({variant}) / ({best[1]}): {seconds_of[variant] / seconds_of[best[1]]:.2f}"
            for parts, variant in best.items()
            if parts > 1
        ]
        if CRITIC_FREE in steps:
            fastest = min(with_critic, key=seconds_of.__getitem__)
            ratio = seconds_of[fastest] / seconds_of[CRITIC_FREE]
            lines.append(f"{title}: ({fastest}) / critic-free: {ratio:.2f} (1: the critic costs no wall-clock time)")
    return "\n".join(lines)


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reward-model", action="store_true", help="a reward model of the policy's size")
    parser.add_argument("--rounds", type=int, default=3, help="blocks per variant")
    parser.add_argument("--steps", type=int, default=3, help="steps per block; the first is left out")
    parser.add_argument("--parts", type=int, nargs="+", default=[4, 6], help="rollout.stream_groups where it streams")
    parser.add_argument("--hidden", type=int, default=128, help="of the models")
    parser.add_argument("--layers", type=int, default=4, help="of the models")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        make_models(Path(name), options.hidden, options.layers)
        rows = asyncio.Runner(loop_factory=uvloop.new_event_loop).run(measure(Path(name), options))
        print(report(rows))


if __name__ == "__main__":
    main()
