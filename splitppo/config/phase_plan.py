"""The resolved phases of a run: the loss, entropy bonus and KL of its steps."""

from collections.abc import Iterator

from splitppo.config.schema import Config
from splitppo.config.subsections.phases import Phase


def phase_plan(config: Config) -> list[str]:
    """Returns a line for each phase that the run comes to, and for the steps between them; none without phases."""
    return [] if not config.algorithm.phases else list(_lines(config, config.last_step))


def _lines(config: Config, last_step: int) -> Iterator[str]:
    step = 1
    for phase in sorted(config.algorithm.phases, key=lambda phase: phase.from_step):
        if phase.from_step > last_step:
            break
        if step < phase.from_step:
            yield _line(config, step, phase.from_step - 1, None)
        end = last_step if phase.to_step is None else min(phase.to_step, last_step)
        yield _line(config, phase.from_step, end, phase)
        step = end + 1
    if step <= last_step:
        yield _line(config, step, last_step, None)


def _line(config: Config, first: int, last: int, phase: Phase | None) -> str:
    at_step = config.at_step(first)
    actor, algorithm = at_step.actor, at_step.algorithm
    entropy = "adaptive" if algorithm.adaptive_entropy.enable else f"{actor.entropy_coeff:g}"
    terms = [f"loss {actor.policy_loss.loss_mode}", f"entropy_coeff {entropy}"]
    if actor.use_kl_loss:
        terms.append(f"kl_loss_coef {actor.kl_loss_coef:g}")
    if algorithm.use_kl_in_reward:
        terms.append(f"kl_coef {'adaptive' if algorithm.kl_ctrl == 'adaptive' else f'{algorithm.kl_coef:g}'}")
    name = f" ({phase.name})" if phase is not None and phase.name else ""
    return f"steps {first} to {last}{name}: {', '.join(terms)}"
