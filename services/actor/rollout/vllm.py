"""Rollout on vLLM, inside the actor's processes: paged attention, continuous batching, weights of its own.

One engine per rank, or one per replica of `rollout.vllm.tensor_model_parallel_size` ranks. The engine is built once, in
the process group that the shell has made, and lives as long as the process: dropping it would take the process group
with it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from services.actor.rollout.protocol import Cancelled, Listener, PromptRows, Rollout, Sampling
from services.actor.rollout.replica import Replica
from services.actor.rollout.stopping import StopRule
from services.actor.rollout.vllm_process import import_vllm, kept_random_state, local_rank, pack_heads
from services.actor.rollout.vllm_sampler import SeededSampler
from splitppo.batch import Array, Column
from splitppo.config import Config

log = logging.getLogger(__name__)

GIB = 1 << 30
MAX_TEMPERATURE = 2.0
# Engine steps between two questions whether anybody still wants the responses, where ranks share an engine.
_STEPS_PER_QUESTION = 8

# Gives the policy's weights one after the other, whole, under their Hugging Face names, in a dtype. Collective.
Weights = Callable[[torch.dtype], Iterator[tuple[str, Tensor]]]


class VllmRollout:
    """Samples with an engine of its own, which takes the policy's weights over when it is told to.

    Args:
        config: of the run; the sections rollout, data and actor.
        model: folder of the model, for its architecture; weights are not read from it.
        weights: of the policy.
        replica: the ranks that share the engine.
        stop_rule: when responses end.
        device: of this rank.

    Raises:
        ValueError: vLLM refuses the configuration: one sentence of it.
    """

    def __init__(
        self,
        config: Config,
        *,
        model: str,
        weights: Weights,
        replica: Replica,
        stop_rule: StopRule,
        device: torch.device,
    ) -> None:
        self._settings = config.rollout.vllm
        self._weights, self._replica, self._stop_rule = weights, replica, stop_rule
        self._dtype = torch.float32 if config.actor.dtype == "fp32" else torch.bfloat16
        self._max_model_len = max_model_len(config)
        self._sleeps = device.type == "cuda" and self._settings.sleep_level > 0
        self._is_asleep = False
        self._policy_version: int | None = None
        is_cpu = device.type == "cpu"
        self._vllm = import_vllm()
        self._engine = self._build_engine(config, model, device)
        self._sampler = SeededSampler(self._engine.model_executor.driver_worker.model_runner) if is_cpu else None

    def _build_engine(self, config: Config, model: str, device: torch.device) -> Any:
        from vllm.v1.engine.llm_engine import LLMEngine

        settings = self._settings
        arguments = self._vllm.EngineArgs(
            model=model,
            tokenizer=config.data.tokenizer or model,
            skip_tokenizer_init=not self._stop_rule.texts,
            generation_config="vllm",  # sampling is ours alone to say
            load_format="dummy",  # the policy's weights come by sync_weights
            dtype="float32" if self._dtype is torch.float32 else "bfloat16",
            seed=0,  # every response has its own
            max_model_len=self._max_model_len,
            tensor_parallel_size=settings.tensor_model_parallel_size,
            distributed_executor_backend="external_launcher",
            kv_cache_memory_bytes=kv_cache_bytes(config),
            gpu_memory_utilization=settings.gpu_memory_utilization,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=self._max_num_batched_tokens(),
            enable_chunked_prefill=settings.enable_chunked_prefill,
            enable_prefix_caching=settings.enable_prefix_caching,
            enforce_eager=settings.enforce_eager or device.type == "cpu",
            enable_sleep_mode=self._sleeps,
            logprobs_mode=log_probs_mode(config),
            disable_log_stats=True,
        )
        with kept_random_state(), local_rank(device.index or 0):
            try:
                return LLMEngine.from_engine_args(arguments, enable_multiprocessing=False)
            except (ValueError, RuntimeError) as error:
                if isinstance(error, torch.OutOfMemoryError | torch.distributed.DistError):
                    raise
                raise ValueError(f"vLLM refuses the rollout (rollout.vllm): {_sentence(error)}") from error

    def _max_num_batched_tokens(self) -> int:
        """What is configured, but no more than there can be, and no less than vLLM needs for one step of all rows."""
        settings = self._settings
        least = settings.max_num_seqs if settings.enable_chunked_prefill else self._max_model_len
        most = settings.max_num_seqs * self._max_model_len
        return max(min(settings.max_num_batched_tokens, most), least, settings.max_num_seqs)

    @property
    def policy_version(self) -> int | None:
        """See `RolloutBackend.policy_version`."""
        return self._policy_version

    def sync_weights(self, version: int) -> None:
        """See `RolloutBackend.sync_weights`; one tensor after the other, never a second whole model."""
        self._policy_version = None
        if self._is_asleep:
            self._engine.wake_up(tags=["weights"])
        self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": self._weights(self._dtype)})
        self._engine.apply_model(pack_heads)
        self._wake()
        if not self._engine.reset_prefix_cache():
            raise RuntimeError("vLLM could not forget the prefixes that it computed with older weights")
        self._policy_version = version

    def sleep(self) -> None:
        """See `RolloutBackend.sleep`."""
        if not self._sleeps or self._is_asleep:
            return
        self._engine.sleep(level=self._settings.sleep_level)
        self._is_asleep = True
        if self._settings.sleep_level == 2:  # the weights are gone
            self._policy_version = None

    def check_request(self, sampling: Sampling, num_tokens: int) -> None:
        """See `RolloutBackend.check_request`."""
        check_temperature(sampling.temperature, "the request's temperature")
        if num_tokens > self._max_model_len:
            raise ValueError(
                f"the longest prompt and its response have {num_tokens} tokens, the engine takes {self._max_model_len}"
                " (rollout.vllm.max_model_len)"
            )

    def _wake(self) -> None:
        if self._is_asleep:
            self._engine.wake_up()
            self._is_asleep = False

    def generate(self, rows: PromptRows, sampling: Sampling, listener: Listener) -> Rollout:
        """See `RolloutBackend.generate`.

        Raises:
            FloatingPointError: the policy gives a sampled token no finite log-prob.
        """
        self._wake()
        shared = self._replica.share(rows)
        responses = _Responses(shared, listener if self._replica.is_leader else None)
        try:
            self._submit(shared, sampling)
            self._run(responses, sampling, listener)
        except BaseException:
            self._drop()
            raise
        return responses.rollout() if self._replica.is_leader else _Responses(rows, None).rollout()

    def _submit(self, rows: PromptRows, sampling: Sampling) -> None:
        """Hands over all rows at once, in order: what is computed together is a function of the rows alone."""
        from vllm.inputs.engine import tokens_input

        row = 0
        if self._sampler is not None:
            self._sampler.begin(sampling)
        for prompt, seeds in zip(rows.prompts, rows.seeds, strict=True):
            tokens = prompt.tolist()
            for seed in seeds.tolist():
                params = self._sampling_params(sampling, seed)
                request_id = self._engine.add_request(str(row), tokens_input(tokens), params)
                if self._sampler is not None:
                    self._sampler.add(request_id, seed)
                row += 1

    def _sampling_params(self, sampling: Sampling, seed: int) -> Any:
        greedy = sampling.temperature == 0.0
        texts = list(self._stop_rule.texts)
        return self._vllm.SamplingParams(
            temperature=sampling.temperature,
            top_p=1.0 if greedy else sampling.top_p,
            top_k=0 if greedy else sampling.top_k,
            seed=None if greedy or self._sampler is not None else seed,
            max_tokens=sampling.max_response_length,
            stop_token_ids=sorted(self._stop_rule.token_ids),
            ignore_eos=True,  # the rule knows all end-of-sequence tokens
            stop=texts,
            include_stop_str_in_output=True,
            detokenize=bool(texts),
            logprobs=0,  # of the sampled token only
            flat_logprobs=True,
            output_kind=self._vllm.sampling_params.RequestOutputKind.FINAL_ONLY,
        )

    def _run(self, responses: _Responses, sampling: Sampling, listener: Listener) -> None:
        """Steps the engine until every response has ended."""
        num_waves = math.ceil(responses.num_rows / self._settings.max_num_seqs)
        total = max(1, num_waves * sampling.max_response_length)
        step = 0
        while self._engine.has_unfinished_requests():
            if self._is_cancelled(step, listener):
                raise Cancelled
            for output in self._engine.step():
                [completion] = output.outputs
                responses.add(int(output.request_id), completion.token_ids, completion.logprobs.logprobs)
            step += 1
            listener.progress(min(step, total), total)

    def _is_cancelled(self, step: int, listener: Listener) -> bool:
        if self._replica.num_ranks == 1:
            return listener.is_cancelled
        return step % _STEPS_PER_QUESTION == 0 and self._replica.agree(listener.is_cancelled)

    def _drop(self) -> None:
        """Forgets what is still being generated."""
        unfinished = list(self._engine.output_processor.request_states)
        self._engine.abort_request(unfinished, internal=True)
        while self._engine.has_unfinished_requests():
            self._engine.step()


class _Responses:
    """The responses to a rank's prompts, as they end.

    Args:
        rows: what was asked for.
        listener: is told of every group that has ended; None: nobody is.
    """

    def __init__(self, rows: PromptRows, listener: Listener | None) -> None:
        num_samples = np.array([len(seeds) for seeds in rows.seeds], np.int64)
        self._groups = np.repeat(rows.groups, num_samples)
        self._listener = listener
        self._tokens: list[Array | None] = [None] * len(self._groups)
        self._log_probs: list[Array] = [np.empty(0, np.float32)] * len(self._groups)
        groups, counts = np.unique(self._groups, return_counts=True)
        self._num_missing = dict(zip(groups.tolist(), counts.tolist(), strict=True))

    @property
    def num_rows(self) -> int:
        return len(self._groups)

    def add(self, row: int, tokens: Sequence[int], log_probs: Sequence[float]) -> None:
        """A response that has ended."""
        self._tokens[row] = np.asarray(tokens, np.int32)
        self._log_probs[row] = np.asarray(log_probs, np.float32)
        if not np.isfinite(self._log_probs[row]).all():
            raise FloatingPointError(
                "the policy gives a sampled token no finite log-prob: its weights hold NaN or infinity"
            )
        group = int(self._groups[row])
        self._num_missing[group] -= 1
        if self._listener is not None and not self._num_missing[group]:
            self._listener.group_ended(group, self.rollout(np.flatnonzero(self._groups == group)))

    def rollout(self, rows: Sequence[int] | Array | None = None) -> Rollout:
        """Some rows that have ended; by default all."""
        rows = range(self.num_rows) if rows is None else rows
        tokens = [self._tokens[row] for row in rows]
        assert all(own is not None for own in tokens)
        return Rollout(
            Column.from_rows(tokens, np.dtype(np.int32)),  # type: ignore[arg-type]
            Column.from_rows([self._log_probs[row] for row in rows], np.dtype(np.float32)),
        )


def max_model_len(config: Config) -> int:
    """Tokens of prompt and response that the engine takes."""
    return config.rollout.vllm.max_model_len or config.data.max_prompt_length + config.data.max_response_length


def check_temperature(temperature: float, name: str) -> None:
    """ValueError where vLLM takes no such temperature."""
    if temperature > MAX_TEMPERATURE:
        raise ValueError(f"vLLM takes temperatures of 0 to {MAX_TEMPERATURE:g}, {name} is {temperature:g}")


def kv_cache_bytes(config: Config) -> int | None:
    """Size of each rank's KV cache; None: what is left of the GPU's share."""
    settings = config.rollout.vllm
    if settings.kv_cache_gb is None:
        return None if config.services.actor.devices else GIB
    return int(settings.kv_cache_gb * GIB)


def log_probs_mode(config: Config) -> str:
    """How vLLM computes log-probs: of the logits as they are, or after temperature, top-k and top-p.

    The contract wants them after temperature and before the cuts. On a CPU our own sampler sees to it. On a GPU it is
    neither where both are used; then they are those of the distribution that was sampled from.
    """
    rollout = config.rollout
    cuts = bool(config.services.actor.devices) and (rollout.top_p < 1.0 or rollout.top_k > 0)
    return "raw_logprobs" if cuts and rollout.temperature == 1.0 else "processed_logprobs"


def _sentence(error: Exception) -> str:
    return " ".join(str(error).split())
