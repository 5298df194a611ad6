"""The pages of the documentation: links that exist, lines of one width, and tables that name every page."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("docs", "recipes", "deploy")
PAGES = sorted(
    str(page.relative_to(ROOT))
    for page in [*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))]
)
MAX_COLUMNS = 120
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
DECISION = re.compile(r"^\| \[\d+\]\(([\w-]+\.md)\) \|.*\| ([^|]+) \|$", re.MULTILINE)


def text_lines(page: str) -> Iterator[tuple[int, str]]:
    """(number, line) of what is neither in a block of code nor a table."""
    in_code = False
    for number, line in enumerate((ROOT / page).read_text().splitlines(), 1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
        elif not in_code and not line.lstrip().startswith("|") and not re.match(r" {4,}(?![*-] |\d+\. )\S", line):
            yield number, line


def anchors(page: Path) -> set[str]:
    """Those of the headings, as GitHub makes them."""
    headings = re.findall(r"^#{1,6} (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    plain = (re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower() for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


def broken_links(page: str) -> list[str]:
    source = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)
    broken = []
    for target in LINK.findall(source):
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        if "://" in target or target.startswith("mailto:"):
            continue
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            broken.append(target)
    return broken


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page: str) -> None:
    assert broken_links(page) == []


def test_a_broken_link_would_be_found(tmp_path: Path) -> None:
    (tmp_path / "there.md").write_text("# A `key` of [yours](x.md)\n")
    assert anchors(tmp_path / "there.md") == {"a-key-of-yours"}
    (tmp_path / "page.md").write_text("[a](there.md#a-key-of-yours) [b](there.md#no-such) [c](gone.md)\n")
    assert broken_links(str(tmp_path / "page.md")) == ["there.md#no-such", "gone.md"]


@pytest.mark.parametrize("page", PAGES)
def test_no_line_of_text_is_long(page: str) -> None:
    assert [number for number, line in text_lines(page) if len(line) > MAX_COLUMNS] == []


OURS = re.compile(
    r"`((?:controller|services|splitppo|rewards|environments|viewer|recipes|benchmarks|tools|tests|deploy|proto)/[\w./-]+"
    r"\.(?:py|sh|proto|yaml|sbatch))`"
)


@pytest.mark.parametrize("page", [page for page in PAGES if page != "CHANGELOG.md" and "/extending/" not in page])
def test_every_file_of_ours_that_a_page_names_is_there(page: str) -> None:
    """The recipes of docs/extending make files, and are followed by a test."""
    named = set(OURS.findall((ROOT / page).read_text()))
    assert {file for file in named if not (ROOT / file).exists()} == set()


def test_every_page_that_code_names_is_there() -> None:
    pattern = r"docs/(adr/[0-9]{3}|[a-z_/-]+\.md)"
    command = ["git", "grep", "-hoE", pattern, "--", ":!docs", ":!*.md", ":!tests"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    named = set(listed.stdout.split())
    assert len(named) > 10
    assert {page for page in named if not [*ROOT.glob(f"{page}*")]} == set()


def test_the_table_of_contents_names_every_page() -> None:
    contents = (ROOT / "docs/README.md").read_text()
    named = {str((ROOT / "docs" / target.partition("#")[0]).resolve()) for target in LINK.findall(contents)}
    pages = [page for page in PAGES if page.startswith("docs/") and not page.startswith("docs/adr/")]
    assert [page for page in pages if page != "docs/README.md" and str(ROOT / page) not in named] == []


# These only list: keys and metrics.
LISTS = ("docs/config", "docs/from-verl/", "docs/metrics.md")
ANSWERING = [page for page in PAGES if page.startswith("docs/") and not page.startswith((*LISTS, "docs/adr/"))]


@pytest.mark.parametrize("page", ANSWERING)
def test_every_page_begins_with_its_questions(page: str) -> None:
    first = (ROOT / page).read_text().splitlines()[:14]
    assert any("?" in line for line in first)


def test_every_decision_has_a_number_a_status_and_a_line_in_the_table() -> None:
    contents = (ROOT / "docs/adr/README.md").read_text()
    decisions = [page for page in (ROOT / "docs/adr").glob("*.md") if page.name != "README.md"]
    assert sorted(DECISION.findall(contents)) == sorted((page.name, "accepted") for page in decisions)
    for page in decisions:
        header = re.match(rf"# {page.name[:3]}: [A-Za-z].*\n\nStatus: accepted\n\n", page.read_text())
        assert header is not None, page.name


def test_every_number_of_a_decision_is_in_force_or_gone() -> None:
    contents = (ROOT / "docs/adr/README.md").read_text()
    in_force = re.findall(r"^\| \[(\d{3})\]", contents, re.MULTILINE)
    gone = re.findall(r"^\| (\d{3}) \| [^|]+ \| [^|]+ \|$", contents, re.MULTILINE)
    never_used = ["006", "008", "009"]
    numbers = sorted([*in_force, *gone, *never_used])
    assert numbers == [f"{number:03}" for number in range(1, len(numbers) + 1)]
