"""Makes what read_digits needs: tokenizer, warm-started model, images for training and validation.

    python -m recipes.read_digits.prepare [--output .cache/read_digits] [--seed 0] [--warm-start-steps 100]

`shuffled/` has the same rows, each with the image of another one, for a run that must not learn anything. The output
depends on the arguments and on the code of this recipe only, and is made once: a fingerprint of both lies beside it.
The output folder appears whole or not at all.
"""

import json
from pathlib import Path

import numpy as np

from recipes.qwen2_tokenizer import PRINTABLE, character_tokenizer, save_tokenizer
from recipes.read_digits import task
from recipes.rows import write_parquet
from recipes.tiny_models import END, NAMED_TOKENS, PAD, START
from recipes.warm_started import WarmStarted

VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
# One token each.
_ROLES = ("user\n", "assistant\n")
CHAT_TEMPLATE = """
{%- for message in messages %}<|im_start|>{{ message.role + '\\n' }}
{%- if message.content is string %}{{ message.content }}
{%- else %}{% for part in message.content %}
{%- if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}<|im_end|>{{ '\\n' }}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
# An image of 32 x 32 pixels becomes 8 x 8 patches of 14, which are 16 tokens.
_PIXELS = (8 * 14) ** 2
IMAGE_SETTINGS = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2_5_VLProcessor",
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "min_pixels": _PIXELS,
    "max_pixels": _PIXELS,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}


def make(folder: Path, seed: int, warm_start_steps: int) -> None:
    """Fills a folder with the files of the recipe."""
    from recipes.read_digits import warm_start  # imports torch, which a folder that is ready does not need

    print("read_digits: warm-starting the model by supervised steps, about twenty seconds", flush=True)
    rng = np.random.default_rng([seed, 0])
    for split, num_images in (("train", task.NUM_TRAIN_IMAGES), ("val", task.NUM_VAL_IMAGES)):
        drawn = [task.draw(rng) for _ in range(num_images)]
        digits = [one.digit for one in drawn]
        images = [task.png_of(one.rgb) for one in drawn]
        of_others = [images[other] for other in rng.permutation(num_images)]
        write_parquet(task.rows_of(digits, images, split), folder / f"{split}.parquet")
        write_parquet(task.rows_of(digits, of_others, split), folder / "shuffled" / f"{split}.parquet")
    model = folder / "model"
    tokenizer = character_tokenizer(PRINTABLE, [PAD, START, END, *VISION_TOKENS], _ROLES)
    save_tokenizer(tokenizer, model, named_tokens=NAMED_TOKENS, chat_template=CHAT_TEMPLATE)
    (model / "preprocessor_config.json").write_text(json.dumps(IMAGE_SETTINGS, indent=2) + "\n", encoding="utf-8")
    config = warm_start.small_qwen2_5_vl(tokenizer.get_vocab(), eos=END, pad=PAD)
    config.save_pretrained(model)
    warm_start.train(config, model, warm_start_steps, seed=seed).save_pretrained(model)


RECIPE = WarmStarted("read_digits", code=("task.py", "warm_start.py", "prepare.py"), num_steps=100, make=make)
prepare = RECIPE.prepare

if __name__ == "__main__":
    RECIPE.main(__doc__)
