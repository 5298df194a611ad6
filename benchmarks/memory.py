"""python -m benchmarks.memory: the memory that `python -m controller --check` estimates, next to what engines take.

Three models of random weights, each as actor and as critic, fp32, one rank in a process of its own: an update of two
mini-batches of two micro-batches, then log-probs (values), then, as the actor, generation. Growth of anonymous memory
(RssAnon) since before the model was loaded, at the peak of each; the estimate is without its term for the process.
--only qwen2_5_vl or qwen3_vl measures a model that reads images, --train-tower one whose tower learns.
--lora RANK trains adapters on all linear layers instead, --freeze PATTERN keeps weights from learning, --offload keeps
weights and moments in main memory, where they count, too, --bf16-moments keeps moments in bf16. `saving` is a
checkpoint of which all is written while the engine does what takes its peak, an update.
--only 0.5B measures a model of Qwen2.5-0.5B's sizes, which takes up to 13 GiB and some minutes.

What the C library keeps of freed memory depends on the history of its heap, so freed tensors are given back at once
(MALLOC_MMAP_THRESHOLD_); --keep-freed measures what ranks hold, which keep it for the next step.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, MixtralForCausalLM, Qwen2ForCausalLM
from transformers.utils import logging as hf_logging

from benchmarks.loading import Peak, anonymous_mib
from controller.memory.estimate import GroupMemory, estimate_group
from controller.memory.terms import Terms
from controller.models.shape import read_model_shape
from services.actor.losses.actor_loss import actor_loss
from services.critic.losses import critic_loss
from services.engine.model.forward import policy_forward, value_forward
from services.engine.train_engine import TrainEngine
from services.rollout.hf_backend.backend import HfRollout
from services.rollout.protocol import Sampling
from services.rollout.stopping import StopRule
from services.runtime.group.rank_imports import KEPT_MEMORY
from splitppo.batch import Batch
from splitppo.config import Config
from splitppo.config.load import validate
from splitppo.config.section import RoleName
from splitppo.images.columns import row_of_images
from splitppo.images.settings import ImageSettings

# hidden, intermediate, layers, query heads, key-value heads, vocabulary, tied; rows of a micro-batch.
MODELS = {
    "3M": ((192, 512, 7, 6, 2, 2_000, True), 4),
    "vocabulary": ((384, 1024, 4, 6, 2, 60_000, True), 2),
    "deep": ((512, 1408, 12, 8, 2, 2_000, True), 4),
    "wide": ((1024, 4096, 3, 16, 16, 12_000, False), 2),
    "28M": ((384, 1536, 12, 6, 6, 2_000, True), 2),
    "experts": ((384, 512, 6, 6, 6, 2_000, True), 4),  # eight in a layer; two compute a token
    "qwen2_5_vl": ((256, 1024, 4, 4, 2, 4_000, False), 4),  # with a tower of TOWER's sizes, as the next one
    "qwen3_vl": ((256, 1024, 4, 4, 2, 4_000, False), 4),
    "0.5B": ((896, 4864, 24, 14, 2, 151_936, True), 2),
}
DEFAULT_MODELS = ("vocabulary", "deep", "wide")
TOWER = {"hidden_size": 256, "intermediate_size": 1024, "depth": 6, "num_heads": 4, "out_hidden_size": 256}
TOWERS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {**TOWER, "fullatt_block_indexes": [2, 5]},
    "qwen3_vl": {**TOWER, "deepstack_visual_indexes": [1, 3, 5]},
}
IMAGE_TOKENS = (6, 10)  # rows and columns; one image in each prompt, almost all of its tokens
START, END, IMAGE = 1, 2, 3  # token ids
PROMPT = 64
RESPONSE = 96
MICRO_BATCHES = 2
MINI_BATCHES = 2
CPU = torch.device("cpu")
# Larger blocks are mapped one by one, and unmapped when they are freed.
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": str(256 << 10)}


def main() -> None:
    """Prints a table of measured and estimated MiB, and their ratio; exit status 1 if a peak is off by over 15 %."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", nargs=3, metavar=("MODEL", "ROLE", "FOLDER"), help=argparse.SUPPRESS)
    parser.add_argument("--only", choices=MODELS, help="one of the models")
    parser.add_argument("--gradient-checkpointing", action="store_true", help="recompute activations")
    parser.add_argument("--selective", action="store_true", help="recompute activations, but not attention")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="train adapters")
    parser.add_argument("--freeze", metavar="PATTERN", help="weights that do not learn")
    parser.add_argument("--train-tower", action="store_true", help="freeze_vision_tower false")
    parser.add_argument("--offload", action="store_true", help="param_offload and optimizer_offload")
    parser.add_argument("--bf16-moments", action="store_true", help="optimizer_state_dtype bf16")
    parser.add_argument("--keep-freed", action="store_true", help="as ranks do")
    options = parser.parse_args()
    changes = {
        "gradient_checkpointing": "selective" if options.selective else options.gradient_checkpointing,
        "lora_rank": options.lora,
        "freeze": [options.freeze] if options.freeze else [],
        "freeze_vision_tower": not options.train_tower,
        "param_offload": options.offload,
        "optimizer_offload": options.offload,
        "optimizer_state_dtype": "bf16" if options.bf16_moments else "fp32",
    }
    if options.one:
        measure(*options.one, **changes)
        return
    print(f"{'model':12s}{'role':8s}{'phase':12s}{'measured':>10s}{'estimate':>10s}{'ratio':>7s}", flush=True)
    more = [f"--lora={options.lora}"]
    more += [f"--freeze={options.freeze}"] if options.freeze else []
    more += ["--gradient-checkpointing"] * options.gradient_checkpointing + ["--offload"] * options.offload
    more += ["--train-tower"] * options.train_tower
    more += ["--bf16-moments"] * options.bf16_moments + ["--selective"] * options.selective
    environment = os.environ | (KEPT_MEMORY if options.keep_freed else GIVE_BACK)
    started_s = time.perf_counter()
    worst = 0.0
    for name in [options.only] if options.only else DEFAULT_MODELS:
        with tempfile.TemporaryDirectory("-memory") as folder:
            save_model(Path(folder), name)
            for role in ("actor", "critic"):
                command = [sys.executable, "-m", "benchmarks.memory", "--one", name, role, folder, *more]
                said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
                print(said, end="", flush=True)
                worst = max(worst, abs(float(said.split()[-1]) - 1.0))
    print(f"largest error of a peak: {worst:.0%}, {time.perf_counter() - started_s:.0f} s")
    sys.exit(worst > 0.15)


