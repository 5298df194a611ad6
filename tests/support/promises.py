"""What the README promises: names for the mark `promise`, each with the words of the README.

`make test` runs every test with this mark, so that each promise is shown once; a test of tests/style holds README, list
and marks together.
"""

PROMISES = {
    # How it is placed, and what nothing may change.
    "groups that exchange messages": "The groups exchange nothing but gRPC messages",
    "no torch in the controller": "one asyncio process without torch",
    "the critic's update hides": "the step stays exactly on-policy",
    "the same weights under every schedule": "The weights are the same, bit for bit on a CPU.",
    "any process may be killed": "Any process may be killed at any moment. Every update is applied exactly once.",
    "the same command resumes": "Ctrl-C finishes the step, saves and exits; the same command resumes the run.",
    "tls and tokens": "The protocol is gRPC with TLS and tokens, without pickle",
    "any client can call": "`grpcurl` can call every worker.",
    "one open port": "On one machine, no other port is open to the network.",
    # What it computes.
    "formulas": "formulas against float64 references",
    "estimators and losses": "ten [estimators](docs/algorithms.md#advantages) and twelve [policy losses]",
    "the model of transformers": "Every start proves that a model computes here what it computes in transformers",
    "adapters": "Both train all weights, or LoRA adapters",
    "ranks divide the weights": "Ranks [divide the weights](docs/ranks.md) among them",
    "a teacher": "the policy learns from that, alone or beside rewards (on-policy distillation)",
    # Rewards.
    "scorers": "Built-in scorers cover all data sources that verl scores",
    "sandboxes": "Programs run against their test cases, each in its own sandbox.",
    "your own reward": "For your own function, set `reward.custom_function_path=my_reward.py`",
    "a judge": "One of them can be a judge behind any OpenAI-compatible URL.",
    "a reward model": "A reward model (a sequence classifier with one label) can be added",
    # Rollouts.
    "conversations": "`rollout.multi_turn` lets the policy talk with your own tools",
    "agents": "An agent that calls OpenAI's or Anthropic's API, a function or a program in any language, trains",
    "vllm": "`hf` samples with the policy itself, `vllm` with vLLM, in the actor's processes.",
    "a rollout group": "a third group samples them on devices of its own, also one step ahead",
    "shared devices": "It may also take turns with the critic on the critic's devices",
    # What a user has in hand.
    "prompts": "A run can mix several files by weight, filter rows",
    "mistakes are sentences": "A mistake in the file ends the command before the first step, with one sentence",
    "checkpoints of Hugging Face": "Hugging Face checkpoints work [unchanged](docs/from-verl.md)",
    "from verl": "one command translates a verl launch script into a SplitPPO config",
    "a plan": "predict the time of a step on other devices",
    "a doctor": "find what is wrong with a run, and what to do",
    "the run folder": "The run folder holds `metrics.jsonl`, TensorBoard files, `report.png`, a timeline for Perfetto",
    "trackers": "A tracker that cannot be reached never ends a run",
    "the viewer": "`make view` shows runs in the browser, while they train and afterwards",
}
