"""Samples tokens from logits, with random numbers that are computed from (seed, position).

A random number is a pure function of the response's seed and the token's position. So a response depends neither on the
rows in its batch nor on the rank that samples it.

Shapes: R rows decoded together, T response tokens, V vocabulary.
"""

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from services.rollout.protocol import Sampling
from splitppo.splitmix import GAMMA, splitmix64


def uniforms(seeds: ArrayLike, positions: ArrayLike) -> Tensor:
    """Computes a random number in [0, 1) for each (seed, position) by SplitMix64; the same pair gives the same number.

    Seeds and positions (of response tokens, from 0) are int64 and broadcast; numbers are float64 with 53 random bits,
    on the CPU.
    """
    seeds_u64, positions_u64 = (np.asarray(numbers, np.int64).astype(np.uint64) for numbers in (seeds, positions))
    bits = splitmix64(splitmix64(seeds_u64) + positions_u64 * GAMMA)
    return torch.from_numpy((bits >> np.uint64(11)) * 2.0**-53)


def turn_seed(seed: int, position: int) -> int:
    """Returns the seed for the tokens from a position on, for an engine that counts from 0 in every turn of a response.

    At position 0 it is the seed of the response.
    """
    if position == 0:
        return seed
    return int(splitmix64(np.asarray(seed ^ position, np.int64).astype(np.uint64))) >> 1  # a positive int64


def sample_tokens(logits_RV: Tensor, uniforms_R: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Samples one token per row of logits by inverting the cumulative distribution in vocabulary order.

    `uniforms_R` are float64 in [0, 1), ignored when greedy.

    Returns:
        (tokens [R] int64, log_probs [R] float32, see `Response`).
    """
    logits_RV = logits_RV.float()
    if sampling.temperature not in (0.0, 1.0):
        logits_RV = logits_RV / sampling.temperature
    max_R1 = logits_RV.amax(dim=-1, keepdim=True)
    weights_RV = (logits_RV - max_R1).exp_()
    log_normaliser_R1 = weights_RV.sum(dim=-1, keepdim=True).log() + max_R1
    if sampling.temperature == 0.0:
        tokens_R1 = logits_RV.argmax(dim=-1, keepdim=True)
    else:
        cumulative_RV = _truncate(weights_RV, sampling).cumsum(dim=-1, dtype=torch.float64)
        # Strictly under the total, so the first entry above it is always a token of positive probability.
        targets_R1 = uniforms_R[:, None] * cumulative_RV[:, -1:]
        tokens_R1 = torch.searchsorted(cumulative_RV, targets_R1, right=True)
        tokens_R1 = tokens_R1.clamp_(max=logits_RV.shape[-1] - 1)  # NaN logits must not become an index
    return tokens_R1.squeeze(-1), (logits_RV.gather(-1, tokens_R1) - log_normaliser_R1).squeeze(-1)


def _truncate(weights_RV: Tensor, sampling: Sampling) -> Tensor:
    """Sets the weights of tokens that top-k and top-p exclude to 0; weights are probabilities up to a factor.

    top-p keeps the smallest set of most likely tokens with at least the share top_p of the weights that top-k keeps.
    """
    keeps_all_k = sampling.top_k == 0 or sampling.top_k >= weights_RV.shape[-1]
    if keeps_all_k and sampling.top_p == 1.0:
        return weights_RV
    sorted_RV, order_RV = weights_RV.sort(dim=-1, descending=True, stable=True)
    if not keeps_all_k:
        sorted_RV[:, sampling.top_k :] = 0.0
    if sampling.top_p < 1.0:
        cumulative_RV = sorted_RV.cumsum(dim=-1, dtype=torch.float64)
        before_RV = cumulative_RV - sorted_RV
        sorted_RV = sorted_RV.masked_fill(before_RV >= sampling.top_p * cumulative_RV[:, -1:], 0.0)
    return torch.zeros_like(weights_RV).scatter_(-1, order_RV, sorted_RV)
