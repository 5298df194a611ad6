"""Where the frozen reference runs when `placement.reference` is `auto`: a rule of the configuration alone.

The reference's forward pass delays whoever is waited for at the end of the log-probs: on the actor it comes after
generation and old log-probs, on the critic after values (and the reward model's scores). The critic can begin while the
actor still generates only where responses are streamed; so it can have the reference for nothing there, and elsewhere
only if it has more ranks.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from splitppo.config.streaming import num_parts, part_work_shares, response_share

if TYPE_CHECKING:
    from splitppo.config.schema import Config

# Of a response token, in forward passes of a token: sampled one after the other. Measured on CPUs; more on GPUs, which
# only lengthens the generation that the critic has time in.
DECODE_COST = 2.0
# Of an update, in forward passes: forward and backward.
UPDATE_COST = 3.0


@dataclass(frozen=True)
class ReferencePlacement:
    """The rule's answer, and why.

    Attributes:
        on_actor, on_critic: from the first sampled token to the last of log-probs, values and scores, in the time that
            one rank takes for a forward pass over the rows of a step.
    """

    host: Literal["actor", "critic"]
    on_actor: float
    on_critic: float

    def __str__(self) -> str:
        if self.on_critic == float("inf"):
            return "actor: there is no critic"
        return (
            f"{self.host}: rollouts with log-probs and values take about {self.on_actor:.2f} forward passes with the"
            f" reference on the actor, {self.on_critic:.2f} on the critic"
        )


def place_reference(config: "Config") -> ReferencePlacement:
    """The group where the reference delays the step least; the actor's where it is the same.

    With a and c ranks, rows of P + R tokens at most, and models that are taken to be
    equally large:

        generate = (P + DECODE_COST R) / ((P + R) a)       old, ref = 1 / a       values, scores, ref = 1 / c
        late = what the critic's update is longer than the actor's, as it matters under `overlap`
        behind(work) = max(work x the last part's share of tokens, late + work - generate)
        on the actor:  generate + max(old + ref, behind(values + scores))
        on the critic: generate + max(old, behind(values + scores + ref))

    The schedule has no say: all three must compute the same, bit for bit, and rows that come in parts are rounded
    differently on the critic.
    """
    if not config.uses_critic:
        return ReferencePlacement("actor", 1.0, float("inf"))
    a, c = (config.services.of(role).num_processes for role in ("actor", "critic"))
    prompt, response = config.data.max_prompt_length, config.data.max_response_length
    generate = (prompt + DECODE_COST * response) / ((prompt + response) * a)
    old = 1 / a if config.needs_old_log_probs else 0.0
    values = (2 if config.reward_model_host == "critic" else 1) / c
    update_actor, update_critic = (UPDATE_COST * model.ppo_epochs for model in (config.actor, config.critic))
    late = max(0.0, update_critic / c - update_actor / a)

    last_share = part_work_shares(num_parts(config), response_share(config))[-1]

    def behind(work: float) -> float:
        return max(work * last_share, late + work - generate)

    return _better(generate + max(old + 1 / a, behind(values)), generate + max(old, behind(values + 1 / c)))


def keep_reference(config: "Config", stored: "Config") -> "Config":
    """`config` of a resumed run with the reference where it was, by its `stored` one, in place of `auto`.

    Groups that others start (`services.launch: external`) go by the rule, as the controller then does.
    """
    is_given = "reference" in config.placement.model_fields_set
    if is_given or config.services.launch == "external" or stored.placement.reference == "auto":
        return config
    return config.with_reference_on(stored.placement.reference)


def _better(on_actor: float, on_critic: float) -> ReferencePlacement:
    is_critic = on_critic < on_actor * (1 - 1e-9)
    return ReferencePlacement("critic" if is_critic else "actor", on_actor, on_critic)
