"""Published weights that are not as they were written, and weights of something else: what a reader refuses."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.engine.exchange import (
    PublishedWeights,
    StoredWeight,
    WeightsManifest,
    version_folder,
)
from splitppo.manifest import MANIFEST, DamagedCheckpoint
from tests.support.checkpoints import cut, empty, flip, remove
from tests.support.published import FP32, RUN, Model, publish, read


@pytest.fixture
def version(tmp_path: Path) -> tuple[Path, str]:
    """The folder of version 3, and the digest of its manifest."""
    manifest_sha256 = publish(tmp_path, 3)
    return version_folder(tmp_path, 3), manifest_sha256


def weights_file(folder: Path) -> Path:
    return folder / "weights-0.safetensors"


def with_header(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes the header of a safetensors file; the file keeps its size."""
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header, separators=(",", ":")).encode().ljust(length)
    assert len(text) == length
    file.write_bytes(content[:8] + text + content[8 + length :])


def flip_last(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def rename(header: dict[str, Any]) -> None:
    header["form"] = header.pop("norm")


def turn(header: dict[str, Any]) -> None:
    header["embed"]["shape"].reverse()


def as_integers(header: dict[str, Any]) -> None:
    header["norm"]["dtype"] = "I32"


def say_length(file: Path, length: int) -> None:
    content = file.read_bytes()
    file.write_bytes(struct.pack("<Q", length) + content[8:])


def link(file: Path) -> None:
    elsewhere = file.parents[1] / "elsewhere"
    file.rename(elsewhere)
    file.symlink_to(elsewhere)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (flip_last, "weights-0.safetensors: norm: expected xxh3-128 [0-9a-f]{32}, found [0-9a-f]{32}$"),
        (flip, "expected a safetensors file, found: "),
        (cut, r"weights-0.safetensors: expected \d+ bytes, found \d+$"),
        (remove, r"weights-0.safetensors: expected \d+ bytes, the file is missing$"),
        (link, "weights-0.safetensors: expected a file, found a link$"),
        (lambda file: say_length(file, 100_000_001), "expected a safetensors file, found: .*[Hh]eader too large"),
        (lambda file: say_length(file, 1 << 62), "expected a safetensors file, found: .*[Hh]eader too large"),
        (lambda file: say_length(file, 99_000_000), "expected a safetensors file, found: .*header"),
        (lambda file: with_header(file, rename), "expected the weight norm, found: .*norm"),
        (lambda file: with_header(file, turn), r"embed is F32 \[3, 5\], expected F32 \[5, 3\]$"),
        (lambda file: with_header(file, as_integers), r"norm is torch.int32 \[3\], expected F32 \[3\]$"),
    ],
    ids=[
        *(
            "a bit of a weight",
            "a bit of the header",
            "a byte less",
            "no file",
            "a link",
            "header over the limit",
            "header over all limits",
        ),
        *("header longer than the file", "a renamed weight", "another shape", "another dtype"),
    ],
)
def test_a_file_that_is_not_as_it_was_published_is_damaged(
    version: tuple[Path, str], damage: Callable[[Path], object], sentence: str
) -> None:
    folder, manifest_sha256 = version
    damage(weights_file(folder))
    with pytest.raises(DamagedCheckpoint, match=sentence) as caught:
        read(folder.parent, 3, manifest_sha256)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (flip, "expected (a|the) manifest of weights"),
        (cut, "expected the manifest of weights as it was written, it was changed$"),
        (empty, "expected a manifest of weights, it cannot be read$"),
        (remove, "manifest.json: the file is missing$"),
    ],
)
def test_a_manifest_that_is_not_as_it_was_written_is_damaged(
    version: tuple[Path, str], damage: Callable[[Path], None], sentence: str
) -> None:
    folder, manifest_sha256 = version
    damage(folder / MANIFEST)
    with pytest.raises(DamagedCheckpoint, match=sentence):
        read(folder.parent, 3, manifest_sha256)


def forge(folder: Path, change: Callable[[WeightsManifest], WeightsManifest]) -> str:
    """Replaces the manifest by another valid one; returns its digest."""
    content = change(WeightsManifest.read(folder / MANIFEST)).serialise()
    (folder / MANIFEST).write_bytes(content)
    return hashlib.sha256(content).hexdigest()


def test_another_manifest_than_the_named_one_is_damaged_even_if_it_is_valid(version: tuple[Path, str]) -> None:
    folder, manifest_sha256 = version
    forged = forge(folder, lambda manifest: replace(manifest, run_id="other"))
    sentence = rf"manifest.json: expected sha256 {manifest_sha256[:16]}\.\.\., found {forged[:16]}\.\.\.$"
    with pytest.raises(DamagedCheckpoint, match=sentence):
        PublishedWeights.open(folder.parent, 3, manifest_sha256)


