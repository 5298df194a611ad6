"""Estimates advantages and returns for all responses of a step, block by block, then over the whole batch.

B responses (the samples of a prompt are neighbours), T response tokens, right-padded.
"""

import numpy as np

from controller.ppo.advantages.arrays import at_turn_ends, turns_of
from controller.ppo.advantages.gae import discounted_deltas
from controller.ppo.advantages.registry import compute_advantages, estimator_of, over_batch
from controller.ppo.masked_stats import Float32s, Float64s, blocks
from splitppo.batch import Batch, Column
from splitppo.config import AlgorithmConfig

# The number of padded tokens that are worked on at a time.
_TOKENS = 1 << 19


def estimate(
    algorithm: AlgorithmConfig,
    rollouts: Batch,
    rewards: Column,
    *,
    response_mask: Column,
    learned: Column,
    num_samples: int,
    greedy_scores_B: Float32s | None = None,
    components_KB: Float32s | None = None,
) -> tuple[Column, Column]:
    """Runs the configured advantage estimator on a step's responses and returns (advantages, returns), float32.

    Both are 0 on tokens that are not `learned`; `response_mask` marks the tokens that count. An estimator that takes a
    batch in pieces gets all samples of a prompt in one piece.
    """
    lengths = response_mask.lengths
    num_rows = rollouts.num_rows
    advantages, returns = (Column(np.empty(len(response_mask.values), np.float32), lengths) for _ in range(2))
    in_pieces = estimator_of(algorithm).takes_pieces
    for start, stop in blocks(lengths, _TOKENS, num_samples=num_samples) if in_pieces else [(0, num_rows)]:
        rows = rollouts.between(start, stop)
        columns = (rewards, response_mask, learned)
        rewards_BT, response_mask_BT, learned_BT = (column.between(start, stop).pad() for column in columns)
        estimated = compute_advantages(
            algorithm,
            rewards_BT,
            learned_BT,
            groups_B=np.arange(rows.num_rows) // num_samples,
            values_BT=rows["values"].pad() if "values" in rows else None,
            response_mask_BT=response_mask_BT,
            greedy_scores_B=None if greedy_scores_B is None else greedy_scores_B[start:stop],
            components_KB=None if components_KB is None else components_KB[:, start:stop],
        )
        is_token_BT = rows["responses"].mask()
        for column, of_rows_BT in zip((advantages, returns), estimated, strict=True):
            column.between(start, stop).values[:] = of_rows_BT[is_token_BT]
    advantages = Column(over_batch(algorithm, advantages, learned.values, rewards.sums()), lengths)
    return advantages, returns


def discounted_sums(
    rewards: Column, *, response_mask: Column, learned: Column, gamma: float, turn_gamma: float | None
) -> Float64s:
    """Computes the Monte-Carlo return of each learned token, [N], 0 elsewhere: GAE with lambda 1 and without values.

        G_t = r_t + g_t * G_{t+1}

    t + 1 is the next token that is learned; g_t is `turn_gamma`, if that is set, from one turn to the next one, else
    `gamma`.
    """
    sums_N = np.zeros(len(rewards.values))
    ends = learned.offsets
    for start, stop in blocks(learned.lengths, _TOKENS):
        rewards_BT, response_mask_BT, learned_BT = (
            column.between(start, stop).pad() for column in (rewards, response_mask, learned)
        )
        gammas = at_turn_ends(learned_BT, turns_of(response_mask_BT), gamma, turn_gamma)
        to_go_BT = discounted_deltas(rewards_BT, np.zeros_like(rewards_BT), learned_BT, gamma=gammas, lam=1.0)
        sums_N[ends[start] : ends[stop]] = to_go_BT[learned.between(start, stop).mask()]
    return sums_N
