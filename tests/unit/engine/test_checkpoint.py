"""Checkpoints of one process: exact, isolated, refused if they do not fit, exported as Hugging Face folders."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

from services.engine import export, hf_folder
from services.engine.checkpoint import Checkpointer
from services.engine.hf_folder import check_can_be_saved
from services.engine.model.weights import Kind
from services.engine.train_engine import TrainEngine
from services.engine.weights_digest import weights_digest
from splitppo.file_lock import any_lock
from tests.support.disks import fill, mounted
from tests.support.engines import forward_of, loss_of, make_batch, make_engine, silent, weights
from tests.support.models import EOS, save_policy, save_value_model

pytestmark = pytest.mark.slow

BATCH = make_batch()


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("models") / "policy")


def updated(folder: Path, kind="policy", **settings) -> TrainEngine:
    engine = make_engine(folder, kind, **settings)
    step(engine)
    return engine


def step(engine: TrainEngine) -> dict[str, float]:
    return engine.update(BATCH, forward_of(engine.kind), loss_of(engine.kind), progress=silent).metrics


def compute(engine: TrainEngine) -> None:
    engine.compute(BATCH, forward_of(engine.kind), outputs=["log_probs"], progress=silent)


def test_a_resumed_engine_goes_on_bit_for_bit(policy: Path, tmp_path: Path) -> None:
    settings = {"lr_schedule": "linear", "lr_decay_steps": 5}
    engine = updated(policy, **settings)
    engine.save_checkpoint(tmp_path / "part", b"\x00state\xff", with_hf_model=False).result(30)
    expected = step(engine)
    resumed = make_engine(policy, **settings)
    assert resumed.load_checkpoint(tmp_path / "part") == b"\x00state\xff"
    assert step(resumed) == expected
    assert resumed.compute_weights_digest() == engine.compute_weights_digest()


def test_a_save_before_the_first_update_loads_as_a_fresh_engine(policy: Path, tmp_path: Path) -> None:
    engine = make_engine(policy)
    engine.save_checkpoint(tmp_path / "part", b"", with_hf_model=False).result(30)
    trained = updated(policy)
    assert trained.load_checkpoint(tmp_path / "part") == b""
    step(trained)
    step(engine)
    assert trained.compute_weights_digest() == engine.compute_weights_digest()


def test_a_save_is_written_on_the_device_of_its_rank(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA starts each thread on device 0, where every rank of a machine would have a context for nothing."""
    current, used = threading.local(), list[int]()

    @contextmanager
    def in_stream(_stream: object) -> Iterator[None]:
        used.append(getattr(current, "device", 0))
        yield

    engine = updated(policy)
    fakes = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "current_device": lambda: getattr(current, "device", 0),
        "set_device": lambda device: setattr(current, "device", device),
        "get_rng_state": torch.get_rng_state,
        "Stream": Mock,
        "current_stream": lambda: None,
        "stream": in_stream,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    torch.cuda.set_device(3)
    saving = Checkpointer(engine.model, policy).save(
        tmp_path / "part", engine.optimizer, at_rest={}, num_updates=1, service_state=b"", with_hf_model=False
    )
    saving.result(30)
    assert used == [3]


def test_the_snapshot_is_not_touched_by_later_updates(policy: Path, tmp_path: Path) -> None:
    engine = updated(policy)
    saved = engine.compute_weights_digest()
    future = engine.save_checkpoint(tmp_path / "part", b"", with_hf_model=True)
    step(engine)
    future.result(30)
    assert weights_digest(AutoModelForCausalLM.from_pretrained(tmp_path / "part" / "huggingface")) == saved
    engine.load_checkpoint(tmp_path / "part")
    assert engine.compute_weights_digest() == saved


