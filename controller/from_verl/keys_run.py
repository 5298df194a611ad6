"""verl's keys of algorithm and run: `algorithm`, `trainer`, and what belongs to no model."""

from collections.abc import Iterator
from typing import Any, get_args

from controller.from_verl.row import NotNeeded, NotSupported, Row, changed, not_needed, slower, taken, unsupported
from controller.from_verl.run import VerlRun
from controller.from_verl.settings import num_of
from splitppo.config.algorithm import KL_ESTIMATOR_NAMES
from splitppo.config.estimator import NEEDS
from splitppo.config.tracking import TrackingConfig

_CORRECTION = "algorithm.rollout_correction"
_TRACKERS = get_args(get_args(TrackingConfig.model_fields["trackers"].annotation)[0])


def _estimator(value: Any, _: VerlRun) -> Any:
    name = str(value).removesuffix("_vectorized")  # the same formula, computed in another way
    if name not in NEEDS:
        raise NotSupported(f"one of {', '.join(NEEDS)}, or one from a file of yours: docs/extending.md")
    return name


def _components(value: Any, run: VerlRun) -> Any:
    if run.value("algorithm.adv_estimator") != "gdpo":
        raise NotNeeded("only gdpo has components")
    return value


def _kl_penalty(value: Any, _: VerlRun) -> Any:
    if value not in KL_ESTIMATOR_NAMES:
        raise NotSupported(f"one of {', '.join(KL_ESTIMATOR_NAMES)}")
    return value


def _is_threshold(value: Any, run: VerlRun) -> Any:
    try:
        return float(value)
    except (TypeError, ValueError):
        if run.value(f"{_CORRECTION}.rollout_is") is None:
            raise NotNeeded("only with rollout_is") from None
        raise NotSupported("one number, above which weights are truncated") from None


def _bypass(value: Any, _: VerlRun) -> Any:
    if not value:
        raise NotNeeded("auto, the default here: the policy's own log-probs, however they are had")
    return True


def _loss_type(value: Any, run: VerlRun) -> Any:
    if not run.value(f"{_CORRECTION}.bypass_mode"):
        raise NotNeeded("only with bypass_mode")
    if value == "reinforce" and run.value(f"{_CORRECTION}.rollout_rs") is not None:
        raise NotSupported("reinforce without rollout_rs: with bypass_mode nothing is rejected")
    return value


def _freq(value: Any, _: VerlRun) -> int:
    return int(value) if value and num_of(value, "freq") > 0 else -1


def _warmup(value: Any, _: VerlRun) -> int:
    return max(0, int(num_of(value, "trainer.critic_warmup")) - 1)


def _loggers(value: Any, _: VerlRun) -> list[Any]:
    """Those that there are; a run with others learns the same."""
    return [name for name in (value if isinstance(value, list) else [value]) if name in _TRACKERS]


def _gpus(_: Any, run: VerlRun) -> str:
    """As the report says it; the keys are set for all groups at once."""
    groups = run.groups
    counts = {"actor": groups.actor, "critic": groups.critic, "reward": groups.reward}
    return " + ".join(f"{count} {role}" for role, count in counts.items() if count)


def _machines(value: Any, run: VerlRun) -> str:
    if value == 1:
        raise NotNeeded("one machine")
    return _gpus(value, run)


def _resume(value: Any, run: VerlRun) -> Any:
    return run.value("trainer.resume_from_path") if value == "resume_path" else value


def _keep(value: Any, run: VerlRun) -> Any:
    kept = [run.value(f"trainer.max_{role}_ckpt_to_keep") for role in ("actor", "critic")]
    numbers = [int(one) for one in kept if one is not None]
    if value is None:
        raise NotNeeded("checkpoint.keep")
    return max(numbers)


def _dump(value: Any, _: VerlRun) -> bool:
    return value is not None


