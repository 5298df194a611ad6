"""The controller finds an output layer of its own in a folder whose config ties it, without torch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from controller.models import tied_weights
from controller.models.shape import read_tensor_shapes
from controller.models.tied_weights import check_tied_weights
from splitppo.config import ConfigError

EMBEDDING = torch.arange(12.0).reshape(4, 3)
TIED = {"tie_word_embeddings": True}


def save(folder: Path, output: torch.Tensor, *, dtype: torch.dtype = torch.bfloat16, sharded: bool = False) -> None:
    shards = [
        {"model.norm.weight": torch.ones(3), "model.embed_tokens.weight": EMBEDDING.to(dtype)},
        {"lm_head.weight": output.to(dtype)},
    ]
    if not sharded:
        save_file(shards[0] | shards[1], folder / "model.safetensors")
        return
    weight_map = {}
    for number, shard in enumerate(shards):
        save_file(shard, folder / f"{number}.safetensors")
        weight_map |= dict.fromkeys(shard, f"{number}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sharded", [False, True])
def test_another_output_layer_than_the_config_says_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, sharded: bool
) -> None:
    monkeypatch.setattr(tied_weights, "_CHUNK", 10)
    other = EMBEDDING.clone()
    other[-1, -1] += 1
    save(tmp_path, other, dtype=dtype, sharded=sharded)
    with pytest.raises(ConfigError, match=r"^actor\.model: .* ties lm_head\.weight to .*, but their values differ"):
        check_tied_weights(tmp_path, TIED, "actor.model")


def test_an_output_layer_of_another_shape_is_another_one(tmp_path: Path) -> None:
    save(tmp_path, torch.cat([EMBEDDING, torch.zeros(1, 3)]))
    with pytest.raises(ConfigError, match="values differ"):
        check_tied_weights(tmp_path, TIED, "actor.model")


@pytest.mark.parametrize("description", [{}, {"tie_word_embeddings": False}])
def test_an_output_layer_that_is_not_tied_may_differ(tmp_path: Path, description: dict[str, bool]) -> None:
    save(tmp_path, -EMBEDDING)
    check_tied_weights(tmp_path, description, "actor.model")


def test_an_output_layer_that_repeats_the_embedding_is_fine(tmp_path: Path) -> None:
    save(tmp_path, EMBEDDING)
    check_tied_weights(tmp_path, TIED, "actor.model")


def test_a_single_file_beside_an_index_of_others_is_refused(tmp_path: Path) -> None:
    save(tmp_path, EMBEDDING, sharded=True)
    assert len(read_tensor_shapes(tmp_path, "actor.model")) == 3
    save(tmp_path, EMBEDDING)
    with pytest.raises(
        ConfigError, match=r"^actor\.model: .* has model\.safetensors and, by model\.safetensors\.index"
    ):
        read_tensor_shapes(tmp_path, "actor.model")


def test_an_index_may_name_the_single_file(tmp_path: Path) -> None:
    save(tmp_path, EMBEDDING)
    weight_map = dict.fromkeys(["lm_head.weight", "model.embed_tokens.weight"], "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert len(read_tensor_shapes(tmp_path, "actor.model")) == 3