@pytest.mark.parametrize("with_hf_model", [False, True])
def test_a_save_needs_no_memory_for_a_second_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, with_hf_model: bool
) -> None:
    monkeypatch.setattr(hf_folder, "MAX_FILE_BYTES", 4 << 20)
    folder = save_policy(tmp_path / "policy", hidden_size=256, intermediate_size=1024, num_hidden_layers=8)
    engine = updated(folder)
    state_bytes = 3 * 4 * engine.num_parameters
    engine.save_checkpoint(tmp_path / "first", b"", with_hf_model=with_hf_model).result(60)
    before = reset_peak()
    engine.save_checkpoint(tmp_path / "part", b"", with_hf_model=with_hf_model).result(60)
    assert peak_bytes() - before < state_bytes / 8
    if with_hf_model:
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "part" / "huggingface")
        assert weights_digest(model) == engine.compute_weights_digest()


def test_a_load_needs_no_memory_for_a_second_optimizer(tmp_path: Path) -> None:
    engine = updated(save_policy(tmp_path / "policy", hidden_size=256, intermediate_size=1024, num_hidden_layers=8))
    engine.save_checkpoint(tmp_path / "part", b"", with_hf_model=False).result(60)
    before = reset_peak()
    engine.load_checkpoint(tmp_path / "part")
    assert peak_bytes() - before < 4 * engine.num_parameters / 2