def test_a_folder_with_the_name_of_another_version_is_damaged(version: tuple[Path, str]) -> None:
    folder, manifest_sha256 = version
    folder.rename(version_folder(folder.parent, 4))
    with pytest.raises(DamagedCheckpoint, match=r"version_4: expected version 4, found 3$"):
        PublishedWeights.open(folder.parent, 4, manifest_sha256)


@pytest.mark.parametrize("asked", [2, 4, -1, 1 << 62])
def test_a_version_that_was_never_published_is_not_found(version: tuple[Path, str], asked: int) -> None:
    folder, manifest_sha256 = version
    sentence = f"there is no .*/version_{asked}: the version was never published here, or was removed$"
    with pytest.raises(FileNotFoundError, match=sentence):
        PublishedWeights.open(folder.parent, asked, manifest_sha256)


def test_a_publication_without_its_manifest_is_not_found(version: tuple[Path, str]) -> None:
    """It was interrupted; only a whole one has the name of its version."""
    folder, manifest_sha256 = version
    folder.rename(folder.with_name("version_3.partial"))
    with pytest.raises(FileNotFoundError, match=r"there is no .*/version_3"):
        PublishedWeights.open(folder.parent, 3, manifest_sha256)


@pytest.mark.parametrize("outside", ["../elsewhere", "{0}/elsewhere"], ids=["relative", "absolute"])
def test_a_manifest_names_no_file_outside_of_its_folder(version: tuple[Path, str], outside: str) -> None:
    folder, _ = version
    elsewhere = folder.parent / "elsewhere"
    elsewhere.write_bytes(weights_file(folder).read_bytes())
    files = {outside.format(folder.parent): elsewhere.stat().st_size}
    forged = forge(folder, lambda manifest: replace(manifest, files=files))
    with pytest.raises(DamagedCheckpoint, match=r"expected the name of a file in its folder, found '.*elsewhere'$"):
        PublishedWeights.open(folder.parent, 3, forged)


def test_a_weight_in_a_file_that_the_manifest_does_not_have_is_damaged(version: tuple[Path, str]) -> None:
    folder, _ = version

    def change(manifest: WeightsManifest) -> WeightsManifest:
        return replace(manifest, weights={**manifest.weights, "scale": StoredWeight("elsewhere", (), "0" * 32)})

    with pytest.raises(DamagedCheckpoint, match="elsewhere: expected the weight scale"):
        read(folder.parent, 3, forge(folder, change))


def without(name: str) -> Callable[[WeightsManifest], WeightsManifest]:
    def change(manifest: WeightsManifest) -> WeightsManifest:
        return replace(manifest, weights={other: at for other, at in manifest.weights.items() if other != name})

    return change


def renamed(manifest: WeightsManifest) -> WeightsManifest:
    return replace(without("norm")(manifest), weights={**manifest.weights, "form": manifest.weights["norm"]})


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda found: replace(found, run_id="other"), "version_3 holds weights of run other, expected run$"),
        (
            lambda found: replace(found, model="large"),
            "holds weights of model large, expected small with hidden_size 3",
        ),
        (lambda found: replace(found, dtype="BF16"), "version_3 holds weights of dtype BF16, expected F32$"),
        (without("norm"), "version_3 lacks the weight norm$"),
        (renamed, "version_3 holds form, which the model does not have$"),
        (
            lambda found: replace(found, weights={**found.weights, "norm": StoredWeight("weights-0", (1, 3), "0")}),
            r"version_3: norm has shape \[1, 3\], expected \[3\]$",
        ),
    ],
    ids=["run", "model", "dtype", "missing", "extra", "shape"],
)
def test_weights_of_something_else_are_the_mistake_of_who_asks_for_them(
    version: tuple[Path, str], change: Callable[[WeightsManifest], WeightsManifest], sentence: str
) -> None:
    folder, _ = version
    published = PublishedWeights.open(folder.parent, 3, forge(folder, change))
    with pytest.raises(ValueError, match=sentence) as caught:
        published.check(RUN, Model(), FP32)
    assert not isinstance(caught.value, DamagedCheckpoint)


def test_weights_of_a_wider_model_are_refused(tmp_path: Path) -> None:
    published = PublishedWeights.open(tmp_path, 0, publish(tmp_path, 0, model=Model(width=4)))
    with pytest.raises(ValueError, match="expected small with hidden_size 3, 19 parameters"):
        published.check(RUN, Model(), FP32)
