"""The fixed prompts of a run's validations, and how it answered each of them from one validation to the next."""

import hashlib
from typing import Any

import numpy as np

from splitppo.run_folder.files import RunDir, Unreadable
from splitppo.run_folder.rollouts import read_fixed

MAX_VALIDATIONS = 200
MAX_CHARACTERS = 200_000
MAX_BEGIN = 200
MAX_ERRORS = 5


def fixed_prompts(folder: RunDir) -> dict[str, Any]:
    """Returns {"step", "prompts": [{"prompt_index", "begin", "hash", "data_source", "place"}], "errors"}.

    They are those of the last validation that can be read; `hash` stands for the whole text of a prompt.
    """
    errors: list[str] = []
    for step in folder.steps("val")[: -MAX_ERRORS - 1 : -1]:
        try:
            rows = read_fixed(folder, step)
        except Unreadable as error:
            errors.append(str(error))
            continue
        found = {row["prompt_index"]: row for row in reversed(rows) if isinstance(row["prompt_index"], int)}
        return {"step": step, "prompts": [_identity(found[prompt]) for prompt in sorted(found)], "errors": errors}
    return {"step": None, "prompts": [], "errors": errors}


def _identity(row: dict[str, Any]) -> dict[str, Any]:
    text = _text(row["prompt"])
    place = {name: row[name] for name in ("prompt_index", "data_source", "place")}
    return {**place, "begin": text[:MAX_BEGIN], "hash": hashlib.sha256(text.encode(errors="replace")).hexdigest()[:16]}


def answers_to(folder: RunDir, prompt: int) -> dict[str, Any]:
    """Returns the responses to one of the fixed prompts.

    These are {"prompt", "images", "ground_truth", "rows", "num_left_out", "errors"}.

    The newest validation comes first; of more than MAX_VALIDATIONS, these are evenly spaced. All texts together have
    at most MAX_CHARACTERS: the oldest responses are cut first, and `is_cut` tells it.

    Raises:
        Unreadable: no validation has this prompt.
    """
    steps = folder.steps("val")[::-1] if prompt < 1 << 63 else []
    rows = list[dict[str, Any]]()
    errors = list[str]()
    chosen = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), MAX_VALIDATIONS)).round().astype(int)).tolist()
    for step in (steps[place] for place in chosen):
        try:
            rows += [{"step": step, **row} for row in read_fixed(folder, step, prompt)]
        except Unreadable as error:
            errors.append(str(error))
    if not rows:
        raise Unreadable(" ".join([f"No validation has a fixed prompt {prompt}.", *errors[:MAX_ERRORS]]))
    texts = {name: _text(rows[0][name])[: MAX_CHARACTERS // 4] for name in ("prompt", "ground_truth")}
    images = rows[0]["images"]
    left = MAX_CHARACTERS - sum(map(len, texts.values()))
    for row in rows:
        del row["prompt"], row["ground_truth"], row["images"]
        response = _text(row["response"])
        row |= {"response": response[:left], "is_cut": len(response) > left}
        left -= len(row["response"])
    return {
        **texts,
        "images": images,
        "rows": rows,
        "num_left_out": len(steps) - len(chosen),
        "errors": errors[:MAX_ERRORS],
    }


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
