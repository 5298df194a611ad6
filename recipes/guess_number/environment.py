"""The environment that hides a number, and whose method `guess` is a tool of the policy."""

from environments.chat import Step


class GuessNumber:
    """Hides the ground truth of a row; the reward at the end is 1 if the policy has found it."""

    def __init__(self, top: int = 31) -> None:
        self.top = top

    def reset(self, *, ground_truth: str) -> None:
        """Hides the number; the prompt says all that the policy must know."""
        self.number = int(ground_truth)
        self.is_found = False

    def privileged(self) -> dict[str, int]:
        """Names the hidden number for the critic (`critic.privileged_prompt`); the policy never reads it."""
        return {"hidden": self.number}

    def guess(self, number: int) -> str | Step:
        """Compares a guess with the hidden number.

        Args:
            number: the guess.
        """
        if not 1 <= number <= self.top:
            raise ValueError(f"expected 1 to {self.top}")
        if number == self.number:
            self.is_found = True
            return Step("right", done=True)
        return "higher" if number < self.number else "lower"

    def get_reward(self) -> float:
        """Returns 1 if the number was found, else 0."""
        return float(self.is_found)
