r"""Prepares HH-RLHF (Bai et al., 2022) as prompt files, with the tiny policy and reward model of cpu.yaml.

    python -m recipes.hh_rlhf.prepare --split rl --input Anthropic/hh-rlhf --output .cache/hh_rlhf

A row of the input has two transcripts, "chosen" and "rejected", in which "\n\nHuman:" and "\n\nAssistant:" take turns.
Their prompt is the common part up to the last "\n\nAssistant:". --split says for which training the rows are:

    sft  prompt, response: texts; the response is the chosen answer
    rm   prompt, chosen, rejected: texts
    rl   prompt files of verl's schema: the prompt as chat messages, to be scored by a reward model

The texts offend; they are never printed.
"""

import re
import sys
from collections.abc import Callable, Mapping
from itertools import groupby

from recipes.preparation import Recipe, command_line, run
from recipes.rows import BadInput, Example, Row

DATA_SOURCE = "Anthropic/hh-rlhf"
ASSISTANT = "\n\nAssistant:"
_TURN = re.compile(r"\n\n(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}


def transcripts(example: Example) -> tuple[str, str, str]:
    """Divides both transcripts of an example into (prompt, chosen, rejected); the prompt is their common beginning.

    The prompt ends with ASSISTANT, the other two texts continue it.

    Raises:
        BadInput: a transcript is missing, or the two have no turn of the assistant in common.
    """
    # Other editions of the data set have the prompt in a field of its own, and only answers in the other two.
    prompt = example.text("prompt") if "prompt" in example.fields else ""
    chosen, rejected = (prompt + example.text(name, may_be_empty=bool(prompt)) for name in ("chosen", "rejected"))
    turns = (turn.end() for turn in re.finditer(ASSISTANT, chosen))
    end = max((end for end in turns if rejected.startswith(chosen[:end])), default=0)
    if not end:
        raise BadInput(f"{example.place}: 'chosen' and 'rejected' have no \"\\n\\nAssistant:\" in common")
    return chosen[:end], chosen[end:], rejected[end:]


def messages(prompt: str) -> list[dict[str, str]] | None:
    """Converts a transcript that is a prompt into chat messages; None unless the first and the last turn are a human's.

    None also if a turn has no text.

    Turns of one speaker that follow each other become one message: chat templates want the speakers to alternate.
    """
    _, *speakers_and_texts = _TURN.split(prompt.removesuffix(ASSISTANT))
    speakers = speakers_and_texts[::2]
    texts = speakers_and_texts[1::2]
    turns = zip(speakers, texts, strict=True)
    together = [
        {"role": _ROLES[speaker], "content": "\n\n".join(text.strip() for _, text in of_speaker)}
        for speaker, of_speaker in groupby(turns, key=lambda turn: turn[0])
    ]
    if not together or not all(message["content"] for message in together):
        return None
    is_of_user = together[0]["role"] == together[-1]["role"] == "user"
    return together if is_of_user else None


def first_answer(continuation: str) -> str:
    """Returns the assistant's text up to the human's next turn: a few transcripts differ before their last turn."""
    return _TURN.split(continuation)[0].strip()


def to_sft_row(example: Example) -> Row | None:
    """Converts an example of HH-RLHF into a row for supervised fine-tuning; None if the answer is empty."""
    prompt, chosen, _ = transcripts(example)
    answer = first_answer(chosen)
    return {"prompt": prompt, "response": answer, **_origin(example)} if answer else None


def to_rm_row(example: Example) -> Row | None:
    """Converts an example of HH-RLHF into a row for training a reward model; None if both answers are equal."""
    prompt, chosen, rejected = transcripts(example)
    both = {"chosen": chosen.strip(), "rejected": rejected.strip()}
    return {"prompt": prompt, **both, **_origin(example)} if both["chosen"] != both["rejected"] else None


def to_rl_row(example: Example) -> Row | None:
    """Converts an example of HH-RLHF into a row of a prompt file for PPO; None if the prompt is no conversation."""
    prompt, chosen, _ = transcripts(example)
    conversation = messages(prompt)
    if conversation is None:
        return None
    # The reward model does not read the ground truth, which is the answer that people preferred.
    return example.verl_row(
        DATA_SOURCE, conversation, "alignment", {"style": "model", "ground_truth": first_answer(chosen)}
    )


def _origin(example: Example) -> Row:
    return {"data_source": DATA_SOURCE, "extra_info": {"split": example.split, "index": example.index}}


TO_ROW: Mapping[str, Callable[[Example], Row | None]] = {"sft": to_sft_row, "rm": to_rm_row, "rl": to_rl_row}


def recipe(split: str) -> Recipe:
    """Returns the recipe that prepares HH-RLHF for one kind of training: "sft", "rm" or "rl"."""
    names = ("{}.jsonl", "{}.jsonl.gz", "{}.parquet", "*/{}.jsonl.gz", "data/{}-*.parquet")
    return Recipe(
        name=f"hh_rlhf {split}",
        to_row=TO_ROW[split],
        files={part: [name.format(part) for name in names] for part in ("train", "test")},
        tiny_models=("tiny_model", "tiny_reward_model") if split == "rl" else (),
        unprintable=("prompt", "content", "ground_truth", "response", "chosen", "rejected"),
    )


def main(arguments: list[str]) -> int:
    """Runs the command line, which makes prompt files of the HH-RLHF data; returns the exit code."""
    parser = command_line(__doc__)
    parser.add_argument("--split", choices=TO_ROW, required=True, help="for which training the rows are")
    options = parser.parse_args(arguments)
    return run(recipe(options.split), options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
