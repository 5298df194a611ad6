"""Converts verl's keys about rollouts and their engine (`actor_rollout_ref.rollout`) into keys of SplitPPO."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from controller.commands.from_verl.keys_engines import OF_MTP, OF_QAT
from controller.commands.from_verl.row import (
    Noted,
    NotNeeded,
    NotSupported,
    Row,
    Section,
    mapped,
    needless,
    one_of,
    only_if,
    same_as,
)
from controller.commands.from_verl.run import VerlRun
from controller.commands.from_verl.settings import num_of
from splitppo.config.subsections.multi_turn import MAX_OBSERVATION_LENGTH, TOOL_FORMATS

_LENGTHS = "not needed if data has the same length, else not supported"
_TOP_K = "0: every token; in verl -1"
_ROLLOUT = "actor_rollout_ref.rollout"
_PARSER = "a parser of your own: rollout.multi_turn.tool_format, as file.py:function"
_SHORT_ENGINE = "with several turns, and less than prompt and response: rollout.multi_turn.max_context_length"
_TEMPLATE_TOKENS = 32  # of a chat template, around the texts of tools
_OTHER_ENGINES = (
    "sglang.attention_backend,sglang.chunked_prefill_size,sglang.disable_overlap_schedule,sglang.disable_radix_cache,"
    "sglang.enable_dp_attention,sglang.enable_draft_weights_cpu_backup,sglang.enable_memory_saver,"
    "sglang.enable_weights_cpu_backup,sglang.mamba_scheduler_strategy,sglang.mem_fraction_static,"
    "sglang.disable_cuda_graph,sglang.max_running_requests,trtllm.batch_wait_max_tokens_ratio,"
    "trtllm.batch_wait_timeout_iters,trtllm.moe_config.backend"
)
# verl's options of engines for reward models and teachers, which have no engine here.
ENGINE_OPTIONS = (
    "{name,engine_kwargs,engine_kwargs.vllm.mm_processor_cache_gb,tensor_model_parallel_size,data_parallel_size,"
    "expert_parallel_size,pipeline_model_parallel_size,moe_tensor_parallel_size,gpu_memory_utilization,max_model_len,"
    "max_num_seqs,max_num_batched_tokens,enforce_eager,free_cache_engine,enable_chunked_prefill,enable_prefix_caching,"
    "cudagraph_capture_sizes,disable_log_stats,skip_tokenizer_init,load_format,layered_summon,multi_stage_wake_up,"
    "limit_images,scheduling_policy,prompt_length,response_length,n,temperature,top_k,top_p,do_sample,ignore_eos,seed,"
    "full_determinism}"
)
TOOL_FILES = ("tool_config_path", "function_tool_path")
ENVIRONMENTS = "name your functions or an environment of your own in rollout.multi_turn.environments"
_OTHER_DISTRIBUTION = "sampled by temperature, top_p and top_k alone: the trainer's log-probs know no other change"
_OWN_WEIGHTS = "the engine samples with the policy's own weights"
_SAMPLES_ANEW = "every step samples new responses"
_with_vllm = partial(only_if, lambda _, run: run.uses_vllm, "only with rollout.backend vllm")
_vllm_only = _with_vllm()
_if_turns = partial(only_if, lambda _, run: run.has_turns, "only with multi_turn.enable, or an agent loop")


def _off_section(value: Any, _: VerlRun) -> Any:
    """Raises NotNeeded if all that would switch a section of verl on is off in it, else NotSupported."""
    if isinstance(value, dict) and not any(value.get(key) for key in ("enable", "enable_train", "enable_rollout")):
        raise NotNeeded("off")
    raise NotSupported(_OWN_WEIGHTS)


def _top_k(value: Any, _: VerlRun) -> int:
    return 0 if value is None else max(0, int(value))


def _rows(rollout: Section, vllm: Section) -> Iterator[Row]:
    """Yields the table rows of verl's section of rollouts; `vllm` is the same section, with keys for rollout.vllm.

    A key gets the first row that matches it, so patterns of keys stand behind the keys.
    """
    backends = mapped({"vllm": "vllm", "sglang": "vllm", "trtllm": "vllm", "hf": "hf"}, "vllm or hf")
    yield rollout.changed("name", "backend", "vllm replaces other engines: same distribution", backends, "vllm")
    yield from rollout.all_taken(n=1, temperature=1.0, top_p=1)
    yield rollout.changed("top_k", "top_k", _TOP_K, _top_k, -1)
    always = "rollouts are always sampled"
    sampled = needless((True,), always, f"{always}; for greedy validation set evaluation.temperature to 0")
    yield rollout.checked("do_sample", "true is not needed, false not supported", sampled)
    yield rollout.unsupported("repetition_penalty", _OTHER_DISTRIBUTION, 1, 1.0)
    yield rollout.unsupported("{min_p,presence_penalty,frequency_penalty}", _OTHER_DISTRIBUTION, 0, 0.0)
    yield rollout.unsupported("ignore_eos", "a response ends with the end-of-sequence token")
    yield from _vllm_rows(vllm)
    for name in ("prompt_length", "response_length"):
        yield rollout.checked(name, _LENGTHS, same_as(f"data.max_{name}", f"data.max_{name} is the one length"))
    yield from _validation_rows(Section(f"{rollout.verl}.val_kwargs", "evaluation"))
    yield from _other_results(rollout)
    yield from _turn_rows(rollout, Section(f"{_ROLLOUT}.multi_turn", "rollout.multi_turn"))
    yield rollout.unsupported("{skip.enable,skip_rollout}", _SAMPLES_ANEW)
    skipped = "{skip.action,skip.dump_dir,skip.max_dump_step,skip.steps,skip_dump_dir}"
    yield rollout.not_needed(skipped, _SAMPLES_ANEW)
    yield from _engine_rows(rollout, vllm)
    yield from _other_speed(rollout)
    yield from _not_needed(rollout)


def _vllm_rows(vllm: Section) -> Iterator[Row]:
    """Yields the table rows of the options of vLLM that SplitPPO has, too."""
    size = "tensor_model_parallel_size"
    divisor = "a divisor of the GPUs that sample"
    yield vllm.changed(size, size, divisor, _with_vllm(lambda _, run: run.groups.tensor_parallel), 2)
    yield from vllm.all_taken(_vllm_only, gpu_memory_utilization=0.5, max_num_seqs=256, max_num_batched_tokens=8192)
    yield vllm.taken("max_model_len", None, _with_vllm(_max_model_len), note=_SHORT_ENGINE)
    yield vllm.taken("enforce_eager", False, _vllm_only)
    yield from vllm.all_taken(_vllm_only, enable_chunked_prefill=True, enable_prefix_caching=True)
    sleep = "2: gives memory back while it does not generate; 0: keeps it"
    level = _with_vllm(lambda value, _: 2 if value else 0)
    hybrid = "${actor_rollout_ref.hybrid_engine}"
    yield vllm.changed("free_cache_engine", "sleep_level", sleep, level, hybrid)


def _max_model_len(value: Any, run: VerlRun) -> Any:
    """Returns the length of the engine; one that cuts conversations off is the limit of a context."""
    length = None if value is None else int(num_of(value, "max_model_len"))
    if length is None or not run.has_turns or length >= run.longest_row:
        return length
    cut = "a turn ends where the context is full, and the conversation goes on if its environment begins another"
    return Noted(length, cut, "rollout.multi_turn.max_context_length")


def _validation_rows(validation: Section) -> Iterator[Row]:
    """Yields the table rows of how validation samples."""
    yield validation.taken("n", 1)
    yield validation.taken("temperature", 0, note="0: greedy")
    yield validation.taken("top_p", 1.0)
    yield validation.changed("top_k", "top_k", _TOP_K, _top_k, -1)
    yield validation.not_needed("do_sample", "val_kwargs.temperature decides, as in verl's agent loop")


def _other_results(rollout: Section) -> Iterator[Row]:
    """Yields the table rows of keys that change what is sampled or learned, and that SplitPPO does not have."""
    yield rollout.unsupported("logprobs_mode", "log-probs are those of the sampled distribution", "processed_logprobs")
    yield rollout.unsupported("over_sample_rate", "a step waits for all its rollouts", 0, 0.0)
    yield rollout.unsupported("{quantization,quantization_config_file,qat.enable}", _OWN_WEIGHTS)
    yield rollout.unsupported("mtp.{enable,enable_train,enable_rollout}", "no speculative decoding")
    yield rollout.unsupported("use_fire_sampling", "tokens of a response are all sampled at one temperature")
    yield rollout.unsupported("{chat_scheduler,multi_turn.completion_callback}", ENVIRONMENTS)
    yield rollout.unsupported(
        "enable_rollout_routing_replay", "no replay of expert routing; set algorithm.rollout_correction.rollout_is"
    )


def _other_speed(rollout: Section) -> Iterator[Row]:
    """Yields the table rows of keys that SplitPPO does not have, and that change only speed, placement or logs."""
    spread = "{data_parallel_size,expert_parallel_size,moe_tensor_parallel_size,pipeline_model_parallel_size}"
    yield rollout.slower(spread, "tensor_model_parallel_size; other GPUs have replicas", 1)
    yield rollout.slower("nnodes", "rollout.nnodes, with hybrid_engine=False", 0)
    yield rollout.slower("disaggregation.enabled", "one engine prefills and decodes")
    yield rollout.slower("prometheus.enable", "read metrics.jsonl; grpcurl asks workers for their health")
    yield rollout.slower("trace.backend", "tracking.dump_rollouts")
    yield rollout.tree_not_needed("{disaggregation,prometheus,trace,profiler}{,.**}", "where engines run, and logs")


def _not_needed(rollout: Section) -> Iterator[Row]:
    """Yields the table rows of keys that need no counterpart, each with the reason."""
    for section in ("mtp", "qat"):
        yield rollout.checked(section, "not needed if it is off, else not supported", _off_section)
    yield rollout.not_needed(f"mtp.{{{OF_MTP}}}", "only with multi-token prediction")
    yield rollout.not_needed(f"qat.{OF_QAT}", "only with qat.enable")
    log_probs = "{log_prob_micro_batch_size,log_prob_micro_batch_size_per_gpu,log_prob_use_dynamic_bsz"
    batches = "forward passes use the micro-batches of actor.ppo_*_per_gpu"
    yield rollout.not_needed(f"{log_probs},log_prob_max_token_len_per_gpu}}", batches)
    yield rollout.not_needed("{seed,full_determinism}", "every response has its own seed, derived from run.seed")
    yield rollout.not_needed("dtype", "actor.dtype sets it")
    yield rollout.not_needed("trust_remote_code", "a model that brings its own code is refused when it is loaded")
    yield rollout.not_needed("layer_name_map.{qkv_layer_name,gate_proj_layer_name}", "only with Megatron")
    yield rollout.not_needed("mode", "the engine is in the processes of the ranks")
    yield rollout.not_needed("calculate_log_probs", "always calculated")
    yield rollout.not_needed(
        "{checkpoint_engine.backend,checkpoint_engine.update_weights_bucket_megabytes,checkpoint_engine.engine_kwargs,"
        "checkpoint_engine.custom_backend_module,checkpoint_engine.engine_kwargs.delta_sharded.encoding,"
        "update_weights_bucket_megabytes,load_format,layered_summon,multi_stage_wake_up,n_gpus_per_node}",
        "weights come from the same process, or as files in rollout.sync_dir",
    )
    yield rollout.unsupported("checkpoint_engine.**", "weights reach the engine as they are")
    yield rollout.not_needed(
        "{cudagraph_capture_sizes,disable_log_stats,skip_tokenizer_init,scheduling_policy,router_config_path,"
        "moe_load_balance_metrics_interval}",
        "speed and logs only",
    )
    yield rollout.not_needed("limit_images", "as many as a row of the data has")


def _turn_rows(rollout: Section, turns: Section) -> Iterator[Row]:
    """Yields the table rows of conversations of several turns, and of verl's agent loops."""
    of_tools = f"not needed with tools; else {ENVIRONMENTS}"
    yield turns.checked("enable", of_tools, _turns_by_tools)
    rewards = "the files as they are; rewards of tools count, which verl only records"
    for name in TOOL_FILES:
        yield turns.changed(name, "environments", rewards, _environments)
    yield turns.unsupported("interaction_config_path", ENVIRONMENTS)
    most = "or max_user_turns + 1, if that is less; without a limit: the tokens of a response"
    yield turns.changed("max_assistant_turns", "max_turns", most, _if_turns(_max_turns), 0)
    yield turns.not_needed("max_user_turns", "part of rollout.multi_turn.max_turns")
    yield turns.taken("max_parallel_calls", 1, _if_turns())
    length = "the tokens of all that follows a turn; verl's is the characters of each tool's text"
    yield turns.changed("max_tool_response_length", "max_observation_length", length, _if_turns(_length), 256)
    yield turns.renamed("format", "tool_format", "hermes", _if_turns(one_of(TOOL_FORMATS, _PARSER)))
    yield turns.unsupported("tool_response_truncate_side", "a long text is cut in its middle", "middle")
    yield turns.unsupported("use_inference_chat_template", "what was sampled stays in the conversation as it is")
    yield turns.unsupported("num_repeat_rollouts", "rollout.n")
    checks = "{tokenization_sanity_check_mode,enable_tokenization_sanity_check}"
    yield turns.not_needed(checks, "what was sampled is never encoded anew")
    yield rollout.checked("agent.default_agent_loop", f"tool_agent is {of_tools}", _turns_by_tools)
    agents = "agent.{agent_loop_config_path,custom_async_server.path,custom_async_server.name}"
    contexts = "several outputs of an agent loop are contexts of one conversation (chat.restart)"
    bounds = "data.max_response_length bounds all of them together, rollout.multi_turn.max_context_length each"
    yield rollout.unsupported(agents, f"{ENVIRONMENTS}; {contexts}: {bounds}")
    yield rollout.not_needed("agent.num_workers", "the ranks that have the engine sample")


