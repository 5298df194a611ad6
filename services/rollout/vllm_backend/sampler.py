"""Replaces the token sampler of vLLM on a CPU by one that depends on seed and position alone.

A token is a function of its response's seed and its position, as with the Hugging Face backend: the same seed gives the
same token. vLLM's own sampler on a CPU uses a generator per request, which it cannot rewind after a prefill in
pieces, and the generator of the process. (On a GPU the sampler of vLLM is stateless, and is used.)

Shapes: R requests of one engine step, V vocabulary.
"""

from dataclasses import replace
from typing import Any

from torch import Tensor

from services.rollout.protocol import Sampling
from services.rollout.sampling import sample_tokens, uniforms


class SeededSampler:
    """Replaces the part of vLLM's sampler after temperature: top-k, top-p and the choice of tokens by seed.

    The input batch of vLLM's model runner names the request of each row, and the row's number of tokens.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._sampling = Sampling(1.0, 1.0, 0, 1)
        self._seeds: dict[str, tuple[int, int]] = {}
        runner.sampler.topk_topp_sampler.forward = self._sample

    def begin(self, sampling: Sampling) -> None:
        """Sets the sampling parameters, and forgets all seeds; called at the beginning of a command."""
        self._sampling = replace(sampling, temperature=1.0)  # vLLM divides the logits
        self._seeds.clear()

    def add(self, request_id: str, seed: int, position: int) -> None:
        """Sets the seed of a vLLM request, and the position in its response of the first token that it samples."""
        self._seeds[request_id] = seed, position

    def _sample(
        self, logits_RV: Tensor, _generators: object, _top_k: object, _top_p: object
    ) -> tuple[Tensor, Tensor | None]:
        """Samples tokens [R] by seed and position; returns them with the log-probs [R, V] before top-k and top-p."""
        batch = self._runner.input_batch
        num_rows = len(logits_RV)
        seeds_R, begins_R = zip(*(self._seeds[request_id] for request_id in batch.req_ids[:num_rows]), strict=True)
        sampled_R = (batch.num_tokens_no_spec - batch.num_prompt_tokens)[:num_rows]
        tokens_R, _ = sample_tokens(logits_RV, uniforms(seeds_R, begins_R + sampled_R), self._sampling)
        return tokens_R, logits_RV.log_softmax(dim=-1)
