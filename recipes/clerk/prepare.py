"""Makes what clerk needs: tokenizer, warm-started model, training and validation prompts.

    python -m recipes.clerk.prepare [--output .cache/clerk] [--seed 0] [--warm-start-steps 300]

The output depends on the arguments and on the code of this recipe only, and is made once: a fingerprint of both lies
beside it. The output folder appears whole or not at all.
"""

from pathlib import Path

from recipes.clerk import task
from recipes.conversations import Language, make_model
from recipes.rows import write_parquet
from recipes.warm_started import WarmStarted

# As few tokens as possible: what the user says, a sign, an answer, its end.
CHAT_TEMPLATE = """
{%- for message in messages %}{% if message.role == 'assistant' %}<|im_start|>
{%- generation %}{{ message.content }}<|im_end|>{% endgeneration %}
{%- else %}{{ message.content }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>{% endif %}"""


def make(folder: Path, seed: int, warm_start_steps: int, *, hidden_size: int = 64) -> None:
    """Fills a folder with the files of the recipe; a model of another width is a critic of benchmarks/curves.py."""
    print("clerk: warm-starting the model by supervised steps, about half a minute", flush=True)
    write_parquet(task.rows_of("train"), folder / "train.parquet")
    write_parquet(task.rows_of("val"), folder / "val.parquet")
    language = Language(tuple(task.RIGHT), CHAT_TEMPLATE)
    make_model(folder / "model", language, task.conversation, warm_start_steps, seed=seed, hidden_size=hidden_size)


RECIPE = WarmStarted("clerk", code=("task.py", "prepare.py", "../conversations.py"), num_steps=300, make=make)
prepare = RECIPE.prepare

if __name__ == "__main__":
    RECIPE.main(__doc__)
