"""The files that a browser gets: ours take text for text, and those of others are what they were."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

from tools.vendor import FOLDER, LOCK, VENDORED

STATIC = FOLDER.parent
OURS = sorted(file for file in STATIC.iterdir() if file.suffix in (".js", ".html", ".css", ".svg"))
# Ways by which a text becomes markup or code, or an address that a text names is loaded.
FORBIDDEN = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|createContextualFragment|DOMParser|setHTML|srcdoc"
    r"|\beval\b|new Function|dangerouslySetInnerHTML|importScripts|javascript:|\bimport\(|window\.open|<iframe|<img"
)


@pytest.mark.parametrize("file", OURS, ids=lambda file: file.name)
def test_no_text_becomes_markup_or_code(file: Path) -> None:
    shows_images = ["<img"] if file.name == "images.js" else []
    assert FORBIDDEN.findall(file.read_text()) == shows_images


def test_an_image_is_drawn_from_its_bytes_and_has_no_other_address() -> None:
    assert re.findall(r"src=\S+", (STATIC / "images.js").read_text()) == [
        "src=${`data:${value.type};base64,${value.base64}`}"
    ]


@pytest.mark.parametrize("file", OURS, ids=lambda file: file.name)
def test_nothing_is_loaded_from_elsewhere(file: Path) -> None:
    addresses = re.findall(r"https?://[^\s\"'`]+", file.read_text())
    allowed = ["https://ui.perfetto.dev"] if file.name == "timeline.js" else []  # a link, which only a click follows
    assert [address for address in addresses if not address.startswith("http://www.w3.org/")] == allowed
    links = [f'<a href="{address}" target="_blank" rel="noreferrer noopener">' for address in allowed]
    assert all(link in file.read_text() for link in links)


def test_no_script_and_no_style_stands_in_the_page() -> None:
    page = (STATIC / "index.html").read_text()
    assert re.findall(r"<script[^>]*>([^<]*)</script>", page) == [""]
    assert "<style" not in page
    assert not re.search(r"\son\w+=|\sstyle=", page)


def test_what_others_wrote_is_what_was_vendored() -> None:
    listed = dict(reversed(line.split("  ")) for line in (FOLDER / VENDORED).read_text().splitlines())
    found = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in FOLDER.iterdir()}
    del found[VENDORED]
    assert found == listed
    assert set(listed) == {name for _, names in LOCK.values() for name in names.values()}


def test_every_package_keeps_its_licence() -> None:
    for package, (integrity, names) in LOCK.items():
        assert integrity.startswith("sha512-")
        assert names["LICENSE"] == f"{package.split('@')[0]}.LICENSE"
        assert "Copyright" in (FOLDER / names["LICENSE"]).read_text(), package
