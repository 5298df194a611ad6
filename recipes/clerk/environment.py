"""The environment that asks a clerk for entries of a card, and rewards each answer by itself."""

import random

from environments.chat import Step
from recipes.clerk.task import NUM_REQUESTS, RIGHT


class Clerk:
    """Asks 16 times for an entry of the card that is the ground truth of a row; a right answer is worth 1/16."""

    def reset(self, *, seed: int, ground_truth: str) -> str:
        """Draws the requests; all samples of a prompt get the same ones."""
        self.card = ground_truth
        self.requests = random.Random(seed).choices(list(RIGHT), k=NUM_REQUESTS)
        return self.requests[0]

    def privileged(self) -> dict[str, str]:
        """Names all requests for the critic (`critic.privileged_prompt`), which the policy reads one by one."""
        return {"requests": "".join(self.requests)}

    def step(self, text: str) -> Step:
        """Judges an answer, and makes the next request."""
        is_right = text == self.card[RIGHT[self.requests.pop(0)]]
        return Step(self.requests[0] if self.requests else "", is_right / NUM_REQUESTS, done=not self.requests)
