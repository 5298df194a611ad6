"""Which tokens of a mini-batch the covariance losses treat apart; decided before rows go to ranks (pure).

Legend: N response tokens of all rows of an update, one row after the other.
"""

import numpy as np
from numpy.typing import NDArray

from services.engine.batching.loss_aggregation import response_mask
from splitppo.batch import Batch, Column
from splitppo.config import ActorConfig
from splitppo.config.policy_loss import PolicyLossConfig
from splitppo.splitmix import splitmix64


def select_tokens(config: ActorConfig, batch: Batch) -> Column:
    """The column `selected_tokens`: bit e is set where the token was selected of its mini-batch of epoch e.

    Over the M counting tokens of a mini-batch (Cui et al., 2025, eq. 10):

        cov = (old_log_prob - mean of old_log_prob) (A - mean of A)
        clip_cov: max(1, floor(clip_cov_ratio M)) drawn of those with clip_cov_lb < cov < clip_cov_ub
        kl_cov:   max(1, floor(kl_cov_ratio M)) with the largest cov

    The paper and verl take the log-probs of the policy in training, of a micro-batch on one rank; verl also draws none
    that the PPO clip holds. With the old ones the selection depends neither on the split nor on the order of rows: what
    is drawn, and which of two equal tokens goes first, is a hash of (seed of the response, epoch, place in it).

    `batch` has the columns mini_batches, advantages, old_log_probs and seeds (one per row).

    Raises:
        ValueError: a row without its seed.
    """
    lengths = batch["responses"].lengths
    if (batch["seeds"].lengths != 1).any():
        raise ValueError(f"loss_mode {config.policy_loss.loss_mode} needs one seed per response in column 'seeds'")
    counts_N = response_mask(batch).values != 0
    log_probs_N, advantages_N = (batch[name].values.astype(np.float64) for name in ("old_log_probs", "advantages"))
    mini_batches = batch["mini_batches"].values.reshape(batch.num_rows, config.ppo_epochs)
    selected_N = np.zeros(len(counts_N), np.int32)
    for epoch, assigned in enumerate(mini_batches.T):
        hash_N = _token_hashes(batch["seeds"].values, lengths, epoch)
        mini_batch_N = np.repeat(assigned, lengths)
        for index in np.unique(assigned):
            tokens = np.flatnonzero(counts_N & (mini_batch_N == index))
            cov = _deviations(log_probs_N[tokens]) * _deviations(advantages_N[tokens])
            chosen = _choose(config.policy_loss, cov, hash_N[tokens])
            selected_N[tokens[chosen]] |= np.int32(1 << epoch)
    return Column(selected_N, lengths)


def _choose(section: PolicyLossConfig, cov: NDArray[np.float64], hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Indices into the tokens of one mini-batch."""
    ratio = section.clip_cov_ratio if section.loss_mode == "clip_cov" else section.kl_cov_ratio
    most = max(1, int(ratio * len(cov)))
    if section.loss_mode == "kl_cov":
        largest: NDArray[np.int64] = np.lexsort((hashes, -cov))[:most]
        return largest
    candidates = np.flatnonzero((cov > section.clip_cov_lb) & (cov < section.clip_cov_ub))
    return candidates[np.argsort(hashes[candidates], kind="stable")[:most]]


def _deviations(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """From the mean, whose bits do not depend on the order of the values."""
    mean: float = np.sort(values).sum() / max(len(values), 1)
    return values - mean


def _token_hashes(seeds: NDArray[np.int64], lengths: NDArray[np.int32], epoch: int) -> NDArray[np.uint64]:
    """[N], a number for each token that depends on its response's seed, the epoch and its place alone."""
    state = splitmix64(splitmix64(seeds.astype(np.uint64)) ^ np.uint64(epoch))
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    places = np.arange(int(lengths.sum(dtype=np.int64))) - np.repeat(starts, lengths)
    return splitmix64(np.repeat(state, lengths) ^ places.astype(np.uint64))
