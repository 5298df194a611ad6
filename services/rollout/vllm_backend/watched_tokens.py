"""Lets the stop rule of a run decide where a vLLM request ends whose response has tokens already."""

from collections.abc import Sequence

from services.rollout.stopping import StopWatch


class WatchedTokens:
    """Takes the place of vLLM's detokenizer of one request: collects the tokens, and ends the request by a StopWatch.

    vLLM's own takes the tokens that a response has already for a part of the prompt, in which no stop text begins.
    See `IncrementalDetokenizer` of vLLM.
    """

    def __init__(self, watch: StopWatch) -> None:
        self._watch = watch
        self.output_token_ids: list[int] = []

    def num_output_tokens(self) -> int:
        """Returns the number of tokens that the request has sampled."""
        return len(self.output_token_ids)

    def update(self, new_token_ids: Sequence[int], _stop_terminated: bool) -> str | None:
        """Adds new tokens up to the one that ends the response; returns a reason if there is one, which ends it."""
        for token in new_token_ids:
            self.output_token_ids.append(token)
            if self._watch.ends_with(token):
                return "stop"
        return None

    def get_next_output_text(self, _finished: bool, _delta: bool) -> str:
        """Returns no text: only tokens are wanted."""
        return ""
