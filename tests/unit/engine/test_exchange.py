"""Weights that are published as files: what a reader gets of them, on one rank and on several."""

from __future__ import annotations

import errno
import re
import resource
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import xxhash
from torch import Tensor, nn

from services.engine import parallel
from services.engine.exchange import (
    NamedWeights,
    PublishedWeights,
    Publisher,
    version_folder,
)
from services.engine.strategies.fsdp2 import units
from splitppo.manifest import MANIFEST, DamagedCheckpoint
from tests.support.disks import fill, mounted, remount
from tests.support.engines import CPU, make_engine, silent
from tests.support.models import save_policy
from tests.support.published import FP32, RUN, Model, publish, publisher, read
from tests.support.ranks import RunRanks, rank_processes


def assert_equal(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, weight in expected.items():
        assert (actual[name].dtype, actual[name].shape) == (weight.dtype, weight.shape), name
        assert torch.equal(actual[name], weight), name


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


# One rank.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_reader_gets_every_weight_in_the_published_dtype_and_tied_ones_once(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    manifest_sha256 = publisher(tmp_path, dtype=dtype).publish(RUN, 3, 0, silent)

    found = read(tmp_path, 3, manifest_sha256)

    assert sorted(found) == ["embed", "norm", "scale"]
    assert_equal(found, dict(Model().whole_weights(dtype)))
    PublishedWeights.open(tmp_path, 3, manifest_sha256).check(RUN, Model(), dtype)


def test_only_the_user_of_the_run_can_read_published_weights(tmp_path: Path) -> None:
    folder = tmp_path / "everybody's" / "splitppo-run"
    publish(folder, 3)
    assert (folder.stat().st_mode & 0o777, version_folder(folder, 3).is_dir()) == (0o700, True)


def test_progress_is_reported_for_each_weight(tmp_path: Path) -> None:
    reports: list[tuple[int, int, str]] = []
    publisher(tmp_path).publish(RUN, 0, 0, lambda *report: reports.append(report))
    assert reports == [(done, 3, "publish") for done in (1, 2, 3)]


def test_the_same_weights_have_the_same_manifest_when_a_step_is_published_again(tmp_path: Path) -> None:
    first = publish(tmp_path, 3)
    (version_folder(tmp_path, 3) / "weights-0.safetensors").write_bytes(b"torn")
    assert publish(tmp_path, 3) == first
    assert_equal(read(tmp_path, 3, first), dict(Model().whole_weights(FP32)))


def test_a_step_that_is_published_again_has_the_newer_weights(tmp_path: Path) -> None:
    first = publish(tmp_path, 3)
    model = Model()
    model.norm.data += 1
    second = publish(tmp_path, 3, model=model)
    assert torch.equal(read(tmp_path, 3, second)["norm"], model.norm)
    with pytest.raises(DamagedCheckpoint, match=rf"expected sha256 {first[:16]}\.\.\., found {second[:16]}"):
        PublishedWeights.open(tmp_path, 3, first)


def test_a_reader_that_has_opened_a_version_keeps_it_when_it_is_removed(tmp_path: Path) -> None:
    held = PublishedWeights.open(tmp_path, 3, publish(tmp_path, 3))
    publish(tmp_path, 4, keep_from=4)
    held.verify()
    assert_equal(dict(held.weights()), dict(Model().whole_weights(FP32)))


def test_older_versions_than_those_still_needed_are_removed(tmp_path: Path) -> None:
    for version in range(4):
        publish(tmp_path, version)
    publish(tmp_path, 4, keep_from=3)
    assert names(tmp_path) == ["version_3", "version_4"]


@pytest.mark.parametrize(("keep_from", "left"), [(-(1 << 63), [0, 1, 2]), (2, [2]), ((1 << 63) - 1, [2])])
def test_any_number_says_what_is_kept(tmp_path: Path, keep_from: int, left: list[int]) -> None:
    for version in range(3):
        publish(tmp_path, version, keep_from=keep_from if version == 2 else 0)
    assert names(tmp_path) == [f"version_{version}" for version in left]


def test_what_an_interrupted_or_later_attempt_has_left_is_removed(tmp_path: Path) -> None:
    """A controller that has gone back publishes an earlier step again."""
    for version in (2, 3, 5):
        publish(tmp_path, version)
    for version in (3, 4):
        (tmp_path / f"version_{version}.partial").mkdir()
        (tmp_path / f"version_{version}.partial" / "weights-0.safetensors").write_bytes(b"half")
    publish(tmp_path, 3, keep_from=2)
    assert names(tmp_path) == ["version_2", "version_3"]


def test_files_that_a_network_file_system_keeps_for_a_reader_are_removed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(tmp_path, 1)

    def keep_open_files(folder: Path, *, ignore_errors: bool = False) -> None:
        for file in folder.iterdir():
            file.rename(folder / f".nfs{file.name}")
        if not ignore_errors:
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(folder))

    with monkeypatch.context() as while_read:
        while_read.setattr("services.engine.exchange.shutil.rmtree", keep_open_files)
        read(tmp_path, 1, publish(tmp_path, 1))
        read(tmp_path, 2, publish(tmp_path, 2, keep_from=2))
    publish(tmp_path, 3, keep_from=3)
    assert names(tmp_path) == ["version_3"]


