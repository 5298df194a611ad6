"""Constants that limit the memory of training and rollout; the memory estimate computes with the same numbers."""

# A model with smaller fp32 weights stays unsharded between forward and backward, and its gradient is reduced once per
# mini-batch: that takes less communication, and memory that such a model can afford.
KEEP_GATHERED_BYTES = 4 << 30
# The largest number of logits that exist at the same time: 512 MiB in fp32. A small vocabulary is one chunk.
MAX_LOGITS = 1 << 27
# The number of positions by which the KV cache of the backend hf grows.
KV_ROOM = 64
# The largest amount of weights in memory while huggingface/ is written. A larger layer is a file of its own.
MAX_FILE_BYTES = 1 << 30
