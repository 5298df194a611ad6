"""Makes what take_notes needs: tokenizer, warm-started model, training and validation prompts.

    python -m recipes.take_notes.prepare [--output .cache/take_notes] [--seed 0] [--warm-start-steps 1200]

The output depends on the arguments and on the code of this recipe only, and is made once: a fingerprint of both lies
beside it. The output folder appears whole or not at all.
"""

from pathlib import Path

from recipes.conversations import Language, make_model
from recipes.rows import write_parquet
from recipes.take_notes import task
from recipes.warm_started import WarmStarted

# As few tokens as possible: what the user says, a sign, a note or an answer, its end.
CHAT_TEMPLATE = """
{%- for message in messages %}{% if message.role == 'assistant' %}<|im_start|>
{%- generation %}{{ message.content }}<|im_end|>{% endgeneration %}
{%- else %}{{ message.content }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>{% endif %}"""
LANGUAGE = Language((*task.FACTS, *task.QUESTIONS), CHAT_TEMPLATE)


def _make(folder: Path, seed: int, warm_start_steps: int) -> None:
    print("take_notes: warm-starting the model by supervised steps, about half a minute", flush=True)
    write_parquet(task.rows_of("train"), folder / "train.parquet")
    write_parquet(task.rows_of("val"), folder / "val.parquet")
    make_model(folder / "model", LANGUAGE, task.conversation, warm_start_steps, seed=seed)


RECIPE = WarmStarted("take_notes", code=("task.py", "prepare.py", "../conversations.py"), num_steps=1200, make=_make)
prepare = RECIPE.prepare

if __name__ == "__main__":
    RECIPE.main(__doc__)
