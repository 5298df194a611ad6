"""Converts verl's keys of data and rewards (`data`, `reward`, older names of `reward`) into keys of SplitPPO.

The older names are `reward_model` and `custom_reward_function`.
"""

from collections.abc import Iterator
from typing import Any

from controller.commands.from_verl.keys_engines import ENGINES, SPEED, any_engine, rest_of_engines
from controller.commands.from_verl.keys_rollout import ENGINE_OPTIONS, TOOL_FILES
from controller.commands.from_verl.row import Noted, NotNeeded, NotSupported, Row, Section, needless, same_as
from controller.commands.from_verl.run import VerlRun
from controller.commands.from_verl.settings import num_of

_FUNCTIONS = "functions are chosen by data_source, and run in processes of their own"
_FIRST_ROWS = "the first rows; verl takes random rows with data.shuffle"
_LENGTH = "not needed if it is data.max_response_length, else not supported"
_OWN_CLASS = "your class; docs/extending/prompts.md says what it must have"
_NO_OTHER_MEDIA = "texts and images only: a row with videos or sounds is refused"
_OTHER_COLUMN = "one column of images, data.image_key; videos and sounds are not read"
_PIXELS_ONLY = "min_pixels and max_pixels alone; all else is that of the model's preprocessor_config.json"
_OF_THE_MODEL = "sizes of patches are those of the model, whose pixels are always made anew from the files"


def _files(value: Any, _: VerlRun) -> Any:
    """Converts verl's data files (a path or a list) into a list, or into the one path; refuses URLs."""
    names = value if isinstance(value, list) else [value]
    if remote := [name for name in names if "://" in str(name)]:
        raise NotSupported(f"copy {remote[0]} to this machine first")
    return names[0] if len(names) == 1 else names


def _limit(value: Any, _: VerlRun) -> Any:
    return None if value is None or num_of(value, "max_samples") <= 0 else value


def _gen_batch(value: Any, run: VerlRun) -> Any:
    """Keeps verl's data.gen_batch_size, the prompts of a round, with filter_groups only; else it is needed for nothing.

    Without filter_groups it equals the train batch, or replaces it (`_trains_on_gen_batch`; the row of
    data.train_batch_size converts it then), or is only how much verl reads at a time: a divisor of the train batch.
    """
    if value in (None, run.value("data.train_batch_size")):
        raise NotNeeded("same value as data.train_batch_size")
    if run.value("algorithm.filter_groups.enable"):
        return value
    if _trains_on_gen_batch(run):
        raise NotNeeded(
            "without filter_groups.enable a step trains on all these prompts: data.train_batch_size gets this number"
        )
    if num_of(run.value("data.train_batch_size"), "data.train_batch_size") % num_of(value, "data.gen_batch_size"):
        raise NotSupported("a divisor of data.train_batch_size")
    raise NotNeeded("only how many prompts verl reads at a time")


def _trains_on_gen_batch(run: VerlRun) -> bool:
    """Returns True if verl's step has data.gen_batch_size prompts, and not data.train_batch_size.

    That is so in its trainers up to 0.8, and in 0.9 without `trainer.use_v1`, if no group of samples is filtered.
    """
    is_v1 = run.settings.version >= (0, 9) and run.value("trainer.use_v1")
    has_size = run.value("data.gen_batch_size") is not None
    return has_size and not is_v1 and not run.value("algorithm.filter_groups.enable") and not _is_fully_async(run)


def _is_fully_async(run: VerlRun) -> bool:
    return any(key.startswith("async_training.") for key in run.settings.given)


def _train_batch(value: Any, run: VerlRun) -> Any:
    """Keeps verl's data.train_batch_size, unless data.gen_batch_size is what a step trains on."""
    if not _trains_on_gen_batch(run):
        return value
    return Noted(run.value("data.gen_batch_size"), "data.gen_batch_size: without filter_groups.enable a step has these")


def _reward_model(value: Any, run: VerlRun) -> Any:
    """Keeps a value that concerns the reward model, if the run has one that adds its score to those of functions.

    NotSupported: in verl a function of the user's own calls the reward model by itself.
    """
    if not run.has_reward_model:
        raise NotNeeded("the reward model is off")
    functions = (run.value(f"{section}custom_reward_function.path") for section in ("reward.", ""))
    if any(functions):
        raise NotSupported("a reward function of your own cannot call the reward model; here both scores are added")
    return value


def _reward_model_dtype(value: Any, run: VerlRun) -> Any:
    _reward_model(value, run)
    return "fp32" if value in ("float32", "fp32") else "bf16"


