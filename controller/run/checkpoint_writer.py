"""Writes pair checkpoints in the background, while training goes on."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass

from controller.run.checkpoint_store import CheckpointStore
from controller.run.state import RunState
from controller.schedule import run_calls
from controller.workers.clients import WorkerClient
from controller.workers.command import CommandReply
from controller.workers.concurrency import BackgroundTask
from splitppo import failpoints
from splitppo.config import Config
from splitppo.rpc.errors import StorageFailed
from splitppo.run_folder.spans import Span

log = logging.getLogger(__name__)


class CheckpointFailed(OSError):
    """A checkpoint could not be written; the message is one sentence with the cause and the last good checkpoint."""


@dataclass(eq=False)
class CheckpointWriter(BackgroundTask):
    """Makes all trained roles save a checkpoint in the background, one checkpoint at a time.

    A checkpoint that is abandoned halfway lacks its commit marker.

    Attributes:
        clients: the clients of all trained roles, which save at the same time unless the schedule is serial.
        on_saved: called with the spans of the saves when all parts are durable, before the checkpoint is committed.
        on_commit: called with the step when its checkpoint is committed.

    Raises (from `begin`, `join` or `check`):
        CheckpointFailed: the storage failed for the previous checkpoint; its other errors are raised unchanged.
    """

    store: CheckpointStore
    clients: Sequence[WorkerClient]
    config: Config
    _: KW_ONLY
    on_saved: Callable[[Sequence[Span]], None]
    on_commit: Callable[[int], None]

    def __post_init__(self) -> None:
        super().__init__()

    def is_due(self, state: RunState, *, is_last: bool) -> bool:
        """Returns True if a checkpoint must be saved after the step `state.step`.

        These are every `checkpoint.save_freq`-th step, the last step with `save_last`, and the best step so far.
        """
        checkpoint = self.config.checkpoint
        step = state.step
        is_regular = checkpoint.save_freq > 0 and step % checkpoint.save_freq == 0
        return is_regular or (is_last and checkpoint.save_last) or step == state.best_step

    async def begin(
        self,
        state: RunState,
        *,
        metrics: Awaitable[Mapping[str, float]],
        rollouts: Callable[[], bytes] | None = None,
    ) -> None:
        """Starts to write the checkpoint of `state.step` in the background, once the previous checkpoint is written.

        The metrics of the step, which exist when its updates are committed, are stored, too: a resumed run may have to
        write the step's line in metrics.jsonl. `rollouts` makes the content of the file with finished rollouts of the
        next step.
        """
        await self.join()
        self.start(lambda: self._write(state, metrics, rollouts))

    async def _write(
        self, state: RunState, awaited_metrics: Awaitable[Mapping[str, float]], rollouts: Callable[[], bytes] | None
    ) -> None:
        """Has every trained role save its part, then commits the checkpoint, so that half of one never counts.

        The commit runs in a thread, to its end even if it is cancelled.

        Raises:
            CheckpointFailed: the storage of a role or of the controller has failed.
        """
        metrics = await awaited_metrics
        part = state.model_dump(mode="json")
        keep = self.config.checkpoint.keep
        try:
            saves = [lambda client=client: self._save(client, state.step) for client in self.clients]
            replies: list[CommandReply] = await run_calls(self.config.run.schedule, *saves)
            saved = {client.role: reply for client, reply in zip(self.clients, replies, strict=True)}
            self.on_saved([reply.span(role, "save_checkpoint", state.step) for role, reply in saved.items()])
            manifests: dict[str, str] = {role: reply.result.manifest_sha256 for role, reply in saved.items()}

            def commit() -> None:
                content = rollouts() if rollouts else None
                self.store.commit(
                    state.step, part, metrics, manifests=manifests, keep=keep, best=state.best_step, rollouts=content
                )

            await _to_its_end(commit)
        except (StorageFailed, OSError) as error:
            raise CheckpointFailed(
                f"the checkpoint of step {state.step} could not be written: {error}; {self.store.last_good()}"
            ) from error
        self.on_commit(state.step)
        log.info("checkpoint of step %d committed", state.step)

    async def _save(self, client: WorkerClient, step: int) -> CommandReply:
        reply = await client.save_checkpoint(base_step=step, with_hf_model=self.config.checkpoint.save_hf_model)
        failpoints.hit("save_checkpoint.half", step)
        return reply


async def _to_its_end(work: Callable[[], None]) -> None:
    """Runs `work` in a thread. If cancelled, waits for the thread, which cannot be stopped."""
    running = asyncio.create_task(asyncio.to_thread(work))
    try:
        await asyncio.shield(running)
    finally:
        await asyncio.wait([running])
