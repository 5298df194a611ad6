"""Images beside prompts: answered by their names alone, as what their bytes are, and exported once each."""

from __future__ import annotations

import base64
import gzip
import io
import json
import re
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from splitppo.run_folder.images import MAX_BYTES, MAX_NAMES
from tests.support.viewed_runs import Shape, images_of, make_run, name_of
from tests.support.viewer_client import ask
from tests.support.vision_models import draw_image
from viewer.__main__ import main

FILES = (draw_image(0, 40, 30), draw_image(1, 30, 40, "JPEG"), draw_image(2, 32, 32, "WEBP"))
TYPES = ("image/png", "image/jpeg", "image/webp")
SHAPE = Shape(steps=4, prompts=3, samples=2, images=FILES)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", SHAPE)


def huge_png(side: int) -> bytes:
    """A few bytes that call themselves an image of side x side pixels."""
    header = b"IHDR" + struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    chunks = [header, b"IDAT" + zlib.compress(b""), b"IEND"]
    framed = [struct.pack(">I", len(one) - 4) + one + struct.pack(">I", zlib.crc32(one)) for one in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(framed)


async def image(run: Path, name: str) -> Any:
    return await ask([run], f"/api/runs/0/images/{name}")


async def test_a_response_names_the_images_of_its_prompt_in_their_order(run: Path) -> None:
    for row in (0, 2):
        [*expected] = map(name_of, images_of(row // SHAPE.samples, SHAPE))
        assert (await ask([run], f"/api/runs/0/train/1/{row}")).json["row"]["images"] == expected
    assert (await ask([run], "/api/runs/0/prompts/2")).json["images"] == [*map(name_of, images_of(2, SHAPE))]
    assert len(images_of(2, SHAPE)) == 2


@pytest.mark.parametrize(("file", "media_type"), [*zip(FILES, TYPES, strict=True)])
async def test_an_image_is_told_as_what_its_bytes_are_in_json(run: Path, file: bytes, media_type: str) -> None:
    answer = await image(run, name_of(file))
    assert answer.json == {"type": media_type, "base64": base64.b64encode(file).decode()}
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "default-src 'none'" in answer.headers["content-security-policy"]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"<script>alert(1)</script>", "is no PNG, JPEG or WebP."),
        (b"<svg xmlns='http://www.w3.org/2000/svg' onload='alert(1)'/>", "is no PNG, JPEG or WebP."),
        (b"GIF89a" + bytes(20), "is no PNG, JPEG or WebP."),
        (b"", "is no PNG, JPEG or WebP."),
        (FILES[0][:40], "is truncated."),
        (huge_png(10_000), "has 100 megapixels, at most 64 are read."),
    ],
)
async def test_a_file_that_is_no_image_is_one_sentence(run: Path, content: bytes, told: str) -> None:
    name = name_of(content)
    (run / "rollouts/images" / name).write_bytes(content)
    answer = await image(run, name)
    assert (answer.status, answer.json) == (422, {"error": f"rollouts/images/{name} {told}"})


async def test_another_image_under_a_name_is_not_shown(run: Path) -> None:
    name = name_of(FILES[0])
    (run / "rollouts/images" / name).write_bytes(FILES[1])
    answer = await image(run, name)
    assert answer.status == 422
    assert answer.json["error"].endswith("is another image than the one that the run recorded.")


async def test_a_file_that_is_too_large_missing_or_a_link_is_one_sentence(run: Path, tmp_path: Path) -> None:
    folder = run / "rollouts/images"
    large, link, missing = ("0" * 31 + digit for digit in "123")
    with (folder / large).open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    secret = tmp_path / "secret"
    secret.write_bytes(FILES[0])
    (folder / link).symlink_to(secret)
    for name, told in ((large, "the viewer reads at most"), (link, "cannot be read"), (missing, "cannot be read")):
        answer = await image(run, name)
        assert answer.status == 422
        assert answer.json["error"].startswith(f"rollouts/images/{name} ")
        assert told in answer.json["error"]


@pytest.mark.parametrize(
    "name", ["x", "0" * 31, "0" * 33, "0" * 31 + "g", "config.yaml", "1.parquet", "0" * 31 + "/0", "", "..", "%2e%2e"]
)
async def test_nothing_but_a_digest_is_an_address(run: Path, name: str) -> None:
    answer = await image(run, name)
    assert answer.status in (404, 422)
    assert "base64" not in answer.json


async def test_without_the_token_no_image_is_shown(run: Path) -> None:
    assert (await ask([run], f"/api/runs/0/images/{name_of(FILES[0])}", token=None)).status == 401


@pytest.mark.parametrize(
    "value", ["../../config.yaml", "<img src=x>", " ".join(["0" * 32] * 1000), [1.0, 2.0], 3, None, "0" * 32 + "\n"]
)
async def test_what_is_no_name_is_left_out(run: Path, value: Any) -> None:
    file = run / "rollouts/train/1.parquet"
    table = pq.read_table(file)
    place = table.column_names.index("images")
    pq.write_table(table.set_column(place, "images", pa.array([value] * len(table))), file)
    names = (await ask([run], "/api/runs/0/train/1/0")).json["row"]["images"]
    assert set(names) <= {"0" * 32}
    assert len(names) <= MAX_NAMES


@pytest.mark.slow
def test_an_exported_file_has_each_image_once(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "run.html"
    assert main(["export", str(run), "--out", str(out)]) == 0
    saved = exported(out)
    images = {address: value for address, value in saved.items() if "/images/" in address}
    assert images.keys() == {f"runs/0/images/{name_of(file)}" for file in FILES}
    assert images[f"runs/0/images/{name_of(FILES[1])}"]["type"] == "image/jpeg"


@pytest.mark.slow
def test_an_image_that_was_removed_is_a_sentence_in_an_exported_file(run: Path, tmp_path: Path) -> None:
    name = name_of(FILES[0])
    (run / "rollouts/images" / name).unlink()
    out = tmp_path / "run.html"
    assert main(["export", str(run), "--out", str(out)]) == 0
    assert "cannot be read" in exported(out)[f"runs/0/images/{name}"]["unreadable"]


@pytest.mark.slow
def test_images_count_in_the_size_of_an_exported_file(tmp_path: Path) -> None:
    noisy = [noise(seed) for seed in range(8)]
    run = make_run(tmp_path / "run", Shape(steps=3, prompts=8, samples=2, images=noisy))
    out = tmp_path / "run.html"
    for room in (0.5, 2.5):
        assert main(["export", str(run), "--out", str(out), "--max-mb", str(room)]) == 0
        assert out.stat().st_size <= room * 1e6
        saved = exported(out)
        images = [address for address in saved if "/images/" in address]
        assert (len(images), len(saved["runs/0"]["train"])) == ((0, 0) if room == 0.5 else (8, 3))


def noise(seed: int) -> bytes:
    """An image of 120 kB."""
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (200, 200, 3), dtype=np.uint8)).save(file, "PNG")
    return file.getvalue()


def exported(file: Path) -> dict[str, Any]:
    """Returns the answers in an exported file by their addresses."""
    found = re.search(r'id="saved">(.*?)</script>', file.read_text())
    assert found
    packed = json.loads(found[1])
    return {address: json.loads(gzip.decompress(base64.b64decode(text))) for address, text in packed.items()}
