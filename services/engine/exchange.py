"""Publishes a policy's weights as files, version by version, and reads them in another worker group.

The folder of a version has one safetensors file per rank that wrote it, and a manifest, which is written last. The
folder gets its name by a rename once it is complete, so that a folder with a version's name is a whole version. Nothing
is synced to the disk: a version need not survive its machine.
"""

import contextlib
import hashlib
import itertools
import json
import secrets
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from queue import Queue
from typing import Any, Self

import safetensors.torch
import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from services.engine import hf_folder, parallel
from services.engine.device_thread import device_thread
from services.engine.model.adapters import base_parameters
from services.engine.model.loading import describe_architecture
from splitppo import failpoints
from splitppo.hard_link import link_or_copy
from splitppo.manifest import MANIFEST, DamagedCheckpoint, SealedFile, map_in_threads, verify_digest, verify_size

_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}  # the names of safetensors
_PREFIX = "version_"
_HEADER_ALIGNMENT = 8
_BYTES_PER_THREAD = 64 << 20  # threads that hash less wait for each other longer than that takes
_BUFFERS_FILE = "model-buffers.safetensors"
# Weights of a rank that wait in main memory to be written, so that ranks with large and with small ones keep pace.
_MAX_WAITING_WEIGHTS = 4

# (name, whole tensor) of each weight, tied ones once; every rank must take them all.
NamedWeights = Iterator[tuple[str, Tensor]]


@dataclass(frozen=True)
class StoredWeight:
    """The place of one weight in the files of a version: file name, shape, and the xxh3-128 of its bytes (hex)."""

    file: str
    shape: tuple[int, ...]
    xxh3_128: str


@dataclass(frozen=True)
class WeightsManifest(SealedFile):
    """The description of one published version: which run and model it is of, its files, and every weight."""

    KIND = "manifest of weights"
    run_id: str
    policy_version: int  # the step after whose update the weights were published
    model: str  # the architecture, in the words of `describe_architecture`
    dtype: str
    files: Mapping[str, int]  # size in bytes by name
    weights: Mapping[str, StoredWeight]


def version_folder(folder: Path, version: int) -> Path:
    """Returns the folder of one version inside the folder in which an actor publishes."""
    return folder / f"{_PREFIX}{version}"


