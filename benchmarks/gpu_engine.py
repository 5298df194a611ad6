"""Cases of benchmarks.gpu_proof that update a model: by size, mode and length, at rest, and twice from one state."""

from __future__ import annotations

import gc
import math
import re
import shutil
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging as hf_logging

from controller.memory.plan import memory_plan
from recipes.qwen2_tokenizer import save_tokenizer
from recipes.sort_letters.prepare import EOS, PAD, make_tokenizer
from services.actor.losses.actor_loss import actor_loss
from services.engine.model.forward import policy_forward
from services.engine.train_engine import TrainEngine
from splitppo.batch import Batch
from splitppo.config import Config
from splitppo.config.load import validate
from splitppo.config.sections.models import Checkpointing

_NAMES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("vocab_size", "tie_word_embeddings"),
)
# Qwen2.5's, and a tiny one.
SIZES = {
    "0.5B": (896, 4864, 24, 14, 2, 151_936, True),
    "1.5B": (1536, 8960, 28, 12, 2, 151_936, True),
    "7B": (3584, 18_944, 28, 28, 4, 152_064, False),
    "tiny": (64, 128, 2, 4, 2, 512, True),
}
MODES: Mapping[str, Mapping[str, Any]] = {"full": {}, "lora": {"lora_rank": 32, "lora_alpha": 32.0}}
# Kernels on a GPU, operators on a CPU.
_ATTENTION = {
    "cuda": re.compile(r"flash|fmha|attn|sdpa", re.IGNORECASE),
    "cpu": re.compile(r"aten::(scaled_dot_product_attention|_scaled_dot_product_\w+_backward)$"),
}
_HEAD = re.compile(r"_ChunkedHead(Backward)?$")
Values = dict[str, Any]


class Skipped(Exception):
    """Raised for a case that cannot be run on this hardware; the text is the reason."""


class Place(NamedTuple):
    """The device of the cases, a folder for their files, and whether their shapes are tiny."""

    device: torch.device
    folder: Path
    tiny: bool


class Rows(NamedTuple):
    """The rows of an update: their number, the tokens of each prompt and response, and the rows of a micro-batch."""

    number: int
    prompt: int
    response: int
    together: int


# The last engine, by its configuration: loading takes longer than what is measured.
_KEPT: dict[str, TrainEngine] = {}


def update(place: Place, *, size: str, mode: str, keys: Mapping[str, Any]) -> Values:
    """Times updates of two micro-batches with one optimizer step, with these keys of the actor's section."""
    config = make_config(place, size, mode, _usual_rows(place), **keys)
    values = measured(place, config, 3, 5)
    resting = torch.cuda.memory_allocated() / 2**30 if place.device.type == "cuda" else None
    return values | {"between updates GiB": resting}


