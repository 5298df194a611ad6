"""verl's keys of data and rewards: `data`, `reward`, and what was `reward_model` and `custom_reward_function`."""

from collections.abc import Iterator
from typing import Any

from controller.from_verl.row import NotNeeded, NotSupported, Row, changed, not_needed, taken, unsupported
from controller.from_verl.run import VerlRun
from controller.from_verl.settings import num_of

_MANAGERS = "naive, dapo, prime and batch are not needed, others not supported"
_LENGTH = "not needed where it is data.max_response_length, else not supported"
_OWN_CLASS = "a class of yours; what it must have: docs/running.md"
_TEXT_ONLY = "text only: prompts with images, videos or sounds are not read"


def _files(value: Any, _: VerlRun) -> Any:
    """A list, or the one file."""
    names = value if isinstance(value, list) else [value]
    if remote := [name for name in names if "://" in str(name)]:
        raise NotSupported(f"copy {remote[0]} here first")
    return names if len(names) > 1 else names[0]


def _limit(value: Any, _: VerlRun) -> Any:
    return None if value is None or num_of(value, "max_samples") <= 0 else value


def _gen_batch(value: Any, run: VerlRun) -> Any:
    if value in (None, run.value("data.train_batch_size")):
        raise NotNeeded("data.train_batch_size says it")
    if not run.value("algorithm.filter_groups.enable"):
        raise NotSupported("without filter_groups.enable a step trains on all that it generates: data.train_batch_size")
    return value


def _sources(value: Any, _: VerlRun) -> Any:
    if value == "data_source":
        raise NotNeeded("the column has this name")
    raise NotSupported("rename the column to data_source")


def _same_length(value: Any, run: VerlRun) -> Any:
    if value == run.value("data.max_response_length"):
        raise NotNeeded("data.max_response_length says it")
    raise NotSupported("the penalty ends at data.max_response_length")


def _reward_manager(value: Any, _: VerlRun) -> Any:
    if value in (None, "naive", "dapo", "prime", "batch"):
        raise NotNeeded("functions are chosen by data_source, each response is scored in a process of its own")
    raise NotSupported("reward.custom_function_path: a function of your own scores each response")


def _reward_model(value: Any, run: VerlRun) -> Any:
    if not run.has_reward_model:
        raise NotNeeded("the reward model is off")
    functions = (run.value(f"{section}custom_reward_function.path") for section in ("reward.", ""))
    if any(functions):
        raise NotSupported("a reward function of your own cannot ask the model; the scores of both are added")
    return value


def _reward_model_dtype(value: Any, run: VerlRun) -> Any:
    _reward_model(value, run)
    return "fp32" if value in ("float32", "fp32") else "bf16"


def _pool(value: Any, run: VerlRun) -> Any:
    _reward_model(value, run)
    return "reward" if run.groups.reward else "critic"


def _data() -> Iterator[Row]:
    yield taken("data.train_files", "data.train_files", "~/data/rlhf/gsm8k/train.parquet", convert=_files)
    yield taken("data.val_files", "data.val_files", "~/data/rlhf/gsm8k/test.parquet", convert=_files)
    yield taken("data.train_batch_size", "data.train_batch_size", 1024)
    yield changed("data.gen_batch_size", "data.gen_batch_size", "only with algorithm.filter_groups.enable", _gen_batch)
    yield taken("data.max_prompt_length", "data.max_prompt_length", 512)
    yield taken("data.max_response_length", "data.max_response_length", 512)
    yield taken("data.prompt_key", "data.prompt_key", "prompt")
    yield changed("data.reward_fn_key", "", "not needed where it is data_source, else not supported", _sources)
    yield changed(
        "data.train_max_samples",
        "data.max_samples",
        "the first ones; with data.shuffle a random choice there",
        _limit,
        -1,
    )
    yield changed(
        "data.val_max_samples",
        "data.val_max_samples",
        "the first ones; with data.shuffle a random choice there",
        _limit,
        -1,
    )
    yield taken("data.shuffle", "data.shuffle", True)
    yield changed("data.seed", "run.seed", "seeds prompt order, sampling and new model heads", default=None)
    yield taken("data.filter_overlong_prompts", "data.filter_overlong_prompts", False)
    yield taken("data.truncation", "data.truncation", "error")
    yield taken("data.tokenizer", "data.tokenizer", None)
    yield taken("data.apply_chat_template_kwargs", "data.apply_chat_template_kwargs", {}, is_section=True)
    yield changed(
        "data.val_batch_size",
        "evaluation.batch_size",
        "prompts per Generate call; all of them there, by default",
        default=None,
    )
    for key in ("custom_cls.path", "custom_cls.name", "sampler.class_path", "sampler.class_name"):
        yield changed(f"data.{key}", f"data.{key}", _OWN_CLASS, default=None)
    yield unsupported("data.datagen.**", "no data is made in a run")
    yield unsupported("data.{tool_config_path,function_tool_path}", "one turn: a prompt, a response")
    yield unsupported(
        "data.{image_key,video_key,audio_key,mm_processor_kwargs}", _TEXT_ONLY, "images", "videos", "audios"
    )
    yield unsupported("data.mm_processor_kwargs.**", _TEXT_ONLY)
    yield not_needed("data.{image_patch_size,return_multi_modal_inputs}", _TEXT_ONLY)
    yield not_needed(
        "data.{validation_shuffle,dataloader_num_workers,filter_overlong_prompts_workers,use_shm}", "speed only"
    )
    yield not_needed(
        "data.{return_raw_input_ids,return_raw_chat,return_full_prompt}", "rows keep their messages and columns"
    )
    yield not_needed("data.trust_remote_code", "a tokenizer is tokenizer.json, without code")


