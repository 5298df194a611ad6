"""The shape of a model, from config.json and the headers of its safetensors files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from controller.models.shape import Kind, UnknownShape, read_model_shape, read_tensor_shapes
from services.engine.model.loading import build_model
from splitppo.config import ConfigError
from tests.support.models import save_experts, save_policy, save_value_model

CONFIG = {"hidden_size": 4, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 10}
TENSORS = {
    "model.embed_tokens.weight": (10, 4),
    "model.layers.0.mlp.gate_proj.weight": (6, 4),
    "model.layers.1.mlp.gate_proj.weight": (7, 4),
    "model.norm.weight": (4,),
}


def write_tensors(file: Path, tensors: dict[str, tuple[int, ...]]) -> None:
    """A safetensors file by its description, with zeros of one byte for its data."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in tensors.items():
        count = 1
        for size in shape:
            count *= size
        header[name] = {"dtype": "F8_E4M3", "shape": list(shape), "data_offsets": [end, end + count]}
        end += count
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))


def write_folder(folder: Path, tensors: dict[str, tuple[int, ...]] = TENSORS, **config: Any) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    write_tensors(folder / "model.safetensors", tensors)
    return str(folder)


@pytest.mark.parametrize("kind", ["policy", "value"])
@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_those_of_the_model_that_the_engine_builds(tmp_path: Path, kind: Kind, tied: bool) -> None:
    policy = save_policy(tmp_path / "policy", tie_word_embeddings=tied)
    shape = read_model_shape(str(policy), kind, "actor.model")
    assert shape.num_parameters == build_model(str(policy), kind).num_parameters()
    assert shape.is_tied == (tied and kind == "policy")


def test_a_value_model_brings_its_own_head(tmp_path: Path) -> None:
    folder = save_value_model(tmp_path / "value")
    built = build_model(str(folder), "value").num_parameters()
    assert read_model_shape(str(folder), "value", "critic.model").num_parameters == built


def test_layers_are_told_from_what_is_in_none(tmp_path: Path) -> None:
    shape = read_model_shape(write_folder(tmp_path / "model"), "policy", "actor.model")
    assert (shape.num_parameters, shape.layer_parameters, shape.root_parameters) == (40 + 24 + 28 + 4, 28, 44)
    assert shape.is_tied, "there is no output layer of its own"
    assert shape.is_gated
    assert (shape.hidden, shape.intermediate, shape.attention, shape.key_values) == (4, 16, 4, 4)


def test_an_output_layer_that_is_saved_beside_a_tied_embedding_counts_once(tmp_path: Path) -> None:
    tensors = TENSORS | {"lm_head.weight": (10, 4)}
    tied = read_model_shape(write_folder(tmp_path / "tied", tensors, tie_word_embeddings=True), "policy", "key")
    own = read_model_shape(write_folder(tmp_path / "own", tensors), "policy", "key")
    value = read_model_shape(write_folder(tmp_path / "value", tensors), "value", "key")
    assert (tied.num_parameters, own.num_parameters) == (96, 136)
    assert value.num_parameters == 96 + 4 + 1


def test_an_index_leads_to_all_shards(tmp_path: Path) -> None:
    folder = Path(write_folder(tmp_path / "model"))
    whole = read_tensor_shapes(folder, "actor.model")
    (folder / "model.safetensors").unlink()
    names = list(TENSORS)
    for part, of_part in enumerate((names[:2], names[2:])):
        write_tensors(folder / f"part-{part}.safetensors", {name: TENSORS[name] for name in of_part})
    weight_map = {name: f"part-{index // 2}.safetensors" for index, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert read_tensor_shapes(folder, "actor.model") == whole == TENSORS
    (folder / "part-1.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"^actor\.model: .* names part-1\.safetensors, which is not there$"):
        read_tensor_shapes(folder, "actor.model")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", r"it has 0 bytes \(.*header too small\)"),
        (b"\x40\0\0\0\0\0\0\0{", r"it has 9 bytes \(.*invalid header length\)"),
        (b"\x02\0\0\0\0\0\0\0[]", r"it has 10 bytes \(.*invalid JSON in header: .*\)"),
        (b"\x02\0\0\0\0\0\0\0{\xff", r"it has 10 bytes \(.*invalid UTF-8 in header: .*\)"),
        (b'\x0a\0\0\0\0\0\0\0{"a":null}', r"it has 18 bytes \(.*invalid JSON in header: .*\)"),
    ],
)
def test_a_torn_header_is_one_sentence(tmp_path: Path, content: bytes, why: str) -> None:
    folder = Path(write_folder(tmp_path / "model"))
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=rf"^actor\.model: \S+/model\.safetensors is torn: {why}$"):
        read_model_shape(str(folder), "policy", "actor.model")


def test_a_file_that_ends_too_early_is_torn(tmp_path: Path) -> None:
    folder = Path(write_folder(tmp_path / "model"))
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-1])
    with pytest.raises(ConfigError, match=rf"is torn: it has {len(content) - 1} bytes \(.*file not fully covered\)$"):
        read_model_shape(str(folder), "policy", "actor.model")


def test_what_is_not_here_is_unknown_and_no_mistake(tmp_path: Path) -> None:
    with pytest.raises(UnknownShape, match=r"^some/model is not in a local folder$"):
        read_model_shape("some/model", "policy", "actor.model")
    folder = Path(write_folder(tmp_path / "model"))
    (folder / "model.safetensors").unlink()
    with pytest.raises(UnknownShape, match=r"holds no safetensors weights$"):
        read_model_shape(str(folder), "policy", "actor.model")
    (folder / "config.json").write_text('{"vocab_size": 10}')
    with pytest.raises(UnknownShape, match=r"config\.json lacks hidden_size$"):
        read_model_shape(str(folder), "policy", "actor.model")


def test_windows_and_experts_are_those_of_one_token(tmp_path: Path) -> None:
    more = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3, "head_dim": 8}
    experts = {"num_experts_per_tok": 2, "moe_intermediate_size": 5, "num_key_value_heads": 1}
    shape = read_model_shape(write_folder(tmp_path / "model", **more, **experts), "policy", "key")
    assert shape.windows == (3, None)
    assert (shape.intermediate, shape.experts_per_token) == (10, 2)
    assert (shape.attention, shape.key_values, shape.head_dim) == (16, 8, 8)


@pytest.mark.parametrize(
    ("shared", "intermediate"), [({"shared_expert_intermediate_size": 7}, 17), ({"n_shared_experts": 2}, 20)]
)
def test_shared_experts_compute_every_token(tmp_path: Path, shared: dict[str, int], intermediate: int) -> None:
    folder = write_folder(tmp_path / "model", num_experts_per_tok=2, moe_intermediate_size=5, **shared)
    assert read_model_shape(folder, "policy", "key").intermediate == intermediate


@pytest.mark.parametrize("architecture", ["qwen3_moe", "mixtral"])
def test_all_experts_are_in_memory_and_those_of_a_token_compute(tmp_path: Path, architecture: str) -> None:
    folder = str(save_experts(tmp_path, architecture))
    shape = read_model_shape(folder, "policy", "key")
    assert shape.num_parameters == build_model(folder, "policy").num_parameters()
    assert shape.intermediate == 2 * (48 if architecture == "qwen3_moe" else 64)
    assert shape.is_gated
    assert {name.rpartition(".")[2] for name in shape.linear_shapes} == {"q_proj", "k_proj", "v_proj", "o_proj"}