def _pool(value: Any, run: VerlRun) -> Any:
    _reward_model(value, run)
    return "reward" if run.has_reward_pool else "critic"


def _data(data: Section) -> Iterator[Row]:
    """Yields the table rows of verl's section `data`: files, lengths, order of the prompts, and other kinds of data."""
    folder = "~/data/rlhf/gsm8k"
    yield from data.all_taken(_files, train_files=f"{folder}/train.parquet", val_files=f"{folder}/test.parquet")
    yield data.taken("train_batch_size", 1024, _train_batch)
    yield data.changed("gen_batch_size", "gen_batch_size", "only with algorithm.filter_groups.enable", _gen_batch)
    yield from data.all_taken(max_prompt_length=512, max_response_length=512, prompt_key="prompt")
    sources = needless(["data_source"], "the column has this name", "rename the column to data_source")
    yield data.checked("reward_fn_key", "not needed if it is data_source, else not supported", sources)
    yield data.changed("train_max_samples", "max_samples", _FIRST_ROWS, _limit, -1)
    yield data.changed("val_max_samples", "val_max_samples", _FIRST_ROWS, _limit, -1)
    yield data.taken("shuffle", True)
    elsewhere = Section("data")
    yield elsewhere.changed("seed", "run.seed", "seeds prompt order, sampling and new model heads", default=None)
    yield from data.all_taken(filter_overlong_prompts=False, truncation="error", tokenizer=None)
    yield data.taken("apply_chat_template_kwargs", {}, is_section=True)
    prompts = "prompts per Generate call; verl's default: all prompts"
    yield elsewhere.changed("val_batch_size", "evaluation.batch_size", prompts, default=None)
    for key in ("custom_cls.path", "custom_cls.name", "sampler.class_path", "sampler.class_name"):
        yield data.changed(key, key, _OWN_CLASS, default=None)
    yield data.unsupported("datagen.**", "no prompts are made during a run")
    yield data.not_needed("continuous_token.{enable,model_family}", "what was sampled is never encoded anew")
    for name in TOOL_FILES:
        key = f"actor_rollout_ref.rollout.multi_turn.{name}"
        yield data.checked(name, "not needed if multi_turn has the same, else not supported", same_as(key, key))
    yield data.taken("image_key", "images")
    for medium in ("video", "audio"):
        own_name = needless((f"{medium}s",), _NO_OTHER_MEDIA, _NO_OTHER_MEDIA)
        note = f"not needed if it is {medium}s, else not supported"
        yield data.checked(f"{medium}_key", note, own_name, f"{medium}s")
    yield data.unsupported("{image_keys,video_keys,audio_keys}", _OTHER_COLUMN)
    for key in ("min_pixels", "max_pixels"):
        yield data.renamed(f"mm_processor_kwargs.{key}", key)
    yield data.unsupported("mm_processor_kwargs", _PIXELS_ONLY)
    others = needless((), "", _PIXELS_ONLY)
    yield data.checked("mm_processor_kwargs.**", f"not supported: {_PIXELS_ONLY}", others)
    yield data.not_needed("{image_patch_size,return_multi_modal_inputs}", _OF_THE_MODEL)
    workers = "{validation_shuffle,dataloader_num_workers,filter_overlong_prompts_workers,use_shm}"
    yield data.not_needed(workers, "speed only")
    messages = "{return_raw_input_ids,return_raw_chat,return_full_prompt,need_tools_kwargs}"
    yield data.not_needed(messages, "rows keep their messages and columns")
    yield data.not_needed("trust_remote_code", "tokenizers are read from tokenizer.json, which has no code")


def _functions() -> Iterator[Row]:
    """Yields the table rows of verl's reward functions and managers, under their present and their older names.

    Where an older name has no default here, verl's default is that of the present name.
    """
    function = Section("reward.custom_reward_function", "reward")
    older_function = Section("custom_reward_function", "reward")
    for section, default_name in ((function, "compute_score"), (older_function, None)):
        yield section.renamed("path", "custom_function_path", default=None)
        yield section.renamed("name", "custom_function_name", default=default_name)
        yield section.renamed("reward_kwargs", "custom_function_kwargs", default={}, is_section=True)
    for rewards, default_workers in ((Section("reward", "reward"), 8), (Section("reward_model", "reward"), None)):
        yield rewards.taken("num_workers", default=default_workers)
        for buffer in ("reward_kwargs.overlong_buffer_cfg", "overlong_buffer"):
            for key in ("enable", "len", "penalty_factor", "log"):
                yield rewards.changed(f"{buffer}.{key}", f"overlong_buffer.{key}", "in training only")
        same_length = same_as("data.max_response_length", "the penalty ends at data.max_response_length")
        yield rewards.checked("reward_kwargs.max_resp_len", _LENGTH, same_length)
        yield rewards.unsupported("reward_kwargs.**", "write the arguments into a reward function of your own")
    yield from _managers(Section(""))


