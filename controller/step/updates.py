"""Makes the two updates that end a PPO step: sends each model the columns that it learns from, and has it trained."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from controller.ppo.distillation import loss_coef
from controller.ppo.experience import Experience
from controller.step.context import StepContext
from controller.step.parts import Compute
from controller.step.recording import recorded_rows, update_columns
from controller.workers.clients import ActorClient, CriticClient
from controller.workers.command import CommandReply
from controller.workers.recovery import replay_if_clean
from splitppo.config import Config
from splitppo.v1 import actor_pb2
from splitppo.v1.batch_pb2 import Slot


class StepUpdates:
    """The updates of actor and critic in one step, from the rows in `slot`; both may run at the same time."""

    def __init__(self, step: StepContext, slot: Slot) -> None:
        self.step = step
        self.slot = slot
        self._actor_has_columns = asyncio.Event()  # the critic's are sent afterwards, while the actor works

    async def update_actor(self, experience: Experience) -> None:
        """Makes one PPO update of the policy, and publishes its weights if a rollout group needs them.

        In the critic's warm-up only the actor's step number advances.
        """
        config = self.step.config
        is_warm_up = self.step.is_warm_up
        send = self._send_nothing if is_warm_up else partial(self._send_to_actor, experience)
        update = partial(
            self.step.workers.actor.update,
            total_steps=config.run.total_steps or 0,
            terms=loss_terms(config),
            advance_only=is_warm_up,
        )
        # The metrics of the experience are computed in a thread during the actor's update, to save the step this time.
        measuring = asyncio.get_running_loop().run_in_executor(None, lambda: self.step.record.learning)
        await self._update(self.step.workers.actor, send, update)
        await self.step.sampling.published.publish(self.step.number, self.step.record.add_reply)
        await measuring
        if not is_warm_up:
            self.step.record.update_columns = await update_columns(self.step, self.slot)

    async def update_critic(self, experience: Experience) -> None:
        """Makes one update of the value model, if there is one. Its columns are sent once the actor has its own."""
        critic = self.step.workers.critic
        if critic is None:
            return

        async def send() -> None:
            await self._actor_has_columns.wait()
            await critic.put_batch(self.slot, experience.critic_columns)

        config = self.step.config
        num_epochs = config.critic.warmup_epochs if self.step.is_warm_up else None
        update = partial(critic.update, total_steps=config.run.total_steps or 0, num_epochs=num_epochs or 0)
        await self._update(critic, send, update)

    async def _send_to_actor(self, experience: Experience) -> None:
        """Sends the columns of the actor's update that its group lacks, and which rows the record asks for."""
        config = self.step.config
        workers = self.step.workers
        columns = experience.actor_columns(
            lacks_reference=config.actor.use_kl_loss and workers.reference is not workers.actor,
            lacks_old=config.algorithm.rollout_correction.bypasses,  # then these are the rollout backend's
        )
        recorded = await recorded_rows(self.step)
        await workers.actor.put_batch(self.slot, columns.merge(recorded))
        self._actor_has_columns.set()

    async def _send_nothing(self) -> None:
        self._actor_has_columns.set()

    async def _update(
        self, client: ActorClient | CriticClient, send: Callable[[], Awaitable[None]], update: Compute
    ) -> None:
        """Sends the columns and updates the model; repeats both if the update failed before it changed the weights.

        If the group is lost, the error ends `Trainer.fit`, and `Session._train_recovering` (controller/session.py)
        restores both models to their last common checkpoint.
        """

        async def attempt() -> CommandReply:
            await send()
            return await update(self.slot, base_step=self.step.base_step)

        name = f"update_{client.role}"
        with self.step.record.timed(name):
            reply = await replay_if_clean(client, self.step.base_step, attempt)
        self.step.record.add_reply(client.role, name, reply)


def loss_terms(config: Config) -> actor_pb2.LossTerms:
    """Returns the protobuf message with those terms of the policy loss that may change from step to step."""
    terms = config.actor.model_dump(include={"entropy_coeff", "use_kl_loss", "kl_loss_coef"})
    phases = config.algorithm.phases
    return actor_pb2.LossTerms(
        **terms,
        loss_mode=config.actor.policy_loss.loss_mode,
        phase=phases[0].label if phases else "",
        teacher_coef=loss_coef(config.teacher),
    )