def _tools_of(run: VerlRun) -> list[Any]:
    return [path for name in TOOL_FILES if (path := run.value(f"{_ROLLOUT}.multi_turn.{name}"))]


def _environments(_: Any, run: VerlRun) -> dict[str, Any]:
    return {"default": {"tools": _tools_of(run)}}


def _turns_by_tools(value: Any, run: VerlRun) -> Any:
    """Checks that several turns are off, or are those of tools, which turn them on here.

    Always raises: NotSupported for turns by other means, else NotNeeded.
    """
    if value in (False, "single_turn_agent"):
        raise NotNeeded("off")
    if value not in (True, "tool_agent") or not _tools_of(run):
        raise NotSupported(ENVIRONMENTS)
    raise NotNeeded("responses have several turns by their tools")


def _max_turns(value: Any, run: VerlRun) -> Any:
    """Returns how many turns of the model verl allows at most: limited by its turns, and by one more than the user's.

    Without any limit there can be one turn for each token of a response.
    """
    of_user = run.value(f"{_ROLLOUT}.multi_turn.max_user_turns")
    limits = [num_of(value, "max_assistant_turns")] if value else []
    limits += [num_of(of_user, "max_user_turns") + 1] if of_user else []
    return int(min(limits, default=num_of(run.value("data.max_response_length"), "max_response_length")))


