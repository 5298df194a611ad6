"""Rules between keys about conversations of several turns (`rollout.multi_turn`)."""

from splitppo.config.schema import Config


def replies_come_in_time(config: Config) -> None:
    """Checks that a group that waits for a tool or an environment does not count as hanging before the tool does."""
    timeout_s = config.rollout.multi_turn.timeout_s
    progress_timeout_s = config.services.progress_timeout_s
    if config.rollout.multi_turn.environments and timeout_s >= progress_timeout_s:
        raise ValueError(
            f"rollout.multi_turn.timeout_s ({timeout_s:g}) must be under services.progress_timeout_s"
            f" ({progress_timeout_s:g})"
        )


def programs_end_in_time(config: Config) -> None:
    """Checks that the limits of sandboxes, and not the time of a call, end programs of the tool `python`."""
    section = config.rollout.multi_turn
    limit_s = 3 * config.reward.code.timeout_s
    runs_programs = any("python" in environment.tools for environment in section.environments.values())
    if runs_programs and section.timeout_s <= limit_s:
        raise ValueError(
            f"rollout.multi_turn.timeout_s ({section.timeout_s:g}) must be over three times reward.code.timeout_s"
            f" ({limit_s:g}), in which the tool python ends a program"
        )


def contexts_have_room_for_a_prompt(config: Config) -> None:
    """Checks that `rollout.multi_turn.max_context_length` leaves room for a turn behind the longest prompt."""
    limit = config.rollout.multi_turn.max_context_length
    longest_prompt = config.data.max_prompt_length
    if config.rollout.multi_turn.environments and limit is not None and limit <= longest_prompt:
        raise ValueError(
            f"rollout.multi_turn.max_context_length ({limit}) must exceed data.max_prompt_length ({longest_prompt}): a"
            " context holds the prompt and the turns that follow"
        )


def turns_have_no_forced_length(config: Config) -> None:
    """Checks that `debug.response_lengths`, with which nothing but its length ends a response, is off."""
    if config.rollout.multi_turn.environments and config.debug.response_lengths is not None:
        raise ValueError(
            "debug.response_lengths and rollout.multi_turn.environments exclude each other: a response of forced length"
            " has one turn; remove one of them"
        )
