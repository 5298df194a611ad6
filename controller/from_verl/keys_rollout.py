"""verl's keys of sampling: `actor_rollout_ref.rollout`."""

from collections.abc import Iterator
from typing import Any

from controller.from_verl.row import NotNeeded, NotSupported, Row, changed, not_needed, slower, taken, unsupported
from controller.from_verl.run import VerlRun

_LENGTHS = "not needed where data says the same, else not supported"
_ROLLOUT, _VLLM = "actor_rollout_ref.rollout", "rollout.vllm"


def _backend(value: Any, _: VerlRun) -> str:
    if value not in ("vllm", "hf", "sglang", "trtllm"):
        raise NotSupported("vllm or hf")
    return "hf" if value == "hf" else "vllm"


def _vllm_only(value: Any, run: VerlRun) -> Any:
    if not run.uses_vllm:
        raise NotNeeded("only with rollout.backend vllm")
    return value


def _tensor_parallel(value: Any, run: VerlRun) -> Any:
    _vllm_only(value, run)
    return run.groups.tensor_parallel


def _top_k(value: Any, _: VerlRun) -> int:
    return 0 if value is None else max(0, int(value))


def _sleep_level(value: Any, run: VerlRun) -> int:
    _vllm_only(value, run)
    return 1 if value else 0


def _same_as_data(key: str) -> Any:
    def convert(value: Any, run: VerlRun) -> Any:
        if value == run.value(key):
            raise NotNeeded(f"{key} says it")
        raise NotSupported(f"{key} is the one length")

    return convert


def _sampled(value: Any, _: VerlRun) -> Any:
    if value:
        raise NotNeeded("rollouts are sampled")
    raise NotSupported("rollouts are sampled; validation is greedy by evaluation.temperature 0")


