"""The number of parts of a step's responses, where `rollout.stream_groups` is `auto`."""

from splitppo.config.schema import Config

AUTO_PARTS = 4
# Shorter responses end too close to each other for their parts to hide more than their calls cost (ADR 023).
MIN_RESPONSE_LENGTH = 64


def resolve_stream_groups(config: Config) -> Config:
    """`config` with a number in place of `auto`.

    A function of the configuration alone, and not of its schedule, which changes no result.
    """
    num_responses = config.data.train_batch_size * config.rollout.n
    pays = len(config.roles) > 1 and config.data.max_response_length >= MIN_RESPONSE_LENGTH
    return _with_parts(config, min(AUTO_PARTS, num_responses) if pays else 1)


def keep_stream_groups(config: Config, stored: Config) -> Config:
    """`config` of a resumed run with the number that it has been using, by its `stored` one, in place of `auto`."""
    return _with_parts(config, stored.rollout.stream_groups)


def _with_parts(config: Config, num_parts: int | str) -> Config:
    if config.rollout.stream_groups != "auto":
        return config
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"stream_groups": num_parts})})
