"""TRL's PPO trainer with forced response lengths, for benchmarks/versus_trl.py; runs in an environment with TRL.

Reads its task as a JSON line from standard input, then one number per line: so many steps are made, and their seconds
written to standard output as a JSON list. All else that is printed goes to standard error.
"""

import json
import os
import sys
import time

import torch
from datasets import Dataset
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    StoppingCriteria,
    StoppingCriteriaList,
    TrainerCallback,
)
from transformers.modeling_outputs import BaseModelOutput
from trl.experimental.ppo import PPOConfig, PPOTrainer


class ForcedLengths(StoppingCriteria):
    """A stopping criterion that ends row b after lengths[b] tokens."""

    def __init__(self, lengths, prompt_tokens, eos_token_id):
        self.lengths = torch.tensor(lengths)
        self.prompt_tokens = prompt_tokens
        self.eos_token_id = torch.tensor([eos_token_id])  # who has it lets `generate` pad the rows that have ended

    def __call__(self, input_ids, *_, **__):
        """Returns [B] bool, true for the rows that have ended."""
        return self.lengths <= input_ids.shape[1] - self.prompt_tokens


class NoRewardModel(nn.Module):
    """A reward model that costs nothing and scores 0: no model scores on the other side either."""

    base_model_prefix = "base"

    def __init__(self):
        super().__init__()
        self.base = self._zeros
        self.score = nn.Identity()

    def _zeros(self, input_ids, **_):
        hidden = torch.zeros(*input_ids.shape, 1)
        return BaseModelOutput(hidden, hidden_states=(hidden,))


class OnDemand(TrainerCallback):
    """A callback that makes as many steps as it is asked for, and says how long each took."""

    def __init__(self, answers):
        self.answers = answers
        self.seconds = []
        self.left = 0

    def on_train_begin(self, *_, **__):
        """Waits for the first number."""
        self._wait()

    def on_step_end(self, *_, **__):
        """Notes the time of the step; after the last step, waits for the next number."""
        self.seconds.append(time.perf_counter() - self.started_s)
        self.left -= 1
        if self.left == 0:
            self.answers.write(json.dumps(self.seconds) + "\n")
            self.answers.flush()
            self.seconds = []
            self._wait()
        self.started_s = time.perf_counter()

    def _wait(self):
        line = sys.stdin.readline()
        if not line:
            os._exit(0)
        self.left = int(line)
        self.started_s = time.perf_counter()


def main():
    """Trains until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    task = json.loads(sys.stdin.readline())
    torch.set_num_threads(task["threads"])
    tokenizer = AutoTokenizer.from_pretrained(task["model"], padding_side="left")
    policy, reference = (AutoModelForCausalLM.from_pretrained(task["model"], dtype=torch.float32) for _ in range(2))
    value = AutoModelForSequenceClassification.from_pretrained(task["model"], num_labels=1, dtype=torch.float32)
    prompts = task["prompts"]
    stop = StoppingCriteriaList([ForcedLengths(task["lengths"], len(prompts[0]), tokenizer.eos_token_id)])
    generate = policy.generate
    policy.generate = lambda **options: generate(
        **options,
        stopping_criteria=stop,
        pad_token_id=tokenizer.pad_token_id,
        suppress_tokens=[tokenizer.pad_token_id, tokenizer.eos_token_id],
    )
    config = PPOConfig(
        output_dir=task["folder"],
        per_device_train_batch_size=len(prompts),
        gradient_accumulation_steps=1,
        num_mini_batches=task["mini_batches"],
        num_ppo_epochs=1,
        total_episodes=len(prompts) * 10_000,
        response_length=max(task["lengths"]),
        local_rollout_forward_batch_size=len(prompts),
        temperature=1.0,
        learning_rate=1e-9,
        kl_coef=0.001,
        gamma=1.0,
        lam=1.0,
        num_sample_generations=0,
        gradient_checkpointing=False,
        bf16=task["dtype"] == "bf16",
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        log_level="error",
    )
    rows = Dataset.from_list([{"input_ids": prompt} for prompt in prompts])
    trainer = PPOTrainer(
        config,
        tokenizer,
        policy,
        reference,
        NoRewardModel(),
        rows,
        value,
        eval_dataset=rows,
        callbacks=[OnDemand(answers)],
    )
    trainer.train()


if __name__ == "__main__":
    main()
