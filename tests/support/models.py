"""Tiny random models and a character-level tokenizer, built locally, for tests that need a model of the hub."""

from __future__ import annotations

import importlib
import itertools
import json
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.support.seeds import shifted

if TYPE_CHECKING:
    import transformers

SPECIAL = ("<pad>", "<eos>", "<unk>")
CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 #.,:?!+-*/=()\n"
VOCABULARY = (*SPECIAL, *CHARACTERS)
PAD, EOS = 0, 1
POSITIONS = 512  # of prompt and response together

SIZES: dict[str, Any] = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    "tie_word_embeddings": True,
    "pad_token_id": PAD,
    "eos_token_id": EOS,
    "bos_token_id": None,
}

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] + ':' + message['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def save_tokenizer(
    folder: Path,
    *,
    vocabulary: Sequence[str] = VOCABULARY,
    more_special: Sequence[str] = (),
    chat_template: str = CHAT_TEMPLATE,
) -> None:
    """Writes a tokenizer with one token per character, and a chat template; a model may have more special tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    ids = {token: index for index, token in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([*SPECIAL, *more_special])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
        "chat_template": chat_template,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


def of_transformers(name: str) -> Any:
    """Returns a class of transformers, which takes seconds to import: what uses this file may not need it."""
    return getattr(importlib.import_module("transformers"), name)


def tiny_config(**changes: Any) -> transformers.Qwen2Config:
    """Returns a configuration with 2 layers, hidden size 32, and 4 heads over 2 key-value heads."""
    return of_transformers("Qwen2Config")(**{**SIZES, **changes})


def save_policy(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Writes a random Qwen2 causal language model with tokenizer and generation config; returns the folder."""
    return save_random(of_transformers("Qwen2ForCausalLM"), tiny_config(**changes), folder, seed=seed)


_GLM_CHOICE = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
_GLM = {**_GLM_CHOICE, "moe_intermediate_size": 48, "head_dim": 32}


def save_experts(folder: Path, architecture: str, *, seed: int = 0, **changes: Any) -> Path:
    """Writes a random causal language model with experts; returns the folder.

    It is "qwen3_moe" (in files `mlp.experts.0.gate_proj`), "mixtral" (`block_sparse_moe.experts.0.w1`), or "glm4_moe",
    which has a buffer in its files that chooses experts, a shared expert, and a first layer without experts.
    """
    family, experts = {
        "qwen3_moe": ("Qwen3Moe", {"num_experts": 4, "moe_intermediate_size": 48}),
        "mixtral": ("Mixtral", {"num_local_experts": 4}),
        "glm4_moe": ("Glm4Moe", _GLM),
    }[architecture]
    more = {"tie_word_embeddings": False, "num_experts_per_tok": 2}
    config = of_transformers(f"{family}Config")(**{**SIZES, **more, **experts, **changes})
    return save_random(of_transformers(f"{family}ForCausalLM"), config, folder, seed=seed)


def save_shapes(folder: Path, *, family: str = "Qwen2", **changes: Any) -> Path:
    """Writes the description of a causal language model of any size, with a weight file that is one hole."""
    config = of_transformers(f"{family}Config")(**{**SIZES, **changes})
    return save_shapes_of(of_transformers(f"{family}ForCausalLM"), config, folder)


def save_shapes_of(model_class: Any, config: Any, folder: Path) -> Path:
    """Writes the description of a model of any size, with a weight file that is one hole."""
    import torch

    with torch.device("meta"):
        shapes = {name: tuple(weight.shape) for name, weight in model_class(config).state_dict().items()}
    config.save_pretrained(folder)
    ends = [*itertools.accumulate(prod(shape) for shape in shapes.values())]
    header = json.dumps(
        {
            name: {"dtype": "F8_E4M3", "shape": shape, "data_offsets": [end - prod(shape), end]}
            for (name, shape), end in zip(shapes.items(), ends, strict=True)
        }
    ).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + ends[-1])
    return folder


def save_value_model(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Writes a random Qwen2 token classifier with one label; returns the folder."""
    return save_random(
        of_transformers("Qwen2ForTokenClassification"), tiny_config(**{"num_labels": 1, **changes}), folder, seed=seed
    )


def save_reward_model(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Writes a random Qwen2 sequence classifier with one label; returns the folder."""
    return save_random(
        of_transformers("Qwen2ForSequenceClassification"),
        tiny_config(**{"num_labels": 1, **changes}),
        folder,
        seed=seed,
    )


def save_random(model_class: Any, config: Any, folder: Path, *, seed: int = 0) -> Path:
    """Writes a model of random weights with tokenizer and generation config; returns the folder."""
    import torch

    with torch.random.fork_rng():
        torch.manual_seed(shifted(seed))
        model = model_class(config)
        with torch.no_grad():  # larger than HF's 0.02, so that outputs differ visibly from token to token
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(5.0)
            for name in model.state_dict().keys() & dict(model.named_buffers()).keys():
                model.get_buffer(name).uniform_(-1.0, 1.0)
    model.generation_config = of_transformers("GenerationConfig")(eos_token_id=EOS, pad_token_id=PAD, bos_token_id=None)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder
