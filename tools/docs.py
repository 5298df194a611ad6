"""Writes the pages of docs/ that are made from the code, or says which are out of date."""

from __future__ import annotations

import argparse
import ast
import inspect
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, TypeAdapter
from pydantic.fields import FieldInfo

from splitppo.config import Config
from splitppo.run_folder.metrics import FIGURES, METRICS
from tools.from_verl_page import KEY_PAGES, from_verl_keys_page, from_verl_page
from tools.page_tables import DOCS
from tools.run_folder_page import run_folder_page
from tools.running_page import running_page


def metrics_page() -> str:
    """Returns the page with unit, meaning and condition of every metric, by section, and the figures that draw them."""
    lines = [
        "# Metrics",
        "",
        "What `metrics.jsonl` and TensorBoard hold, one line or point per step; made by `python -m tools.docs` from",
        "`splitppo/run_folder/metrics.py`, the table by which terminal, report and viewer show metrics, too.",
        "`{a,b}` stands for each of its words, `<x>` for any text. Shares, ratios and plain numbers have the unit 1.",
        'If there is nothing under "when", every step of every run has the metric. A metric over nothing (no token, no',
        "response) is left out.",
    ]
    for section, metrics in METRICS.items():
        lines += ["", f"## {section}", "", "| metric | unit | meaning | when |", "|---|---|---|---|"]
        lines += [f"| `{row.names}` | {row.unit} | {_cell(row.meaning)} | {_cell(row.when)} |" for row in metrics]
    lines += ["", "## Figures", "", "| figure | metrics | drawn on |", "|---|---|---|"]
    for figure in FIGURES:
        title = _cell(", ".join(filter(None, (figure.title, figure.unit))))
        names = ", ".join(f"`{name}`" for name in figure.metrics)
        lines.append(f"| {title} | {names} | {', '.join(figure.pages)} |")
    return "\n".join(lines) + "\n"


# Pages of the configuration, and their sections.
CONFIG_PAGES: Mapping[str, Sequence[str]] = {
    "config/run": ("run", "data", "rollout", "evaluation", "checkpoint", "tracking", "debug"),
    "config/algorithm": ("algorithm",),
    "config/models": ("actor", "critic", "placement", "reward_model", "teacher"),
    "config/reward": ("reward",),
    "config/services": ("services",),
}


def config_contents() -> str:
    """Returns the page that says which page has the keys of a section."""
    page_of = {name: page for page, names in CONFIG_PAGES.items() for name in names}
    rows = [
        f"| [{name}]({page_of[name]}.md#{name}) | {_cell(_first_line(field.annotation))} |"
        for name, field in Config.model_fields.items()
    ]
    lines = [
        "# Configuration",
        "",
        "One YAML file describes a run. Any key can be overridden on the command line with `key.path=value`. A key",
        "without a default must be given; `null` stands for what its meaning names. To print every key of a run:",
        "`python -m controller --config FILE --check -v`. These pages are made by `python -m tools.docs` from",
        "`splitppo/config`.",
        "",
        *["| section | |", "|---|---|", *rows],
    ]
    return "\n".join(lines) + "\n"


def config_page(page: str) -> str:
    """Returns a page with every key of some sections: type, default and meaning."""
    names = CONFIG_PAGES[page]
    lines = [
        f"# Configuration: {', '.join(names)}",
        "",
        "Made by `python -m tools.docs`; [config.md](../config.md) has all.",
    ]
    printed: dict[str, str] = {}
    for name in names:
        kind = Config.model_fields[name].annotation
        assert isinstance(kind, type), name
        lines += _section(name, kind, printed)
    return "\n".join(lines) + "\n"


def _first_line(kind: Any) -> str:
    return inspect.cleandoc(kind.__doc__ or "").partition("\n")[0]


def _section(path: str, section: type[BaseModel], printed: dict[str, str]) -> list[str]:
    """Returns the keys of a section in a table, then its own sections.

    Args:
        path: the name of the section.
        section: its class.
        printed: the rows that the page has already, with the section in which each stands; those of this one are added.
            Keys that an earlier section has with the same meaning are named there only.
    """
    rows = {}
    inner = []
    meanings = descriptions(section)
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            inner += _section(f"{path}.{name}".lstrip("."), kind, printed)
        else:
            default = "" if field.is_required() else f"`{_plain(field.get_default(call_default_factory=True))}`"
            meaning = f"{' '.join(meanings.get(name, '').split())}{_bounds(field)}"
            rows[name] = f"| `{name}` | {_cell(_type_name(kind))} | {default} | {_cell(meaning)} |"
            if entry := _entry(kind):
                inner += _section(f"{path}.{name}[]", entry, printed)
            if optional := _optional(kind):
                inner += _section(f"{path}.{name}", optional, printed)
    same = {name: printed[row] for name, row in rows.items() if row in printed}
    new = [row for row in rows.values() if row not in printed]
    printed.update(dict.fromkeys(new, path))
    title = ["", f"## {path}", "", inspect.cleandoc(section.__doc__ or "")]
    table = ["", "| key | type | default | meaning |", "|---|---|---|---|", *new] if new else []
    return [*title, *table, *_as_in(same), *inner]


