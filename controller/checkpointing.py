"""Writing a pair checkpoint while the run goes on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence

from controller.checkpoints import CheckpointStore
from controller.clients import CommandReply, WorkerClient
from controller.run_state import RunState
from controller.schedule import run_calls
from controller.trace import Span
from splitppo import failpoints
from splitppo.config import CheckpointConfig
from splitppo.config.schema import Schedule
from splitppo.rpc.errors import StorageFailed

log = logging.getLogger(__name__)


class CheckpointFailed(OSError):
    """A checkpoint could not be written; `str()` is one sentence that names the cause and the last good pair."""


class CheckpointWriter:
    """Saves both roles in the background, one checkpoint at a time; the commit marker is written last.

    Args:
        store: the run's checkpoints.
        clients: of all trained roles.
        config: how many are kept, and what belongs to each.
        schedule: of the run; the roles save at the same time unless it is serial.
        on_saved: called when all parts are durable, before the checkpoint counts, with the spans of the engines.
        on_commit: called with the step when its checkpoint counts.

    Raises (from `begin`, `join` or `check`): what kept the checkpoint before from being written; CheckpointFailed where
        storage did.
    """

    def __init__(
        self,
        store: CheckpointStore,
        clients: Sequence[WorkerClient],
        config: CheckpointConfig,
        schedule: Schedule,
        *,
        on_saved: Callable[[Sequence[Span]], None],
        on_commit: Callable[[int], None],
    ) -> None:
        self._store = store
        self._clients = clients
        self._config = config
        self._schedule: Schedule = schedule
        self._on_saved = on_saved
        self._on_commit = on_commit
        self._writing: asyncio.Task[None] | None = None

    async def begin(self, state: RunState, *, metrics: Awaitable[Mapping[str, float]]) -> None:
        """Starts the checkpoint of `state.step`.

        Args:
            state: the controller's part.
            metrics: of the step; there when its updates are committed. They are stored too, so a resumed run has no
                gap in its metrics, wherever it was killed.
        """
        await self.join()
        self._writing = asyncio.create_task(self._write(state, metrics))

    def check(self) -> None:
        """Raises what has kept the last checkpoint from being written, as soon as that is known."""
        if self._writing is not None and self._writing.done():
            writing, self._writing = self._writing, None
            writing.result()

    async def join(self) -> None:
        """Waits for the checkpoint that is being written, if there is one; it goes on when the wait is cancelled."""
        if self._writing is not None:
            await asyncio.wait([self._writing])
            writing, self._writing = self._writing, None
            writing.result()

    async def abandon(self) -> None:
        """Gives the running checkpoint up, whatever became of it; without its marker it never counts."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)

    async def _write(self, state: RunState, awaited_metrics: Awaitable[Mapping[str, float]]) -> None:
        metrics = await awaited_metrics
        try:
            replies = await self._save(state.step)
            self._on_saved([reply.span(role, "save_checkpoint", state.step) for role, reply in replies.items()])
            await self._commit(state, metrics, {role: reply.manifest_sha256 for role, reply in replies.items()})
        except (StorageFailed, OSError) as error:
            raise CheckpointFailed(
                f"the checkpoint of step {state.step} could not be written: {error}; {self._store.last_good()}"
            ) from error
        self._on_commit(state.step)
        log.info("checkpoint of step %d committed", state.step)

    async def _save(self, step: int) -> dict[str, CommandReply]:
        """Lets every role write its part; returns their replies, when all are durable."""
        saves = [lambda client=client: self._save_part(client, step) for client in self._clients]
        replies = await run_calls(self._schedule, *saves)
        return {client.role: reply for client, reply in zip(self._clients, replies, strict=True)}

    async def _save_part(self, client: WorkerClient, step: int) -> CommandReply:
        reply = await client.save_checkpoint(base_step=step, with_hf_model=self._config.save_hf_model)
        failpoints.hit("save_checkpoint.half", step)
        return reply

    async def _commit(self, state: RunState, metrics: Mapping[str, float], manifests: Mapping[str, str]) -> None:
        """Runs to its end even when cancelled: a thread cannot be stopped, and must not write behind a restart."""
        commit = asyncio.to_thread(
            self._store.commit,
            state.step,
            state.model_dump(mode="json"),
            metrics,
            manifests=manifests,
            keep=self._config.keep,
        )
        committing = asyncio.create_task(commit)
        try:
            await asyncio.shield(committing)
        except asyncio.CancelledError:
            await asyncio.wait([committing])
            raise
