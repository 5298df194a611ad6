"""The configuration section `rollout`: how responses are sampled, and by which rollout backend."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from splitppo.config.section import (
    CONTROLLER_ONLY,
    IS_WORK,
    MAY_CHANGE,
    Key,
    NumberOrAuto,
    PositiveInt,
    Section,
    ShareOrAuto,
    expected,
)
from splitppo.config.subsections.multi_turn import MultiTurnConfig

# At a lower temperature, logits divided by it, or their exponentials, may leave float32 (vLLM raises it to this).
MIN_TEMPERATURE = 0.01
_IS_WORK_OF_CONTROLLER = Key(shapes_worker=False, is_work=True)
AbsolutePath = Annotated[str, expected("an absolute path", lambda folder: not folder or Path(folder).is_absolute())]


class VllmConfig(Section):
    """The settings of the vLLM engine in the processes of the group that samples, used with rollout.backend vllm.

    The names of the keys are those of vLLM and verl.
    """

    tensor_model_parallel_size: PositiveInt = 1
    """The number of ranks that share one engine. It divides the ranks of each group that samples; the other ranks
    hold further engines."""

    max_model_len: PositiveInt | None = None
    """The largest number of tokens in a prompt with its response, or in a context of a conversation. null:
    rollout.multi_turn.max_context_length, or if that is null data.max_prompt_length + data.max_response_length."""

    max_num_seqs: PositiveInt = 256
    """The largest number of responses that one engine decodes at the same time."""

    max_num_batched_tokens: PositiveInt = 8192
    """The largest number of tokens that one engine computes in one of its steps."""

    enable_chunked_prefill: bool = True
    """If true, a prompt may be computed in several pieces, while other responses are decoded."""

    enable_prefix_caching: bool = True
    """If true, prompts that begin with the same tokens share the KV cache of these tokens."""

    kv_cache_gb: float | None = Field(None, gt=0.0)
    """The size of the KV cache of each rank, in GiB. null: 1 on a CPU; on a GPU gpu_memory_utilization sets it, when
    the other groups that use this GPU are ready."""

    gpu_memory_utilization: float = Field(0.5, gt=0.0, lt=1.0)
    """The share of a GPU's memory that vLLM may use for weights and KV cache while it generates. Without kv_cache_gb,
    so much must be free when vLLM starts."""

    enforce_eager: bool = False
    """If true, vLLM uses no CUDA graphs. On a CPU there are none in any case."""

    sleep_level: Annotated[Literal[0, 1, 2] | None, MAY_CHANGE] = None
    """The GPU memory that vLLM gives back while it does not generate. 0: none, which is refused for a rollout group
    on GPUs of the critic. 1: the KV cache, and the weights, which move to pinned main memory. 2: KV cache and weights,
    both dropped. null: 2 if the actor's group samples, because its engine gets new weights before it generates again; 1
    if only a rollout group does, which may generate several times with the same weights."""


class RolloutConfig(Section):
    """The settings of sampling responses in training, and the rollout backend that samples."""

    backend: Literal["hf", "vllm"] = "hf"
    """The engine that samples. hf: the policy of the trainer itself. vllm: vLLM with a copy of the policy's weights."""

    n: Annotated[PositiveInt, IS_WORK] = 1
    """The number of responses that are sampled for each prompt."""

    temperature: float = Field(1.0, ge=MIN_TEMPERATURE)
    """The number that divides the logits, when tokens are sampled and when their log-probs are computed."""

    top_p: float = Field(1.0, gt=0.0, le=1.0)
    """Tokens are sampled from the smallest set of most likely tokens whose probabilities add up to this number. 1: from
    all tokens."""

    top_k: int = Field(0, ge=0)
    """Tokens are sampled from this many most likely tokens. 0: from all tokens."""

    stop: tuple[str, ...] = ()
    """Texts that end a response when they appear in it, in addition to the end-of-sequence tokens."""

    max_batch_size: Annotated[PositiveInt, MAY_CHANGE] = 256
    """The largest number of responses that one rank decodes at the same time, with rollout.backend hf."""

    stream_groups: Annotated[NumberOrAuto, CONTROLLER_ONLY] = "auto"
    """The number of parts into which the responses of a step are divided, in the order in which they end. Other groups
    compute with a part while the next parts are still generated. auto: 6 if a group other than the actor's computes
    with the parts, data.max_response_length is at least 64, staleness is 0, max_step_tokens is null and
    algorithm.filter_groups is off; else 1. A resumed run keeps its number."""

    staleness: Annotated[Literal[0, 1], CONTROLLER_ONLY] = 0
    """The number of updates between the weights that sample the responses of a step and the weights that learn from
    them. 1: the responses of the next step are sampled before the update of this step. Then
    algorithm.rollout_correction must have rollout_is or bypass_mode."""

    max_step_tokens: Annotated[int | None, _IS_WORK_OF_CONTROLLER] = Field(None, ge=1, lt=2**31)
    """The largest number of tokens of each response that are sampled before a step learns (partial rollouts). A longer
    response goes on in the next step, with the weights of that step. A step learns from the oldest complete prompts.
    Then algorithm.rollout_correction must have rollout_is token, or bypass_mode. null: a step samples whole
    responses."""

    overcommit: Annotated[float, _IS_WORK_OF_CONTROLLER] = Field(1.5, ge=1.0)
    """The number of unfinished responses that are sampled at the same time if max_step_tokens is set, as a multiple of
    data.train_batch_size x n. There are fewer while complete prompts wait, so that at most one batch of them waits."""

    share: ShareOrAuto = "auto"
    """The share of the prompts that the group of services.rollout answers, from 0 to 1; the actor's group answers the
    rest. 1: that group samples all responses; 0: the actor's group does, and that group is not started. auto: 1, unless
    services.rollout has the devices or cpus of services.critic, and staleness is 0; then its ranks divided by the ranks
    of both groups that sample, or 0 if the critic's update is longer than the actor's. A resumed run keeps its
    share."""

    sync_dir: Annotated[AbsolutePath, MAY_CHANGE] = ""
    """The absolute path of the folder in which the actor publishes the weights for the group of services.rollout. Both
    groups must see it. Several runs may share it; each needs room for three versions until it has ended. It may lie in
    main memory, e.g. in /dev/shm. Empty: the folder weights in the run folder."""

    check_freq: Annotated[int | None, CONTROLLER_ONLY] = Field(None, ge=0)
    """The number of steps from one comparison of the rollout backend's log-probs with the trainer's to the next,
    beginning with the first step of a start. 0: never, as with staleness 1 and with max_step_tokens. null: 1 with
    rollout.backend vllm; with hf 100 if every step computes old log-probs or bypass_mode is on, else 0."""

    max_log_prob_diff: Annotated[float | None, CONTROLLER_ONLY] = Field(None, gt=0.0)
    """The largest difference of log-probs, in nats, that a comparison (check_freq) may find. A larger difference ends
    the run. null: 0.001 with actor.dtype fp32, 2 with bf16."""

    max_mean_log_prob_diff: Annotated[float | None, CONTROLLER_ONLY] = Field(None, gt=0.0)
    """The largest mean difference of log-probs, in nats, over all tokens of a comparison. A larger mean ends the run.
    null: ten times what the dtype usually shows, 0.0001 with actor.dtype fp32, 0.3 with bf16."""

    multi_turn: Annotated[MultiTurnConfig, CONTROLLER_ONLY] = MultiTurnConfig()
    vllm: VllmConfig = VllmConfig()

    @property
    def has_older_weights(self) -> bool:
        """True if steps learn from responses of weights before the last update: `staleness` or `max_step_tokens`."""
        return self.staleness > 0 or self.max_step_tokens is not None
