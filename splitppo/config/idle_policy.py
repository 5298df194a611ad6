"""Warns of a run whose steps all belong to the critic's warm-up."""

from splitppo.config.schema import Config


def idle_policy(config: Config) -> str | None:
    """Returns a warning if the critic's warm-up leaves no step of the run that trains the policy, else None.

    `config.run.total_steps` must be resolved. Such a run is no mistake if only its critic is wanted.
    """
    warmup_steps = config.num_warmup_steps
    total_steps = config.run.total_steps
    assert total_steps is not None, "Inputs.with_last_step has set it"
    if warmup_steps < total_steps or config.evaluation.val_only:
        return None
    until = "" if config.critic.warmup_until is None else ", unless critic.warmup_until ends the warm-up before"
    return (
        f"critic.warmup_steps ({warmup_steps}) covers all {total_steps} steps of the run, so the policy learns"
        f" nothing{until}: lower critic.warmup_steps, or go on if the run is to train a critic alone"
    )
