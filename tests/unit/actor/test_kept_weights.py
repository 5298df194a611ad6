"""The weights of a step that the actor keeps as a Hugging Face folder: who loads them, what replaces them."""

from __future__ import annotations

import json
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DeepseekV3Config, DeepseekV3ForCausalLM

from services.actor.role import ActorRole
from services.engine import hf_folder
from services.engine.exchange import Publisher, saved_buffers
from services.engine.weights_digest import weights_digest
from splitppo.batch import Batch
from splitppo.file_lock import any_lock
from splitppo.rpc.errors import StorageFailed
from splitppo.v1 import actor_pb2, worker_pb2
from tests.support.disks import fill, mounted
from tests.support.engines import CPU, load_model, make_engine, silent
from tests.support.models import EOS, VOCABULARY, save_policy, save_random
from tests.support.roles import call, context_of, experience, update_request


def actor_in(run_dir: Path, model: Path, *, sync_dir: str = "") -> ActorRole:
    section = {"model": str(model), "lr": 1e-2}
    return ActorRole(
        context_of(
            "actor",
            run={"dir": str(run_dir), "total_steps": 10},
            rollout={"n": 3, "sync_dir": sync_dir},
            actor=section,
            checkpoint={"max_writers": 1},
        )
    )


def publish(role: ActorRole, version: int, **fields: Any) -> str:
    return begin_to_publish(role, version, **fields).result(60)


def begin_to_publish(role: ActorRole, version: int, *, keep_from: int = 0, save_hf_model: bool = True) -> Future[str]:
    header = worker_pb2.CommandHeader(run_id="run", base_step=version)
    request = actor_pb2.PublishWeightsRequest(header=header, keep_from=keep_from, save_hf_model=save_hf_model)
    durable = call(role, "PublishWeights", request, Batch(0, {})).durable
    assert durable is not None
    return durable


def folder_of(run_dir: Path, step: int) -> Path:
    return run_dir / "huggingface" / f"global_step_{step}"


def names_in(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "run" / "services").mkdir(parents=True)
    return tmp_path / "run"


@pytest.mark.promise("checkpoints of Hugging Face")
@pytest.mark.parametrize("tied", [True, False])
def test_transformers_and_an_actor_load_the_weights_of_the_step(tmp_path: Path, run_dir: Path, *, tied: bool) -> None:
    role = actor_in(run_dir, save_policy(tmp_path / "policy", tie_word_embeddings=tied))
    publish(role, 0, save_hf_model=False)
    assert not (run_dir / "huggingface").exists()
    call(role, "Update", update_request(), experience(role))
    expected = role.compute_weights_digest()

    publish(role, 1)
    call(role, "Update", update_request(2), experience(role))

    loaded = AutoModelForCausalLM.from_pretrained(folder_of(run_dir, 1))
    assert weights_digest(loaded) == expected != role.compute_weights_digest()
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    assert loaded.generation_config.eos_token_id == EOS
    assert AutoTokenizer.from_pretrained(folder_of(run_dir, 1))("abc")["input_ids"] == [3, 4, 5]
    assert make_engine(folder_of(run_dir, 1)).compute_weights_digest() == expected
    assert names_in(run_dir / "huggingface") == ["global_step_1"]