def test_files_of_others_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    publish(tmp_path, 1, keep_from=1)
    assert names(tmp_path) == ["notes", "version_1"]


class ManyWeights(Model):
    """A small model with 24 weights more; `num_gathered` counts those that have been asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.ParameterList([torch.full((2,), float(value)) for value in range(24)])
        self.num_gathered = 0

    def whole_weights(self, dtype: torch.dtype) -> NamedWeights:
        for name, weight in super().whole_weights(dtype):
            self.num_gathered += 1
            yield name, weight


@pytest.fixture
def when_written(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Gives a function that sets what is called for each weight while it is written, before its digest is made."""

    def set_hook(hook: Callable[[], object]) -> None:
        def digest(values: memoryview) -> str:
            hook()
            return xxhash.xxh3_128(values).hexdigest()

        monkeypatch.setattr("services.engine.exchange.xxhash.xxh3_128_hexdigest", digest)

    return set_hook


def test_the_next_weights_are_gathered_while_one_is_written(
    tmp_path: Path, when_written: Callable[[Callable[[], object]], None]
) -> None:
    """Else every rank would wait for each write of every other rank."""
    model, is_second_gathered = Model(), threading.Event()
    have_seen = list[bool]()

    def whole_weights(dtype: torch.dtype) -> NamedWeights:
        for number, named in enumerate(model.whole_weights(dtype)):
            if number:
                is_second_gathered.set()
            yield named

    when_written(lambda: have_seen.append(is_second_gathered.wait(10.0)))
    Publisher(tmp_path, model, whole_weights, FP32, CPU).publish(RUN, 0, 0, silent)
    assert have_seen == [True] * 3


def test_only_a_few_weights_wait_in_memory_to_be_written(
    tmp_path: Path, when_written: Callable[[Callable[[], object]], None]
) -> None:
    model = ManyWeights()
    num_in_memory = list[int]()

    def write_slowly() -> None:
        time.sleep(0.002)
        num_in_memory.append(model.num_gathered - len(num_in_memory))

    when_written(write_slowly)
    manifest_sha256 = publish(tmp_path, 0, model=model)
    assert len(num_in_memory) == 27
    assert max(num_in_memory) <= 6  # one is written, four wait, and one has just been gathered
    assert_equal(read(tmp_path, 0, manifest_sha256), dict(Model.whole_weights(model, FP32)))


def test_weights_are_gathered_to_the_end_when_storage_has_failed(tmp_path: Path) -> None:
    """The other ranks need this one's part of each."""
    model = ManyWeights()
    with small_files(0), pytest.raises(OSError, match="File too large"):
        publish(tmp_path, 0, model=model)
    assert model.num_gathered == 27


