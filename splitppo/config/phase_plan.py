"""Describes the phases of a run as text: which loss, entropy bonus and KL coefficients apply in which steps."""

from itertools import groupby

from splitppo.config.schema import Config


def phase_plan(config: Config) -> list[str]:
    """Returns a line of text for each phase that the run reaches, and for each span of steps between phases.

    The list is empty if the configuration has no phases.
    """
    if not config.algorithm.phases:
        return []
    groups = groupby(range(1, config.last_step + 1), config.algorithm.phase_number)
    return [_line(config, [*steps]) for _, steps in groups]


def _line(config: Config, steps: list[int]) -> str:
    """Says in one line what the policy learns from in steps that share a phase; the first one stands for all."""
    at_step = config.at_step(steps[0])
    actor = at_step.actor
    algorithm = at_step.algorithm
    entropy = "adaptive" if algorithm.adaptive_entropy.enable else f"{actor.entropy_coeff:g}"
    terms = [f"loss {actor.policy_loss.loss_mode}", f"entropy_coeff {entropy}"]
    if actor.use_kl_loss:
        terms.append(f"kl_loss_coef {actor.kl_loss_coef:g}")
    if algorithm.use_kl_in_reward:
        terms.append(f"kl_coef {'adaptive' if algorithm.kl_ctrl == 'adaptive' else f'{algorithm.kl_coef:g}'}")
    teacher = at_step.teacher
    if teacher.folders:
        terms.append(f"teacher coef {'adaptive' if teacher.kl_ctrl == 'adaptive' else f'{teacher.coef:g}'}")
    name = "".join(f" ({phase.name})" for phase in algorithm.phases if phase.name)  # in a step there is one at most
    return f"steps {steps[0]} to {steps[-1]}{name}: {', '.join(terms)}"