def row(place: Place, *, size: str, mode: str, tokens: int, checkpointing: Checkpointing = True) -> Values:
    """Times updates with a single row, and the shares of attention and of the head in one of them."""
    rows = Rows(1, tokens // 8, tokens - tokens // 8, 1)
    keys = {"gradient_checkpointing": checkpointing, "ppo_max_token_len_per_gpu": 1 << 16}
    config = make_config(place, size, mode, rows, **keys)
    values = measured(place, config, 1, 2)
    return values | shares(_update_of(place, config), place.device)


def repeat(place: Place, *, size: str, deterministic: bool) -> Values:
    """Times updates, and makes the same two updates twice from the same weights."""
    torch.use_deterministic_algorithms(deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = False  # a help to find bugs, which takes time
    try:
        config = make_config(place, size, "full", _usual_rows(place), gradient_checkpointing=True)
        values, digests = measured(place, config, 1, 3), []
        engine, step = engine_of(place, config), _update_of(place, config)
        for _ in range(2):
            engine.load_checkpoint(None)
            step()
            step()
            digests.append(engine.compute_weights_digest())
    finally:
        torch.use_deterministic_algorithms(False)
    return values | {"same weights twice": digests[0] == digests[1]}


def measured(place: Place, config: Config, num_warm: int, num_timed: int) -> Values:
    """Times updates; returns figures of the median, the peak of memory, and the estimate of `controller --check`."""
    estimate = estimated_bytes(place, config)
    engine, step = engine_of(place, config), _update_of(place, config)
    metrics: list[Mapping[str, float]] = []
    if is_cuda := place.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = median_s(lambda: metrics.append(step()), place, num_warm, num_timed)
    peak = torch.cuda.max_memory_allocated() / 2**30 if is_cuda else None
    data, mfu = config.data, [found["mfu"] for found in metrics[-num_timed:] if "mfu" in found]
    return {
        "trained M": sum(weight.numel() for weight in engine.model.parameters() if weight.requires_grad) / 1e6,
        "update s": seconds,
        "tokens/s": data.train_batch_size * data.longest_row / seconds,
        "MFU": statistics.median(mfu) if mfu else None,
        "peak GiB": peak,
        "estimate GiB": estimate / 2**30,
        "peak/estimate": peak and peak * 2**30 / estimate,
    }


def estimated_bytes(place: Place, config: Config) -> int:
    """Returns the estimated memory of an update, without that of the process; Skipped if the GPU has less."""
    gpus = {0: torch.cuda.get_device_properties(0).total_memory} if place.device.type == "cuda" else {}
    [group] = memory_plan(config, gpus).groups
    terms = max((group.phases[name] for name in ("backward", "optimizer step")), key=lambda phase: phase.total)
    if gpus and terms.total > gpus[0]:
        raise Skipped(f"it needs about {terms.total / 2**30:.0f} GiB, the GPU has {gpus[0] / 2**30:.0f}")
    return terms.total - terms.process


def shares(call: Callable[[], object], device: torch.device) -> Values:
    """Returns the shares of attention and of the head (log-probs, entropy) in the device's time of a call."""
    is_cuda = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]) as profiler:
        call()
    events = profiler.key_averages()
    name = "device" if is_cuda else "cpu"
    on_device = [event for event in events if event.device_type == (DeviceType.CUDA if is_cuda else DeviceType.CPU)]
    total = sum(getattr(event, f"self_{name}_time_total") for event in on_device if not event.is_user_annotation)
    found = {
        "attention share": [event for event in on_device if _ATTENTION[device.type].search(event.key)],
        "head share": [event for event in events if _HEAD.match(event.key)],
    }
    return {key: sum(getattr(event, f"{name}_time_total") for event in of) / total for key, of in found.items()}


def median_s(call: Callable[[], object], place: Place, num_warm: int, num_timed: int) -> float:
    """Returns the median seconds of calls; those before count for nothing. With tiny shapes one of each is enough."""
    seconds = []
    for _ in range(2 if place.tiny else num_warm + num_timed):
        began_s = time.perf_counter()
        call()
        if place.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began_s)
    return statistics.median(seconds[1 if place.tiny else num_warm :])


def relative_error(found: Tensor, exact: Tensor) -> float:
    """Returns norm(found - exact) / norm(exact)."""
    return float((found.double() - exact.double()).norm() / exact.double().norm())


def engine_of(place: Place, config: Config) -> TrainEngine:
    """Returns an engine of the actor: the last one, if it has the same configuration."""
    if not dist.is_initialized():
        if place.device.type == "cuda":
            torch.cuda.set_device(0)
        backends = "cpu:gloo,cuda:nccl" if place.device.type == "cuda" else "gloo"
        dist.init_process_group(backends, store=dist.HashStore(), rank=0, world_size=1)
    if repr(config.actor) not in _KEPT:
        drop_engine()
        device = torch.device("cuda", 0) if place.device.type == "cuda" else place.device
        length = config.data.max_response_length
        engine = TrainEngine(config.actor, kind="policy", seed=0, max_response_length=length, device=device)
        _KEPT[repr(config.actor)] = engine
    return _KEPT[repr(config.actor)]


