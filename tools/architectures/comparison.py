"""Compares a small random model with what the engine and the rollout backend hf compute with it.

The reference is the model's own forward in transformers, with eager attention, one row at a time and without packing,
padding, cache or chunks. It shares no code with the engine. The rows are longer than the small windows, chunks and
rope switches of `tiny_configs`, which the engine's own proof at the start of a run does not reach.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from controller.step.log_prob_check import LogProbCheck, RolloutMismatch
from services.engine.batching.row_checks import check_rows
from services.engine.forward_proof import Difference
from services.engine.frozen_model import FrozenModel
from services.engine.model.adapters import trained_parameters
from services.engine.model.forward import policy_forward, reward_forward, value_forward
from services.engine.model.loading import for_generation
from services.engine.model.weights import AUTO_MODELS, Kind
from services.engine.token_metrics import LossOutput
from services.engine.train_engine import TrainEngine
from services.rollout.hf_backend.backend import HfRollout
from services.rollout.hf_backend.decoding_proof import prove_decoding
from services.rollout.protocol import Sampling
from services.rollout.stopping import StopRule
from splitppo.batch import Array, Batch
from splitppo.config import ActorConfig, ComputedModelConfig
from splitppo.config.resolve import MAX_LOG_PROB_DIFF, MAX_MEAN_LOG_PROB_DIFF
from splitppo.config.sections.rollout import RolloutConfig
from tools.architectures.tiny_configs import EOS, PAD, VOCABULARY

CPU = torch.device("cpu")
BOUND = 2e-4  # nats in fp32; gradients, relative to their norm
TEMPERATURE = 0.7
_LONGEST = (20, 19)  # prompt and response of the longest row
_MAX_RESPONSE = 14
_MOST_PARAMETERS = 30_000_000
_SCALE = 4.0  # of the initial weights, so that every part of the model shows in the logits


@dataclass
class Verdict:
    """What the comparison of one architecture has found.

    Attributes:
        results: for each use ("packed", "padded", "critic", "reward", "hf") "exact", a refusal, or how wrong it is.
        reason: why the model cannot be built, or cannot compute in transformers itself; empty if it can.
    """

    model_type: str
    results: dict[str, str] = field(default_factory=dict)
    reason: str = ""
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def is_wrong(self) -> bool:
        """True if a use is neither exact nor refused."""
        return any(result.startswith("WRONG") for result in self.results.values())


def compare(model_type: str, config: Any, folder: Path) -> Verdict:
    """Builds a random model of a configuration, and compares all that SplitPPO does with it; writes to `folder`."""
    verdict = Verdict(model_type)
    rows = _rows(getattr(config.get_text_config(), "vocab_size", VOCABULARY))
    try:
        policy = _save(config, "policy", folder / "policy")
        expected = _own_log_probs(policy, rows, TEMPERATURE)
    except Exception as error:  # noqa: BLE001 - a class of transformers may raise anything for a small configuration
        verdict.reason = _sentence(error)
        return verdict
    for use, packed in (("packed", True), ("padded", False)):
        verdict.results[use] = _result(lambda packed=packed: _compare_policy(policy, rows, expected, packed=packed))
    verdict.results["hf"] = _result(lambda: _compare_sampling(policy, rows))
    for use, kind in (("critic", "value"), ("reward", "reward")):
        if type(config) in AUTO_MODELS[kind]._model_mapping:  # noqa: SLF001 - there is no public name
            verdict.results[use] = _result(
                lambda kind=kind, use=use: _compare_scalars(config, kind, rows, folder / use)
            )
        else:
            verdict.results[use] = "refused: transformers has no such head"
    return verdict


def _result(difference: Callable[[], float]) -> str:
    """Describes what a comparison has found; ValueError is the product's refusal."""
    try:
        found = difference()
    except ValueError as error:
        return f"refused: {_sentence(error)}"
    except Exception as error:  # noqa: BLE001 - a use that ends in a traceback is found here
        return f"WRONG: {type(error).__name__}: {_sentence(error)}"
    return "exact" if found <= BOUND else f"WRONG by {found:.2g}"


