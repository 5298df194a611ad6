"""Files with samplers as users write them."""

from __future__ import annotations

WORST = '''
class Worst:
    """Whatever has scored least so far comes next."""

    def __init__(self, data_source, data_config, seed):
        self.scores = [0.0] * len(data_source)

    def next_batch(self, num_prompts):
        return sorted(range(len(self.scores)), key=lambda row: (self.scores[row], row))[:num_prompts]

    def update(self, indices, scores):
        for index, of_prompt in zip(indices, scores):
            self.scores[index] += 1 + float(of_prompt.mean())

    def state_dict(self):
        return {"scores": self.scores}

    def load_state_dict(self, state):
        self.scores = state["scores"]
'''
