"""GSM8K: rows, mistakes in the input, the tiny model, and configs that divide."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from controller.data.tokenizer import load_tokenizer
from recipes.gsm8k.prepare import BadInput, find_files, main, read_examples, to_row
from recipes.gsm8k.tiny_model import make_tiny_model
from rewards.gsm8k import compute_score
from splitppo.config import load_config
from splitppo.config.batch_plan import batch_plan

RECIPE = Path(__file__).parents[3] / "recipes" / "gsm8k"
EXAMPLES = [
    {"question": "Ann has 2 boxes of 600 nails. How many nails?", "answer": "2*600 = <<2*600=1200>>1200\n#### 1,200"},
    {"question": "Bo owes $3 and pays $5. What is left?", "answer": "3-5 = -2\n#### -2"},
]


def write_jsonl(file: Path, examples: list[dict[str, str]]) -> Path:
    file.write_text("".join(json.dumps(example) + "\n" for example in examples), encoding="utf-8")
    return file


def row_of(example: dict[str, str], index: int = 0) -> dict[str, object]:
    return to_row("here", index, example, split="train")


def test_a_row_has_verls_schema() -> None:
    assert row_of(EXAMPLES[0], 7) == {
        "data_source": "openai/gsm8k",
        "prompt": [
            {
                "role": "user",
                "content": "Ann has 2 boxes of 600 nails. How many nails?"
                ' Let\'s think step by step and output the final answer after "####".',
            }
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "1200"},
        "extra_info": {"split": "train", "index": 7, **EXAMPLES[0]},
    }


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_worked_answer_gets_the_reward(example: dict[str, str]) -> None:
    row = row_of(example)
    truth = row["reward_model"]["ground_truth"]  # type: ignore[index]
    assert compute_score("openai/gsm8k", example["answer"], truth) == 1.0


def test_both_splits_are_written(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", EXAMPLES)
    write_jsonl(tmp_path / "test.jsonl", EXAMPLES[:1])
    output = tmp_path / "new" / "output"
    assert main(["--input", str(tmp_path), "--output", str(output), "--no-tiny-model"]) == 0
    splits = {split: pq.read_table(output / f"{split}.parquet").to_pylist() for split in ("train", "test")}
    assert [row["extra_info"]["index"] for row in splits["train"]] == [0, 1]
    assert [row["extra_info"]["split"] for row in splits["test"]] == ["test"]


def test_the_hubs_parquet_files_are_read_as_well(tmp_path: Path) -> None:
    for folder in ("main", "socratic"):
        (tmp_path / folder).mkdir()
        for split in ("train", "test"):
            pq.write_table(pa.Table.from_pylist(EXAMPLES), tmp_path / folder / f"{split}-00000-of-00001.parquet")
    files = find_files(str(tmp_path))
    assert {file.parent.name for file in files.values()} == {"main"}
    assert [dict(example) for _, _, example in read_examples(files["train"])] == EXAMPLES


@pytest.mark.parametrize(
    ("second_line", "complaint"),
    [
        ('{"question": "Why?"', "not valid JSON"),
        ('["question", "answer"]', "expected a JSON object, got list"),
        ('{"question": "Why?"}', "expected a text under 'answer', got None"),
        ('{"question": " ", "answer": "#### 1"}', "expected a text under 'question', got ' '"),
        ('{"question": "Why?", "answer": "because"}', 'the answer has no number after "####"'),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], second_line: str, complaint: str
) -> None:
    write_jsonl(tmp_path / "test.jsonl", EXAMPLES)
    file = write_jsonl(tmp_path / "train.jsonl", EXAMPLES[:1])
    file.write_text(file.read_text() + second_line + "\n")
    assert main(["--input", str(tmp_path), "--output", str(tmp_path / "out")]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"error: {file}, line 2: {complaint}")
    assert not (tmp_path / "out").exists()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", EXAMPLES)
    with pytest.raises(BadInput, match=r"has no test\.jsonl"):
        find_files(str(tmp_path))


def test_a_missing_folder_is_not_looked_for_on_the_hub(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="there is no folder"):
        find_files(str(tmp_path / "absent"))


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").touch()
    with pytest.raises(BadInput, match="has no rows"):
        list(read_examples(tmp_path / "train.jsonl"))


def test_the_tiny_model_is_a_hugging_face_folder_with_a_chat_template(tmp_path: Path) -> None:
    rows = [row_of(example) for example in EXAMPLES]
    num_parameters = make_tiny_model(rows, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    assert 0.9e6 < num_parameters < 1.2e6
    assert model.num_parameters() == num_parameters
    assert tokenizer.eos_token_ids == tuple(model.generation_config.eos_token_id)
    messages = [{"role": "user", "content": "How many?"}]
    rendered = tokenizer.chat_template.render(messages)
    assert rendered == "<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n"
    text = "1,200 nails — it's\n\n  naïve"
    expected = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(text).ids
    transformers_tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert transformers_tokenizer(text).input_ids == expected
    assert tokenizer.decode_batch([np.array(expected)]) == [text]
    templated = transformers_tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert templated["input_ids"] == tokenizer.encode_batch([messages], [rendered])[0].tolist()


@pytest.mark.parametrize("name", ["cpu.yaml", "qwen2.5-0.5b.yaml"])
def test_the_rows_of_a_mini_batch_divide_over_the_ranks(name: str) -> None:
    for role in batch_plan(load_config(RECIPE / name)).roles:
        assert role.mini_batch_rows % role.num_ranks == 0


def test_the_gpu_sets_are_disjoint_and_fill_the_node() -> None:
    services = yaml.safe_load((RECIPE / "qwen2.5-0.5b.yaml").read_text())["services"]
    assert sorted(services["actor"]["devices"] + services["critic"]["devices"]) == list(range(8))
