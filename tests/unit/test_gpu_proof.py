"""The GPU proof around its cases: which run, in which order and for how long, and what stays of what was done."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_cases import FUNCTIONS
from benchmarks.gpu_list import GROUPS, QUICK_LIMIT_S, Case, all_cases, chosen, quick_cases
from benchmarks.gpu_page import Report
from benchmarks.gpu_proof import Measuring, how_to_carry, missing_packages, run_cases

MACHINE = {"device": "NVIDIA H200", "driver": "580.1", "torch": "2.11.0"}
# Stands for the process that measures.
CHILD = """
import json, os, sys, time
for function, arguments in map(json.loads, sys.stdin):
    if function == "hang":
        print("in a kernel", file=sys.stderr, flush=True)
        time.sleep(300)
    if function == "die":
        print("the GPU is lost", file=sys.stderr)
        sys.exit(3)
    result = {"failed": "ValueError: no"} if function == "fail" else {"values": {"pid": os.getpid(), **arguments}}
    print(json.dumps(result), flush=True)
"""


def proof_of(folder: Path, *cases: Case, limit_s: float = 60.0) -> dict[str, Any]:
    """Runs cases by the child above; returns what is in the file."""
    report = Report(folder / "proof.json", "proof", MACHINE, cases, is_tiny=False)
    with closing(Measuring([sys.executable, "-c", CHILD], folder / "log.txt")) as measuring:
        run_cases(cases, limit_s, measuring, report)
    return content_of(report)


def content_of(report: Report) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(report.file.read_text())
    return content


def results_of(content: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {entry["name"]: entry for entry in content["cases"]}


def names(cases: Sequence[Case]) -> list[str]:
    return [case.name for case in cases]


def test_a_case_that_hangs_takes_its_own_time_and_the_next_one_a_new_process(tmp_path: Path) -> None:
    hanging = Case("basics/hang", "hang", limit_s=0.5)
    results = results_of(proof_of(tmp_path, Case("basics/one", "one"), hanging, Case("basics/two", "two")))
    assert results["basics/hang"]["failed"] == "stopped after 0.5 s, its limit"
    assert results["basics/one"]["values"]["pid"] != results["basics/two"]["values"]["pid"]


def test_a_case_whose_process_dies_has_its_last_words_and_the_rest_goes_on(tmp_path: Path) -> None:
    results = results_of(proof_of(tmp_path, Case("row/die", "die"), Case("row/fail", "fail"), Case("row/one", "one")))
    assert results["row/die"]["failed"] == "its process ended with exit status 3: the GPU is lost"
    assert results["row/die"]["log"] == "the GPU is lost\n"
    assert results["row/fail"]["failed"] == "ValueError: no"
    assert "values" in results["row/one"]


def test_cases_that_ask_for_variables_have_a_process_with_them(tmp_path: Path) -> None:
    cases = [Case("basics/one", "one"), Case("basics/two", "two"), Case("basics/own", "own", environment={"A": "1"})]
    pids = [result["values"]["pid"] for result in results_of(proof_of(tmp_path, *cases)).values()]
    assert pids[0] == pids[1] != pids[2]


def test_what_the_limit_leaves_no_time_for_is_named_and_fails_the_proof(tmp_path: Path) -> None:
    content = proof_of(tmp_path, Case("basics/one", "one"), Case("basics/two", "two"), limit_s=0.0)
    assert (content["cases"], content["not reached"]) == ([], ["basics/one", "basics/two"])
    report = Report(tmp_path / "proof.json", "proof", MACHINE, [Case("basics/one", "one")], is_tiny=False)
    assert report.has_failed
    report.add(Case("basics/one", "one"), {"values": {"figure": 1.0}}, 1.0)
    assert not report.has_failed


def test_a_killed_session_keeps_the_cases_that_were_done_as_json_and_as_a_page(tmp_path: Path) -> None:
    done, running = Case("update/a", "update", {"size": "7B"}), Case("row/b", "row")
    report = Report(tmp_path / "new" / "proof.json", "proof --quick", MACHINE, [done, running], is_tiny=False)
    assert content_of(report)["not reached"] == ["update/a", "row/b"]

    report.add(done, {"values": {"update s": 1.25}}, 3.21)

    content = content_of(report)
    assert content["machine"] == MACHINE
    assert content["cases"] == [
        {
            "name": "update/a",
            "function": "update",
            "arguments": {"size": "7B"},
            "seconds": 3.2,
            "values": {"update s": 1.25},
        }
    ]
    page = (tmp_path / "new" / "proof.md").read_text()
    assert page.startswith(
        "## On one GPU: `proof --quick`\n\n* **Machine**: device NVIDIA H200; driver 580.1; torch 2.11.0."
    )
    assert f"### {GROUPS['update']}\n\n| update/a |  |\n" in page
    assert "| update s | 1.25 |\n" in page
    assert page.endswith("\nNot reached: row/b.\n")


def test_the_page_has_a_table_of_each_kind_and_of_lists_and_a_line_for_what_has_no_figures(tmp_path: Path) -> None:
    cases = [Case(f"row/{name}", "row") for name in "abcd"]
    report = Report(tmp_path / "proof.json", "proof", MACHINE, cases, is_tiny=True)
    kernels = [{"kernel": "gemm|64", "ms": 1234.5}, {"kernel": "norm", "ms": 0.5}]
    report.add(cases[0], {"values": {"tokens/s": 12_345.6, "MFU": 0.412, "kernels": kernels}}, 1.0)
    report.add(cases[1], {"values": {"tokens/s": 9.0, "same": True}}, 1.0)
    report.add(cases[2], {"skipped": "it needs 200 GiB"}, 0.0)
    report.add(cases[3], {"failed": "OutOfMemoryError: CUDA", "log": "much"}, 0.0)
    assert report.page_file.read_text().split(f"### {GROUPS['row']}\n\n")[1].splitlines() == [
        "| case | tokens/s | MFU | took s | same |",
        "| --- | --- | --- | --- | --- |",
        "| row/a | 12,346 | 0.412 | 1 |  |",
        "| row/b | 9 |  | 1 | yes |",
        "",
        "row/a, kernels:",
        "",
        "| kernel | ms |",
        "| --- | --- |",
        "| gemm\\|64 | 1,234 |",
        "| norm | 0.5 |",
        "",
        "* row/c: skipped: it needs 200 GiB",
        "* row/d: failed: OutOfMemoryError: CUDA",
    ]
    assert "The shapes are tiny" in report.page_file.read_text()


def test_the_quick_proof_begins_with_what_must_be_known_first_and_ends_in_time() -> None:
    assert [(case.group, case.arguments.get("size")) for case in quick_cases()] == [
        ("tests", None),
        *[("basics", None)] * 3,
        ("run", "0.5B"),
        *[("update", "1.5B")] * 3,
        ("row", "7B"),
        *[("repeat", "1.5B")] * 2,
        ("sanitizer", None),
    ]
    assert all(case.limit_s < QUICK_LIMIT_S / 2 for case in quick_cases())


def test_cases_have_names_of_their_own_that_begin_with_their_group() -> None:
    assert len({*names(all_cases())}) == len(all_cases())
    assert {case.group for case in all_cases()} == {*GROUPS}


@pytest.mark.parametrize("cases", [quick_cases(), all_cases()], ids=["quick", "all"])
def test_each_case_can_be_chosen_and_left_out_by_name(cases: list[Case]) -> None:
    for case in cases:
        assert chosen(cases, [case.name], []) == [case]
        assert chosen(cases, [], [case.name]) == [other for other in cases if other != case]


def test_groups_and_patterns_choose_several_cases_which_keep_their_order() -> None:
    found = names(chosen(quick_cases(), ["row", "basics/a*", "tests/gpu"], ["basics/adamw"]))
    assert found == ["tests/gpu", "basics/attention", "row/7B-lora-32k"]


def test_a_name_that_no_case_has_is_refused() -> None:
    with pytest.raises(ValueError, match="no case is named rows: expected a name that --list shows"):
        chosen(quick_cases(), ["rows"], [])
    with pytest.raises(ValueError, match="no case is named run/7B"):
        chosen(quick_cases(), [], ["run/7B"])


def test_missing_packages_are_named_with_the_commands_that_bring_them() -> None:
    assert missing_packages() == []
    sentence = how_to_carry(["pydantic>=2.12", "rich>=14"])
    assert "lacks pydantic>=2.12, rich>=14: " in sentence
    assert sentence.count("'pydantic>=2.12' 'rich>=14'") == 2


def test_every_case_has_a_function_that_measures_it() -> None:
    assert {case.function for case in all_cases()} <= FUNCTIONS.keys()
