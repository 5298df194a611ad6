"""What an update returns of its own forwards."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from splitppo.batch import Batch
from tests.support.roles import build_actor, call, experience, update_request


@pytest.mark.parametrize("packed", [True, False])
def test_an_update_returns_what_the_last_forward_of_the_recorded_rows_computes(model: Path, packed: bool) -> None:
    """Two epochs of two mini-batches: the last forwards come after two and after three optimizer steps."""
    settings = {"ppo_mini_batch_size": 2, "shuffle": False, "use_remove_padding": packed, "lr": 0.01}
    role, plain = (build_actor(model, ppo_epochs=2, **settings) for _ in range(2))
    batch = experience(role)
    is_recorded = np.arange(batch.num_rows) % 3 != 1
    marked = batch.merge(Batch.from_rows(recorded=is_recorded[:, None]))
    kept, nothing = call(role, "Update", update_request(), marked), call(plain, "Update", update_request(), batch)
    assert nothing.columns is None
    assert role.compute_weights_digest() == plain.compute_weights_digest()
    assert kept.columns is not None
    assert (kept.columns["update_entropy"].lengths == batch["responses"].lengths * is_recorded).all()

    assert batch.num_rows == 12
    again = build_actor(model, ppo_epochs=1, **settings)
    call(again, "Update", update_request(), batch)  # epoch 1
    for rows in (np.arange(6), np.arange(6, 12)):
        part = batch.take(rows)
        outputs = ("log_probs", "entropy")
        expected = again._engine.compute(part, again._forward, outputs=outputs, progress=lambda *_: None)
        for name, output in zip(("update_log_probs", "update_entropy"), outputs, strict=True):
            seen = kept.columns[name].take(rows).values
            wanted = expected[output].take(np.flatnonzero(is_recorded[rows])).values
            assert seen == pytest.approx(wanted, abs=1e-5), name
        call(again, "Update", update_request(), part)  # that mini-batch of epoch 2
