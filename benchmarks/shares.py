"""Measures what it brings if both pools sample: step times with and without `rollout.share`, in one run.

    python -m benchmarks.shares [--works varied fixed long_tails quickstart] [--rounds 3] [--steps 4]

With a share, a rollout group on the critic's core samples beside the actor's group, and takes turns with the critic's
group. The works are those of benchmarks/versus_trl.py (lengths varied or fixed), of benchmarks/streaming.py (long
tails), and the quickstart. Each work has its own groups: the actor alone with the reference in either group, both
pools, and for a critic-free step the actor on both cores. Blocks of steps alternate between the variants; the first
step of each block is left out. Learning rates are 0 and every step gets the same prompts and seeds, so all steps work
on the same rollouts. Figures are medians, "least" the shortest step: other work on the machine only adds time. Only
ratios within one run mean anything on a shared machine.

The formula is that of docs/rollout-groups.md. Publish, load and the generation of half of the rows were timed
under `serial`, where nothing else runs; generation is multiplied by the slowdown that the planner fits to the other
variants:

    step with a share = step - gen(all) + publish + max(gen(actor's rows), late + load + gen(group's rows))

The planner predicts the step of each share, from the actor alone under `overlap` (one run), or also from the two
`serial` variants (three runs).
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import uvloop

from benchmarks import streaming, versus_trl
from benchmarks.forced_lengths import CRITIC_FREE, Block, Variant, configs_of, make_configs, started
from benchmarks.overlap import RECIPE, median
from benchmarks.planner import SETTINGS
from controller.commands.planner.measured import measurement_of
from controller.commands.planner.plans import Plans, make_plans
from recipes.sort_letters.prepare import prepare
from splitppo.config import Config
from splitppo.config.resolve import AUTO_PARTS

PARTS = (1, 4, AUTO_PARTS)
SHARES = (0.25, 0.375, 0.5, 0.625, 0.75)
HALF = Variant("both pools", share=0.5)
UNSTREAMED = Variant("reference: actor")
SERIAL = UNSTREAMED._replace(schedule="serial")
HALF_SERIAL = HALF._replace(schedule="serial")
FREE_ON_BOTH = Variant("actor on both cores", has_critic=False)
ALONE = tuple(Variant(f"reference: {host}", parts) for host in ("actor", "critic") for parts in PARTS)
BOTH = tuple(HALF._replace(num_parts=parts) for parts in PARTS)
EVERY_SHARE = tuple(HALF._replace(share=share) for share in SHARES)
# Columns of the table: timings of the step, (pool, name) of spans, and pools. `critic` counts the rollout group, too.
TIMINGS = ("step", "gen", "old_log_prob", "ref", "values", "update_actor", "update_critic")
SAMPLERS = ("actor", "rollout")
SPANS = (("actor", "gen"), ("rollout", "gen"), ("rollout", "sync"), ("actor", "publish"))
IDLE = ("actor", "critic")
Measured = Mapping[Variant, Sequence[Block]]


class Work(NamedTuple):
    """The variants that do the same work, and the configuration of each set of groups in a folder."""

    variants: Sequence[Variant]
    configs: Callable[[Path, Sequence[str]], dict[str, Config]]


def _compared_with_trl(lengths: str) -> Work:
    def configs(folder: Path, groups: Sequence[str]) -> dict[str, Config]:
        versus_trl.make_models(folder)
        return make_configs(folder, groups, versus_trl.LENGTHS[lengths], versus_trl.MAX_RESPONSE, {})

    variants = (SERIAL, HALF_SERIAL, *ALONE, *dict.fromkeys((*BOTH, *EVERY_SHARE)), CRITIC_FREE, FREE_ON_BOTH)
    return Work(variants, configs)


def _long_tails(folder: Path, groups: Sequence[str]) -> dict[str, Config]:
    streaming.make_models(folder)
    return make_configs(folder, groups, streaming.LENGTHS, streaming.MAX_RESPONSE, streaming.MODEL)


def _quickstart(folder: Path, groups: Sequence[str]) -> dict[str, Config]:
    prepare(Path(".cache/sort_letters"))
    return configs_of(RECIPE, folder, groups, SETTINGS)


WORKS = {
    "varied": _compared_with_trl("varied"),
    "fixed": _compared_with_trl("fixed"),
    "long_tails": Work((SERIAL, HALF_SERIAL, *ALONE, *BOTH, CRITIC_FREE), _long_tails),
    "quickstart": Work((SERIAL, HALF_SERIAL, UNSTREAMED, HALF, CRITIC_FREE, FREE_ON_BOTH), _quickstart),
}


async def measure(name: str, num_rounds: int, num_steps: int) -> None:
    """Runs all blocks of a work; prints the report of those so far after each round."""
    work = WORKS[name]
    measured = defaultdict[Variant, list[Block]](list)
    with tempfile.TemporaryDirectory() as folder:
        configs = work.configs(Path(folder), list(dict.fromkeys(variant.groups for variant in work.variants)))
        async with started(configs) as blocks:
            for number in range(1, num_rounds + 1):
                for variant in work.variants:
                    measured[variant].append(await blocks.run(variant, num_steps))
                print(f"{name}, {number} rounds\n{report(measured)}\n", flush=True)


def step_s(blocks: Sequence[Block]) -> float:
    """Returns the median seconds of a step."""
    return timing_s(blocks, "step")


def timing_s(blocks: Sequence[Block], name: str) -> float:
    """Returns the median of a timing, in seconds; NaN if no step has it."""
    return median([row for block in blocks for row in block.rows], f"timing_s/{name}")


def span_s(blocks: Sequence[Block], pool: str, name: str) -> float:
    """Returns the median seconds per step of an engine's work, without the first step of each block; NaN without any.

    A publication is that of the step's own weights, after the update.
    """
    steps: dict[tuple[int, int], float] = defaultdict(float)
    for number, block in enumerate(blocks):
        for span in block.spans:
            if (span.pool, span.name) == (pool, name) and span.step > 1:
                steps[number, span.step] += span.duration_s
    return statistics.median(steps.values()) if steps else float("nan")


def plans_of(measured: Measured, *variants: Variant) -> Plans:
    """Returns the planner's predictions from the blocks of these variants; the first one's layout gets the shares."""
    runs = [
        measurement_of(blocks[0].config, [(block.lines, block.spans) for block in blocks], source=str(variant))
        for variant, blocks in ((variant, measured[variant]) for variant in variants)
    ]
    return make_plans(runs, None)


def formula_s(measured: Measured, slowdown: float) -> float:
    """Returns the seconds of a step with half of the rollouts in each pool, by the formula above."""
    alone = measured[UNSTREAMED]
    parts = measured[HALF_SERIAL]
    publish = span_s(parts, "actor", "publish")
    load = span_s(parts, "rollout", "sync")
    late = max(0.0, timing_s(alone, "update_critic") - timing_s(alone, "update_actor") - publish)
    by_actor, by_group = (slowdown * span_s(parts, pool, "gen") for pool in SAMPLERS)
    return step_s(alone) - span_s(alone, "actor", "gen") + publish + max(by_actor, late + load + by_group)


def report(measured: Measured) -> str:
    """Returns the table of all variants, and the ratios below it."""
    names = [name.replace("update_", "upd.").replace("old_log_prob", "old") for name in TIMINGS]
    heads = ("least", *names, "gen.actor", "gen.group", "load", "publish", *(f"idle.{pool}" for pool in IDLE))
    lines = ["median seconds".ljust(44) + "".join(f"{head:>11}" for head in heads)]
    for variant, blocks in measured.items():
        rows = [row for block in blocks for row in block.rows]
        figures = [min(row["timing_s/step"] for row in rows), *(timing_s(blocks, name) for name in TIMINGS)]
        figures += [
            *(span_s(blocks, *span) for span in SPANS),
            *(median(rows, f"overlap/bubble_{pool}") for pool in IDLE),
        ]
        lines.append(f"{variant!s:<44}" + "".join(f"{figure:>11.3f}" for figure in figures))
    return "\n".join([*lines, "", *ratios(measured), "", *predictions(measured)])


def ratios(measured: Measured) -> list[str]:
    """Returns the ratios of steps, and what the formula says."""
    steps = {variant: step_s(blocks) for variant, blocks in measured.items()}
    slowdown = plans_of(measured, UNSTREAMED, SERIAL, HALF_SERIAL).slowdown
    alone, both = (min(steps.keys() & {*variants}, key=steps.__getitem__) for variants in (ALONE, BOTH))
    expected_s = formula_s(measured, slowdown)
    slowed = [span_s(measured[HALF], pool, "gen") / span_s(measured[HALF_SERIAL], pool, "gen") for pool in SAMPLERS]
    half = span_s(measured[HALF_SERIAL], "actor", "gen") / span_s(measured[SERIAL], "actor", "gen")
    pairs = [(both, alone), (HALF, UNSTREAMED)]
    pairs += [(one, free) for free in (CRITIC_FREE, FREE_ON_BOTH) if free in steps for one in (both, alone)]
    return [
        *(f"({one}) / ({other}): {steps[one] / steps[other]:.3f}" for one, other in pairs),
        f"({HALF}) / formula ({expected_s:.2f} s): {steps[HALF] / expected_s:.3f}",
        f"slowdown while both cores work: {slowdown:.2f}",
        f"slowdown of generation while both sample: actor {slowed[0]:.2f}, rollout group {slowed[1]:.2f}",
        f"generation of half of the rows / of all: {half:.2f}",
    ]


def predictions(measured: Measured) -> list[str]:
    """Returns a line for each share: the measured seconds of a step beside those that the planner predicts."""
    lines = []
    sources = {"one run": (UNSTREAMED,), "three runs": (UNSTREAMED, SERIAL, HALF_SERIAL)}
    plans = {name: plans_of(measured, *variants).shares for name, variants in sources.items()}
    for variant in (UNSTREAMED, *(variant for variant in EVERY_SHARE if variant in measured)):
        measured_s = step_s(measured[variant])
        lines.append(f"share {variant.share:g}: {measured_s:.3f} s")
        for name, rows in plans.items():
            # The planner knows every twentieth.
            predicted_s = float(np.interp(variant.share, [row.share for row in rows], [row.step_s for row in rows]))
            lines[-1] += f"; by {name} {predicted_s:.3f} s, {predicted_s / measured_s - 1.0:+.1%}"
    return lines


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--works", nargs="+", choices=list(WORKS), default=list(WORKS), help="what the steps do")
    parser.add_argument("--rounds", type=int, default=3, help="blocks per variant")
    parser.add_argument("--steps", type=int, default=4, help="steps per block; the first is left out")
    options = parser.parse_args()
    for name in options.works:
        asyncio.Runner(loop_factory=uvloop.new_event_loop).run(measure(name, options.rounds, options.steps))


if __name__ == "__main__":
    main()
