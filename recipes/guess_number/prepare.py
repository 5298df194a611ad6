"""Makes what guess_number needs: tokenizer, warm-started model, training and validation prompts.

    python -m recipes.guess_number.prepare [--output .cache/guess_number] [--seed 0] [--warm-start-steps 500]

The output depends on the arguments and on the code of this recipe only, and is made once: a fingerprint of both lies
beside it. The output folder appears whole or not at all.
"""

from pathlib import Path

from tokenizers import Tokenizer

from recipes.guess_number import task
from recipes.qwen2_tokenizer import PRINTABLE, character_tokenizer, save_tokenizer
from recipes.rows import write_parquet
from recipes.tiny_models import END, PAD, START
from recipes.warm_started import WarmStarted

# Short: a tool is shown by its name alone. What the assistant says is marked, for the warm start.
CHAT_TEMPLATE = """
{%- if tools %}<|im_start|>system
{% for tool in tools %}<tools>{{ tool.function.name }}</tools>{% endfor %}<|im_end|>{{ '\\n' }}{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role + '\\n' }}
{%- if message.role == 'assistant' %}{% generation %}{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>{% endgeneration %}
{%- else %}{{ message.content }}<|im_end|>{% endif %}{{ '\\n' }}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def make_tokenizer() -> Tokenizer:
    """Makes a tokenizer with one token per character, and one for each part that conversations have in common."""
    roles = ["system\n", "user\n", "assistant\n", "tool\n"]
    numbers = map(str, range(10, task.TOP + 1))
    said = [task.PROMPT, task.CALL_START, *numbers, task.CALL_END, "higher", "lower"]
    return character_tokenizer(PRINTABLE, [PAD, START, END], [*roles, "<tools>guess</tools>", *said])


def _make(folder: Path, seed: int, warm_start_steps: int) -> None:
    from recipes import warm_start  # imports torch, which a folder that is ready does not need
    from recipes.guess_number.warm_start import examples

    print("guess_number: warm-starting the model by supervised steps, about twenty seconds", flush=True)
    write_parquet(task.rows_of("train", task.NUM_TRAIN_ROWS_EACH), folder / "train.parquet")
    write_parquet(task.rows_of("val", 1), folder / "val.parquet")
    tokenizer = make_tokenizer()
    names = {"eos_token": END, "pad_token": PAD, "unk_token": PAD}
    save_tokenizer(tokenizer, folder / "model", named_tokens=names, chat_template=CHAT_TEMPLATE)
    config = warm_start.small_qwen2(tokenizer, eos=END, pad=PAD, max_position_embeddings=128, hidden_size=64)
    model = warm_start.train(config, examples(folder / "model", seed), warm_start_steps, seed=seed)
    model.save_pretrained(folder / "model")


RECIPE = WarmStarted("guess_number", code=("task.py", "warm_start.py", "prepare.py"), num_steps=500, make=_make)
prepare = RECIPE.prepare

if __name__ == "__main__":
    RECIPE.main(__doc__)