def reset_peak() -> int:
    """Forgets the highest memory of this process; returns what it has now, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()


def peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) << 10


@pytest.mark.parametrize(
    ("call", "order"),
    [
        (lambda engine: step(engine), ["written", "returned"]),
        (lambda engine: engine.load_checkpoint(None), ["written", "returned"]),
        (lambda engine: compute(engine), ["returned", "written"]),
    ],
    ids=["update", "load", "log-probs"],
)
def test_what_changes_weights_waits_until_they_are_written_and_nothing_else_does(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call, order: list[str]
) -> None:
    engine, happened, returned, fsync = updated(policy), [], threading.Event(), os.fsync

    def slow(file: int) -> None:
        if not happened or happened == ["returned"]:
            returned.wait(60.0 if order[0] == "returned" else 1.0)  # an update would wait for ever
            happened.append("written")
        fsync(file)

    monkeypatch.setattr(os, "fsync", slow)
    digest = engine.compute_weights_digest()
    saved = engine.save_checkpoint(tmp_path / "part", b"", with_hf_model=False)
    call(engine)
    happened.append("returned")
    returned.set()
    assert saved.result(30) == digest
    assert happened == order


@pytest.mark.parametrize(
    "work",
    [
        lambda engine, report: engine.update(BATCH, forward_of("policy"), loss_of("policy"), progress=report),
        lambda engine, report: engine.load_checkpoint(None, report),
    ],
    ids=["update", "load"],
)
def test_what_waits_for_the_turn_of_a_checkpoint_reports_progress(policy: Path, tmp_path: Path, work) -> None:
    engine, lock, reports = updated(policy, writer_locks=[tmp_path / "lock"]), ExitStack(), list[int]()
    lock.enter_context(any_lock([tmp_path / "lock"]))  # as another process that writes
    give_up = threading.Timer(60.0, lock.close)
    give_up.start()

    def report(done: int, _: int, phase: str) -> None:
        if phase == "save" and give_up.is_alive():
            reports.append(done)
            give_up.cancel()
            lock.close()

    saved = engine.save_checkpoint(tmp_path / "part", b"", with_hf_model=True)
    work(engine, report)
    assert reports == [0]
    digest = saved.result(60)
    assert weights_digest(AutoModelForCausalLM.from_pretrained(tmp_path / "part" / "huggingface")) == digest


def test_an_update_reports_no_progress_while_the_writing_of_its_rank_stands_still(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, fsync, stands_still, goes_on = updated(policy), os.fsync, threading.Event(), threading.Event()
    reports = list[str]()

    def stuck(file: int) -> None:
        stands_still.set()
        goes_on.wait(60)
        fsync(file)

    monkeypatch.setattr(os, "fsync", stuck)
    saved = engine.save_checkpoint(tmp_path / "part", b"", with_hf_model=False)
    assert stands_still.wait(60)
    threading.Timer(2.5, goes_on.set).start()
    engine.update(
        BATCH,
        forward_of("policy"),
        loss_of("policy"),
        progress=lambda _, __, phase: None if goes_on.is_set() else reports.append(phase),
    )
    saved.result(60)
    assert set(reports) == {"update"}


def test_loading_the_initial_model_forgets_all_training(policy: Path) -> None:
    engine, fresh = updated(policy), make_engine(policy)
    engine.load_checkpoint(None)
    assert engine.compute_weights_digest() == fresh.compute_weights_digest()
    assert engine.num_updates == 0
    assert step(engine) == step(fresh)
    assert engine.compute_weights_digest() == fresh.compute_weights_digest()


def test_a_new_value_head_is_zero_again_when_the_initial_model_is_loaded(policy: Path) -> None:
    engine = updated(policy, "value")
    assert engine.model.score.weight.any()
    engine.load_checkpoint(None)
    assert not engine.model.score.weight.any()
    assert not engine.model.score.bias.any()


def test_the_random_state_is_restored(policy: Path, tmp_path: Path) -> None:
    engine = make_engine(policy)
    engine.save_checkpoint(tmp_path / "part", b"", with_hf_model=False).result(30)
    expected = torch.rand(3)
    engine.load_checkpoint(tmp_path / "part")
    assert torch.equal(torch.rand(3), expected)


def test_a_save_replaces_the_leftovers_of_a_torn_one(policy: Path, tmp_path: Path) -> None:
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "__7_0.distcp").write_text("torn")
    make_engine(policy).save_checkpoint(tmp_path / "part", b"", with_hf_model=False).result(30)
    assert not (tmp_path / "part" / "__7_0.distcp").exists()


def test_a_save_never_removes_the_folder_that_another_rank_may_be_making(policy: Path, tmp_path: Path) -> None:
    folder = tmp_path / "actor"
    folder.mkdir()
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        make_engine(policy).save_checkpoint(folder, b"", with_hf_model=False).result(30)
        assert os.path.samestat(os.fstat(descriptor), folder.stat())
    finally:
        os.close(descriptor)


def test_weights_that_are_a_hugging_face_folder_need_no_export(policy: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is a Hugging Face folder already: expected a checkpoint"):
        export.export(policy, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_missing_and_torn_checkpoints_are_refused_and_change_nothing(policy: Path, tmp_path: Path) -> None:
    engine = updated(policy)
    digest = engine.compute_weights_digest()
    with pytest.raises(ValueError, match="nowhere holds no complete checkpoint"):
        engine.load_checkpoint(tmp_path / "nowhere")
    engine.save_checkpoint(tmp_path / "part", b"", with_hf_model=False).result(30)
    shard = tmp_path / "part" / "__0_0.distcp"
    engine.check_checkpoint(tmp_path / "part")
    os.truncate(shard, shard.stat().st_size - 1)
    with pytest.raises(ValueError, match=r"is torn: __0_0\.distcp has \d+ of \d+ bytes"):
        engine.load_checkpoint(tmp_path / "part")
    shard.unlink()
    with pytest.raises(ValueError, match=r"is torn: __0_0\.distcp is missing"):
        engine.check_checkpoint(tmp_path / "part")
    (tmp_path / "part" / ".metadata").write_bytes(b"\x80")
    with pytest.raises(ValueError, match=r"is torn: \.metadata cannot be read"):
        engine.check_checkpoint(tmp_path / "part")
    assert engine.compute_weights_digest() == digest


@pytest.mark.parametrize("left", [0, 60_000, 150_000, 200_000])
def test_a_full_disk_is_an_error_of_storage_whatever_was_being_written(policy: Path, tmp_path: Path, left: int) -> None:
    engine = updated(policy)
    with mounted(tmp_path / "disk", "size=4m") as disk:
        filler = fill(disk, left=left)
        with pytest.raises(OSError, match="No space left on device"):
            engine.save_checkpoint(disk / "part", b"", with_hf_model=True).result(30)
        filler.unlink()
        saved = engine.save_checkpoint(disk / "part", b"state", with_hf_model=True).result(30)
        assert engine.load_checkpoint(disk / "part") == b"state"
        assert engine.compute_weights_digest() == saved


def test_an_error_of_torchs_writer_names_the_file_and_the_space(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = updated(policy)
    monkeypatch.setattr(torch, "save", Mock(side_effect=RuntimeError("[enforce fail] . unexpected pos 704 vs 598")))
    monkeypatch.setattr(shutil, "disk_usage", Mock(return_value=Mock(free=512)))
    with pytest.raises(OSError, match=r"No space left on device \(.*pos 704.*; 512 bytes are free\): '.*\.distcp'"):
        engine.save_checkpoint(tmp_path / "part", b"", with_hf_model=False).result(30)


@pytest.mark.parametrize("with_hf_model", [False, True])
def test_a_shard_that_cannot_be_read_back_is_an_error_of_storage(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, with_hf_model: bool
) -> None:
    engine = updated(policy)
    real = torch.distributed.checkpoint.filesystem.FileSystem.create_stream

    def stale(self: Any, path: Any, mode: str) -> Any:
        if mode == "rb" and str(path).endswith(".distcp"):
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return real(self, path, mode)

    monkeypatch.setattr(torch.distributed.checkpoint.filesystem.FileSystem, "create_stream", stale)
    with pytest.raises(OSError, match="Stale file handle"):
        engine.save_checkpoint(tmp_path / "part", b"", with_hf_model=with_hf_model).result(30)


@pytest.mark.parametrize("kind", ["policy", "value"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_save_answers_the_digest_of_the_weights_on_storage(tmp_path: Path, kind, tied: bool) -> None:
    engine = updated(save_policy(tmp_path / "policy", tie_word_embeddings=tied), kind)
    expected = engine.compute_weights_digest()
    saved = engine.save_checkpoint(tmp_path / "part", b"", with_hf_model=False)
    step(engine)
    assert saved.result(30) == expected
    assert engine.compute_weights_digest() != expected


def test_a_model_is_described_by_what_its_weights_depend_on(policy: Path, tmp_path: Path) -> None:
    engine, wider = make_engine(policy), make_engine(save_policy(tmp_path / "wider", hidden_size=48))
    sizes = f"hidden_size 32, num_hidden_layers 2, vocab_size {engine.model.config.vocab_size}"
    assert engine.architecture == f"qwen2 with {sizes}, {engine.num_parameters} parameters"
    assert wider.architecture != engine.architecture != make_engine(policy, "value").architecture


def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(policy: Path, tmp_path: Path) -> None:
    wider = make_engine(save_policy(tmp_path / "wider", hidden_size=48))
    wider.save_checkpoint(tmp_path / "part", b"", with_hf_model=False).result(30)
    engine = make_engine(policy)
    digest = engine.compute_weights_digest()
    for refuse in (engine.check_checkpoint, engine.load_checkpoint):
        with pytest.raises(ValueError, match=r"is of another model: model\.\S+ has shape"):
            refuse(tmp_path / "part")
    assert engine.compute_weights_digest() == digest


def test_export_gives_a_folder_that_transformers_loads_with_the_same_weights(
    policy: Path, tmp_path: Path, capsys
) -> None:
    engine = updated(policy)
    engine.save_checkpoint(tmp_path / "part", b"", with_hf_model=False).result(30)
    assert export.main(["--checkpoint", str(tmp_path / "part"), "--output", str(tmp_path / "out")]) == 0
    assert capsys.readouterr() == (f"{tmp_path / 'out'}\n", "")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert weights_digest(model) == engine.compute_weights_digest()
    assert model.generation_config.eos_token_id == EOS
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("abc")["input_ids"] == [3, 4, 5]


@pytest.mark.parametrize(
    "content",
    [
        '{"eos_token_id": 1, "top_k": 20}',
        '{"eos_token_id": [1], "do_sample": false, "temperature": 1e-6, "min_p": 0.1}',
        '{"num_beams": 1, "length_penalty": 2.0, "early_stopping": true}',
        '{"max_new_tokens": -1, "cache_implementation": "none of theirs", "our_own_key": {"a": [1]}}',
        '{"num_return_sequences": 4, "output_scores": true}',
        "{}",
    ],
)
@pytest.mark.parametrize("kind", ["policy", "value"])
def test_a_generation_config_is_copied_as_it_is_whatever_transformers_would_say(
    policy: Path, tmp_path: Path, kind: Kind, content: str
) -> None:
    shutil.copytree(policy, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(content)
    engine = make_engine(tmp_path / "model", kind)
    for with_hf_model in (True, False):
        engine.save_checkpoint(tmp_path / "part", b"", with_hf_model=with_hf_model).result(30)
        folder = tmp_path / "part" / "huggingface"
        if not with_hf_model:
            folder = tmp_path / "out"
            export.export(tmp_path / "part", folder)
        assert (folder / "generation_config.json").read_text() == content
        assert make_engine(folder, kind, seed=9).compute_weights_digest() == engine.compute_weights_digest()


def test_what_no_checkpoint_could_give_back_is_refused_before_training() -> None:
    config = AutoConfig.for_model("qwen2", architectures=["OursForCausalLM"])
    with pytest.raises(ValueError, match=r"could not be exported: .* has no architecture 'OursForCausalLM'$"):
        check_can_be_saved(config)


def test_a_config_that_transformers_cannot_build_any_more_ends_an_export_in_one_sentence(
    policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_engine(policy).save_checkpoint(tmp_path / "part", b"", with_hf_model=False).result(30)
    config = tmp_path / "part" / "huggingface" / "config.json"
    config.write_text(config.read_text().replace('"use_cache": true', '"use_cache": "maybe"'))
    assert export.main(["--checkpoint", str(tmp_path / "part"), "--output", str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {tmp_path / 'out' / 'config.json'}: Validation error for field 'use_cache'")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("tied", [True, False])
def test_a_value_model_from_a_language_model_exports_as_a_token_classifier(tmp_path: Path, tied: bool) -> None:
    engine = updated(save_policy(tmp_path / "policy", tie_word_embeddings=tied), "value")
    engine.save_checkpoint(tmp_path / "part", b"", with_hf_model=True).result(30)
    model = AutoModelForTokenClassification.from_pretrained(tmp_path / "part" / "huggingface")
    assert weights_digest(model) == engine.compute_weights_digest()
    again = make_engine(tmp_path / "part" / "huggingface", "value", seed=99)
    assert again.compute_weights_digest() == engine.compute_weights_digest()


@pytest.mark.parametrize("output", ["used", "fine"])
def test_export_mistakes_are_one_sentence_and_exit_2(tmp_path: Path, output: str, capsys) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    arguments = ["--checkpoint", str(tmp_path / "nowhere"), "--output", str(tmp_path / output)]
    assert export.main(arguments) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_digest_counts_tied_weights_once_and_values_only(tmp_path: Path) -> None:
    tied = make_engine(save_policy(tmp_path / "tied"))
    assert tied.num_parameters == sum(tensor.numel() for tensor in weights(tied).values())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "tied")
    assert weights_digest(model) == tied.compute_weights_digest()
    assert weights_digest(model.bfloat16().float()) != tied.compute_weights_digest()
    value = make_engine(save_value_model(tmp_path / "value"), "value")
    assert value.compute_weights_digest() != tied.compute_weights_digest()
