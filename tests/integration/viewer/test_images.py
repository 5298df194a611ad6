"""Images beside prompts, in a browser: those of each prompt, from the server and from an exported file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.browser import Page, viewer
from tests.support.viewed_runs import Shape, images_of, make_run, name_of
from tests.support.vision_models import draw_image
from viewer.__main__ import main

pytestmark = pytest.mark.browser

SIZES = ((40, 30), (30, 50), (64, 20))
FILES = tuple(
    draw_image(seed, *size, file_format)
    for seed, (size, file_format) in enumerate(zip(SIZES, ("PNG", "JPEG", "WEBP"), strict=True))
)
SHAPE = Shape(steps=4, prompts=3, samples=2, images=FILES)
DRAWN = (
    "return [...document.querySelectorAll('.images img')].map((one) => [one.naturalWidth, one.naturalHeight, one.alt])"
)


def look_at_images(page: Page) -> None:
    """Looks at the responses to two prompts, one with an image and one with two, and at the page of a prompt."""
    for prompt, address in ((0, "tokens/train/1/1"), (2, "tokens/train/1/6"), (2, "prompt/3")):
        sizes = [SIZES[FILES.index(file)] for file in images_of(prompt, SHAPE)]
        expected = [[*size, f"image {number} of the prompt"] for number, size in enumerate(sizes, start=1)]
        page.go(f"run/0/{address}")
        page.until(lambda expected=expected: page.script(DRAWN) == expected, f"the images of {address}")  # type: ignore[misc]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", SHAPE)


def test_the_images_of_a_prompt_are_drawn_beside_it(
    open_page: Callable[[str], Page], run: Path, tmp_path: Path
) -> None:
    with viewer([run]) as address:
        page = open_page(address)
        look_at_images(page)
        page.leave()
    file = tmp_path / "run.html"
    assert main(["export", str(run), "--out", str(file)]) == 0
    look_at_images(open_page(file.as_uri()))


def test_what_is_no_image_is_a_sentence_and_runs_nothing(open_page: Callable[[str], Page], run: Path) -> None:
    svg = b"<svg xmlns='http://www.w3.org/2000/svg' onload='alert(1)'><script>alert(1)</script></svg>"
    for file in FILES:
        (run / "rollouts/images" / name_of(file)).write_bytes(svg)
    with viewer([run]) as address:
        page = open_page(address)
        page.go("run/0/tokens/train/1/1")
        page.until_shown(f"rollouts/images/{name_of(FILES[0])} is no PNG, JPEG or WebP.")
        assert page.script(DRAWN) == []
        # The browser itself logs each 422; nothing else may be there.
        assert [fault for fault in page.faults() if "422" not in fault] == []
        page.driver.get("about:blank")
        page.forget()


def test_an_address_of_an_image_that_somebody_opens_is_no_image(open_page: Callable[[str], Page], run: Path) -> None:
    """Without the token, which a browser does not send by itself, an address gives a sentence."""
    with viewer([run]) as address:
        page = open_page(address)
        page.driver.get(f"{page.origin}/api/runs/0/images/{name_of(FILES[0])}")
        assert "The token is missing" in json.loads(page.text())["error"]
        page.driver.get("about:blank")
        page.forget()