def test_the_folder_says_the_dtype_of_its_weights(model: Path, tmp_path: Path) -> None:
    engine = make_engine(model)
    publisher = Publisher(tmp_path / "weights", engine.model, engine.whole_weights, torch.bfloat16, CPU)
    publisher.publish("run", 4, 0, silent)

    publisher.save_hf_model(4, {}, model, tmp_path / "kept")

    assert json.loads((tmp_path / "kept" / "config.json").read_text())["dtype"] == "bfloat16"
    assert engine.model.config.dtype == torch.float32
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "kept")
    assert loaded.dtype == torch.bfloat16
    rounded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    assert weights_digest(loaded) == weights_digest(rounded)
    num_bytes = sum(parameter.nbytes for parameter in loaded.parameters())
    index = json.loads((tmp_path / "kept" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == num_bytes


def test_saved_buffers_are_kept_beside_the_weights(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
    ranks = {"v_head_dim": 8, "kv_lora_rank": 8, "q_lora_rank": 8}
    experts = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
    config = DeepseekV3Config(vocab_size=len(VOCABULARY), **sizes, **heads, **ranks, **experts)
    source = save_random(DeepseekV3ForCausalLM, config, tmp_path / "policy")
    policy = load_model(str(source))
    (bias,) = saved_buffers(policy).values()
    bias.copy_(torch.arange(8.0))
    publisher = Publisher(tmp_path / "weights", policy, lambda _: policy.named_parameters(), torch.float32, CPU)
    publisher.publish("run", 4, 0, silent)

    publisher.save_hf_model(4, saved_buffers(policy), source, tmp_path / "kept")

    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path / "kept", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    for model in (loaded, load_model(str(tmp_path / "kept"))):
        assert torch.equal(*saved_buffers(model).values(), torch.arange(8.0))
        assert weights_digest(model) == weights_digest(policy)


def test_the_files_are_those_of_the_version_and_stay_when_it_is_removed(model: Path, run_dir: Path) -> None:
    role = actor_in(run_dir, model)
    expected = role.compute_weights_digest()
    publish(role, 1)
    (weights,) = folder_of(run_dir, 1).glob("*.safetensors")
    assert weights.samefile(run_dir / "weights" / "version_1" / "weights-0.safetensors")

    publish(role, 2, keep_from=2)

    assert names_in(run_dir / "weights") == ["version_2"]
    assert weights_digest(AutoModelForCausalLM.from_pretrained(folder_of(run_dir, 1))) == expected


def test_weights_on_another_file_system_are_copied(model: Path, run_dir: Path, tmp_path: Path) -> None:
    with mounted(tmp_path / "memory", "size=4m") as memory:
        role = actor_in(run_dir, model, sync_dir=str(memory))
        publish(role, 1)
        assert (memory / "splitppo-run" / "version_1").is_dir()
    assert make_engine(folder_of(run_dir, 1)).compute_weights_digest() == role.compute_weights_digest()


def test_a_folder_is_written_when_no_other_rank_of_the_machine_writes(model: Path, run_dir: Path) -> None:
    role = actor_in(run_dir, model)
    publish(role, 1)
    (lock,) = (run_dir / "services").glob("writer_*.lock")
    with any_lock([lock]):
        kept = begin_to_publish(role, 2)
        with pytest.raises(TimeoutError):
            kept.result(0.5)
        call(role, "Update", update_request(), experience(role))  # commands do not wait
    kept.result(60)
    assert names_in(run_dir / "huggingface") == ["global_step_1", "global_step_2"]


def test_a_version_stays_until_its_folder_is_written(model: Path, run_dir: Path) -> None:
    role = actor_in(run_dir, model)
    publish(role, 1)
    (lock,) = (run_dir / "services").glob("writer_*.lock")
    with ThreadPoolExecutor(1) as thread:
        with any_lock([lock]):
            kept = begin_to_publish(role, 2)
            later = thread.submit(publish, role, 3, keep_from=3)
            with pytest.raises(TimeoutError):
                later.result(0.5)
            assert names_in(run_dir / "weights") == ["version_1", "version_2"]
        kept.result(60)
        later.result(60)
    assert names_in(run_dir / "weights") == ["version_3"]
    assert make_engine(folder_of(run_dir, 2)).compute_weights_digest() == role.compute_weights_digest()


def test_a_repeated_step_replaces_its_folder(model: Path, run_dir: Path) -> None:
    role = actor_in(run_dir, model)
    publish(role, 1)
    (folder_of(run_dir, 1) / "of_the_first_time").touch()
    call(role, "Update", update_request(), experience(role))

    publish(role, 1)

    assert make_engine(folder_of(run_dir, 1)).compute_weights_digest() == role.compute_weights_digest()
    assert not (folder_of(run_dir, 1) / "of_the_first_time").exists()
    assert names_in(run_dir / "huggingface") == ["global_step_1"]


def test_a_reader_sees_the_earlier_folder_until_the_new_one_is_whole(tmp_path: Path) -> None:
    folder = tmp_path / "global_step_1"
    for name in ("global_step_1", "global_step_7.partial", "global_step_8.earlier"):  # two are left by a crash
        (tmp_path / name).mkdir()
    (folder / "earlier").touch()

    with hf_folder.replacing(folder) as new:
        (new / "later").touch()
        assert names_in(folder) == ["earlier"]
    assert names_in(folder) == ["later"]
    assert names_in(tmp_path) == ["global_step_1"]

    def fail() -> None:
        with hf_folder.replacing(folder) as new:
            (new / "half").touch()
            raise OSError("torn")

    with pytest.raises(OSError, match="torn"):
        fail()
    assert names_in(folder) == ["later"]
    assert names_in(tmp_path) == ["global_step_1"]


@pytest.mark.parametrize("left", [0, 60_000])
def test_a_full_disk_is_one_sentence_and_leaves_nothing_half(model: Path, tmp_path: Path, left: int) -> None:
    with mounted(tmp_path / "disk", "size=4m") as disk:
        (disk / "run" / "services").mkdir(parents=True)
        role = actor_in(disk / "run", model, sync_dir=str(tmp_path / "weights"))
        publish(role, 1)
        expected = role.compute_weights_digest()
        call(role, "Update", update_request(), experience(role))
        filler = fill(disk, left=left)
        for version in (1, 2):
            with pytest.raises(StorageFailed, match=rf"^No space left on device: {disk}/run/huggingface/\S+$"):
                publish(role, version)
        assert names_in(disk / "run" / "huggingface") == ["global_step_1"]
        assert make_engine(folder_of(disk / "run", 1)).compute_weights_digest() == expected
        filler.unlink()
        publish(role, 2)
        assert make_engine(folder_of(disk / "run", 2)).compute_weights_digest() == role.compute_weights_digest()
