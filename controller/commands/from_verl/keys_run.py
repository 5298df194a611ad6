"""Converts verl's keys of `algorithm` and `trainer`, and keys outside all sections, into keys of SplitPPO."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, get_args

from controller.commands.from_verl.row import NotNeeded, NotSupported, Row, Section, if_rewarded, one_of, only_if
from controller.commands.from_verl.run import VerlRun
from controller.commands.from_verl.settings import num_of
from splitppo.config.section import KlEstimator
from splitppo.config.sections.tracking import TrackingConfig
from splitppo.config.subsections.estimator import NEEDS
from splitppo.config.subsections.rejection import parse_weight_bounds

_CORRECTION = "algorithm.rollout_correction"
_LOWER = "rollout_rs_threshold_lower"
VETO = f"{_CORRECTION}.rollout_token_veto_threshold"
_OLD_REJECTIONS = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}
_SAMPLES_ANEW = "every step samples new responses"
_TIMELESS = "which weights sample is never a matter of time"
_TRACE = "trace.json has every call of a step, for Perfetto"
_TRACKERS = get_args(get_args(TrackingConfig.model_fields["trackers"].annotation)[0])


def _estimator(value: Any, run: VerlRun) -> Any:
    """Returns the name of the advantage estimator; NotSupported for one that is unknown here."""
    if run.is_taught_alone:
        return "reinforce_plus_plus"  # makes nothing of scores of 0
    name = str(value).removesuffix("_vectorized")  # the same formula, computed in another way
    names = f"one of {', '.join(NEEDS)}, or a function of your own: docs/extending.md"
    return one_of(NEEDS, names)(name, run)


def _reinforces(run: VerlRun) -> bool:
    policy_gradient = run.value(f"{_CORRECTION}.use_policy_gradient")
    return bool(policy_gradient) or run.value(f"{_CORRECTION}.loss_type") == "reinforce"


def _bypasses(run: VerlRun) -> bool:
    return bool(run.value(f"{_CORRECTION}.bypass_mode"))


_weights = only_if(
    lambda _, run: _reinforces(run) or not _bypasses(run),
    "with bypass_mode and ppo_clip verl only measures weights: the ratio includes them",
)
_if_bypassed = partial(only_if, lambda _, run: _bypasses(run), "only with bypass_mode")
_loss_type = _if_bypassed(lambda value, run: "reinforce" if _reinforces(run) else value)


def _is_threshold(value: Any, run: VerlRun) -> Any:
    """Keeps the bounds of importance-sampling weights (IS); NotNeeded without such weights, NotSupported if wrong."""
    if run.value(f"{_CORRECTION}.rollout_is") is None or value is None:
        raise NotNeeded("only with rollout_is")
    try:
        parse_weight_bounds(value)
    except ValueError as error:
        raise NotSupported(str(error)) from None
    return value


def _normalizes(value: Any, run: VerlRun) -> Any:
    """Keeps whether IS weights are divided by their mean over the batch; NotSupported where verl takes another mean."""
    _weights(value, run)
    if value and _bypasses(run) and run.value(f"{_CORRECTION}.rollout_is"):
        raise NotSupported("with bypass_mode verl divides the weights by the mean of each micro-batch")
    return value


def _rejects(value: Any, _: VerlRun) -> Any:
    """Converts a name of verl's rejection rule (rollout_rs) into the name in SplitPPO.

    Rules of verl up to 0.7.0 bound the ratio of the probabilities; k1 is minus the logarithm of this ratio.
    """
    return _OLD_REJECTIONS.get(value, value)


def _rejection_bounds(value: Any, run: VerlRun) -> Any:
    """Returns the bounds outside of which responses are rejected, as verl writes them.

    Older rules of verl bound the ratio, from lower to upper. Here they become k1, which bounds the inverse ratio: from
    1/upper to 1/lower. A ratio without a lower bound has 1/upper as that, so its inverse goes up to upper.
    """
    if value is None or run.value(f"{_CORRECTION}.rollout_rs") not in _OLD_REJECTIONS:
        return value
    upper = num_of(value, f"{_CORRECTION}.rollout_rs_threshold")
    lower = run.value(f"{_CORRECTION}.{_LOWER}")
    highest = upper if lower is None else 1.0 / num_of(lower, _LOWER)
    return f"{1.0 / upper!r}_{highest!r}"


def _veto(value: Any, _: VerlRun) -> str:
    if not 0.0 < num_of(value, VETO) < 1.0:
        raise NotSupported("rollout_rs: seq_max_k1, with a probability ratio between 0 and 1")
    return "seq_max_k1"


def rules_with_veto(run: VerlRun) -> Mapping[str, str]:
    """Returns rollout_rs and its thresholds, by their keys, with verl's veto as one more rule.

    The veto rejects a response with a token whose probability ratio of trainer to rollout is below a threshold: a bound
    of the greatest inverse ratio. Versions of verl that have it have at most one other rule.
    """
    rule, bounds = (run.value(f"{_CORRECTION}.{key}") for key in ("rollout_rs", "rollout_rs_threshold"))
    rules = [] if rule is None else [(_rejects(rule, run), _rejection_bounds(bounds, run))]
    rules.append(("seq_max_k1", 1.0 / num_of(run.value(VETO), VETO)))
    names, thresholds = zip(*rules, strict=True)
    keys = {"rollout_rs": names, "rollout_rs_threshold": thresholds}
    return {f"{_CORRECTION}.{key}": ",".join(map(str, values)) for key, values in keys.items()}


def _freq(value: Any, _: VerlRun) -> int:
    return int(value) if value and num_of(value, "freq") > 0 else -1


def _warmup(value: Any, _: VerlRun) -> int:
    return max(0, int(num_of(value, "trainer.critic_warmup")) - 1)


def _loggers(value: Any, _: VerlRun) -> list[Any]:
    """Converts verl's list of experiment trackers: returns those that SplitPPO has, too, and leaves out all others."""
    return [name for name in (value if isinstance(value, list) else [value]) if name in _TRACKERS]