@dataclass(frozen=True)
class Publisher:
    """Writes the weights of a model that all ranks of this group train together.

    Attributes:
        folder: the folder of all versions.
        model: the Hugging Face model, whose weights may be sharded over the ranks.
        whole_weights: returns the weights in `dtype`; a collective.
    """

    folder: Path
    model: Any
    whole_weights: Callable[[torch.dtype], NamedWeights]
    dtype: torch.dtype
    device: torch.device

    def publish(self, run_id: str, version: int, keep_from: int, report: Callable[[int, int, str], None]) -> str:
        """Writes the files of a version; rank r writes every num_ranks-th weight. Collective.

        Before that it removes all versions but those from `keep_from` up to `version` - 1, so also a leftover of
        `version` itself.

        Returns:
            The sha256 of the manifest on rank 0, an empty text on the other ranks.

        Raises:
            OSError: storage has failed on some rank; it is raised on all ranks, and the version is not there.
        """
        final = version_folder(self.folder, version)
        partial_folder = final.with_name(f"{final.name}.partial")
        manifest_sha256 = ""
        try:
            with self._together():
                if parallel.rank() == 0:
                    self._remove_all_but(range(keep_from, version))
                    self.folder.mkdir(0o700, parents=True, exist_ok=True)  # /dev/shm is open to all users
                    partial_folder.mkdir()
            with self._together():
                self._write_own(partial_folder, report)
            with self._together():
                if parallel.rank() == 0:
                    failpoints.hit("publish_weights.before_manifest")
                    manifest_sha256 = self._write_manifest(partial_folder, run_id, version)
                    partial_folder.rename(final)
        except OSError:
            if parallel.rank() == 0:  # no rank writes any more, and a checkpoint may need the room
                shutil.rmtree(partial_folder, ignore_errors=True)
            raise
        return manifest_sha256

    def save_hf_model(self, version: int, buffers: Mapping[str, Tensor], source: Path, folder: Path) -> None:
        """Keeps a published version as a Hugging Face folder, by hard links where possible; for one rank alone.

        `buffers` are the model's saved buffers; `source` is the folder of its other files. An earlier folder of
        that name is replaced.

        Raises:
            OSError: storage has failed; the earlier folder is as it was.
        """
        published = version_folder(self.folder, version)
        manifest = WeightsManifest.read(published / MANIFEST)
        with hf_folder.replacing(folder) as partial_folder:
            hf_folder.copy_files(source, partial_folder)
            hf_folder.write_config(self.model.config, self.dtype, partial_folder)
            files = sorted(manifest.files)
            of_all = f"of-{len(manifest.files):05d}.safetensors"
            kept_as = {file: f"model-{number:05d}-{of_all}" for number, file in enumerate(files, 1)}
            for file, kept_file in kept_as.items():
                link_or_copy(published / file, partial_folder / kept_file)
            file_of = {name: kept_as[weight.file] for name, weight in manifest.weights.items()}
            num_bytes = sum(prod(weight.shape) for weight in manifest.weights.values()) * self.dtype.itemsize
            if buffers:
                content = safetensors.torch.save(dict(buffers), {"format": "pt"})
                (partial_folder / _BUFFERS_FILE).write_bytes(content)
                file_of |= dict.fromkeys(buffers, _BUFFERS_FILE)
            hf_folder.write_index(partial_folder, file_of, num_bytes)

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """Raises an OSError on every rank if the `with` block has raised one on any rank; a barrier of all ranks."""
        failure: OSError | None = None
        try:
            yield
        except OSError as error:
            failure = error
        has_failed = parallel.reduce_array([failure is not None], self.device, torch.distributed.ReduceOp.MAX)[0]
        if failure is not None:
            raise failure
        if has_failed:
            raise OSError(f"another rank could not write the weights to {self.folder}; its log says why")

    def _remove_all_but(self, kept: range) -> None:
        """Removes the other versions. On network file systems mapped files stay, until a later call of this method."""
        for entry in [*self.folder.glob(f"{_PREFIX}*")]:
            version = entry.name.removeprefix(_PREFIX)
            if not (version.isdecimal() and int(version) in kept):
                rest = entry.rename(entry.with_name(f"{_PREFIX}{secrets.token_hex(4)}.removed"))
                shutil.rmtree(rest, ignore_errors=True)

    def _write_own(self, folder: Path, report: Callable[[int, int, str], None]) -> None:
        """Writes this rank's share of the weights to one file, and their digests to a file beside it.

        A thread writes while the main thread gathers the next weights: no rank waits for the storage of another one.
        """
        shapes = _shapes(self.model)
        own = dict(itertools.islice(shapes.items(), parallel.rank(), None, parallel.num_ranks()))
        file = folder / f"weights-{parallel.rank()}.safetensors"
        gathered: Queue[tuple[str, Tensor] | None] = Queue(_MAX_WAITING_WEIGHTS)
        with device_thread("publish") as thread:
            written = thread.submit(_write_weights, file, own, self.dtype, gathered)
            try:
                for number, (name, tensor) in enumerate(self.whole_weights(self.dtype), 1):
                    if name in own:
                        gathered.put((name, tensor.detach().cpu()))
                    report(number, len(shapes), "publish")
            finally:
                gathered.put(None)
        entries = {name: (file.name, own[name], digest) for name, digest in written.result().items()}
        _digests_file(folder, parallel.rank()).write_text(json.dumps(entries))

    def _write_manifest(self, folder: Path, run_id: str, version: int) -> str:
        """Writes the manifest of a version from the digests that each rank left in a file, and returns its sha256.

        Removes these files, so every rank must have written its own before; only one rank calls this.
        """
        weights: dict[str, StoredWeight] = {}
        for rank in range(parallel.num_ranks()):
            own = json.loads(_digests_file(folder, rank).read_text())
            weights |= {name: StoredWeight(file, tuple(shape), digest) for name, (file, shape, digest) in own.items()}
            _digests_file(folder, rank).unlink()
        files = {name: (folder / name).stat().st_size for name in {weight.file for weight in weights.values()}}
        architecture = describe_architecture(self.model)
        manifest = WeightsManifest(run_id, version, architecture, _DTYPES[self.dtype], files, weights)
        content = manifest.serialise()
        (folder / MANIFEST).write_bytes(content)
        return hashlib.sha256(content).hexdigest()


def saved_buffers(model: Any) -> dict[str, Tensor]:
    """Returns the buffers of a model that its files have, by name; weights are published without them."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {name: tensor for name, tensor in model.state_dict().items() if name not in parameters}


def _shapes(model: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in base_parameters(model).items()}


def _digests_file(folder: Path, rank: int) -> Path:
    return folder / f"digests-{rank}.json"


def _write_weights(
    file: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, gathered: Queue[tuple[str, Tensor] | None]
) -> dict[str, str]:
    """Writes the weights of `gathered`, which are those of `shapes` in order, to a file; returns the digest of each.

    The last item of the queue is None. All items are taken also if storage fails, because whoever gathers goes on.

    Raises:
        OSError: storage has failed; it names the file.
    """
    weights = iter(gathered.get, None)
    digests: dict[str, str] = {}
    try:
        if shapes:
            with file.open("xb") as stream:
                stream.write(_header(shapes, dtype))
                for name, tensor in weights:
                    values = _bytes_of(tensor)
                    stream.write(values)
                    digests[name] = xxhash.xxh3_128_hexdigest(values)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(file)) from error
    finally:
        for _ in weights:
            pass
    return digests


def _header(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> bytes:
    """Makes the header of a safetensors file with these tensors, one after the other."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin = end
        end = end + prod(shape) * dtype.itemsize
        entries[name] = {"dtype": _DTYPES[dtype], "shape": shape, "data_offsets": [begin, end]}
    content = json.dumps(entries, separators=(",", ":")).encode()
    content += b" " * (-len(content) % _HEADER_ALIGNMENT)
    return struct.pack("<Q", len(content)) + content


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


