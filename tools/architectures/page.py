"""Writes docs/architectures.md: what is said there of the proof, and a table of the comparisons."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

_HEAD = """# Architectures

| question | short answer |
|---|---|
| Can my model be trained? | any causal language model of transformers can be tried; search for its `model_type` |
| How is that known? | every start proves its forward against transformers, and ends with exit code 2 if it differs |
| Without a run? | `python -m services.actor --config my.yaml --check` (`services.critic`, ...) proves the models |
| What is refused? | the [refused](#refused) types; vision-language models; noise that cannot be switched off |

At every start each group sends a few short rows of fixed token ids through the model's own forward, each row alone,
with the whole logits and with attention of transformers. The engine's log-probs, values or scores of these rows,
packed or padded as in training, must be the same, also in training mode, and so must the log-probs of a few tokens
that the backend `hf` decodes. Else the group ends with one sentence, before anything is sampled.

* **The bound.** In fp32 log-probs must agree to 1e-4 nats, values and scores to 1e-4 of their spread. In bf16 a model
  differs from itself (with other attention, beside padding), and the engine as much from it: three times that mean
  difference and four times the greatest are allowed, and the rounding of the logits; at most 0.15 and 2 nats.
* **What it costs.** One pass of the engine over four rows, and one of the model's own forward over each of them; in
  bf16 five more passes, and one more of a model that is trained. The controller's `--check` says how many
  floating-point operations that is.
* **Compiled layers** (`actor.compile`) are proved without compiled code and with it
  ([operations.md](operations.md#compiled-layers)).
* **Sampling** with vLLM is held to the trainer by the check of the first step
  ([rollout_correction.md](rollout_correction.md#the-check)).
* **longrope** (Phi-3): rows of more tokens than `original_max_position_embeddings` are rotated by other factors, and
  computed apart from shorter ones. They cannot be sampled, so `data.max_prompt_length + data.max_response_length`,
  or `rollout.multi_turn.max_context_length`, must not exceed that number; `--check` says so.
* **Attention sinks** and other additions to attention (gpt_oss): the model keeps its own attention, and rows are
  padded. `use_remove_padding: true` and `ulysses_sequence_parallel_size` are refused.

Short rows do not reach windows, chunks, and rotary factors that change with length. `python -m tools.architectures`
compares every architecture with small ones of these, from random weights in fp32, row by row: log-probs and gradients,
packed and padded, values, scores, and what `hf` samples. `--mutations 200` changes fields of the configurations at
random: multipliers, caps, windows, kinds of layers.

"""

_LEGEND = """`=`: the same as the model's own forward, up to rounding. `-`: refused, with a sentence; the last column
has the reason where it is not that transformers has no such head. vLLM: the version of the locks knows the
architecture.
"""


VERDICTS = ("Wrong", "Trained, packed or padded", "Trained, padded only", "Refused", "Not compared")


@dataclass(frozen=True)
class Row:
    """What the page says of an architecture: its verdict, and the cells of its line."""

    model_type: str
    verdict: str
    cells: str


def write_page(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Writes the page from the lines that `python -m tools.architectures --output` has written."""
    latest = {line["model_type"]: line for line in lines if not line["changes"]}
    text = _HEAD + _summary(latest.values()) + _LEGEND + "\n".join(_tables([*_rows(latest)])) + "\n"
    path.write_text(text, encoding="utf-8")


def _verdict(line: dict[str, Any]) -> str:
    """Returns the heading under which an architecture stands."""
    results = line["results"]
    if line["reason"]:
        return "Not compared"
    if any(result.startswith("WRONG") for result in results.values()):
        return "Wrong"
    if results["packed"] == "exact":
        return "Trained, packed or padded"
    return "Trained, padded only" if results["padded"] == "exact" else "Refused"


def _summary(lines: Collection[dict[str, Any]]) -> str:
    counts = Counter(map(_verdict, lines))
    num_trained = counts["Trained, packed or padded"] + counts["Trained, padded only"]
    num_refused = counts["Refused"]
    return f"""## With transformers {version("transformers")}

Of {len(lines)} architectures {num_trained} can be trained, {num_refused} are refused, {counts["Wrong"]} are wrong.
The other {counts["Not compared"]} could not be built small on a CPU; they are proved at a start like all others.

"""


def _rows(lines: dict[str, dict[str, Any]]) -> Iterator[Row]:
    names = _of_vllm()
    for model_type, line in sorted(lines.items()):
        marks = [_mark(line["results"].get(use)) for use in ("packed", "padded", "critic", "reward", "hf")]
        has_vllm = "=" if _class_name(model_type) in names else "-"
        yield Row(model_type, _verdict(line), f"{' | '.join(marks)} | {has_vllm} | {_why(line)} |")


def _tables(rows: Sequence[Row]) -> Iterator[str]:
    """Yields the lines of a table for each verdict; a line has all types with equal results."""
    for verdict in VERDICTS:
        alike: dict[str, list[str]] = {}
        for row in rows:
            if row.verdict == verdict:
                alike.setdefault(row.cells, []).append(row.model_type)
        if not alike:
            continue
        yield from ("", f"### {verdict}", "")
        yield "| `model_type` | packed | padded | critic | reward model | hf | vLLM | why not |"
        yield "|---|---|---|---|---|---|---|---|"
        for cells, model_types in sorted(alike.items(), key=lambda entry: -len(entry[1])):
            yield f"| {', '.join(model_types)} | {cells}"


def _mark(result: str | None) -> str:
    if result is None:
        return ""
    return "=" if result == "exact" else "-" if result.startswith("refused") else "**wrong**"


# Reasons as the engine gives them, and as the page groups them.
_GROUPED = (
    (r"rows of \w+ cannot be packed", "rows cannot be packed"),
    (r"the engine cannot compute with [\w-]+ in padded rows: .*", "log-probs are not those of the model itself"),
    (r"\d+ parameters: no small", "no small"),
)


def _why(line: dict[str, Any]) -> str:
    """Returns the reason of the first refusal that needs one, without the names of the model and the numbers."""
    if line["reason"]:
        return _grouped(f"not compared: {line['reason'].split('. ')[0][:90]}")
    for use in ("padded", "packed", "hf"):
        result = line["results"].get(use, "exact")
        if result == "exact" or "no such head" in result:
            continue
        reason = result.removeprefix("refused: ").partition(" differ by")[0].removesuffix(": they")
        reason = reason.split("/policy: ")[-1].replace("use_remove_padding: ", "")
        return _grouped(reason.partition(", set it to")[0][:110])
    return ""


def _grouped(reason: str) -> str:
    for pattern, words in _GROUPED:
        reason = re.sub(pattern, words, reason)
    return reason.replace("|", "\\|")


def _class_name(model_type: str) -> str:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])


def _of_vllm() -> frozenset[str]:
    """Returns the names of the classes that vLLM knows; none without vLLM."""
    try:
        from vllm.model_executor.models.registry import ModelRegistry
    except ImportError:
        return frozenset()
    return frozenset(ModelRegistry.get_supported_archs())