def _gpus(_: Any, run: VerlRun) -> str:
    """Describes the GPUs of each process group as text for the report on the translation; `translate` sets the keys."""
    return " + ".join(f"{count} {role}" for role, count in run.groups.ranks().items())


_machines = only_if(lambda value, _: value != 1, "one machine", _gpus)
_staleness = only_if(lambda value, _: not value, "rollouts are sampled on the actor's GPUs", lambda *_: 1)


def _rollout_gpus(_: Any, run: VerlRun) -> str:
    if not run.has_rollout_pool:
        raise NotSupported("only with actor_rollout_ref.hybrid_engine=False, as in verl")
    return f"{run.groups.rollout} rollout"


def _resume(value: Any, run: VerlRun) -> Any:
    return run.value("trainer.resume_from_path") if value == "resume_path" else value


def _keep(value: Any, run: VerlRun) -> Any:
    """Returns how many checkpoints to keep: the larger of verl's two numbers; None (all) if one is null or below 1."""
    keys = [f"trainer.max_{role}_ckpt_to_keep" for role in ("actor", "critic")]
    kept = [run.value(key) for key in keys if key in run.settings.given] or [value]
    return None if any(number is None or num_of(number, keys[0]) <= 0 for number in kept) else int(max(kept))


def _max_gen_batches(value: Any, _: VerlRun) -> Any:
    return int(max(num_of(value, "algorithm.filter_groups.max_num_gen_batches"), 0))


def _algorithm(algorithm: Section, correction: Section) -> Iterator[Row]:
    """Yields the table rows of verl's section `algorithm`, with those of its sections correction and filter_groups."""
    yield from _estimator_rows(algorithm)
    yield from _kl_rows(algorithm)
    yield from _correction_rows(algorithm, correction)
    yield from _filter_rows(Section("algorithm.filter_groups", "algorithm.filter_groups"))
    yield algorithm.unsupported("use_pf_ppo", "every response is used once per epoch")
    yield algorithm.not_needed("pf_ppo.{reweight_method,weight_pow}", "only with use_pf_ppo")


