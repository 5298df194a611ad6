"""Cases of benchmarks.gpu_proof that update a model: by size, mode and length, at rest, and twice from one state."""

from __future__ import annotations

import gc
import math
import re
import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
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
# Qwen2.5's, and the one of every model if shapes are tiny.
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
_KERNEL_NAME = 120  # characters that are shown; names of templates have thousands
_TINY_ROW_SHARE = 256  # tokens of a long row for each one of a tiny row
NOT_ON_A_CPU = "not on a CPU"
Values = dict[str, Any]


class Skipped(Exception):
    """Raised for a case that cannot be run on this hardware; the text is the reason."""


class Place(NamedTuple):
    """The device of the cases, a folder for their files, and whether their shapes are tiny."""

    device: torch.device
    folder: Path
    tiny: bool

    @property
    def has_kernels(self) -> bool:
        """True on a GPU; False on a CPU, also if torch was made to take it for a GPU."""
        return self.device.type == "cuda" and bool(torch._C._has_cuda)  # noqa: SLF001 # is_built may be replaced


class Rows(NamedTuple):
    """The rows of an update: their number, the tokens of each prompt and response, and the rows of a micro-batch."""

    number: int
    prompt: int
    response: int
    together: int


# The last engine, by its configuration: loading takes longer than what is measured.
_KEPT: dict[str, TrainEngine] = {}


def update(place: Place, *, size: str, mode: str, keys: Mapping[str, Any], num_kernels: int) -> Values:
    """Times updates of two micro-batches with one optimizer step, with these keys of the actor's section.

    The last one is profiled, for the shares of attention and head, and so many of its longest kernels.
    """
    if "compile" in keys and place.device.type == "cuda" and not place.has_kernels:
        raise Skipped(NOT_ON_A_CPU)  # code is made for a GPU of this name
    config = make_config(place, size, mode, _usual_rows(place), **keys)
    values = measured(place, config, 3, 5)
    resting = torch.cuda.memory_allocated() / 2**30 if place.device.type == "cuda" else NOT_ON_A_CPU
    return {**values, "between updates GiB": resting, **profiled(place, _update_of(place, config), num_kernels)}


