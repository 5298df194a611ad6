"""Policy losses Clip-Cov and KL-Cov: restrain tokens of high covariance (log-prob, advantage), to keep up entropy.

The restrained tokens are selected for the whole mini-batch, in `prepare`, before its rows go to ranks.

Legend: N response tokens of all rows (of an update in `prepare`, of a micro-batch in a loss), one row after the other;
M tokens of one mini-batch that count.
"""

from collections.abc import Callable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.actor.losses.clip_losses import ppo_clip
from services.actor.losses.policy_loss import PolicyTokens
from services.engine.batching.loss_aggregation import response_mask
from splitppo.batch import Batch, Column
from splitppo.config import ActorConfig
from splitppo.splitmix import splitmix64

# (config, covariances [M], hashes [M]) -> indices of the tokens that are selected.
Choice = Callable[[ActorConfig, NDArray[np.float64], NDArray[np.uint64]], NDArray[np.int64]]


def clip_cov(tokens: PolicyTokens, config: ActorConfig) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Computes the Clip-Cov loss (Cui et al., 2025, eq. 11, 12) per token: the PPO clip, but 0 for selected tokens.

        loss = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), r = exp(log_prob - old_log_prob); selected: 0

    There is no dual clip. Metric: pg_clipfrac (share of selected tokens, as with verl).
    """
    assert tokens.selected is not None
    loss_N, _ = ppo_clip(tokens.log_ratio.exp(), tokens.advantages, config)
    return torch.where(tokens.selected, 0.0, loss_N), {"pg_clipfrac": tokens.selected.float()}


def kl_cov(tokens: PolicyTokens, config: ActorConfig) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Computes the KL-Cov loss (Cui et al., 2025, eq. 13, 14): the plain surrogate, plus KL on selected tokens.

        loss = -A r, r = exp(log_prob - old_log_prob); selected: + ppo_kl_coef |log_prob - old_log_prob|

    Metric: pg_klfrac (share of selected tokens).
    """
    assert tokens.selected is not None
    penalty_N = config.policy_loss.ppo_kl_coef * (tokens.log_probs - tokens.old_log_probs).abs()
    loss_N = -tokens.advantages * tokens.log_ratio.exp()
    return loss_N + torch.where(tokens.selected, penalty_N, 0.0), {"pg_klfrac": tokens.selected.float()}


def prepare_clip_cov(config: ActorConfig, batch: Batch) -> Column:
    """Selects tokens for Clip-Cov: max(1, floor(clip_cov_ratio M)), sampled from clip_cov_lb < cov < clip_cov_ub.

    See `_select_tokens`. verl in addition never selects a token that the PPO clip has clipped.
    """
    return _select_tokens(config, batch, _draw_between)


def prepare_kl_cov(config: ActorConfig, batch: Batch) -> Column:
    """Selects tokens for KL-Cov: the max(1, floor(kl_cov_ratio M)) with the largest cov; see `_select_tokens`."""
    return _select_tokens(config, batch, _take_largest)


def _draw_between(config: ActorConfig, cov_M: NDArray[np.float64], hashes_M: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Returns which of M tokens Clip-Cov selects: among those between the bounds of cov, those of smallest hash."""
    section = config.policy_loss
    candidates = np.flatnonzero((cov_M > section.clip_cov_lb) & (cov_M < section.clip_cov_ub))
    drawn = np.argsort(hashes_M[candidates], kind="stable")[: max(1, int(section.clip_cov_ratio * len(cov_M)))]
    return candidates[drawn]


def _take_largest(config: ActorConfig, cov_M: NDArray[np.float64], hashes_M: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Returns which of M tokens KL-Cov selects: those with the largest cov; hashes decide between equal ones."""
    largest_first: NDArray[np.int64] = np.lexsort((hashes_M, -cov_M))
    return largest_first[: max(1, int(config.policy_loss.kl_cov_ratio * len(cov_M)))]


def _select_tokens(config: ActorConfig, batch: Batch, choose: Choice) -> Column:
    """Makes the column `selected_tokens`: marks the tokens that `choose` selects per mini-batch and epoch.

    Over the M counting tokens of a mini-batch (Cui et al., 2025, eq. 10):

        cov = (old_log_prob - mean of old_log_prob) (A - mean of A)

    The paper and verl take the log-probs of the policy in training, of a micro-batch on one rank. With the old ones the
    selection depends neither on the split nor on the order of rows. A hash of (seed of the response, epoch, place in
    the response) decides which tokens are sampled, and which of two equal tokens comes first.

    `batch` has the columns mini_batches, advantages, old_log_probs and seeds (one per row).

    Raises:
        ValueError: a row does not have exactly one seed.
    """
    lengths = batch["responses"].lengths
    if (batch["seeds"].lengths != 1).any():
        raise ValueError(f"loss_mode {config.policy_loss.loss_mode} needs one seed per response in column 'seeds'")
    counts_N = response_mask(batch).values != 0
    log_probs_N = batch["old_log_probs"].values.astype(np.float64)
    advantages_N = batch["advantages"].values.astype(np.float64)
    mini_batches = batch["mini_batches"].values.reshape(batch.num_rows, config.ppo_epochs)
    selected = np.zeros((len(counts_N), config.ppo_epochs), np.uint8)
    for epoch, mini_batch_of_rows in enumerate(mini_batches.T):
        hashes_N = _token_hashes(batch["seeds"].values, lengths, epoch)
        mini_batch_N = np.repeat(mini_batch_of_rows, lengths)
        for mini_batch in np.unique(mini_batch_of_rows):
            tokens = np.flatnonzero(counts_N & (mini_batch_N == mini_batch))
            cov_M = _deviations(log_probs_N[tokens]) * _deviations(advantages_N[tokens])
            selected[tokens[choose(config, cov_M, hashes_N[tokens])], epoch] = 1
    return Column(selected.reshape(-1), lengths * np.int32(config.ppo_epochs))


def _deviations(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Subtracts the mean from the values; sums them sorted, so that their order changes no bit of the result."""
    mean: float = np.sort(values).sum() / max(len(values), 1)
    return values - mean


def _token_hashes(seeds: NDArray[np.int64], lengths: NDArray[np.int32], epoch: int) -> NDArray[np.uint64]:
    """Hashes (seed of the response, epoch, position in the response) of each token to a uint64, [N]."""
    state = splitmix64(splitmix64(seeds.astype(np.uint64)) ^ np.uint64(epoch))
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    places = np.arange(int(lengths.sum(dtype=np.int64))) - np.repeat(starts, lengths)
    return splitmix64(np.repeat(state, lengths) ^ places.astype(np.uint64))
