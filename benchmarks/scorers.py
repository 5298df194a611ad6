r"""CPU seconds of each built-in scorer for the worst of many hostile responses of 128 kB.

    python -m benchmarks.scorers [--limit-s 2]

A response repeats one or two of the marks that the scorer looks for, mixed or one behind the other, by itself or as
the answer. With a limit, the process ends with a signal (SIGXCPU) at the first response that takes more CPU time; the
last line that it printed names it.
"""

import argparse
import itertools
import math
import resource
import time
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from typing import Any

from rewards.scorers.math_equivalence import normalise
from rewards.scorers.math_writing import rewritten

RESPONSE_CHARACTERS = 128_000
# Of each scorer: marks, an answer around which they stand (with a place for them), and a ground truth.
_IN_MATH = ("\\", "{", "}", " ", "1", ",111", "(", r"\text{ ", r"\frac{", ".", "°", r"\bf ", r"\overline{3}", "cm ")
MARKS: dict[str, tuple[tuple[str, ...], str, Any]] = {
    "competition_math": (("\\", r"\boxed", "{", "}", "$", "\n", " "), r"\boxed{%s}", "5"),
    "exact_match": (("<answer>", "</answer>", "the ", " ", ".", "A"), "<answer>%s</answer>", {"target": "5"}),
    "geo3k": (
        ("<think>", "</think>", r"\boxed{", "}", "{ ", " }", " {", "\\", "\n", " "),
        r"<think></think>\boxed{%s}",
        "5",
    ),
    "gsm8k": (("#### ", "5", ",", ".", " ", "-", "$", "/", " million", " or "), "#### %s", "5"),
    "hellaswag": (("####", " ", "(", "*", "A", ")", ".", "\n"), "#### %s", 1),
    "math_dapo": (("Answer:", " ", "\n", "$", "=", r"\text{", "}", r"\boxed{", "frac", ",", "1"), "Answer: %s", "5"),
    "math_equivalence": (_IN_MATH, "%s", "5"),
    "numina": (("answer", " is", ":", " ", ".", "\n", "*", r"\("), "The answer is %s", "5"),
    "read_digits": ((" ", "\n", "5"), "%s", "5"),
    "sort_letters": (("####", " ", "\n", "a"), "#### %s", "5"),
}


def hostile_responses(marks: tuple[str, ...], answer: str) -> Iterator[tuple[str, str]]:
    """Returns hostile responses, each with a short name."""
    for first, second in itertools.combinations_with_replacement(marks, 2):
        times = RESPONSE_CHARACTERS // len(first + second)
        shapes = {"mixed": (first + second) * times, "in turn": first * times + second * times}
        for (shape, text), place in itertools.product(shapes.items(), dict.fromkeys((answer, "%s"))):
            yield f"{shape} {first!r} {second!r} in {place!r}", place % f"1{text}x"[:RESPONSE_CHARACTERS]


def _rewrite(text: str) -> str:
    return normalise(rewritten(text))


def slowest(module: str, limit_s: float | None) -> tuple[float, str]:
    """Returns the most CPU seconds that a response took, and its name."""
    marks, answer, truth = MARKS[module]
    rule = import_module(f"rewards.scorers.{module}")
    is_scorer = module != "math_equivalence"
    score = partial(rule.compute_score, module, ground_truth=truth) if is_scorer else _rewrite
    worst = 0.0, ""
    for name, response in hostile_responses(marks, answer):
        begun_s = time.process_time()
        if limit_s is not None:
            print(f"{module}: {name}", flush=True)
            _, hard_limit = resource.getrlimit(resource.RLIMIT_CPU)
            resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(begun_s + limit_s), hard_limit))
        score(response)
        worst = max(worst, (time.process_time() - begun_s, name))
    return worst


def main() -> None:
    """Prints a line for each scorer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit-s", type=float, help="CPU seconds for each response")
    arguments = parser.parse_args()
    worst = {module: slowest(module, arguments.limit_s) for module in MARKS}
    for module, (seconds, name) in worst.items():
        print(f"{module:17} {1000 * seconds:7.1f} ms  {name}")


if __name__ == "__main__":
    main()