@contextmanager
def small_files(num_bytes: int) -> Iterator[None]:
    """Lets this process write no file beyond so many bytes, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("num_bytes", [0, 100, 400], ids=["header", "weights", "manifest"])
def test_storage_that_fails_leaves_no_version_and_the_earlier_one_whole(tmp_path: Path, num_bytes: int) -> None:
    first = publish(tmp_path, 1)
    with small_files(num_bytes), pytest.raises(OSError, match="File too large"):
        publish(tmp_path, 2, keep_from=1)
    assert names(tmp_path) == ["version_1"]
    assert_equal(read(tmp_path, 1, first), dict(Model().whole_weights(FP32)))
    assert_equal(read(tmp_path, 2, publish(tmp_path, 2)), dict(Model().whole_weights(FP32)))


def test_a_full_disk_is_named_with_the_file(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=1m") as disk:
        filler = fill(disk)
        with pytest.raises(OSError, match="No space left on device") as caught:
            publish(disk, 1)
        assert str(disk / "version_1.partial") in str(caught.value)
        assert names(disk) == ["filler"]
        filler.unlink()
        publish(disk, 1)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=1m") as disk:
        assert remount(disk, "ro")
        with pytest.raises(OSError, match=r"Read-only file system: .*disk/version_1\.partial"):
            publish(disk, 1)


# Several ranks.


@dataclass(frozen=True)
class Ranks:
    """Processes for groups of up to three ranks, and a policy whose weights they shard."""

    run: RunRanks
    policy: Path


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    policy = save_policy(tmp_path_factory.mktemp("models") / "policy")
    with rank_processes(3) as run:
        yield Ranks(run, policy)


def publish_sharded(policy: Path, folder: Path, dtype: str) -> str:
    """On a rank: publishes a policy that is sharded over the ranks of its group."""
    engine = make_engine(policy, dtype=dtype)
    assert units(engine.model)
    made = Publisher(folder, engine.model, engine.whole_weights, _DTYPES[dtype], CPU)
    return made.publish(RUN, 7, 0, silent)


_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@pytest.mark.parametrize(("num_ranks", "dtype"), [(2, "bf16"), (3, "fp32")])
def test_a_policy_that_is_sharded_over_ranks_is_read_as_by_one(
    ranks: Ranks, tmp_path: Path, num_ranks: int, dtype: str
) -> None:
    manifest_sha256, *others = ranks.run(num_ranks, publish_sharded, ranks.policy, tmp_path, dtype)

    engine = make_engine(ranks.policy)
    assert others == [""] * (num_ranks - 1)
    assert names(tmp_path / "version_7") == [
        MANIFEST,
        *(f"weights-{rank}.safetensors" for rank in range(num_ranks)),
    ]
    assert_equal(read(tmp_path, 7, manifest_sha256), dict(engine.whole_weights(_DTYPES[dtype])))
    PublishedWeights.open(tmp_path, 7, manifest_sha256).check(RUN, engine.model, _DTYPES[dtype])


def publish_whole(folder: Path) -> str:
    """On a rank: publishes a model that every rank has whole, with fewer weights than there may be ranks."""
    model = Model()
    del model.norm
    return publish(folder, 0, model=model)


def read_on_rank(folder: Path, version: int, manifest_sha256: str) -> list[str]:
    return list(read(folder, version, manifest_sha256))


def test_ranks_without_a_weight_of_their_own_write_no_file_and_any_number_of_ranks_reads_them(
    ranks: Ranks, tmp_path: Path
) -> None:
    manifest_sha256, *_ = ranks.run(3, publish_whole, tmp_path)
    assert names(tmp_path / "version_0") == [MANIFEST, "weights-0.safetensors", "weights-1.safetensors"]
    read_by_two = ranks.run(2, read_on_rank, tmp_path, 0, manifest_sha256)
    assert read_by_two == [["embed", "scale"]] * 2


def publish_without_room_on(victim: int, folder: Path) -> tuple[str, list[str], str]:
    """On a rank: the error of a publication for which one rank has no room, the files after it, and what comes then."""
    publish(folder, 1)
    try:
        with small_files(50 if parallel.rank() == victim else resource.RLIM_INFINITY):
            publish(folder, 2)
    except OSError as error:
        torch.distributed.barrier()  # rank 0 has removed what was written
        left = names(folder)
        torch.distributed.barrier()
        return str(error), left, publish(folder, 2)
    return "", [], ""


@pytest.mark.parametrize("victim", [0, 1])
def test_storage_that_fails_for_one_rank_is_an_error_of_all_ranks_which_then_go_on(
    ranks: Ranks, tmp_path: Path, victim: int
) -> None:
    found = ranks.run(2, publish_without_room_on, victim, tmp_path)

    expected = {
        victim: rf"File too large: '.*version_2\.partial/weights-{victim}\.safetensors'",
        1 - victim: f"another rank could not write the weights to {tmp_path}; its log says why",
    }
    for rank, (error, left, _) in enumerate(found):
        assert re.search(expected[rank], error), error
        assert left == ["version_1"]
    assert_equal(read(tmp_path, 2, found[0][2]), dict(Model().whole_weights(FP32)))
