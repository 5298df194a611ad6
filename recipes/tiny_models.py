"""Makes random Qwen2 models of about a million parameters, for two CPU cores, with a tokenizer trained on the rows.

The models cannot reason, and PPO will not teach them to: they only take real rows through the whole pipeline.
"""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from recipes import qwen2_tokenizer
from recipes.made_once import code_fingerprint, make_once
from recipes.rows import Row

# The class in transformers, by kind.
KINDS = {"tiny_model": "Qwen2ForCausalLM", "tiny_reward_model": "Qwen2ForSequenceClassification"}
PAD = "<|endoftext|>"
START = "<|im_start|>"
END = "<|im_end|>"
NAMED_TOKENS = {"eos_token": END, "pad_token": PAD, "unk_token": PAD}
VOCAB_SIZE = 2048
SEED = 0
# So many rows have most words of a data set.
_NUM_TOKENIZER_ROWS = 1000
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny_model(kind: str, rows: Sequence[Row], folder: Path) -> str:
    """Makes a tiny random model with tokenizer as a Hugging Face folder, unless it exists; returns a report.

    Args:
        kind: one of KINDS; a reward model is a sequence classifier with one label.
        rows: prepared rows; the tokenizer is trained on the prompts and worked answers of the first rows.
        folder: made if it is missing, replaced if it was made from other rows or by other code.
    """
    texts = list(_texts(rows))
    digest = hashlib.sha256("\0".join(texts).encode("utf-8", "surrogatepass")).hexdigest()
    code = code_fingerprint(Path(__file__), Path(qwen2_tokenizer.__file__))
    wanted = {"kind": kind, "texts_sha256": digest, **code}
    is_new = make_once(folder, wanted, lambda scratch: _make(kind, texts, scratch))
    return f"a random {kind.replace('_', ' ')} in {folder}{'' if is_new else ', which is up to date'}"


def _make(kind: str, texts: Sequence[str], folder: Path) -> None:
    import torch
    import transformers  # slow to import, and a folder that is up to date does not need them

    tokens = [PAD, START, END]
    tokenizer = qwen2_tokenizer.train_tokenizer(texts, vocab_size=VOCAB_SIZE, special_tokens=tokens)
    pad, _, end = map(tokenizer.token_to_id, tokens)
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(SEED)
    config = transformers.Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=384,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=pad,
        num_labels=1,
    )
    model = getattr(transformers, KINDS[kind])(config)
    # Like instruction-tuned Qwen2: a response ends with <|im_end|> or with <|endoftext|>.
    model.generation_config = transformers.GenerationConfig(eos_token_id=[end, pad], pad_token_id=pad)
    model.save_pretrained(folder)
    qwen2_tokenizer.save_tokenizer(tokenizer, folder, named_tokens=NAMED_TOKENS, chat_template=CHAT_TEMPLATE)


def _texts(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows[:_NUM_TOKENIZER_ROWS]:
        yield from (message["content"] for message in row["prompt"])
        yield row["extra_info"].get("answer", "")