def _estimator_rows(algorithm: Section) -> Iterator[Row]:
    """Yields the rows of the advantage estimator, and of the rewards that it takes."""
    taught_alone = "distillation without rewards has no estimator"
    yield algorithm.changed("adv_estimator", "adv_estimator", taught_alone, convert=_estimator, default="gae")
    yield from algorithm.all_taken(gamma=1.0, lam=1.0, norm_adv_by_std_in_grpo=True)
    yield algorithm.taken("use_kl_in_reward", False, if_rewarded())
    gdpo = only_if(lambda _, run: run.value("algorithm.adv_estimator") == "gdpo", "only gdpo has components")
    yield from algorithm.all_taken(gdpo, gdpo_reward_keys=None, gdpo_reward_weights=None)


def _kl_rows(algorithm: Section) -> Iterator[Row]:
    """Yields the rows of the KL penalty in the rewards, and of its controller."""
    yield algorithm.taken("kl_penalty", "kl", one_of(get_args(KlEstimator)))
    yield algorithm.renamed("kl_ctrl.type", "kl_ctrl", "fixed")
    yield algorithm.renamed("kl_ctrl.kl_coef", "kl_coef", 0.001)
    yield algorithm.renamed("kl_ctrl.horizon", "kl_horizon", 10000)
    yield algorithm.renamed("kl_ctrl.target_kl", "kl_target", 0.1)


def _correction_rows(algorithm: Section, correction: Section) -> Iterator[Row]:
    """Yields the rows of rollout_correction, and of the keys of `algorithm` that older versions of verl have for it."""
    yield correction.taken("rollout_is", None, _weights)
    yield correction.taken("rollout_is_threshold", 2.0, _is_threshold)
    yield correction.taken("rollout_is_batch_normalize", False, _normalizes)
    ratios = "token, sequence and geometric, of verl up to 0.7.0, become k1, which bounds the inverse ratio"
    yield correction.changed("rollout_rs", "rollout_rs", ratios, convert=_rejects, default=None)
    yield correction.changed(
        "rollout_rs_threshold", "rollout_rs_threshold", ratios, convert=_rejection_bounds, default=None
    )
    yield correction.not_needed(_LOWER, "a part of rollout_rs_threshold", None)
    veto = "one more rule, seq_max_k1, which bounds the inverse ratio"
    yield correction.changed("rollout_token_veto_threshold", "rollout_rs", veto, convert=_veto)
    gradient = only_if(lambda value, _: value, "loss_type sets it", _loss_type)
    yield correction.changed(
        "use_policy_gradient", "loss_type", "true: loss_type reinforce", convert=gradient, default=False
    )
    auto = "auto, the default here: log-probs of the policy, from the trainer or the rollout backend"
    yield correction.taken(
        "bypass_mode", "${verl_not:${actor_rollout_ref.hybrid_engine}}", only_if(lambda value, _: value, auto)
    )
    yield correction.taken("loss_type", "ppo_clip", _loss_type)
    moved = "algorithm.rollout_correction: rollout_is is the level, rollout_rs replaces mask and veto"
    yield algorithm.unsupported("rollout_is_threshold", moved)
    older = "{rollout_is,rollout_is_level,rollout_is_mode,rollout_is_threshold_lower,rollout_is_veto_threshold}"
    yield algorithm.not_needed(older, "only with algorithm.rollout_is_threshold")


def _filter_rows(filters: Section) -> Iterator[Row]:
    """Yields the rows of dynamic sampling, verl's filter_groups."""
    yield filters.taken("enable", False)
    if_filtered = only_if(
        lambda _, run: run.value("algorithm.filter_groups.enable"),
        "only with filter_groups.enable",
        lambda value, _: "score" if value == "reward" else value,
    )
    yield filters.taken("metric", None, if_filtered)
    yield filters.taken("max_num_gen_batches", 0, _max_gen_batches)
    yield filters.slower("max_inflight_gen_batches", "the rounds of a step run one after the other", 1)