def _length(value: Any, run: VerlRun) -> int:
    """Converts the characters of a tool's text into tokens of all that follows a turn, so that no more is cut."""
    calls = num_of(run.value(f"{_ROLLOUT}.multi_turn.max_parallel_calls"), "max_parallel_calls")
    length = num_of(value, "max_tool_response_length") * calls + _TEMPLATE_TOKENS
    return min(int(length), MAX_OBSERVATION_LENGTH)


def _engine_rows(rollout: Section, vllm: Section) -> Iterator[Row]:
    """Yields the table rows of engine_kwargs, the options that verl passes on to vLLM and to other engines."""
    yield rollout.not_needed(f"engine_kwargs.{{{_OTHER_ENGINES}}}", "speed and memory only, of another engine")
    yield rollout.not_needed(
        "engine_kwargs.vllm.{disable_mm_preprocessor_cache,swap_space,attention_backend,block_size,"
        "compilation_config,compilation_config.cudagraph_mode,compilation_config.cudagraph_capture_sizes,"
        "compilation_config.level,compilation_config.mode,compilation_config.use_cudagraph,"
        "max_seq_len_to_capture,cpu_offload_gb,num_gpu_blocks_override,async_scheduling,enable_sleep_mode,"
        "enable_expert_parallel,mm_processor_cache_gb,distributed_executor_backend,additional_config.enable_cpu_binding}",
        "speed and memory only",
    )
    merged = "adapters are merged into the weights that vLLM gets"
    yield rollout.not_needed(
        "engine_kwargs.vllm.{enable_lora,max_loras,max_lora_rank,max_cpu_loras,fully_sharded_loras}", merged
    )
    yield vllm.renamed(
        "engine_kwargs.vllm.max_model_len", "max_model_len", convert=_with_vllm(_max_model_len), note=_SHORT_ENGINE
    )
    yield rollout.unsupported("engine_kwargs{,.**}", "rollout.vllm has the options of vLLM that can be set")


ROLLOUT_ROWS: tuple[Row, ...] = tuple(_rows(Section(_ROLLOUT, "rollout"), Section(_ROLLOUT, "rollout.vllm")))
