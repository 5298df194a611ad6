r"""CPU seconds of each parser of tool calls for the worst of many hostile turns of 128 kB.

    python -m benchmarks.tool_calls [--limit-s 2]

A turn repeats two of the marks that the parser looks for, mixed or one behind the other, by itself or behind the
beginning of a call. With a limit, the process ends with a signal (SIGXCPU) at the first turn that takes more CPU time;
the last line that it printed names it.
"""

import argparse
import itertools
import math
import resource
import time
from collections.abc import Iterator
from importlib import import_module

TURN_CHARACTERS = 128_000
# Of each parser: marks, and the beginning of a call.
_JSON_MARKS = ('"', "\\", '\\"', "{", "}", "[", ",", ":", '{"', '{"a":', "\n", "</think>", "<think>")
MARKS: dict[str, tuple[tuple[str, ...], str]] = {
    "hermes": (("<tool_call>", "</tool_call>", "<tool_call>{", *_JSON_MARKS), '<tool_call>{"name": "f", "arguments": '),
    "llama3_json": (("<|python_tag|>", ";", '{"name": "f"}', *_JSON_MARKS), '{"name": "f", "parameters": '),
    "qwen3_coder": (
        (
            *(
                "<tool_call>",
                "</tool_call>",
                "<function=",
                "<function=f>",
                "</function>",
                "<parameter=",
                "<parameter=a>",
            ),
            *("</parameter>", "<", ">", "\n", " ", "</think>"),
        ),
        "<tool_call>\n<function=f>\n<parameter=a>\n",
    ),
}


def hostile_turns(marks: tuple[str, ...], beginning: str) -> Iterator[tuple[str, str]]:
    """Returns hostile turns, each with a short name."""
    for first, second in itertools.product(marks, repeat=2):
        times = TURN_CHARACTERS // len(first + second)
        shapes = {"mixed": (first + second) * times, "in turn": first * times + second * times}
        for (shape, text), start in itertools.product(shapes.items(), ("", beginning)):
            yield f"{shape} {first!r} {second!r} behind {start!r}", (start + text)[:TURN_CHARACTERS]


def slowest(module: str, limit_s: float | None) -> tuple[float, str]:
    """Returns the most CPU seconds that a turn took, and its name."""
    parse = import_module(f"environments.tool_calls.{module}").parse
    worst = 0.0, ""
    for name, turn in hostile_turns(*MARKS[module]):
        begun_s = time.process_time()
        if limit_s is not None:
            print(f"{module}: {name}", flush=True)
            _, hard_limit = resource.getrlimit(resource.RLIMIT_CPU)
            resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(begun_s + limit_s), hard_limit))
        parse(turn, [])
        worst = max(worst, (time.process_time() - begun_s, name))
    return worst


def main() -> None:
    """Prints a line for each parser."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit-s", type=float, help="CPU seconds for each turn")
    arguments = parser.parse_args()
    worst = {module: slowest(module, arguments.limit_s) for module in MARKS}
    for module, (seconds, name) in worst.items():
        print(f"{module:17} {1000 * seconds:7.1f} ms  {name}")


if __name__ == "__main__":
    main()