def _trainer(trainer: Section) -> Iterator[Row]:
    """Yields the table rows of verl's section `trainer`: steps, folder, GPUs, checkpoints, validation."""
    yield trainer.renamed(
        "total_training_steps", "run.total_steps", None, note="if epochs are given too, the lower limit counts"
    )
    yield trainer.renamed("total_epochs", "run.total_epochs", 30)
    yield trainer.renamed("experiment_name", "run.name", "gsm8k")
    yield trainer.renamed("project_name", "tracking.project", "verl_examples")
    folder = "checkpoints/${trainer.project_name}/${trainer.experiment_name}"
    yield trainer.renamed("default_local_dir", "run.dir", folder, note="checkpoints, metrics and logs")
    loggers = f"{', '.join(_TRACKERS)}; console and metrics.jsonl are always written"
    yield trainer.changed("logger", "tracking.trackers", loggers, _loggers)
    gpus = "in verl all models use all GPUs; here a critic has its own, one of four unless --gpus is given"
    yield trainer.changed("n_gpus_per_node", "services.*.devices", gpus, _gpus)
    several = "on several machines you start the groups, with services.*.nnodes and master_addr: docs/hosts.md"
    yield trainer.changed("nnodes", "services.*.num_processes", several, _machines)
    warmup = "max(0, N - 1): in verl the actor learns from step N on"
    yield trainer.changed("critic_warmup", "critic.warmup_steps", warmup, _warmup, 0)
    yield trainer.changed("save_freq", "checkpoint.save_freq", "-1: only after the last step; in verl never", _freq, -1)
    yield trainer.changed("test_freq", "evaluation.test_freq", "-1: only before and after the run", _freq, -1)
    yield trainer.renamed("val_before_train", "evaluation.val_before_train", True)
    yield trainer.renamed("val_only", "evaluation.val_only", False)
    yield trainer.renamed("resume_mode", "run.resume", "auto", _resume)
    yield trainer.not_needed("resume_from_path", "only with resume_mode resume_path", None)
    for key in ("max_actor_ckpt_to_keep", "max_critic_ckpt_to_keep"):
        yield trainer.changed(key, "checkpoint.keep", "pairs of checkpoints; null: all", _keep, None)
    for key, dump in (("rollout", "tracking.dump_rollouts"), ("validation", "evaluation.dump_generations")):
        yield trainer.changed(f"{key}_data_dir", dump, "into run.dir", lambda value, _: value is not None)
    generations = "evaluation.dump_generations writes them all, evaluation.num_examine prints some"
    yield trainer.not_needed("{log_val_generations,val_generations_to_log_to_wandb}", generations)
    yield trainer.slower("default_hdfs_dir", "copy run.dir/checkpoints")
    yield trainer.slower("checkpoint_callback_class", "watch run.dir/checkpoints/latest")
    yield trainer.slower("device", "NVIDIA GPUs or CPUs", "cuda", "cpu", default="cuda")
    yield trainer.unsupported("v1.trainer_mode", f"sync, or one_step_off_policy: {_TIMELESS}", "sync")
    yield trainer.unsupported("v1.sampler.sync_refill_failed_groups", "a lost group is sampled again")
    yield trainer.unsupported("v1.sampler.custom_sampler.{path,name}", "a step trains on the rollouts that it samples")
    of_modes = "{colocate_async,separate_async}.{num_warmup_batches,parameter_sync_step}"
    yield trainer.not_needed(f"v1.{of_modes}", "only with another trainer_mode")
    buffer = "{max_off_policy_strategy,max_off_policy_threshold,sampler_kwargs}"
    yield trainer.not_needed(f"v1.sampler.{buffer}", "a step trains on the rollouts that it samples")
    yield trainer.not_needed("v1.sync", "a section without keys")
    yield trainer.not_needed("balance_batch", "rows are always divided evenly by tokens")
    yield trainer.not_needed("use_v1", "a step samples and learns as in both of verl's trainers", True)
    yield trainer.not_needed("{use_legacy_worker_impl,ray_wait_register_center_timeout}", "no Ray")
    checkpoints = "{del_local_ckpt_after_load,remove_previous_ckpt_in_save,esi_redundant_time}"
    yield trainer.not_needed(checkpoints, "checkpoint.keep")


