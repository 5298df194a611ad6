"""Converts verl's keys of on-policy distillation (`distillation`) into keys of the section `teacher`."""

from collections.abc import Iterator
from functools import partial
from typing import Any, get_args

from controller.commands.from_verl.keys_rollout import ENGINE_OPTIONS
from controller.commands.from_verl.keys_trained import ACTOR
from controller.commands.from_verl.row import (
    NotNeeded,
    NotSupported,
    Row,
    Section,
    if_rewarded,
    needless,
    only_if,
    same_as,
)
from controller.commands.from_verl.run import VerlRun
from splitppo.config.section import KlEstimator

_LOSS = "distillation.distillation_loss"
_POOL = "placement.teacher and services.reward: one forward pass per response, no engine"


def signal_of(run: VerlRun) -> str:
    """Returns the teacher.signal of a verl run with distillation."""
    if run.value(f"{_LOSS}.loss_mode") == "forward_kl_topk":
        return "top_k"
    return "advantage" if run.value(f"{_LOSS}.use_policy_gradient") else "loss"


def _signal(use_policy_gradient: Any, run: VerlRun) -> str:
    """Returns teacher.signal; NotSupported: verl would take the KL over the top k as a policy gradient."""
    signal = signal_of(run)
    if signal == "top_k" and use_policy_gradient:
        raise NotSupported("false with loss_mode forward_kl_topk: the KL is a term of the loss")
    return signal


def _loss_type(loss_mode: Any, run: VerlRun) -> str:
    """Returns teacher.loss_type: how the loss estimates the KL from the teacher, if the signal is a term of the loss.

    NotNeeded: the signal fixes the estimator (top_k always, advantages with k1). NotSupported: another estimator in
    advantages, or k1 in the loss, where its gradient does not depend on the teacher.
    """
    signal = signal_of(run)
    if loss_mode not in (*get_args(KlEstimator), "forward_kl_topk"):
        raise NotSupported("an estimator as in actor.kl_loss_type, or forward_kl_topk")
    if signal == "top_k" or (signal == "advantage" and loss_mode in ("k1", "kl")):
        raise NotNeeded(f"teacher.signal is {signal}")
    if signal == "advantage":
        raise NotSupported("loss_mode k1, or use_policy_gradient false: the signal in advantages is the log-ratio")
    if loss_mode in ("k1", "kl"):
        raise NotSupported("use_policy_gradient true, or k1+: the gradient of k1 does not depend on the teacher")
    return str(loss_mode)


def _enabled(value: Any, run: VerlRun) -> Any:
    """Checks that distillation can be translated if it is on; it needs no key, as the section `teacher` turns it on.

    Always raises: NotNeeded if it is off or can be translated; NotSupported unless each teacher has a model_path and,
    if there are several, a key of its own.
    """
    if not value:
        raise NotNeeded("off")
    if value is not True:
        raise NotSupported("true or false")
    named = run.value("distillation.teacher_models")
    teachers = [*named.values()] if isinstance(named, dict) else []
    keys = [teacher.get("key") for teacher in teachers if isinstance(teacher, dict) and teacher.get("model_path")]
    if not keys or len(keys) < len(teachers) or (len(keys) > 1 and (None in keys or len({*keys}) < len(keys))):
        raise NotSupported("each of teacher_models with a model_path and, if there are several, a key of its own")
    raise NotNeeded("the section `teacher`")


def teachers_of(run: VerlRun) -> dict[str, str]:
    """Returns the teachers of a verl run by data_source; "" is that of all rows, which a single teacher is."""
    named = run.value("distillation.teacher_models")
    if run.value("distillation.enabled") is not True or not isinstance(named, dict):
        return {}
    models = {str(teacher.get("key")): teacher.get("model_path") for teacher in named.values()}
    return {"": next(iter(models.values()))} if len(models) == 1 else models


def _rows(distillation: Section) -> Iterator[Row]:
    """Yields the table rows of verl's section `distillation`: the loss first, then the teachers."""
    loss = Section(_LOSS, "teacher")
    if_on = partial(only_if, lambda _, run: bool(run.value("distillation.enabled")), "distillation.enabled is false")
    if_top_k = only_if(lambda _, run: signal_of(run) == "top_k", "only with loss_mode forward_kl_topk")
    yield distillation.checked("enabled", "a teacher; each needs a model_path, several need keys", _enabled)
    signals = "a policy gradient is in the advantages, all else in the loss"
    yield loss.changed("use_policy_gradient", "signal", signals, if_on(_signal), False)
    yield loss.renamed("loss_mode", "loss_type", "k3", if_on(_loss_type))
    yield loss.renamed("topk", "top_k", 32, if_on(if_top_k))
    yield loss.renamed("log_prob_min_clamp", "log_prob_min", None, if_on(if_top_k))
    yield loss.renamed("loss_max_clamp", "max_abs", None, if_on())
    yield loss.renamed("distillation_loss_coef", "coef", 1.0, if_on(if_rewarded()))
    alone = if_on(lambda value, _: not value)
    yield loss.changed("use_task_rewards", "only", "use_task_rewards: false", alone, True)
    own_loss = "its loss is the actor's here: set actor_rollout_ref.actor.{}"
    vanilla = needless(("vanilla",), "the actor's loss", own_loss.format("policy_loss.loss_mode"))
    yield loss.checked("policy_loss_mode", "vanilla", vanilla)
    for key in ("clip_ratio", "clip_ratio_low", "clip_ratio_high"):
        same = same_as(f"{ACTOR}.{key}", own_loss.format(key))
        yield loss.checked(key, "not needed if it is the actor's, else not supported", same)
    yield loss.not_needed("{use_chunked_topk,chunked_topk_chunk_size}", "logits are always made in chunks")
    by_source = needless(("data_source", None), "teachers are chosen by data_source", "put it into data_source")
    yield distillation.checked("teacher_key", "data_source", by_source, "data_source")
    yield distillation.not_needed("{n_gpus_per_node,nnodes,strategy}", _POOL)
    teacher = Section(f"{distillation.verl}.teacher_models.*")  # of any name
    yield teacher.not_needed("{model_path,key}", "teacher.model or teacher.models by data_source")
    yield teacher.not_needed("num_replicas", _POOL)
    yield teacher.not_needed(f"inference.{ENGINE_OPTIONS}", _POOL)
    same = same_as("actor_rollout_ref.rollout.dtype", "the policy's")
    yield teacher.checked("inference.dtype", "the policy's", same)
    yield teacher.unsupported("**", "teachers have a model_path and a key: one forward pass per response, no engine")


DISTILLATION_ROWS: tuple[Row, ...] = tuple(_rows(Section("distillation", "teacher")))