def drop_engine() -> None:
    """Frees the memory of the last engine."""
    _KEPT.clear()
    gc.collect()
    torch.cuda.empty_cache()  # without a GPU, nothing


def make_config(place: Place, size: str, mode: str, rows: Rows, **keys: Any) -> Config:
    """Returns the configuration of a run whose actor makes such updates."""
    actor = {
        "model": str(model_folder(place, size)),
        "dtype": "bf16",
        "lr": 1e-5,
        "ppo_mini_batch_size": rows.number,
        "ppo_max_token_len_per_gpu": rows.together * (rows.prompt + rows.response),
        **MODES[mode],
        **keys,
    }
    lengths = {"max_prompt_length": rows.prompt, "max_response_length": rows.response}
    tree = {
        "run": {"dir": str(place.folder / "none"), "total_steps": 1},
        "data": {"train_files": "none", "train_batch_size": rows.number, **lengths},
        "algorithm": {"adv_estimator": "reinforce_plus_plus"},
        "actor": actor,
        "services": {"actor": {"devices": [0]}} if place.device.type == "cuda" else {},
    }
    return validate(tree, "benchmark")


def _usual_rows(place: Place) -> Rows:
    return Rows(4, 16, 48, 2) if place.tiny else Rows(16, 512, 1536, 8)


def _update_of(place: Place, config: Config) -> Callable[[], Mapping[str, float]]:
    engine, batch = engine_of(place, config), make_batch(config)
    forward, loss = policy_forward(1.0), actor_loss(config.actor)
    return lambda: engine.update(batch, forward, loss, progress=lambda *_: None)


def make_batch(config: Config) -> Batch:
    """Returns one mini-batch of rows of full length, all of whose tokens count."""
    data, rng = config.data, np.random.default_rng(0)
    number, vocabulary = data.train_batch_size, SIZES[Path(config.actor.model).name][5]
    length = data.max_response_length
    return Batch.from_rows(
        prompts=list(rng.integers(3, vocabulary, (number, data.max_prompt_length))),
        responses=list(rng.integers(3, vocabulary, (number, length))),
        response_mask=[np.ones(length, bool)] * number,
        seeds=[[row] for row in range(number)],
        advantages=list(rng.normal(size=(number, length))),
        # about those of random weights, else the clipped loss has no gradient
        old_log_probs=list(rng.normal(-math.log(vocabulary), 0.1, (number, length))),
    )


def model_folder(place: Place, size: str) -> Path:
    """Returns the folder of a policy with random bf16 weights, made on the device, and a tokenizer of characters.

    Only the last size is kept, since the largest takes 15 GB.
    """
    models = place.folder / "models"
    if (models / size).exists():
        return models / size
    drop_engine()
    shutil.rmtree(models, ignore_errors=True)
    tokenizer = make_tokenizer()
    special = {"pad_token_id": tokenizer.token_to_id(PAD), "eos_token_id": tokenizer.token_to_id(EOS)}
    sizes = dict(zip(_NAMES, SIZES[size], strict=True))
    config = Qwen2Config(**sizes, **special, max_position_embeddings=1 << 17)
    hf_logging.disable_progress_bar()
    with torch.device("meta"):
        model = Qwen2ForCausalLM(config)
    model = model.bfloat16().to_empty(device=place.device)
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():  # zeros would make products faster than they are
        if parameter.ndim > 1:
            parameter.data.normal_(0.0, 0.02)
        else:
            parameter.data.fill_(float("norm" in name))
    model.tie_weights()
    unfinished = models / "unfinished"
    model.save_pretrained(unfinished, max_shard_size="4GB")
    save_tokenizer(tokenizer, unfinished, named_tokens={"eos_token": EOS, "pad_token": PAD, "unk_token": EOS})
    return unfinished.rename(models / size)
