"""Proves on request that a group can compute with its models, one after another in one process."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from services.engine.model.weights import Kind
from services.engine.model_check import check_model
from splitppo.config import ComputedModelConfig, Config
from splitppo.config.section import RoleName


def check_models(
    role_name: RoleName, config: Config, also: Callable[[Any, torch.device], None] = lambda *_: None
) -> Iterator[str]:
    """Proves each model that a role's group computes with, see `check_model`; yields a line for each.

    `also` is a further check of the model that the group trains.

    Raises:
        ValueError: a model cannot be loaded, or cannot be computed with as it is configured.
    """
    devices = config.services.of(role_name).devices
    sequence_ranks = 1
    limits = config.data.pixel_limits
    if role_name in config.trained_roles:
        kind: Kind = "value" if role_name == "critic" else "policy"
        section = config.trained_model_of(role_name)
        sequence_ranks = section.ulysses_sequence_parallel_size
        yield check_model(
            f"{role_name}.model",
            section,
            kind,
            devices=devices,
            sequence_ranks=sequence_ranks,
            pixel_limits=limits,
            also=also,
        )
    for key, frozen_kind, frozen in _frozen_models(role_name, config):
        yield check_model(key, frozen, frozen_kind, devices=devices, sequence_ranks=sequence_ranks, pixel_limits=limits)


def _frozen_models(role_name: RoleName, config: Config) -> Iterator[tuple[str, Kind, ComputedModelConfig]]:
    """Yields (key of the configuration, kind, section) of the frozen models of a group but the actor's reference.

    That is the model which the actor trains, before its first update.
    """
    if config.reference_host == role_name != "actor":
        yield "actor.model", "policy", config.actor
    if config.reward_model_host == role_name:
        yield "reward_model.model", "reward", config.reward_model
    if config.teacher_host == role_name:
        for folder in config.teacher.folders:
            yield config.teacher.key_of(folder), "policy", config.teacher.of(folder)