def _managers(top: Section) -> Iterator[Row]:
    """Yields the table rows of verl's reward managers, which call the reward functions."""
    own = "reward.custom_function_path: a function of your own scores each response"
    managers = needless((None, "naive", "dapo", "prime", "batch"), _FUNCTIONS, own)
    for key in ("reward.reward_manager.name", "{reward_model.reward_manager,reward_manager.name}"):
        yield top.checked(key, "naive, dapo, prime and batch are not needed, others not supported", managers)
    own_manager = "{reward.reward_manager.source,reward_manager.source,reward_model.reward_loop_source}"
    yield top.unsupported(own_manager, "reward.custom_function_path", "register")
    for manager in ("reward.reward_manager", "reward_manager"):
        yield top.not_needed(f"{manager}.module.{{path,name}}", "only with a reward manager of your own")
    older = "reward_model.{reward_loop_class_name,reward_loop_module_path}"
    yield top.not_needed(older, "only with a reward manager of your own")
    yield top.not_needed("reward_model.use_reward_loop", "functions are chosen by data_source, and always called here")


def _models(top: Section, model: Section) -> Iterator[Row]:
    """Yields the table rows of verl's reward model and code sandbox; `model` is the section with older key names."""
    alone = "its score alone, in training (reward_model.rule_coef 0); reward functions score validation"
    path = "{reward.reward_model.model_path,reward_model.model.path}"
    both = Section("{reward.reward_model,reward_model}")
    yield top.changed(path, "reward_model.model", alone, _reward_model)
    yield both.changed("enable", "placement.reward_model", "the critic's group, or a group of its own", _pool)
    yield both.changed("rollout.dtype", "reward_model.dtype", "of the computation", _reward_model_dtype)
    yield both.not_needed("{enable_resource_pool,n_gpus_per_node,nnodes}", "placement.reward_model, services.reward")
    yield both.unsupported("rollout.{quantization,quantization_config_file,mtp,qat.enable}", "its weights as they are")
    yield both.not_needed(f"rollout.{ENGINE_OPTIONS}", "one forward pass per response, no engine")
    logs = "rollout.{disaggregation,prometheus,trace,profiler}{,.**}"
    yield both.tree_not_needed(logs, "one forward pass per response, no engine")
    yield model.taken("max_length", None, _reward_model)
    yield model.renamed("{param_offload,model.fsdp_config.param_offload,megatron.param_offload}", "param_offload")
    yield model.not_needed("model.input_tokenizer", "responses are encoded anew, with the model's own template")
    yield model.not_needed(
        "{strategy,micro_batch_size,micro_batch_size_per_gpu,use_dynamic_bsz,forward_max_token_len_per_gpu,"
        "ulysses_sequence_parallel_size,nccl_timeout,load_weight,model.use_shm,model.use_remove_padding,"
        "model.use_fused_kernels}",
        SPEED,
    )
    yield model.not_needed("launch_reward_fn_async", "scoring runs during generation")
    yield model.tree_not_needed("{profiler,model.profiler}.**", "scoring is in trace.json")
    yield model.unsupported("model.type", "a model with one score for each response", "discriminative")
    yield model.not_needed("model.trust_remote_code", "a model that brings its own code is refused when it is loaded")
    engine = Section(f"{model.verl}.{ENGINES}")
    yield engine.not_needed("{fsdp_size,optimizer_offload,offload_policy,ulysses_sequence_parallel_size}", SPEED)
    yield engine.changed("dtype", "reward_model.dtype", "of the computation", _reward_model_dtype)
    yield from any_engine(model.verl)
    yield from rest_of_engines(model.verl)
    yield model.unsupported(
        "model.{override_config,external_lib}{,.**}", "write it into the model folder's config.json"
    )
    sandbox = Section("{sandbox_fusion,reward.sandbox_fusion,reward_model.sandbox_fusion}")
    limit = "code answers run in local sandboxes here (reward.code), with one limit for all tests of an answer"
    yield sandbox.unsupported("url", limit)
    yield sandbox.not_needed("{max_concurrent,memory_limit_mb}", "only with sandbox_fusion.url")


DATA_ROWS: tuple[Row, ...] = (
    *_data(Section("data", "data")),
    *_functions(),
    *_models(Section(""), Section("reward_model", "reward_model")),
)