def _rewards() -> Iterator[Row]:
    for section in ("reward.custom_reward_function", "custom_reward_function"):
        yield taken(f"{section}.path", "reward.custom_function_path", None)
        yield taken(f"{section}.name", "reward.custom_function_name", "compute_score" if "." in section else None)
        yield taken(f"{section}.reward_kwargs", "reward.custom_function_kwargs", {}, is_section=True)
    for section in ("reward", "reward_model"):
        yield taken(f"{section}.num_workers", "reward.num_workers", 8 if section == "reward" else None)
        for buffer in ("reward_kwargs.overlong_buffer_cfg", "overlong_buffer"):
            for key in ("enable", "len", "penalty_factor", "log"):
                yield changed(f"{section}.{buffer}.{key}", f"reward.overlong_buffer.{key}", "in training only")
        yield changed(f"{section}.reward_kwargs.max_resp_len", "", _LENGTH, _same_length)
        yield unsupported(f"{section}.reward_kwargs.**", "write the arguments into a reward function of your own")
    yield changed("reward.reward_manager.name", "", _MANAGERS, _reward_manager)
    yield changed("reward_model.reward_manager", "", _MANAGERS, _reward_manager)
    yield unsupported(
        "{reward.reward_manager.source,reward_model.reward_loop_source}", "reward.custom_function_path", "register"
    )
    yield not_needed(
        "{reward.reward_manager.module.*,reward_model.reward_loop_*}", "only with a reward manager of your own"
    )
    both = "its score is added to that of a reward function, where the data_source has one"
    yield changed("{reward.reward_model.model_path,reward_model.model.path}", "reward_model.model", both, _reward_model)
    yield changed(
        "{reward.reward_model,reward_model}.enable",
        "placement.reward_model",
        "the critic's group, or one of its own",
        _pool,
    )
    yield changed(
        "{reward.reward_model,reward_model}.rollout.dtype", "reward_model.dtype", "compute", _reward_model_dtype
    )
    yield not_needed(
        "{reward.reward_model,reward_model}.{enable_resource_pool,n_gpus_per_node,nnodes}",
        "placement.reward_model, services.reward",
    )
    yield not_needed("{reward.reward_model,reward_model}.rollout.**", "one forward pass per response, no engine")
    yield taken("reward_model.max_length", "reward_model.max_length", None, convert=_reward_model)
    yield not_needed(
        "reward_model.model.input_tokenizer", "responses are encoded anew for the reward model, with its own template"
    )
    yield not_needed(
        "reward_model.{strategy,micro_batch_size*,use_dynamic_bsz,forward_max_token_len_per_gpu,ulysses_sequence_parallel_size}",
        "speed and memory only",
    )
    yield not_needed(
        "reward_model.{launch_reward_fn_async,model.**,profiler.**}", "responses are scored while others are generated"
    )
    yield unsupported(
        "{sandbox_fusion,reward.sandbox_fusion,reward_model.sandbox_fusion}.url",
        "the same data sources run in sandboxes here (reward.code), with a limit for all tests of an answer",
    )
    yield not_needed(
        "{sandbox_fusion,reward.sandbox_fusion,reward_model.sandbox_fusion}.*", "only with sandbox_fusion.url"
    )


DATA_ROWS: tuple[Row, ...] = (*_data(), *_rewards())