def _filter_metric(value: Any, run: VerlRun) -> Any:
    if value is None or not run.value("algorithm.filter_groups.enable"):
        raise NotNeeded("only with filter_groups.enable")
    return value


def _max_gen_batches(value: Any, _: VerlRun) -> Any:
    return int(max(num_of(value, "algorithm.filter_groups.max_num_gen_batches"), 0))


def _algorithm() -> Iterator[Row]:
    yield taken("algorithm.adv_estimator", "algorithm.adv_estimator", "gae", convert=_estimator)
    for key, default in (("gamma", 1.0), ("lam", 1.0), ("norm_adv_by_std_in_grpo", True), ("use_kl_in_reward", False)):
        yield taken(f"algorithm.{key}", f"algorithm.{key}", default)
    for key in ("gdpo_reward_keys", "gdpo_reward_weights"):
        yield taken(f"algorithm.{key}", f"algorithm.{key}", None, convert=_components)
    yield taken("algorithm.kl_penalty", "algorithm.kl_penalty", "kl", convert=_kl_penalty)
    for key, ours, value in (
        ("type", "kl_ctrl", "fixed"),
        ("kl_coef", "kl_coef", 0.001),
        ("horizon", "kl_horizon", 10000),
        ("target_kl", "kl_target", 0.1),
    ):
        yield taken(f"algorithm.kl_ctrl.{key}", f"algorithm.{ours}", value)
    for key in ("rollout_is", "rollout_rs", "rollout_rs_threshold"):
        yield taken(f"{_CORRECTION}.{key}", f"{_CORRECTION}.{key}", None)
    yield taken(
        f"{_CORRECTION}.rollout_is_threshold", f"{_CORRECTION}.rollout_is_threshold", 2.0, convert=_is_threshold
    )
    yield taken(f"{_CORRECTION}.rollout_is_batch_normalize", f"{_CORRECTION}.rollout_is_batch_normalize", False)
    yield taken(f"{_CORRECTION}.bypass_mode", f"{_CORRECTION}.bypass_mode", False, convert=_bypass)
    yield taken(f"{_CORRECTION}.loss_type", f"{_CORRECTION}.loss_type", "ppo_clip", convert=_loss_type)
    yield taken("algorithm.filter_groups.enable", "algorithm.filter_groups.enable", False)
    yield taken("algorithm.filter_groups.metric", "algorithm.filter_groups.metric", None, convert=_filter_metric)
    yield taken(
        "algorithm.filter_groups.max_num_gen_batches",
        "algorithm.filter_groups.max_num_gen_batches",
        0,
        convert=_max_gen_batches,
    )
    yield unsupported("algorithm.use_pf_ppo", "every response is learned from once per epoch")
    yield not_needed("algorithm.pf_ppo.*", "only with use_pf_ppo")


