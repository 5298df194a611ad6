"""The configuration section `teacher`: frozen models whose log-probs of the sampled tokens the policy learns from."""

from typing import Annotated, Literal

from pydantic import Field

from splitppo.config.section import CONTROLLER_ONLY, IS_WORK, KlEstimator, PositiveInt
from splitppo.config.sections.models import ComputedModelConfig

# Signals that the loss of an update computes, from columns that the actor's group then needs.
_IN_LOSS = ("loss", "top_k")
# Their gradient is the same whatever the teacher says.
_WITHOUT_TEACHER = ("kl", "k1")


class TeacherConfig(ComputedModelConfig):
    """The settings of the teachers (on-policy distillation): which models teach, and how the policy learns from them.

    For each sampled token, d = log-prob by the teacher - log-prob by the policy that sampled, both at
    rollout.temperature. Its mean over tokens is minus the KL of the policy from the teacher.
    """

    model: Annotated[str, IS_WORK] = ""
    """The teacher: a local folder or a hub name of a causal language model with the tokenizer of the policy. Empty: no
    teacher, or only those of models."""

    models: Annotated[dict[str, str], IS_WORK] = Field(default_factory=dict)
    """Teachers of their own for the rows of a data_source: {data_source: model, ...}. The rows of all others have
    teacher.model."""

    signal: Annotated[Literal["advantage", "reward", "loss", "top_k"], IS_WORK] = "advantage"
    """The way in which the policy learns from its teacher. advantage: coef * d is added to the advantage of each
    token, after whitening. reward: coef * d is added to the reward of each token, so that a critic foresees it.
    loss: coef * KL(policy, teacher) on sampled tokens is added to the loss. top_k: likewise, with the KL over the
    teacher's most likely tokens."""

    coef: Annotated[float, CONTROLLER_ONLY, Field(ge=0.0)] = 1.0
    """The weight of the signal; with kl_ctrl adaptive its first value."""

    loss_type: KlEstimator = "low_var_kl"
    """The estimator of the KL with signal loss; the names are those of actor.kl_loss_type. kl and k1 need a + at the
    end: their own gradient does not depend on the teacher."""

    top_k: Annotated[PositiveInt, IS_WORK] = 64
    """The number of tokens with signal top_k: at each position, those that the teacher finds most likely."""

    top_k_kl: Literal["forward", "reverse"] = "forward"
    """The KL with signal top_k. forward: of the teacher from the policy, over these tokens alone (verl's
    forward_kl_topk). reverse: of the policy from the teacher, with all other tokens as one."""

    log_prob_min: float | None = Field(None, lt=0.0)
    """The lowest log-prob of a token that counts, in nats: lower ones, of teacher and policy, are raised to it. null:
    no bound."""

    max_abs: float | None = Field(10.0, gt=0.0)
    """The bound of d, or of the KL of a token in the loss, in nats: values beyond it are cut off on both sides. null:
    no bound."""

    kl_ctrl: Annotated[Literal["fixed", "adaptive"], CONTROLLER_ONLY] = "fixed"
    """The control of coef. fixed: it stays. adaptive: it rises while the KL of the policy from the teacher is above
    kl_target, and falls below it, as algorithm.kl_ctrl does."""

    kl_target: Annotated[float, CONTROLLER_ONLY, Field(gt=0.0)] = 0.1
    """The KL from the teacher, in nats, near which kl_ctrl adaptive keeps the policy."""

    kl_horizon: Annotated[PositiveInt, CONTROLLER_ONLY] = 10_000
    """The number of samples over which kl_ctrl adaptive moves the weight: a larger number moves it more slowly."""

    only: Annotated[bool, CONTROLLER_ONLY] = False
    """If true, the policy learns from the teacher alone: responses are not scored in training. Reward functions, if
    there are any, score the validation."""

    def _check_keys(self) -> None:
        """Raises ValueError if the loss has no use for a teacher, or keys need a teacher that is not given."""
        super()._check_keys()
        if self.loss_type in _WITHOUT_TEACHER:
            raise ValueError(
                f"loss_type: the gradient of {self.loss_type} does not depend on the teacher: expected another"
                f" estimator, or {self.loss_type}+"
            )
        if "" in self.models.values():
            raise ValueError("models: expected a model for each data_source, got an empty text")
        if self.kl_ctrl == "adaptive" and not self.coef:
            raise ValueError("coef: expected more than 0 with kl_ctrl adaptive, which multiplies it")
        if self.only and not self.folders:
            raise ValueError("only: there is no teacher: set teacher.model or teacher.models")

    @property
    def folders(self) -> tuple[str, ...]:
        """The models of all teachers, each once, in the order of the column `teachers`; empty without a teacher."""
        return tuple(dict.fromkeys(filter(None, (self.model, *self.models.values()))))

    def number_of(self, data_source: str) -> int | None:
        """Returns the index in `folders` of the teacher of a row; None if its data source has no teacher."""
        model = self.models.get(data_source, self.model)
        return self.folders.index(model) if model else None

    def key_of(self, folder: str) -> str:
        """Returns the first key that names one of the teachers."""
        sources = (source for source, model in self.models.items() if model == folder)
        return "teacher.model" if folder == self.model else f"teacher.models.{next(sources)}"

    def of(self, folder: str) -> "TeacherConfig":
        """Returns the settings of one of the teachers."""
        return self.changed("", {"model": folder})

    @property
    def is_in_loss(self) -> bool:
        """True if there is a teacher whose signal is a term of the actor's loss."""
        return bool(self.folders) and self.signal in _IN_LOSS

    @property
    def policy_column(self) -> str:
        """The column with the log-probs by the policy, with which those of the teachers are compared.

        Not every step of a run whose loss has the signal has old log-probs: it takes those of the rollout backend.
        """
        return "rollout_log_probs" if self.is_in_loss else "old_log_probs"

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that the teachers compute."""
        top = ("teacher_top_ids", "teacher_top_log_probs") if self.signal == "top_k" else ()
        return ("teacher_log_probs", *top)
