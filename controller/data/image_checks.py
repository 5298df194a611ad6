"""Checks that all that a run has for its rows can read their images, and says what the images are like."""

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import numpy as np

from controller.data.prompt_files import PromptRow
from controller.data.prompts import PromptBatch
from controller.models.vision import check_counts_alike, read_vision_input
from rewards.terms import JUDGE, scored_sources, terms_of
from splitppo.config import Config, ConfigError

_READS_TEXT = "it would read the text alone"
_NAMED_IMAGE = re.compile(r"\bimage (?P<name>[0-9a-f]{32}) (?P<what>[^;\n]+)")


def check_images(config: Config, rows: Sequence[PromptRow]) -> None:
    """Checks that nothing that would read the rows leaves out their images, nor takes them for something else.

    Raises:
        ConfigError: rows have images, and the run has something that cannot read them, or a critic that reads no images
            or counts their tokens otherwise; the sentence names the first row with images.
    """
    with_images = [row for row in rows if row.images.names]
    if not with_images:
        return
    column = f"column {config.data.image_key!r}"
    for key, why in _excluded_by(config):
        raise ConfigError(f"{with_images[0].place}: {column} is not empty, which excludes {key}: {why}")
    for row in with_images:
        if _is_judged(config, row.data_source):
            scorer = f"the scorer {JUDGE!r} of data_source {row.data_source!r}"
            raise ConfigError(f"{row.place}: {column} is not empty, which excludes {scorer}: {_READS_TEXT}")
    if not config.uses_critic:
        return
    actor = read_vision_input(config).settings
    critic = read_vision_input(config, "critic")
    if critic.settings is None:
        raise ConfigError(f"{with_images[0].place}: {critic.reads_none_because}, but {column} is not empty")
    assert actor is not None, "else no row with images is read"
    check_counts_alike(actor, critic.settings)


def _excluded_by(config: Config) -> Iterator[tuple[str, str]]:
    """Yields each key of the configuration with which there can be no images, and why."""
    multi_turn = config.rollout.multi_turn
    for key, is_set, why in (
        ("rollout.multi_turn.environments", bool(multi_turn.environments), "a prompt with images has one turn"),
        ("rollout.max_step_tokens", config.rollout.max_step_tokens is not None, "responses are sampled as a whole"),
        ("critic.privileged_prompt", config.critic.privileged_prompt is not None, "it would shift the image tokens"),
        ("teacher.model", bool(config.teacher.folders), _READS_TEXT),
        ("reward_model.model", config.reward_model_host is not None, _READS_TEXT),
    ):
        if is_set:
            yield key, why
    for role in config.trained_roles:
        key = f"{role}.ulysses_sequence_parallel_size"
        num_ranks = config.trained_model_of(role).ulysses_sequence_parallel_size
        if num_ranks > 1:
            yield f"{key} ({num_ranks})", "the positions of a row with images stay on one rank"


def _is_judged(config: Config, data_source: str) -> bool:
    """Returns whether a judge scores the responses of a data source, perhaps beside other scorers."""
    has_scorer = bool(scored_sources(config.reward, [data_source]))
    return has_scorer and any(term.name == JUDGE for term in terms_of(config.reward, data_source))


def wrong_image(message: str, rows: Iterable[PromptRow]) -> str | None:
    """Returns the sentence of a worker group about an image that it names, with the image's place in the data files.

    Only who decodes an image sees some of its faults, for instance that it is torn. Returns None for a message that
    names no image of the rows.
    """
    found = _NAMED_IMAGE.search(message)
    if found is None:
        return None
    for row in rows:
        if found["name"] in row.images.names:
            return f"{row.place}: image {row.images.names.index(found['name']) + 1} {found['what']}"
    return None


def image_report(split: str, prompts: PromptBatch) -> str:
    """Returns a line that says how many images the prompts of a split have, and how many tokens these; "" for none."""
    if prompts.images is None:
        return ""
    num_tokens = np.array([*chain.from_iterable(row.images.num_tokens for row in prompts.rows)])
    num_with = sum(bool(row.images.names) for row in prompts.rows)
    num_bytes = {row.images.stored_row: row.images.num_bytes for row in prompts.rows}
    median, most_of, largest = np.quantile(num_tokens, [0.5, 0.9, 1.0], method="higher")
    prompt_lengths = prompts.prompts.lengths
    return (
        f"{split} images: {len(num_tokens):,} in {num_with:,} of {prompts.num_prompts:,} prompts,"
        f" {sum(num_bytes.values()) / 1e6:,.1f} MB; tokens of an image: {num_tokens.min():,} to {largest:,}, median"
        f" {median:,}, 90 % at most {most_of:,}; tokens of a prompt: up to {prompt_lengths.max():,}\n"
    )
