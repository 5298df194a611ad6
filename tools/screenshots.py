"""Takes the pictures of a run's pages in docs/pictures/viewer, light and dark, of the quickstart.

python -m tools.screenshots               # train the quickstart into a folder of its own, and show it
python -m tools.screenshots --run FOLDER  # show a run that is there

It needs Debian's packages chromium and chromium-driver.
"""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pyarrow.parquet as pq
from PIL import Image
from selenium import webdriver

from tests.support.browser import CHROMIUM, DRIVER, Page, chromium, viewer

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "docs" / "pictures" / "viewer"
WIDTH = 1280
HEIGHT = 800
COLOURS = 256
# [picture, address, what is there when the page is drawn]
PAGES = (
    ("overview", "run/0/overview", '[data-card="explained"] canvas'),
    ("responses", "run/0/responses", "table.responses"),
    ("tokens", "run/0/tokens/train/{step}/{row}", ".tok.chosen"),
    ("critic", "run/0/critic", "table.worst"),
    ("policy", "run/0/policy", '[data-card="ratio"] canvas'),
    ("timeline", "run/0/timeline/train/{step}", "table.critical"),
)
# Two frames on, every canvas is drawn.
DRAWN = "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 300)));"


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the pictures; returns the exit status, 2 without a browser or without that run."""
    parser = argparse.ArgumentParser(prog="python -m tools.screenshots")
    parser.add_argument("--run", metavar="FOLDER", type=Path, help="a run folder; without it the quickstart is trained")
    run = parser.parse_args(arguments).run
    if not (CHROMIUM.exists() and DRIVER.exists()):
        sys.stderr.write("error: no browser here: apt-get install chromium chromium-driver\n")
        return 2
    if run is not None and not (run / "metrics.jsonl").is_file():
        sys.stderr.write(f"error: {run} is no run folder: it has no metrics.jsonl\n")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        take(run or trained(Path(folder) / "quickstart"))
    return 0


def trained(folder: Path) -> Path:
    """Trains the quickstart into a folder, which is returned."""
    subprocess.run([sys.executable, "-m", "recipes.sort_letters.quickstart", f"run.dir={folder}"], cwd=ROOT, check=True)
    return folder


def take(run: Path) -> None:
    """Writes every picture of a run, and prints their sizes."""
    TARGET.mkdir(parents=True, exist_ok=True)
    with viewer([run.resolve()]) as address, chromium() as driver:
        page = Page(driver, address)
        page.size(WIDTH, HEIGHT)
        step, row = most_to_see(run)
        for theme in ("light", "dark"):
            media = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
            driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
            for name, place, sign in PAGES:
                page.go(place.format(step=step, row=row))
                if name == "tokens":
                    page.one(".tok")
                    page.one(".tokens").send_keys("2" + "\ue014" * 3)  # colours by advantage, the third token
                page.one(sign)
                write(driver, TARGET / f"{name}-{theme}.png")


def most_to_see(run: Path) -> tuple[int, int]:
    """The step in the middle of a run, and the row of its longest response that has its tokens."""
    steps = sorted(int(file.stem) for file in (run / "rollouts" / "train").glob("*.parquet"))
    step = steps[len(steps) // 2]
    columns = pq.read_table(
        run / "rollouts" / "train" / f"{step}.parquet", columns=["row", "length", "why"]
    ).to_pydict()
    rows = zip(columns["length"], columns["row"], columns["why"], strict=True)
    return step, max((length, row) for length, row, why in rows if why)[1]


def write(driver: webdriver.Chrome, file: Path) -> None:
    """Writes what the window shows, with few colours."""
    driver.execute_async_script(DRAWN)
    shot = Image.open(io.BytesIO(driver.get_screenshot_as_png())).convert("RGB")
    filled = driver.execute_script("return document.getElementById('app').getBoundingClientRect().bottom")
    shot = shot.crop((0, 0, WIDTH, min(HEIGHT, int(filled))))
    few = shot.quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(file, optimize=True)
    sys.stdout.write(f"{file.relative_to(ROOT)}: {file.stat().st_size / 1000:,.0f} kB\n")


if __name__ == "__main__":
    sys.exit(main())