def _rows() -> Iterator[Row]:
    yield changed(
        f"{_ROLLOUT}.name", "rollout.backend", "vllm in place of other engines: the same distribution", _backend, "vllm"
    )
    yield taken(f"{_ROLLOUT}.n", "rollout.n", 1)
    yield taken(f"{_ROLLOUT}.temperature", "rollout.temperature", 1.0)
    yield taken(f"{_ROLLOUT}.top_p", "rollout.top_p", 1)
    yield changed(f"{_ROLLOUT}.top_k", "rollout.top_k", "0: every token, -1 there", _top_k, -1)
    yield changed(f"{_ROLLOUT}.do_sample", "", "true is not needed, false not supported", _sampled)
    yield unsupported(f"{_ROLLOUT}.ignore_eos", "a response ends with the end-of-sequence token")
    yield changed(
        f"{_ROLLOUT}.tensor_model_parallel_size",
        f"{_VLLM}.tensor_model_parallel_size",
        "a divisor of the actor's GPUs",
        _tensor_parallel,
        2,
    )
    for key, default in (
        ("gpu_memory_utilization", 0.5),
        ("max_num_seqs", 256),
        ("max_num_batched_tokens", 8192),
        ("max_model_len", None),
        ("enforce_eager", False),
        ("enable_chunked_prefill", True),
        ("enable_prefix_caching", True),
    ):
        yield taken(f"{_ROLLOUT}.{key}", f"{_VLLM}.{key}", default, convert=_vllm_only)
    yield changed(
        f"{_ROLLOUT}.free_cache_engine",
        f"{_VLLM}.sleep_level",
        "1: memory is given back while it does not generate; 0: kept",
        _sleep_level,
        True,
    )
    yield changed(f"{_ROLLOUT}.prompt_length", "", _LENGTHS, _same_as_data("data.max_prompt_length"))
    yield changed(f"{_ROLLOUT}.response_length", "", _LENGTHS, _same_as_data("data.max_response_length"))
    yield taken(f"{_ROLLOUT}.val_kwargs.n", "evaluation.n", 1)
    yield taken(f"{_ROLLOUT}.val_kwargs.temperature", "evaluation.temperature", 0, note="0: greedy")
    yield taken(f"{_ROLLOUT}.val_kwargs.top_p", "evaluation.top_p", 1.0)
    yield changed(f"{_ROLLOUT}.val_kwargs.top_k", "evaluation.top_k", "0: every token, -1 there", _top_k, -1)
    yield not_needed(f"{_ROLLOUT}.val_kwargs.do_sample", "val_kwargs.temperature says it, as to verl's agent loop")
    yield unsupported(f"{_ROLLOUT}.logprobs_mode", "log-probs are of what was sampled from", "processed_logprobs")
    yield unsupported(f"{_ROLLOUT}.over_sample_rate", "every rollout that is asked for is awaited", 0, 0.0)
    yield unsupported(
        f"{_ROLLOUT}.{{quantization,quantization_config_file}}", "the engine samples with the policy's own weights"
    )
    yield unsupported(f"{_ROLLOUT}.qat.enable", "the engine samples with the policy's own weights")
    yield unsupported(f"{_ROLLOUT}.mtp.{{enable,enable_rollout}}", "no speculative decoding")
    yield unsupported(f"{_ROLLOUT}.enable_rollout_routing_replay", "no replay of expert routing")
    yield unsupported(f"{_ROLLOUT}.multi_turn.enable", "one turn: a prompt, a response")
    yield not_needed(f"{_ROLLOUT}.multi_turn.**", "only with multi_turn.enable")
    yield unsupported(f"{_ROLLOUT}.agent.default_agent_loop", "one turn: a prompt, a response", "single_turn_agent")
    yield unsupported(
        f"{_ROLLOUT}.agent.{{agent_loop_config_path,custom_async_server.path,custom_async_server.name}}",
        "one turn: a prompt, a response",
    )
    yield not_needed(f"{_ROLLOUT}.agent.**", "the actor's ranks sample themselves")
    yield unsupported(f"{_ROLLOUT}.skip.enable", "every step samples anew")
    yield unsupported(f"{_ROLLOUT}.skip_rollout", "every step samples anew")
    yield not_needed(f"{_ROLLOUT}.{{skip.**,skip_dump_dir}}", "every step samples anew")
    yield not_needed(f"{_ROLLOUT}.engine_kwargs.{{sglang,trtllm}}.**", "of another engine")
    yield not_needed(
        f"{_ROLLOUT}.engine_kwargs.vllm.{{disable_mm_preprocessor_cache,swap_space,attention_backend}}",
        "speed and memory only",
    )
    yield unsupported(f"{_ROLLOUT}.engine_kwargs.**", "what may be set of vLLM is in rollout.vllm")
    yield unsupported(f"{_ROLLOUT}.engine_kwargs", "what may be set of vLLM is in rollout.vllm")
    yield slower(
        f"{_ROLLOUT}.{{data_parallel_size,expert_parallel_size,pipeline_model_parallel_size}}",
        "tensor_model_parallel_size; the rest of the actor's GPUs are replicas",
        1,
    )
    yield slower(f"{_ROLLOUT}.nnodes", "rollouts are sampled on the actor's GPUs", 0)
    yield slower(f"{_ROLLOUT}.disaggregation.enabled", "one engine prefills and decodes")
    yield slower(f"{_ROLLOUT}.prometheus.enable", "metrics.jsonl, and the health of every worker by grpcurl")
    yield slower(f"{_ROLLOUT}.trace.backend", "tracking.dump_rollouts")
    yield not_needed(f"{_ROLLOUT}.{{disaggregation,prometheus,trace,profiler,mtp,qat}}.**", "off, or of Ray")
    yield not_needed(f"{_ROLLOUT}.{{mtp,qat,profiler}}", "off")
    yield not_needed(f"{_ROLLOUT}.log_prob_*", "what is only computed goes in the micro-batches of actor.ppo_*_per_gpu")
    yield not_needed(f"{_ROLLOUT}.{{seed,full_determinism}}", "every response has a seed of its own, from run.seed")
    yield not_needed(f"{_ROLLOUT}.dtype", "actor.dtype")
    yield not_needed(f"{_ROLLOUT}.mode", "the engine is in the actor's processes")
    yield not_needed(f"{_ROLLOUT}.calculate_log_probs", "always: every step compares them")
    yield not_needed(
        f"{_ROLLOUT}.{{checkpoint_engine.**,update_weights_bucket_megabytes,load_format,layered_summon,multi_stage_wake_up,n_gpus_per_node}}",
        "the policy's weights are in the engine's own processes",
    )
    yield not_needed(
        f"{_ROLLOUT}.{{cudagraph_capture_sizes,disable_log_stats,skip_tokenizer_init,scheduling_policy,router_config_path,"
        "moe_load_balance_metrics_interval,limit_images}",
        "speed and logs only",
    )


ROLLOUT_ROWS: tuple[Row, ...] = tuple(_rows())
