"""The cells of processes that die while groups start, and of the template from which they are forked."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tests.kill_matrix.cells import Cell

_TEMPLATE = "services.runtime.group.template"
_TORCHRUN = "services.runtime.group.torchrun --nproc-per-node 1 -m services.critic"


def start_cells_at(step: int) -> Iterable[Cell]:
    """Those of the first start, which step 1 waits for, and the end of a template whose groups work on `step`."""
    starting: dict[str, Any] = {"step": 0, "running": 1, "ends_process": False}
    yield Cell("template", "importing", "", title=_TEMPLATE, from_outside=True, **starting)
    yield Cell("critic_torchrun", "forking", "", title=_TORCHRUN, from_outside=True, **starting)
    yield Cell("actor_0", "joining", "actor.start", **starting)
    yield Cell("actor_1", "joining", "actor.start", **starting)
    yield Cell("critic_0", "joining", "critic.start", **starting)
    yield Cell("actor_1", "loading", "actor.load", **starting)
    yield Cell("critic_0", "loading", "critic.load", **starting)
    # The critic, which dies afterwards, is started again from another template; the actor goes on without one.
    lost_later = Cell("critic_0", "after_template", "critic.update.committed", step)
    by_itself = {"title": _TEMPLATE, "from_outside": True, "ends_process": False}
    yield Cell("template", "computing_values", "critic.compute_values", step, **by_itself, companion=lost_later)