def _sentence(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _rows(vocab_size: int) -> list[tuple[Array, Array]]:
    """Returns eight rows of different lengths, without special ids."""
    rng = np.random.default_rng(1)
    lengths = [_LONGEST, *zip(rng.integers(1, 14, 7), rng.integers(1, 18, 7), strict=True)]
    return [tuple(rng.integers(3, vocab_size, length).astype(np.int32) for length in row) for row in lengths]  # type: ignore[misc]


def _save(config: Any, kind: Kind, folder: Path) -> Any:
    """Writes a random model of a kind; returns it as transformers loads it, in eval mode with eager attention."""
    if kind != "policy":
        config = type(config).from_dict({**config.to_dict(), "num_labels": 1})
    with torch.device("meta"):
        num_parameters = AUTO_MODELS[kind].from_config(config).num_parameters()
    if num_parameters > _MOST_PARAMETERS:
        raise ValueError(f"{num_parameters} parameters: no small configuration is known")
    torch.manual_seed(0)
    model = AUTO_MODELS[kind].from_config(config).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                weight.mul_(_SCALE)
            elif not any(part in name for part in ("A_log", "dt_bias", "a_param", ".D")):  # must stay in their range
                weight.add_(torch.randn_like(weight) * 0.2)
    if kind == "policy":
        model.generation_config = transformers.GenerationConfig(eos_token_id=EOS, pad_token_id=PAD)
    model.save_pretrained(folder)
    return AUTO_MODELS[kind].from_pretrained(folder, attn_implementation="eager").float().eval()


def _own_log_probs(model: Any, rows: list[tuple[Array, Array]], temperature: float) -> Tensor:
    """Computes the log-probs of all response tokens by the model's own forward, row by row, with gradients; [N]."""
    parts = []
    for prompt, response in rows:
        ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))
        logits = model(input_ids=ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        parts.append((logits / temperature).log_softmax(-1).gather(-1, ids[len(prompt) :, None])[:, 0])
    return torch.cat(parts)


def _compare_policy(model: Any, rows: list[tuple[Array, Array]], expected_N: Tensor, *, packed: bool) -> float:
    """Returns the greatest difference of log-probs, or of gradients relative to their norm."""
    weights = np.random.default_rng(2).normal(size=len(expected_N)).astype(np.float32)
    model.zero_grad()
    (torch.from_numpy(weights) * expected_N).sum().backward(retain_graph=True)
    own = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    section = {"model": model.name_or_path, "use_remove_padding": packed, "ppo_max_token_len_per_gpu": 90}
    engine = TrainEngine(
        ActorConfig.model_validate(section), kind="policy", seed=1, max_response_length=_LONGEST[1], device=CPU
    )
    prompts, responses = zip(*rows, strict=True)
    batch = Batch.from_rows(prompts=prompts, responses=responses)
    advantages = np.split(weights, np.cumsum([len(response) for response in responses])[:-1])
    batch = batch.merge(Batch.from_rows(advantages=advantages))
    forward = policy_forward(TEMPERATURE)
    computed = engine.compute(batch, forward, outputs=("log_probs",), progress=lambda *_: None)["log_probs"]
    found = Difference.of(torch.from_numpy(computed.values), expected_N.detach()).largest

    def loss(outputs: Any, tokens: Any) -> LossOutput:
        return LossOutput((tokens.columns["advantages"] * outputs["log_probs"]).sum(), {}, {"x": outputs["log_probs"]})

    [mini_batch] = engine.plan_update(batch)
    engine.accumulate_gradients(batch, mini_batch, forward, loss)
    gradients = {name: weight.grad for name, weight in trained_parameters(engine.model).items()}
    norm = float(torch.stack([gradient.norm() for gradient in own.values()]).norm())
    for name, gradient in own.items():
        other = gradients.get(name)
        found = max(found, float((gradient if other is None else gradient - other).norm()) / norm)
    return found


def _compare_scalars(config: Any, kind: Kind, rows: list[tuple[Array, Array]], folder: Path) -> float:
    """Returns the greatest difference of values or scores, relative to their spread."""
    model = _save(config, kind, folder)
    if kind == "reward":  # a whole row is scored at its last token
        rows = [(np.concatenate(row)[:-1], np.concatenate(row)[-1:]) for row in rows]
    parts = []
    with torch.no_grad():
        for prompt, response in rows:
            ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))
            logits = model(input_ids=ids[None], use_cache=False).logits[0]
            parts.append(logits.reshape(-1)[:1] if kind == "reward" else logits[len(prompt) - 1 : -1, 0])
    expected = torch.cat(parts)
    frozen = FrozenModel(ComputedModelConfig(model=str(folder), ppo_max_token_len_per_gpu=90), kind=kind, device=CPU)
    prompts, responses = zip(*rows, strict=True)
    forward, name = (reward_forward, "scores") if kind == "reward" else (value_forward, "values")
    batch = Batch.from_rows(prompts=prompts, responses=responses)
    computed = frozen.compute(batch, forward, outputs=(name,), progress=lambda *_: None)[name]
    return Difference.of(torch.from_numpy(computed.values), expected).largest / max(1.0, float(expected.std()))


def _compare_sampling(model: Any, rows: list[tuple[Array, Array]]) -> float:
    """Returns the mean difference of the log-probs that the backend hf reports for what it samples.

    What a run refuses is refused here: at the start, or by the check of its first step.
    """
    config = ComputedModelConfig(model=model.name_or_path, use_remove_padding=False)
    frozen = FrozenModel(config, device=CPU)

    gathered = partial(for_generation, frozen.model)
    prove_decoding(gathered, model.name_or_path, CPU, "fp32")
    rollout = HfRollout(gathered=gathered, stop_rule=StopRule(()), max_batch_size=3, device=CPU)
    asked = Batch.from_rows(
        prompts=[prompt for prompt, _ in rows[:5]], seeds=[[7 + 2 * row, 8 + 2 * row] for row in range(5)]
    )
    check_rows(asked, frozen.model, room=_MAX_RESPONSE)
    parts: list[tuple[Tensor, Tensor]] = []
    for step in rollout.generate(asked, Sampling(1.3, 1.0, 0, _MAX_RESPONSE), lambda: False):
        for response in step.ended:
            with torch.no_grad():
                expected = _own_log_probs(model, [(response.prompt, np.array(response.tokens, np.int32))], 1.3)
            parts.append((torch.tensor(list(response.log_probs)), expected))
    found = Difference.of(*(torch.cat(side) for side in zip(*parts, strict=True)))
    rollout_config = RolloutConfig(
        max_log_prob_diff=MAX_LOG_PROB_DIFF["fp32"], max_mean_log_prob_diff=MAX_MEAN_LOG_PROB_DIFF["fp32"]
    )
    try:
        LogProbCheck(rollout_config, 1).compare("the first step", found.largest, found.mean)
    except RolloutMismatch as refusal:
        raise ValueError(str(refusal)) from refusal
    return found.mean