def _as_in(same: Mapping[str, str]) -> list[str]:
    """Returns a paragraph for each section that has keys of this one: keys, by the section in which they stand."""
    lines = []
    for path in dict.fromkeys(same.values()):
        keys = ", ".join(f"`{name}`" for name, other in same.items() if other == path)
        lines += ["", *textwrap.wrap(f"As in [{path}](#{path.replace('.', '')}): {keys}.", 120)]
    return lines


@cache
def descriptions(section: type[BaseModel]) -> dict[str, str]:
    """Returns what the source says below each key of a section; pydantic would parse it at every start."""
    meanings = {name: field.description for name, field in section.model_fields.items() if field.description}
    for part in reversed(section.__mro__[: section.__mro__.index(BaseModel)]):
        [body] = ast.parse(textwrap.dedent(inspect.getsource(part))).body
        assert isinstance(body, ast.ClassDef)
        for key, text in pairwise(body.body):
            match key, text:
                case ast.AnnAssign(ast.Name(name)), ast.Expr(ast.Constant(str(meaning))):
                    meanings[name] = meaning
    return meanings


def _entry(kind: Any) -> type[BaseModel] | None:
    """Returns the section that a list holds, if it holds sections."""
    kinds = get_args(kind) if get_origin(kind) is tuple else ()
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def _optional(kind: Any) -> type[BaseModel] | None:
    """Returns the section that a key holds, if it holds a section or null."""
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else ()
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def _type_name(kind: Any) -> str:
    """Returns a type as people write it: `int or null`, `list of str`, `serial, gather or overlap`."""
    origin = get_origin(kind)
    arguments = get_args(kind)
    if origin is Annotated:
        return _type_name(arguments[0])
    if origin is Literal:
        return ", ".join(str(value).lower() if isinstance(value, bool) else str(value) for value in arguments)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(map(_type_name, arguments)))
    if origin is tuple:
        entries = [argument for argument in arguments if argument is not Ellipsis]
        return f"list of {_type_name(entries[0])}"
    if origin is dict or (isinstance(kind, type) and issubclass(kind, BaseModel)):
        return "mapping"
    return {NoneType: "null", Path: "path"}.get(kind, getattr(kind, "__name__", str(kind)))


def _bounds(field: FieldInfo) -> str:
    """Returns the range of a number in brackets, if the type does not say it."""
    metadata = [*field.metadata, *_inner_metadata(field.annotation)]
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    limits = {sign: getattr(mark, name) for mark in metadata for name, sign in signs.items() if hasattr(mark, name)}
    return f" ({', '.join(f'{sign} {value:.12g}' for sign, value in limits.items())})" if limits else ""


def _inner_metadata(kind: Any) -> list[Any]:
    """Returns the metadata of Annotated inside an optional type."""
    if get_origin(kind) in (Union, UnionType):
        return [mark for argument in get_args(kind) for mark in _inner_metadata(argument)]
    if get_origin(kind) is not Annotated:
        return []
    metadata = kind.__metadata__
    return [limit for mark in metadata for limit in (mark.metadata if isinstance(mark, FieldInfo) else [mark])]


def _plain(value: Any) -> str:
    """Returns a default as YAML writes it."""
    return yaml.safe_dump(TypeAdapter(type(value)).dump_python(value, mode="json"), default_flow_style=True).split(
        "\n"
    )[0]


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


PAGES: Mapping[str, Callable[[], str]] = {
    "config": config_contents,
    **{page: partial(config_page, page) for page in CONFIG_PAGES},
    "from-verl": from_verl_page,
    **{page: partial(from_verl_keys_page, page) for page in KEY_PAGES},
    "metrics": metrics_page,
    "run-folder": run_folder_page,
    "running": running_page,
}


def main(arguments: list[str] | None = None) -> int:
    """Writes or checks one page, or all; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.docs", description=__doc__)
    parser.add_argument("page", nargs="?", choices=PAGES, help="default: all of them")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is out of date")
    options = parser.parse_args(arguments)
    status = 0
    for name in [options.page] if options.page else PAGES:
        file = DOCS / f"{name}.md"
        page = PAGES[name]()
        file.parent.mkdir(exist_ok=True)
        if not options.check:
            file.write_text(page, encoding="utf-8")
        elif not file.is_file() or file.read_text(encoding="utf-8") != page:
            sys.stderr.write(f"docs/{name}.md is out of date: python -m tools.docs {name}\n")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