def row(place: Place, *, size: str, mode: str, tokens: int, checkpointing: Checkpointing = True) -> Values:
    """Times updates with a single row, and the shares of attention and of the head in one of them."""
    if place.tiny:
        tokens //= _TINY_ROW_SHARE
    rows = Rows(1, tokens // 8, tokens - tokens // 8, 1)
    keys = {"gradient_checkpointing": checkpointing, "ppo_max_token_len_per_gpu": 1 << 16}
    config = make_config(place, size, mode, rows, **keys)
    values = measured(place, config, 1, 2)
    return values | profiled(place, _update_of(place, config))


def repeat(place: Place, *, size: str, deterministic: bool) -> Values:
    """Times updates, and makes the same two updates twice from the same weights."""
    torch.use_deterministic_algorithms(deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = False  # a help to find bugs, which takes time
    try:
        config = make_config(place, size, "full", _usual_rows(place), gradient_checkpointing=True)
        values = measured(place, config, 1, 3)
        digests = []
        engine = engine_of(place, config)
        step = _update_of(place, config)
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
    engine = engine_of(place, config)
    step = _update_of(place, config)
    metrics: list[Mapping[str, float]] = []
    is_cuda = place.device.type == "cuda"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds = median_s(lambda: metrics.append(step()), place, num_warm, num_timed)
    peak = torch.cuda.max_memory_allocated() if is_cuda else None
    mfu = [found["mfu"] for found in metrics[-num_timed:] if "mfu" in found]
    return {
        "trained M": sum(weight.numel() for weight in engine.model.parameters() if weight.requires_grad) / 1e6,
        "update s": seconds,
        "tokens/s": config.data.train_batch_size * config.data.longest_row / seconds,
        "MFU": (statistics.median(mfu) if mfu else "peak not known") if place.has_kernels else NOT_ON_A_CPU,
        "peak GiB": NOT_ON_A_CPU if peak is None else peak / 2**30,
        "estimate GiB": estimate / 2**30,
        "peak/estimate": NOT_ON_A_CPU if peak is None else peak / estimate,
    }


def estimated_bytes(place: Place, config: Config) -> int:
    """Returns the estimated memory of an update, without that of the process; Skipped if the GPU has less."""
    gpus = {0: torch.cuda.get_device_properties(0).total_memory} if place.device.type == "cuda" else {}
    [group] = memory_plan(config, gpus).groups
    terms = max((group.phases[name] for name in ("backward", "optimizer step")), key=lambda phase: phase.total)
    if gpus and terms.total > gpus[0]:
        raise Skipped(f"it needs about {terms.total / 2**30:.0f} GiB, the GPU has {gpus[0] / 2**30:.0f}")
    return terms.total - terms.process


def profiled(place: Place, call: Callable[[], object], num_kernels: int = 0) -> Values:
    """Returns the shares of attention and of the head (log-probs, entropy) in the device's time of a call.

    With `num_kernels`, also so many kernels that take the most time.
    """
    values: Values = {"attention share": NOT_ON_A_CPU, "head share": NOT_ON_A_CPU}
    if num_kernels:
        values["longest kernels"] = NOT_ON_A_CPU
    is_cuda = place.device.type == "cuda"
    if is_cuda and not place.has_kernels:
        return values
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]) as profiler:
        call()
    events = profiler.key_averages()
    name = "device" if is_cuda else "cpu"
    of_device = DeviceType.CUDA if is_cuda else DeviceType.CPU
    on_device = [event for event in events if event.device_type == of_device and not event.is_user_annotation]
    total_us = sum(getattr(event, f"self_{name}_time_total") for event in on_device)
    found = {
        "attention share": [event for event in on_device if _ATTENTION[place.device.type].search(event.key)],
        "head share": [event for event in events if _HEAD.match(event.key)],
    }
    for key, of_share in found.items():
        values[key] = sum(getattr(event, f"{name}_time_total") for event in of_share) / total_us
    if num_kernels and is_cuda:
        values["longest kernels"] = _longest(on_device, num_kernels)
    return values


def _longest(kernels: Sequence[Any], num_kernels: int) -> list[Values]:
    """Returns a row for each of the kernels on which the device spent the most time."""
    total_us = sum(kernel.self_device_time_total for kernel in kernels)
    longest = sorted(kernels, key=lambda kernel: kernel.self_device_time_total, reverse=True)[:num_kernels]
    return [
        {
            "kernel": kernel.key[:_KERNEL_NAME],
            "calls": kernel.count,
            "ms": kernel.self_device_time_total / 1e3,
            "share": kernel.self_device_time_total / total_us,
        }
        for kernel in longest
    ]


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
    is_cuda = place.device.type == "cuda"
    device = torch.device("cuda", 0) if is_cuda else place.device
    if not dist.is_initialized():
        if is_cuda:
            torch.cuda.set_device(device)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if is_cuda else "gloo",
            store=dist.HashStore(),
            rank=0,
            world_size=1,
            device_id=device if is_cuda else None,
        )
    if repr(config.actor) not in _KEPT:
        drop_engine()
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
    engine = engine_of(place, config)
    batch = make_batch(config)
    forward = policy_forward(1.0)
    loss = actor_loss(config.actor)
    return lambda: engine.update(batch, forward, loss, progress=lambda *_: None)


def make_batch(config: Config) -> Batch:
    """Returns one mini-batch of rows of full length, all of whose tokens count."""
    data = config.data
    rng = np.random.default_rng(0)
    number = data.train_batch_size
    vocabulary = SIZES[Path(config.actor.model).name][5]
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

    With tiny shapes every size is the tiny one. Only the last size is kept, since the largest takes 15 GB.
    """
    if place.tiny:
        size = "tiny"
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