@dataclass(frozen=True)
class PublishedWeights:
    """One published version, whose files are mapped into memory; the weights are read when they are asked for."""

    folder: Path
    manifest: WeightsManifest
    files: Mapping[str, Any]

    @classmethod
    def open(cls, folder: Path, version: int, manifest_sha256: str) -> Self:
        """Opens a version in the folder of all versions, and checks its manifest and the sizes of its files.

        Raises:
            FileNotFoundError: the version was never published, was removed, or lies in a folder of another machine.
            DamagedCheckpoint: the manifest is another one than `manifest_sha256`, or a file is not as it says.
        """
        own = version_folder(folder, version)
        if not own.is_dir():
            raise FileNotFoundError(f"there is no {own}: the version was never published here, or was removed")
        manifest = WeightsManifest.read(own / MANIFEST)
        verify_digest(own / MANIFEST, manifest_sha256, hashlib.sha256(manifest.serialise()).hexdigest())
        if manifest.policy_version != version:
            raise DamagedCheckpoint(f"{own}: expected version {version}, found {manifest.policy_version}")
        files = {name: _open(own, name, size) for name, size in manifest.files.items()}
        return cls(own, manifest, files)

    def check(self, run_id: str, model: Any, dtype: torch.dtype) -> None:
        """Checks that the weights are those of this run, dtype and model; ValueError, one sentence, if not."""
        manifest = self.manifest
        expected = {"run": run_id, "model": describe_architecture(model), "dtype": _DTYPES[dtype]}
        found = {"run": manifest.run_id, "model": manifest.model, "dtype": manifest.dtype}
        for name, value in expected.items():
            if found[name] != value:
                raise ValueError(f"{self.folder} holds weights of {name} {found[name]}, expected {value}")
        shapes = _shapes(model)
        stored = {name: weight.shape for name, weight in manifest.weights.items()}
        if missing := shapes.keys() - stored.keys():
            raise ValueError(f"{self.folder} lacks the weight {min(missing)}")
        if unknown := stored.keys() - shapes.keys():
            raise ValueError(f"{self.folder} holds {min(unknown)}, which the model does not have")
        for name, shape in shapes.items():
            if stored[name] != shape:
                raise ValueError(f"{self.folder}: {name} has shape {list(stored[name])}, expected {list(shape)}")

    def verify(self) -> None:
        """Compares the digest of every weight with the manifest, on several threads; DamagedCheckpoint if one differs.

        A weight that has another shape or dtype in its file than in the manifest is damaged, too.
        """
        num_bytes = sum(self.manifest.files.values())
        map_in_threads(self._verify, self.manifest.weights, most=num_bytes // _BYTES_PER_THREAD)

    def _verify(self, name: str) -> None:
        """Raises DamagedCheckpoint if a weight's shape, dtype or xxh3-128 digest differs from the manifest."""
        weight = self.manifest.weights[name]
        tensor = self.read(name)
        stored = (tuple(tensor.shape), _DTYPES.get(tensor.dtype, str(tensor.dtype)))
        if stored != (weight.shape, self.manifest.dtype):
            raise DamagedCheckpoint(
                f"{self.folder / weight.file}: {name} is {stored[1]} {list(stored[0])}, expected"
                f" {self.manifest.dtype} {list(weight.shape)}"
            )
        if (found := xxhash.xxh3_128_hexdigest(_bytes_of(tensor))) != weight.xxh3_128:
            raise DamagedCheckpoint(
                f"{self.folder / weight.file}: {name}: expected xxh3-128 {weight.xxh3_128}, found {found}"
            )

    def read(self, name: str) -> Tensor:
        """Returns a weight by name, on the CPU, without a copy where possible; DamagedCheckpoint if it is not there."""
        file = self.manifest.weights[name].file
        try:
            tensor: Tensor = self.files[file].get_tensor(name)
        except (KeyError, SafetensorError) as error:
            raise DamagedCheckpoint(f"{self.folder / file}: expected the weight {name}, found: {error}") from error
        return tensor

    def weights(self) -> NamedWeights:
        """Yields the name and the values of every weight, one after the other."""
        return ((name, self.read(name)) for name in self.manifest.weights)


def _open(folder: Path, name: str, size: int) -> Any:
    """Opens a weight file of a version, which must have `size` bytes; nothing of its values is read yet.

    Raises:
        DamagedCheckpoint: the name leads out of the folder, or there is a link, another size, or no safetensors file.
    """
    file = folder / name
    if Path(name).name != name:
        raise DamagedCheckpoint(f"{folder / MANIFEST}: expected the name of a file in its folder, found {name!r}")
    if file.is_symlink():
        raise DamagedCheckpoint(f"{file}: expected a file, found a link")
    verify_size(file, size)
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise DamagedCheckpoint(f"{file}: expected a safetensors file, found: {error}") from error
