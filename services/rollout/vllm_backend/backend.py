"""Samples responses with vLLM inside the actor's processes, with a second copy of the policy's weights.

There is one vLLM engine per rank, or one per replica of `rollout.vllm.tensor_model_parallel_size` ranks. The engine is
built once, in the process group of the runtime, and lives as long as the process, because its end would end the process
group, too.

Each turn of a conversation is a vLLM request of its own, whose prompt is all tokens of its context, and so is the rest
of a response that has tokens already; vLLM finds the keys and values of those that it has computed in its prefix cache.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from services.engine.exchange import saved_buffers
from services.engine.model.file_names import FileNames
from services.rollout.protocol import (
    DecodingStep,
    OpenTurns,
    PolicyWeights,
    Response,
    Sampling,
    begin_responses,
)
from services.rollout.sampling import turn_seed
from services.rollout.stopping import StopRule
from services.rollout.vllm_backend.checks import check_temperature, max_model_len
from services.rollout.vllm_backend.engine import build_engine, sleeps
from services.rollout.vllm_backend.process import forget_kernels, import_vllm, pack_heads
from services.rollout.vllm_backend.sampler import SeededSampler
from services.rollout.vllm_backend.tensor_parallel import Replica
from services.rollout.vllm_backend.watched_tokens import WatchedTokens
from services.runtime.command import CommandCancelled
from services.runtime.context import RankContext
from splitppo.batch import Batch


class VllmRollout:
    """The rollout backend that samples with a vLLM engine; see `RolloutBackend`.

    The engine gets the architecture from the model's folder, and the policy's weights at every sync.

    Raises:
        ValueError: vLLM refuses the configuration; the message is one sentence.
    """

    def __init__(self, context: RankContext, policy: PolicyWeights, stop_rule: StopRule) -> None:
        config = context.config
        device = context.device
        self._settings = config.rollout.vllm
        self._policy = policy
        self._stop_rule = stop_rule
        self._file_names = FileNames.of(policy.model)  # vLLM loads the weights as if from a published checkpoint
        self.ranks_per_engine = self._settings.tensor_model_parallel_size
        self._replica = Replica(context.rank, self.ranks_per_engine)
        self._dtype = torch.float32 if config.actor.dtype == "fp32" else torch.bfloat16
        self._max_model_len = max_model_len(config)
        self._sleeps = sleeps(config, device)
        self._is_asleep = False
        self.policy_version: int | None = None
        self._vllm = import_vllm()
        may_converse = bool(config.rollout.multi_turn.environments)
        self.takes_stop_texts = stop_rule.tokenizer is not None and (may_converse or bool(stop_rule.texts))
        self._image_settings = getattr(policy.model, "image_settings", None)
        self._engine = build_engine(
            config, device, has_texts=self.takes_stop_texts, image_settings=self._image_settings
        )
        runner = self._engine.model_executor.driver_worker.model_runner
        self._sampler = SeededSampler(runner) if device.type == "cpu" else None

    def sync_weights(self, version: int) -> None:
        """Loads the policy's weights into vLLM, tensor by tensor, without a third copy; see `RolloutBackend`.

        An engine that sleeps gets memory for its weights first; the rest of it wakes when they are loaded. Results that
        it keeps of older weights are dropped: prefixes, features of images, and on a CPU packed copies.
        """
        self.policy_version = None
        if self._is_asleep:
            self._engine.wake_up(tags=["weights"])
        self._engine.apply_model(forget_kernels)
        weights = itertools.chain(self._policy.whole_weights(self._dtype), saved_buffers(self._policy.model).items())
        named = self._file_names.unstack(weights)
        self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": named})
        self._engine.apply_model(pack_heads)
        self._wake()
        if not self._engine.reset_prefix_cache():
            raise RuntimeError("vLLM could not forget the prefixes that it computed with older weights")
        self._engine.reset_encoder_cache()
        self.policy_version = version

    def sleep(self) -> None:
        """Lets vLLM free its GPU memory until it is used again; see `RolloutBackend.sleep`."""
        if not self._sleeps or self._is_asleep:
            return
        self._engine.sleep(level=self._settings.sleep_level)
        self._is_asleep = True
        if self._settings.sleep_level == 2:  # the weights are gone
            self.policy_version = None

    def check_request(self, sampling: Sampling, num_tokens: int) -> None:
        """Raises ValueError for a temperature or a length that vLLM cannot do; see `RolloutBackend.check_request`."""
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

    def generate(
        self,
        rows: Batch,
        sampling: Sampling,
        is_cancelled: Callable[[], bool],
        open_turns: OpenTurns | None = None,
    ) -> Iterator[DecodingStep]:
        """Samples one response per seed of this rank's prompts; see `RolloutBackend.generate`."""
        self._wake()
        if self._sampler is not None:
            self._sampler.begin(sampling)
        responses = begin_responses(self._replica.share(rows))
        try:
            for response in responses:  # before the first step, so that vLLM's batches do not depend on timing
                self._submit(response, sampling, open_turns)
            yield from self._run(responses, sampling, is_cancelled, open_turns)
        except BaseException:
            self._drop()
            raise

    def _submit(self, response: Response, sampling: Sampling, open_turns: OpenTurns | None) -> None:
        """Submits a vLLM request for a response, or for its next turn: the tokens so far are the request's prompt."""
        position = len(response.tokens)
        rule = self._stop_rule
        most = open_turns.max_tokens(response) if open_turns else rule.max_tokens_now(response, sampling)
        texts = [*rule.texts, *(open_turns.stop_texts(response) if open_turns else ())]
        params = self._sampling_params(sampling, turn_seed(response.seed, position), most - position, texts)
        request = self._engine.add_request(str(response.index), self._input(response), params)
        if self._sampler is not None:
            self._sampler.add(request, response.seed, position)
        if response.num_begun and rule.texts:
            watch = rule.begin(response.prompt, begun=response.tokens)
            self._engine.output_processor.request_states[request].detokenizer = WatchedTokens(watch)

    def _input(self, response: Response) -> Any:
        """Makes the input of a vLLM request: all tokens that the next one follows, with the images among them."""
        from vllm.inputs.engine import tokens_input

        if not response.images:
            return tokens_input(response.context().tolist())
        from services.rollout.vllm_backend.images import image_input

        assert self._image_settings is not None, "a prompt with images was checked"
        return image_input(response.context(), response.images, self._image_settings)

    def _sampling_params(self, sampling: Sampling, seed: int, max_tokens: int, texts: list[str]) -> Any:
        """Returns vLLM's parameters of one request: `max_tokens` at most, ended by the rule's tokens and `texts` alone.

        Greedy requests have neither top-p, top-k nor seed. On a CPU there is no seed either, since `SeededSampler`
        draws.
        """
        greedy = sampling.temperature == 0.0
        return self._vllm.SamplingParams(
            temperature=sampling.temperature,
            top_p=1.0 if greedy else sampling.top_p,
            top_k=0 if greedy else sampling.top_k,
            seed=None if greedy or self._sampler is not None else seed,
            max_tokens=max_tokens,
            stop_token_ids=sorted(self._stop_rule.token_ids),
            ignore_eos=True,  # the rule knows all end-of-sequence tokens
            stop=texts,
            include_stop_str_in_output=True,
            detokenize=bool(texts),
            logprobs=0,  # of the sampled token only
            flat_logprobs=True,
            output_kind=self._vllm.sampling_params.RequestOutputKind.FINAL_ONLY,
        )

    def _run(
        self,
        responses: Sequence[Response],
        sampling: Sampling,
        is_cancelled: Callable[[], bool],
        open_turns: OpenTurns | None,
    ) -> Iterator[DecodingStep]:
        """Steps the vLLM engine until every response has ended; yields the progress after each step.

        A response whose turn ends leaves the engine (`num_waiting`), and is submitted again when its reply is due. The
        other ranks of an engine step along, but only the leader reports. `total` is an estimate: as many steps as
        batches of full responses take.
        """
        total = math.ceil(len(responses) / self._settings.max_num_seqs) * sampling.most_tokens(0)
        engine = self._engine
        num_waiting = 0
        ended: list[Response] = []
        for step in itertools.count():
            is_busy = engine.has_unfinished_requests()
            if not (is_busy or num_waiting or ended):
                return
            if self._replica.agree(is_cancelled, step):
                raise CommandCancelled
            turns: list[Response] = []
            for output in engine.step() if is_busy else ():
                [completion] = output.outputs
                response = responses[int(output.request_id)]
                response.extend(completion.token_ids, completion.logprobs.logprobs)
                if open_turns is None and completion.finish_reason == "length":
                    response.is_unfinished = len(response.tokens) < self._stop_rule.max_tokens(response.seed, sampling)
                goes_on = open_turns and len(response.tokens) < sampling.max_response_length
                (turns if goes_on else ended).append(response)
            done = min(step + 1, total)
            yield DecodingStep(done, total, ended, turns) if self._replica.is_leader else DecodingStep(done, total, ())
            ended = []
            num_waiting += len(turns)
            if open_turns is None or not num_waiting:
                continue
            is_idle = not engine.has_unfinished_requests()
            while (due := self._replica.due(open_turns, step, is_idle=is_idle)) is None:
                yield DecodingStep(done, total, ())
            for index, reply in due:
                num_waiting -= 1
                if reply.is_last:
                    ended.append(responses[index])
                else:
                    responses[index].observe(reply)
                    self._submit(responses[index], sampling, open_turns)

    def _drop(self) -> None:
        """Aborts all vLLM requests that are still being generated."""
        unfinished = list(self._engine.output_processor.request_states)
        self._engine.abort_request(unfinished, internal=True)
        while self._engine.has_unfinished_requests():
            self._engine.step()
