"""The results of benchmarks.gpu_proof as they come: a file of JSON, and a page of Markdown for docs/benchmarks.md."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.gpu_list import GROUPS, Case
from splitppo.atomic_write import write_atomically

Result = dict[str, Any]


class Report:
    """The results so far in two files, which are written again after each case, so that a killed session keeps them.

    Args:
        file: the JSON; the page lies beside it, and ends in .md.
        command: the command that made the results.
        machine: hardware and versions.
        cases: all cases that will run; those without a result are named as not reached.
    """

    def __init__(
        self, file: Path, command: str, machine: Mapping[str, Any], cases: Sequence[Case], *, is_tiny: bool
    ) -> None:
        self.file = file
        self.page_file = file.with_suffix(".md")
        self._command = command
        self._machine = machine
        self._is_tiny = is_tiny
        self._names = [case.name for case in cases]
        self._entries: list[dict[str, Any]] = []
        file.parent.mkdir(parents=True, exist_ok=True)
        self._write()

    @property
    def has_failed(self) -> bool:
        """True if a case failed or was not reached."""
        return any("failed" in entry for entry in self._entries) or len(self._entries) < len(self._names)

    def add(self, case: Case, result: Result, seconds: float) -> str:
        """Writes the result of a case; returns it as one line."""
        arguments = {"arguments": dict(case.arguments)} if case.arguments else {}
        entry = {"name": case.name, "function": case.function, **arguments, "seconds": round(seconds, 1), **result}
        self._entries.append(entry)
        self._write()
        values = result.get("values", {})
        found = [f"{name} {shown(value)}" for name, value in values.items() if not isinstance(value, list)]
        states = [f"{state}: {result[state]}" for state in ("failed", "skipped") if state in result]
        return f"{case.name} ({seconds:.0f} s): {', '.join([*found, *states])}"

    def _write(self) -> None:
        content = {
            "command": self._command,
            "machine": self._machine,
            "tiny": self._is_tiny,
            "cases": self._entries,
            "not reached": self._not_reached(),
        }
        write_atomically(self.file, json.dumps(content, indent=2) + "\n")
        write_atomically(self.page_file, self.page())

    def _not_reached(self) -> list[str]:
        done = {entry["name"] for entry in self._entries}
        return [name for name in self._names if name not in done]

    def page(self) -> str:
        """Returns the results as Markdown: the machine, a table for each kind of case, then what has no figures."""
        machine = "; ".join(f"{name} {shown(value)}" for name, value in self._machine.items())
        lines = [f"## On one GPU: `{self._command}`", "", f"* **Machine**: {machine}."]
        if self._is_tiny:
            lines.append("* The shapes are tiny: these figures show that the cases run, and nothing about speed.")
        for group, of_group in groupby(self._entries, key=lambda entry: entry["name"].partition("/")[0]):
            lines += ["", f"### {GROUPS[group]}", *_tables(list(of_group))]
        if left := self._not_reached():
            lines += ["", f"Not reached: {', '.join(left)}."]
        return "\n".join(lines) + "\n"


def _tables(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns a table of the neighbours with one function, tables of their lists, and a line for each without figures.

    A case by itself is shown figure by figure, since its figures are many.
    """
    measured = [entry for entry in entries if "values" in entry]
    blocks: list[list[str]] = []
    for _, group in groupby(measured, key=lambda entry: entry["function"]):
        of_function = list(group)
        figures = [_figures(entry) for entry in of_function]
        if len(of_function) == 1:
            blocks.append(_table([of_function[0]["name"], ""], list(figures[0].items())))
        else:
            columns = list(dict.fromkeys(name for row in figures for name in row))
            names = [entry["name"] for entry in of_function]
            rows = [[name, *map(row.get, columns)] for name, row in zip(names, figures, strict=True)]
            blocks.append(_table(["case", *columns], rows))
        blocks += [table for entry in of_function for table in _lists(entry)]
    without = [
        f"* {entry['name']}: {state}: {entry[state]}"
        for state in ("skipped", "failed")
        for entry in entries
        if state in entry
    ]
    blocks += [without] if without else []
    return [line for block in blocks for line in ("", *block)]


def _lists(entry: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yields the figures of a case that are lists of rows, each as a table under its name."""
    for name, rows in entry["values"].items():
        if isinstance(rows, list):
            yield [f"{entry['name']}, {name}:", "", *_table(list(rows[0]), [list(row.values()) for row in rows])]


def _figures(entry: Mapping[str, Any]) -> dict[str, Any]:
    single = {name: value for name, value in entry["values"].items() if not isinstance(value, list)}
    return {**single, "took s": entry["seconds"]}


def _table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    lines = [columns, ["---"] * len(columns), *([shown(value) for value in row] for row in rows)]
    return [f"| {' | '.join(line)} |" for line in lines]


def shown(value: Any) -> str:
    """Returns a figure as the tables show it: three digits, thousands with commas, and nothing for None."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return "" if value is None else str(value).replace("|", "\\|")