def _rollout_pool(top: Section, fully: Section) -> Iterator[Row]:
    """Yields the table rows of one_step_off_policy and fully_async_policy; the keys of the second are in `fully`."""
    one_ahead = "hybrid_engine false: the group of services.rollout samples one step ahead"
    yield top.changed("actor_rollout_ref.hybrid_engine", "rollout.staleness", one_ahead, _staleness, True)
    behind = "GPUs behind those of the other groups"
    yield top.changed("rollout.{nnodes,n_gpus_per_node}", "services.rollout.*", behind, _rollout_gpus)
    yield top.unsupported(
        "rollout.{total_rollout_steps,total_epochs}", "set trainer.total_training_steps or total_epochs"
    )
    yield top.not_needed("rollout.{n,test_freq}", "actor_rollout_ref.rollout.n, trainer.test_freq")
    yield fully.unsupported("partial_rollout", "each response is sampled by one version of the weights")
    yield fully.unsupported("trigger_parameter_sync_step", "the rollout group gets the weights of every step", 1)
    yield fully.unsupported("require_batches", "data.train_batch_size is the number of prompts of a step")
    only_one = "the group of services.rollout samples alone"
    yield fully.slower("{use_trainer_do_validate,use_dynamic_resource_scheduling}", only_one)
    yield fully.not_needed("{dynamic_schedule_policy,concurrent_samples_per_replica}", "speed only")
    # All other keys: the first row that matches a key converts it.
    yield fully.unsupported("**", f"{_TIMELESS}; with --drop async_training always one update older")


def _rest(top: Section) -> Iterator[Row]:
    """Yields the table rows of keys outside of all sections: Ray, Hydra, profilers, transfer queue, engines."""
    yield top.tree_not_needed("**_target_", "classes of verl, which read the other keys")
    yield top.not_needed("actor_rollout_ref.nccl_timeout", "services.progress_timeout_s")
    yield top.unsupported("skip.{rollout,rollout_tq,async_rollout}.enable", _SAMPLES_ANEW)
    yield top.not_needed("skip.{rollout,rollout_tq,async_rollout}.{action,dump_dir,steps}", _SAMPLES_ANEW)
    yield top.tree_not_needed("{ray_kwargs,ray_init}.**", "no Ray")
    yield top.tree_not_needed("transfer_queue.**", "gRPC sends each worker the columns that it lacks")
    profilers = "{global_profiler,profiler,actor_rollout_ref.profiler,trainer.npu_profile}{,.**}"
    for key in (profilers, "trainer.{profile_steps,controller_nsight_options.**,worker_nsight_options.**}"):
        yield top.tree_not_needed(key, _TRACE)
    yield top.tree_not_needed("hydra.**", "no Hydra: a file of yours that a defaults list names is refused")
    engines = "{model_engine,actor@actor_rollout_ref.actor,critic@critic,ref@actor_rollout_ref.ref}"
    yield top.slower(engines, "FSDP2 over all ranks of a group", "dp", "dp_actor", "dp_critic", "dp_ref")


RUN_ROWS: tuple[Row, ...] = (
    *_rollout_pool(Section(""), Section("async_training")),
    *_rest(Section("")),
    *_algorithm(Section("algorithm", "algorithm"), Section(_CORRECTION, _CORRECTION)),
    *_trainer(Section("trainer")),
)