def save_model(folder: Path, name: str) -> None:
    """Writes one of MODELS with random weights."""
    hidden, intermediate, layers, heads, key_value_heads, vocabulary, tied = MODELS[name][0]
    if name in TOWERS:
        save_vision_model(folder, name)
        return
    model_class: Any = MixtralForCausalLM if name == "experts" else Qwen2ForCausalLM
    config = model_class.config_class(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(0)
    hf_logging.disable_progress_bar()
    model_class(config).save_pretrained(folder)


def save_vision_model(folder: Path, name: str) -> None:
    """Writes one of TOWERS under a language model of MODELS, with random weights."""
    hidden, intermediate, layers, heads, key_value_heads, vocabulary, _ = MODELS[name][0]
    half = hidden // heads // 2
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [half - 2 * (half // 3), half // 3, half // 3]}
    if name == "qwen3_vl":
        rope["mrope_interleaved"] = True
    text = {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
        "head_dim": hidden // heads,
        "vocab_size": vocabulary,
        "rope_parameters": rope,
    }
    ids = {"vision_start_token_id": START, "vision_end_token_id": END, "image_token_id": IMAGE}
    config = AutoConfig.for_model(name, text_config=text, vision_config=TOWERS[name], tie_word_embeddings=False, **ids)
    torch.manual_seed(0)
    hf_logging.disable_progress_bar()
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({"min_pixels": 1, "max_pixels": 1 << 24}))


def make_config(name: str, folder: str, **changes: Any) -> Config:
    """Returns the configuration of a run that does what is measured; `changes` are keys of both trained models."""
    rows = MODELS[name][1]
    trained = {
        "model": folder,
        "lr": 1e-4,
        "ppo_mini_batch_size": rows * MICRO_BATCHES,
        "ppo_micro_batch_size_per_gpu": rows,
        **changes,
    }
    prompts = rows * MICRO_BATCHES * MINI_BATCHES
    data = {"train_files": "none", "train_batch_size": prompts, "max_prompt_length": PROMPT}
    tree = {
        "run": {"dir": folder, "total_steps": 1},
        "data": data | {"max_response_length": RESPONSE},
        "actor": trained,
        "critic": trained,
    }
    return validate(tree, "benchmark")


def measure(name: str, role: RoleName, folder: str, **changes: Any) -> None:
    """Measures one model in a process of its own: prints a line for each phase, and one for the peak of all."""
    config = make_config(name, folder, **changes)
    kind = "policy" if role == "actor" else "value"
    memory = estimate_group(config, role, read_model_shape(folder, kind, role))
    torch.randn(64, 64) @ torch.randn(64, 64)
    before = anonymous_mib()
    engine = TrainEngine(
        config.model_of(role), kind=kind, seed=0, max_response_length=config.data.max_response_length, device=CPU
    )
    calls = phases_of(config, role, engine)
    peaks = {phase: peak_of(call) - before for phase, call in calls.items()}
    for phase, peak in peaks.items():
        report(name, role, phase, peak, estimate_of(memory, phase))
    print(f"{name:12s}{role:8s}process {before:.0f} MiB")
    saving = peaks.pop("saving")
    highest = max(peaks.values())
    print(f"{name:12s}{role:8s}saving / peak {saving / highest:.2f}")
    report(name, role, "peak", highest, counted_mib(memory.peak))


def phases_of(config: Config, role: RoleName, engine: TrainEngine) -> dict[str, Callable[[], object]]:
    """Returns the phases that are measured, by the names of the estimate, except for the two parts of an update."""
    batch = make_batch(config, engine.model.image_settings)
    forward = policy_forward(1.0) if role == "actor" else value_forward
    loss = actor_loss(config.actor) if role == "actor" else critic_loss(config.critic)
    rollout = HfRollout(engine.gathered, StopRule(()), config.rollout.max_batch_size, CPU)
    sampling = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_response_length=RESPONSE)
    output, phase = ("log_probs", "log-probs") if role == "actor" else ("values", "values")
    calls: dict[str, Callable[[], object]] = {
        "update": lambda: engine.update(batch, forward, loss, progress=silent),
        phase: lambda: engine.compute(batch, forward, outputs=(output,), progress=silent),
    }
    if role == "actor":
        calls["generate"] = lambda: list(rollout.generate(batch, sampling, lambda: False))

    def save_and_update() -> None:
        saved = engine.save_checkpoint(Path(config.run.dir) / "checkpoint", b"", with_hf_model=False)
        calls["update"]()
        saved.result()

    calls["saving"] = save_and_update
    return calls


def make_batch(config: Config, images: ImageSettings | None) -> Batch:
    """Returns rows of full length, all of whose tokens count, with images of their own if the model reads some."""
    num_rows = config.data.train_batch_size
    vocabulary = 2_000
    rng = np.random.default_rng(0)
    columns = ("advantages", "returns", "values", "old_log_probs")
    rows = Batch.from_rows(
        prompts=[rng.integers(3, vocabulary, PROMPT) for _ in range(num_rows)],
        responses=[rng.integers(3, vocabulary, RESPONSE) for _ in range(num_rows)],
        response_mask=[np.ones(RESPONSE, bool)] * num_rows,
        mini_batches=[[row % MINI_BATCHES] for row in range(num_rows)],
        seeds=[[row] for row in range(num_rows)],
        **{name: [rng.normal(size=RESPONSE) for _ in range(num_rows)] for name in columns},
    )
    return rows if images is None else rows.merge(make_images(num_rows, images))


def make_images(num_rows: int, settings: ImageSettings) -> Batch:
    """Returns prompts that are an image each, but for their last tokens, with the images, which are all different."""
    rows, columns = (size * settings.merge_size for size in IMAGE_TOKENS)
    size = (rows * settings.patch_size, columns * settings.patch_size, 3)
    drawn = []
    for seed in range(num_rows):
        file = io.BytesIO()
        Image.fromarray(np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)).save(file, "PNG")
        drawn.append(row_of_images([(file.getvalue(), rows, columns)]))
    prompt = [START, *[IMAGE] * prod(IMAGE_TOKENS), END]
    prompt += [10] * (PROMPT - len(prompt))
    return Batch.from_rows(
        prompts=[prompt] * num_rows, images=[files for files, _ in drawn], image_sizes=[sizes for _, sizes in drawn]
    )


def peak_of(call: Callable[[], object]) -> float:
    """Returns the highest anonymous memory of this process during a call, in MiB."""
    peak = Peak()
    call()
    return peak.stop()


def estimate_of(memory: GroupMemory, phase: str) -> float:
    """Returns the estimate of a phase in MiB, without the process, and without room for more decoded images."""
    if phase == "saving" and memory.saving is not None:
        return counted_mib(memory.saving)
    names = ("backward", "optimizer step") if phase == "update" else (phase,)
    return max(counted_mib(memory.phases[name]) for name in names)


def counted_mib(terms: Terms) -> float:
    """Returns the MiB that are compared with what is measured: all but process and decoded images."""
    return (terms.total - terms.process - terms.images) / 2**20


def report(name: str, role: str, phase: str, measured: float, estimate: float) -> None:
    """Prints a line of the table."""
    print(f"{name:12s}{role:8s}{phase:12s}{measured:10.0f}{estimate:10.0f}{estimate / measured:7.2f}")


def silent(done: int, total: int, phase: str) -> None:
    """A progress report that nobody reads."""


if __name__ == "__main__":
    main()
