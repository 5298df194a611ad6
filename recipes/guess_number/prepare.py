"""Makes what guess_number needs: tokenizer, warm-started model, training and validation prompts.

    python -m recipes.guess_number.prepare [--output .cache/guess_number] [--seed 0] [--warm-start-steps 500]

The output depends on the arguments and on the code of this recipe only, and is made once: a fingerprint of both lies
beside it. The output folder appears whole or not at all.
"""

from pathlib import Path

from recipes.conversations import Language, make_model
from recipes.guess_number import task
from recipes.rows import write_parquet
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
# One token each: the roles, and the parts that conversations have in common.
_ROLES = ("system\n", "user\n", "assistant\n", "tool\n")
_NUMBERS = tuple(map(str, range(10, task.TOP + 1)))
_WORDS = (
    *(*_ROLES, "<tools>guess</tools>", task.PROMPT, task.CALL_START, *_NUMBERS, task.CALL_END),
    *("higher", "lower"),
)
LANGUAGE = Language(_WORDS, CHAT_TEMPLATE, task.TOOLS)


def make(folder: Path, seed: int, warm_start_steps: int, *, hidden_size: int = 64) -> None:
    """Fills a folder with the files of the recipe; a model of another width is a critic of benchmarks/curves.py."""
    print("guess_number: warm-starting the model by supervised steps, about twenty seconds", flush=True)
    write_parquet(task.rows_of("train", task.NUM_TRAIN_ROWS_EACH), folder / "train.parquet")
    write_parquet(task.rows_of("val", 1), folder / "val.parquet")
    make_model(folder / "model", LANGUAGE, task.conversation, warm_start_steps, seed=seed, hidden_size=hidden_size)


RECIPE = WarmStarted("guess_number", code=("task.py", "prepare.py", "../conversations.py"), num_steps=500, make=make)
prepare = RECIPE.prepare

if __name__ == "__main__":
    RECIPE.main(__doc__)