def _trainer() -> Iterator[Row]:
    yield taken("trainer.total_training_steps", "run.total_steps", None, note="with epochs, whichever ends first")
    yield taken("trainer.total_epochs", "run.total_epochs", 30)
    yield taken("trainer.experiment_name", "run.name", "gsm8k")
    yield taken("trainer.project_name", "tracking.project", "verl_examples")
    yield taken(
        "trainer.default_local_dir",
        "run.dir",
        "checkpoints/${trainer.project_name}/${trainer.experiment_name}",
        note="checkpoints, metrics, logs, all of it",
    )
    yield changed(
        "trainer.logger",
        "tracking.trackers",
        f"of {', '.join(_TRACKERS)}; console and metrics.jsonl are always written",
        _loggers,
    )
    gpus = "both models have all GPUs there; each has its own here, three to one unless --gpus says otherwise"
    yield changed("trainer.n_gpus_per_node", "services.*.devices", gpus, _gpus)
    yield changed(
        "trainer.nnodes",
        "services.*.num_processes",
        "with several machines you start the groups, with services.*.nnodes and master_addr: docs/deployment.md",
        _machines,
    )
    yield changed(
        "trainer.critic_warmup", "critic.warmup_steps", "max(0, N - 1): there the actor joins in step N", _warmup, 0
    )
    yield changed("trainer.save_freq", "checkpoint.save_freq", "-1: after the last step only, never there", _freq, -1)
    yield changed("trainer.test_freq", "evaluation.test_freq", "-1: before and after the run only", _freq, -1)
    yield taken("trainer.val_before_train", "evaluation.val_before_train", True)
    yield taken("trainer.val_only", "evaluation.val_only", False)
    yield taken("trainer.resume_mode", "run.resume", "auto", convert=_resume)
    yield not_needed("trainer.resume_from_path", "only with resume_mode resume_path", None)
    yield changed(
        "trainer.max_{actor,critic}_ckpt_to_keep", "checkpoint.keep", "pairs; 3 unless given, all of them there", _keep
    )
    yield changed("trainer.rollout_data_dir", "tracking.dump_rollouts", "into run.dir", _dump)
    yield changed("trainer.validation_data_dir", "evaluation.dump_generations", "into run.dir", _dump)
    yield not_needed(
        "trainer.{log_val_generations,val_generations_to_log_to_wandb}",
        "evaluation.dump_generations writes all of them, evaluation.num_examine are printed",
    )
    yield slower("trainer.default_hdfs_dir", "copy run.dir/checkpoints")
    yield slower("trainer.checkpoint_callback_class", "watch run.dir/checkpoints/latest")
    yield slower("trainer.device", "NVIDIA GPUs or CPUs", "cuda", "cpu", default="cuda")
    yield unsupported(
        "trainer.v1.trainer_mode", "synchronous PPO; run.schedule: overlap hides the critic's update", "sync"
    )
    yield unsupported("trainer.v1.sampler.sync_refill_failed_groups", "a lost group is sampled again")
    yield unsupported(
        "trainer.v1.sampler.custom_sampler.{path,name}", "rollouts are learned from in the step that samples them"
    )
    yield not_needed("trainer.v1.**", "synchronous PPO")
    yield not_needed("trainer.balance_batch", "rows are always divided evenly by tokens")
    yield not_needed("trainer.{use_v1,use_legacy_worker_impl,ray_wait_register_center_timeout}", "no Ray")
    yield not_needed(
        "trainer.{del_local_ckpt_after_load,remove_previous_ckpt_in_save,esi_redundant_time}", "checkpoint.keep"
    )


def _rest() -> Iterator[Row]:
    yield not_needed("**_target_", "classes of verl")
    yield not_needed("actor_rollout_ref.hybrid_engine", "rollouts are sampled on the actor's GPUs")
    yield not_needed("actor_rollout_ref.nccl_timeout", "services.progress_timeout_s")
    yield unsupported("distillation.enabled", "no distillation")
    yield not_needed("distillation.**", "only with distillation.enabled")
    yield unsupported("skip.{rollout,rollout_tq,async_rollout}.enable", "every step samples anew")
    yield not_needed("skip.**", "every step samples anew")
    yield not_needed("{ray_kwargs,ray_init}.**", "no Ray")
    yield not_needed("transfer_queue.**", "columns go by gRPC, each worker is sent what it lacks")
    yield not_needed("{global_profiler,profiler}.**", "trace.json has every call of a step, for Perfetto")
    yield slower("{global_profiler,profiler}", "trace.json has every call of a step, for Perfetto")
    yield not_needed("hydra.**", "no Hydra")
    yield slower(
        "{model_engine,actor@actor_rollout_ref.actor,critic@critic,ref@actor_rollout_ref.ref}",
        "FSDP2 over all ranks of a group",
        "dp",
        "dp_actor",
        "dp_critic",
        "dp_ref",
    )


RUN_ROWS: tuple[Row, ...] = (*_rest(), *_algorithm(), *_trainer())
