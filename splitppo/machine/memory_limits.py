"""Limits of what the engine and the rollout keep in memory; the memory estimate computes with the same numbers."""

# A model whose full fp32 weights are smaller stays unsharded between forward and backward, and its gradient is reduced
# once per mini-batch: less communication for memory that is there.
KEEP_GATHERED_BYTES = 4 << 30
# Logits that exist at once, in elements: 512 MiB in fp32. A small vocabulary is one chunk.
MAX_LOGITS = 1 << 27
# Positions of room that are made at once in the KV cache of the backend hf.
KV_ROOM = 64
# Weights that are in memory at once while huggingface/ is written. A layer that is larger is a file of its own.
MAX_FILE_BYTES = 1 << 30
