"""The section `rollout`."""

from typing import Annotated, Literal

from pydantic import Field

from splitppo.config.section import CONTROLLER_ONLY, IS_WORK, MAY_CHANGE, NumberOrAuto, PositiveInt, Section

# Under it logits divided by the temperature, or their exponentials, may leave float32 (vLLM raises it to this).
MIN_TEMPERATURE = 0.01


class VllmConfig(Section):
    """The vLLM engine inside the actor's processes (rollout.backend: vllm); names are vLLM's and verl's."""

    tensor_model_parallel_size: PositiveInt = 1
    """ranks that share one engine; divides services.actor.num_processes, the rest are replicas"""

    max_model_len: PositiveInt | None = None
    """tokens of prompt and response; default: data.max_prompt_length + data.max_response_length"""

    max_num_seqs: PositiveInt = 256
    """responses that one engine decodes together"""

    max_num_batched_tokens: PositiveInt = 8192
    """tokens that one engine step computes at most"""

    enable_chunked_prefill: bool = True
    """prompts may be prefilled in pieces, beside decoding"""

    enable_prefix_caching: bool = True
    """prompts that begin alike share their KV cache"""

    kv_cache_gb: float | None = Field(None, gt=0.0)
    """KV cache per rank, GiB; default: 1 on a CPU, by gpu_memory_utilization on a GPU"""

    gpu_memory_utilization: float = Field(0.5, gt=0.0, lt=1.0)
    """share of a GPU's memory for vLLM's weights and KV cache while it generates"""

    enforce_eager: bool = False
    """no CUDA graphs (there are none on a CPU)"""

    sleep_level: Literal[0, 1, 2] = 1
    """GPU memory given back while it does not generate: 0 none, 1 weights (to the host) and KV cache, 2 all"""


class RolloutConfig(Section):
    """Sampling of responses, and the engine that does it."""

    backend: Literal["hf", "vllm"] = "hf"
    """rollout backend: the policy itself, or vLLM beside it"""

    n: Annotated[PositiveInt, IS_WORK] = 1
    """responses per prompt"""

    temperature: float = Field(1.0, ge=MIN_TEMPERATURE)
    """divides the logits, in sampling and in log-probs"""

    top_p: float = Field(1.0, gt=0.0, le=1.0)
    """nucleus; 1 keeps every token"""

    top_k: int = Field(0, ge=0)
    """most likely tokens kept; 0 keeps every token"""

    stop: tuple[str, ...] = ()
    """texts that end a response, beside the end-of-sequence tokens"""

    max_batch_size: Annotated[PositiveInt, MAY_CHANGE] = 256
    """rows that one rank decodes together (hf)"""

    stream_groups: Annotated[NumberOrAuto, CONTROLLER_ONLY] = "auto"
    """parts of a step's responses, in the order in which they end, each sent on while others are still generated;
    auto: 6 where another group than the actor's computes with them and data.max_response_length is at least 64, and
    without algorithm.filter_groups, else 1"""

    check_freq: Annotated[int | None, CONTROLLER_ONLY] = Field(None, ge=0)
    """steps between comparisons of the rollout backend's log-probs with the trainer's, from the first step on; 0:
    never; default: 1 for an engine with weights of its own (vllm), 100 with bypass_mode, else 0"""

    max_log_prob_diff: Annotated[float | None, CONTROLLER_ONLY] = Field(None, gt=0.0)
    """largest difference that such a comparison may find, nats; default: 1e-3 (actor.dtype fp32), 2"""

    vllm: VllmConfig = VllmConfig()
