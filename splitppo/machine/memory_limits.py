"""Constants that limit the memory of training and rollout; the memory estimate computes with the same numbers."""

# A model with smaller fp32 weights stays unsharded between forward and backward, and its gradient is reduced once per
# mini-batch: that takes less communication, and memory that such a model can afford.
KEEP_GATHERED_BYTES = 4 << 30
# Decoded images that a rank keeps for its next passes over the same rows.
DECODED_IMAGES_BYTES = 1 << 30
# The largest number of logits that exist at the same time: 512 MiB in fp32. A small vocabulary is one chunk.
MAX_LOGITS = 1 << 27
# The largest number of entries of an attention mask while hf computes prompts: 64 MiB, and as many floats in attention.
MAX_MASK = 1 << 26
# The number of positions by which the KV cache of the backend hf grows.
KV_ROOM = 64
# The largest amount of weights in memory while huggingface/ is written. A larger layer is a file of its own.
MAX_FILE_BYTES = 1 << 30
# The memory on the device for the moments of AdamW that are stepped on together, if they are kept in main memory or in
# bf16; with those in main memory, two such buckets are there at the same time.
MOMENT_BUCKET_BYTES = 256 << 20


def bucket_bytes_per_weight(bytes_each: int) -> int:
    """Returns the bytes that a weight takes in a bucket: two moments in fp32, and to round them to bf16 6 bytes more.

    `bytes_each` are those of a moment where it is kept.
    """
    return 8 if bytes_each == 4 else 8 + 4 + 2
