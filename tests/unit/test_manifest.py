"""Manifests: the facts that they hold of files, and their sentences on damage."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from splitppo.manifest import (
    DamagedCheckpoint,
    FileEntry,
    Manifest,
    describe_files,
    read_manifest,
    verify_files,
    write_manifest,
)
from tests.support.checkpoints import cut, flip, remove


@pytest.fixture
def part(tmp_path: Path) -> Path:
    folder = tmp_path / "actor"
    (folder / "huggingface").mkdir(parents=True)
    (folder / "shard").write_bytes(bytes(1000))
    (folder / ".metadata").write_bytes(b"meta")
    (folder / "huggingface" / "config.json").write_text("{}")
    return folder


def manifest_of(part: Path) -> Manifest:
    return Manifest("actor", 3, "a model", describe_files(part), "weights", "ledger")


def test_every_file_is_described_by_size_and_digest(part: Path) -> None:
    assert describe_files(part) == {
        ".metadata": FileEntry(4, hashlib.sha256(b"meta").hexdigest()),
        "huggingface/config.json": FileEntry(2, hashlib.sha256(b"{}").hexdigest()),
        "shard": FileEntry(1000, hashlib.sha256(bytes(1000)).hexdigest()),
    }


def test_a_manifest_is_read_as_it_was_written_and_does_not_describe_itself(part: Path) -> None:
    manifest = manifest_of(part)
    digest = write_manifest(part, manifest)
    assert digest == hashlib.sha256((part / "manifest.json").read_bytes()).hexdigest()
    assert read_manifest(part) == manifest == manifest_of(part)
    verify_files(part, manifest)


@pytest.mark.parametrize("name", [".metadata", "huggingface/config.json", "shard"])
@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (flip, r"expected sha256 [0-9a-f]{16}\.\.\., found [0-9a-f]{16}\.\.\.$"),
        (cut, r"expected \d+ bytes, found \d+$"),
        (remove, r"expected \d+ bytes, the file is missing$"),
    ],
)
def test_a_damaged_file_is_named_with_what_was_expected(part: Path, name: str, damage: Any, sentence: str) -> None:
    manifest = manifest_of(part)
    damage(part / name)
    with pytest.raises(DamagedCheckpoint, match=f"^{part / name}: {sentence}"):
        verify_files(part, manifest)


def test_a_file_that_nobody_wrote_does_no_harm(part: Path) -> None:
    manifest = manifest_of(part)
    (part / "notes.txt").write_text("the best one")
    verify_files(part, manifest)


def test_a_link_into_nowhere_is_a_missing_file(part: Path) -> None:
    manifest = manifest_of(part)
    (part / "shard").unlink()
    (part / "shard").symlink_to("nowhere")
    with pytest.raises(DamagedCheckpoint, match=f"{part / 'shard'}: expected 1000 bytes, the file is missing$"):
        verify_files(part, manifest)


def test_a_missing_manifest_is_damage(part: Path) -> None:
    with pytest.raises(DamagedCheckpoint, match=r"manifest\.json: the file is missing"):
        read_manifest(part)


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff", b"{", b"[]", b"null", b'{"files": 3}', b'{"files": {"shard": [1]}}', b'{"files": {}, "version": 1}'],
)
def test_what_is_no_manifest_is_damage(part: Path, content: bytes) -> None:
    (part / "manifest.json").write_bytes(content)
    with pytest.raises(DamagedCheckpoint, match=r"manifest\.json: expected a manifest, it cannot be read"):
        read_manifest(part)


@pytest.mark.parametrize("key", ["step", "role", "model", "weights_sha256"])
def test_another_spelling_of_a_manifest_is_damage(part: Path, key: str) -> None:
    write_manifest(part, manifest_of(part))
    content = json.loads((part / "manifest.json").read_bytes())
    assert key in content
    (part / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(DamagedCheckpoint, match=r"manifest\.json: expected the manifest as it was written"):
        read_manifest(part)


def test_every_single_bit_of_a_manifest_counts(part: Path) -> None:
    write_manifest(part, manifest_of(part))
    content = (part / "manifest.json").read_bytes()
    for position in range(len(content)):
        changed = bytearray(content)
        changed[position] ^= 1
        (part / "manifest.json").write_bytes(changed)
        with pytest.raises(DamagedCheckpoint, match=r"manifest\.json: expected "):
            read_manifest(part)


def test_storage_that_may_not_be_read_is_not_damage(part: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = manifest_of(part)
    failure = OSError(errno.EACCES, "Permission denied")

    def refuse(*_: Any, **__: Any) -> None:
        raise failure

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(OSError, match="Permission denied"):
        verify_files(part, manifest)
    failure = OSError(errno.EIO, "Input/output error")
    with pytest.raises(DamagedCheckpoint, match="expected a readable file, found: Input/output error"):
        verify_files(part, manifest)


def test_a_manifest_that_is_no_file_or_enormous_is_damage_and_is_not_read(part: Path) -> None:
    file = part / "manifest.json"
    os.mkfifo(file)
    with pytest.raises(DamagedCheckpoint, match=r"manifest\.json: expected a manifest, it is no file"):
        read_manifest(part)
    file.unlink()
    with file.open("wb") as stream:
        stream.truncate(40 << 30)
    with pytest.raises(DamagedCheckpoint, match=r"or larger than 256 MiB"):
        read_manifest(part)
