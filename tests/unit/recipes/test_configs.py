"""The recipes' configurations: their numbers divide, they read the files of prepare.py, and they pass --check."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from controller.__main__ import main
from controller.memory.plan import memory_plan
from splitppo.config import load_config
from splitppo.config.batch_plan import batch_plan
from tests.support.fake_gpus import put_gpus
from tests.support.groups import PROJECT
from tests.support.models import save_policy, save_reward_model, save_shapes
from tests.support.vision_models import draw_image, save_vision_policy, save_vision_shapes

pytestmark = pytest.mark.slow

RECIPES = PROJECT / "recipes"
ON_BOTH = ("gsm8k", "competition_math", "hellaswag", "hh_rlhf")
NAMES = (*ON_BOTH, "geo3k")
CONFIGS = sorted(file for name in NAMES for file in (RECIPES / name).glob("*.yaml"))
SHARES = RECIPES / "competition_math" / "qwen2.5-1.5b-shares.yaml"
GEO3K = RECIPES / "geo3k" / "qwen2.5-vl-7b.yaml"
TAUGHT = RECIPES / "competition_math" / "qwen3-8b-teacher.yaml"
# (layers, hidden, MLP, query heads) by configuration of MATH; 8 (7B: 4) key-value heads of 128, 152,064 tokens.
LARGE = {
    "qwen2.5-7b": (28, 3584, 18_944, 28),
    "qwen2.5-7b-32k": (28, 3584, 18_944, 28),
    "qwen2.5-7b-lora": (28, 3584, 18_944, 28),
    "qwen2.5-32b-lora": (64, 5120, 27_648, 40),
}
GPU_CONFIGS = [file for file in CONFIGS if file.name != "cpu.yaml"]
LONG = {"max_position_embeddings": 65_536}
# Text and vision tower of Qwen2.5-VL-7B.
VL_TEXT = {
    "num_hidden_layers": 28,
    "hidden_size": 3584,
    "intermediate_size": 18_944,
    "vocab_size": 152_064,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
}
VL_TOWER = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "out_hidden_size": 3584,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
# An input row of each recipe, by hand.
EXAMPLES: dict[str, dict[str, Any]] = {
    "gsm8k": {"question": "What is 6 * 7?", "answer": "#### 42"},
    "competition_math": {"problem": "What is 6 * 7?", "solution": "\\boxed{42}"},
    "hellaswag": {"activity_label": "a", "ctx_a": "b.", "ctx_b": "c", "endings": ["d", "e"], "label": 1},
    "geo3k": {"problem": "<image>Find x.", "answer": "12", "images": ["figure.png"]},
    "hh_rlhf": {"chosen": "\n\nHuman: hi\n\nAssistant: well", "rejected": "\n\nHuman: hi\n\nAssistant: ill"},
}


def name_of(file: Path) -> str:
    return f"{file.parent.name}/{file.name}"


def test_every_recipe_has_a_configuration_for_a_cpu_and_one_for_gpus() -> None:
    assert {file.parent.name for file in GPU_CONFIGS} == set(NAMES)
    assert {file.parent.name for file in CONFIGS if file not in GPU_CONFIGS} == set(ON_BOTH)
    assert len(CONFIGS) == 2 * len(ON_BOTH) + 3 + len(LARGE)  # SHARES, TAUGHT and GEO3K


def test_of_a_recipe_with_a_share_all_gpus_sample_the_critics_in_turns() -> None:
    config, plain = load_config(SHARES), load_config(SHARES.with_name("qwen2.5-1.5b.yaml"))
    assert (config.sampling_roles, config.rollout.share) == (("actor", "rollout"), 0.5)
    assert config.gpus_in_turns == {4, 5, 6, 7}
    for section in ("data", "algorithm", "actor", "critic"):
        assert getattr(config, section) == getattr(plain, section)


@pytest.mark.parametrize("file", CONFIGS, ids=name_of)
def test_the_rows_of_a_mini_batch_divide_over_the_ranks(file: Path) -> None:
    config = load_config(file)
    assert batch_plan(config)
    for role in config.trained_roles:
        num_rows = (config.trained_model_of(role).ppo_mini_batch_size or 0) * config.rollout.n
        assert num_rows % config.services.of(role).num_processes == 0


@pytest.mark.parametrize("file", CONFIGS, ids=name_of)
def test_a_configuration_reads_what_its_own_command_makes(file: Path) -> None:
    config, output, text = load_config(file), f".cache/{file.parent.name}", file.read_text()
    assert f"python -m recipes.{file.parent.name}.prepare " in text
    assert f"--output {output}" in text
    assert config.data.train_files == (f"{output}/train.parquet",)
    assert config.data.val_files in ((f"{output}/test.parquet",), ())
    if file.name == "cpu.yaml":
        assert config.actor.model == f"{output}/tiny_model"
        assert config.reward_model.model in (f"{output}/tiny_reward_model", "")


@pytest.mark.parametrize("file", GPU_CONFIGS, ids=name_of)
def test_the_gpu_sets_are_disjoint_and_fill_the_node(file: Path) -> None:
    services = yaml.safe_load(file.read_text())["services"]
    groups = {TAUGHT: ("actor", "reward"), GEO3K: ("actor",)}.get(file, ("actor", "critic"))
    assert sorted(device for group in groups for device in services[group]["devices"]) == list(range(8))


@pytest.mark.parametrize("file", GPU_CONFIGS, ids=name_of)
def test_check_passes_with_prepared_rows_and_local_models(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    put_gpus(monkeypatch, [80 << 30] * 8)
    recipe = file.parent.name
    config = load_config(file)
    num_prompts = config.data.train_batch_size
    lines = f"{json.dumps(EXAMPLES[recipe])}\n" * (num_prompts + 1)
    (tmp_path / "rows.jsonl").write_text(lines)
    (tmp_path / "figure.png").write_bytes(draw_image(0, 60, 40))
    source = ["--input", str(tmp_path / "rows.jsonl"), "--test-rows", "1", "--output", str(tmp_path)]
    more = ["--split", "rl"] if recipe == "hh_rlhf" else []
    prepare = importlib.import_module(f"recipes.{recipe}.prepare")
    assert prepare.main([*source, *more, "--no-tiny-model"]) == 0
    local = [
        f"run.dir={tmp_path / 'run'}",
        f"data.train_files={tmp_path / 'train.parquet'}",
        f"actor.model={(save_vision_policy if file == GEO3K else save_policy)(tmp_path / 'policy', **LONG)}",
    ]
    if load_config(file).teacher.model:
        local.append(f"teacher.model={tmp_path / 'policy'}")
    if load_config(file).data.val_files:
        local.append(f"data.val_files={tmp_path / 'test.parquet'}")
    if load_config(file).reward_model.model:
        judge = save_reward_model(tmp_path / "judge", max_position_embeddings=2048)
        local.append(f"reward_model.model={judge}")
    if load_config(file).rollout.backend == "vllm":  # the tests' environment has vLLM for CPUs, or none
        local.append("rollout.backend=hf")
    capsys.readouterr()
    assert main(["--config", str(file), "--check", *local]) == 0, capsys.readouterr().err
    assert f"step: {num_prompts} prompts x {config.rollout.n} samples" in capsys.readouterr().out


@pytest.mark.parametrize("name", LARGE)
def test_a_large_recipe_fits_gpus_of_80_gb_and_its_readme_has_the_estimate(name: str, tmp_path: Path) -> None:
    layers, hidden, mlp, heads = LARGE[name]
    key_values = 4 if "7b" in name else 8
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": mlp, "vocab_size": 152_064}
    heads_of = {"num_attention_heads": heads, "num_key_value_heads": key_values, "tie_word_embeddings": False}
    folder = save_shapes(tmp_path / "model", **sizes, **heads_of)
    config = load_config(RECIPES / "competition_math" / f"{name}.yaml", [f"actor.model={folder}"])
    plan = memory_plan(config, dict.fromkeys(range(8), 80 << 30), 256 << 30)
    assert plan.misfit is None
    assert all(group.peak.total < 72 << 30 for group in plan.groups), "of 79.6 GiB, a tenth is for the allocator"
    peaks = " and ".join(f"{group.peak.total / 2**30:.1f}" for group in plan.groups)
    readme = (RECIPES / "competition_math" / "README.md").read_text()
    [row] = [line for line in readme.splitlines() if line.startswith(f"| {name}.yaml ")]
    assert f"| {peaks} |" in row


def test_the_recipe_with_images_fits_gpus_of_80_gb_and_its_readme_has_the_estimate(tmp_path: Path) -> None:
    folder = save_vision_shapes(tmp_path / "model", vision=VL_TOWER, **VL_TEXT)
    config = load_config(GEO3K, [f"actor.model={folder}"])
    plan = memory_plan(config, dict.fromkeys(range(8), 80 << 30), 256 << 30)
    assert plan.misfit is None
    [group] = plan.groups
    assert group.peak.total < 72 << 30, "of 79.6 GiB, a tenth is for the allocator"
    readme = (GEO3K.parent / "README.md").read_text()
    assert f"a rank needs {group.peak.total / 2**30:.1f} GiB by `--check`" in " ".join(readme.split())
