"""Reads the terms of the actor's loss that may change from step to step, which come with each update."""

from collections.abc import Mapping
from typing import TypeVar

from pydantic import ValidationError

from splitppo.config import ActorConfig, Config
from splitppo.config.section import Section
from splitppo.config.sections.teacher import TeacherConfig
from splitppo.config.subsections.phases import MAX_LABEL
from splitppo.v1 import actor_pb2

S = TypeVar("S", bound=Section)


def terms_of(request: actor_pb2.ActorUpdateRequest, config: Config) -> tuple[ActorConfig, TeacherConfig | None]:
    """Returns the settings of actor and teacher with an update request's loss terms; absent terms are `config`'s.

    The teacher is None if the loss has no term of a teacher.

    Raises:
        ValueError: a term is invalid.
    """
    actor = config.actor
    terms = request.loss_terms
    teacher = config.teacher if config.teacher.is_in_loss else None
    if not request.HasField("loss_terms"):
        return actor, teacher
    if len(terms.phase) > MAX_LABEL:
        raise ValueError(f"loss_terms.phase: expected at most {MAX_LABEL} characters, got {len(terms.phase)}")
    section = actor.model_dump()
    section["policy_loss"]["loss_mode"] = terms.loss_mode
    section |= {name: getattr(terms, name) for name in ("entropy_coeff", "use_kl_loss", "kl_loss_coef")}
    if teacher is not None and terms.HasField("teacher_coef"):
        teacher = _validated(TeacherConfig, {**teacher.model_dump(), "coef": terms.teacher_coef}, "teacher_")
    return _validated(ActorConfig, section), teacher


def coefficients_of(actor: ActorConfig, teacher: TeacherConfig | None) -> dict[str, float]:
    """Returns the coefficients of the loss in an update as metrics: of entropy, KL and teachers, as far as used."""
    coefficients = {"actor/entropy_coeff": actor.entropy_coeff}
    if actor.use_kl_loss:
        coefficients["actor/kl_coef"] = actor.kl_loss_coef
    if teacher is not None:
        coefficients["distillation/coef"] = teacher.coef
    return coefficients


def _validated(section: type[S], values: Mapping[str, object], prefix: str = "") -> S:
    """Makes a section of loss terms that came by wire; ValueError if the configuration would refuse one of them.

    A term's name is that of its key after `prefix`.
    """
    try:
        return section(**values)
    except ValidationError as error:
        wrong = error.errors()[0]
        message = wrong["msg"].removeprefix("Value error, ")
        if wrong["type"] != "value_error":  # else the sentence has the value already
            message = f"{wrong['loc'][-1]}: {message[:1].lower()}{message[1:]}, got {wrong['input']}"
        raise ValueError(f"loss_terms.{prefix}{message}") from None
