"""The rows of prompt files that count, and the rows of a user's class."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from controller.data import prompt_files
from controller.data.prompt_files import PromptRow, read_rows
from splitppo.config import ConfigError, DataConfig


def row(prompt: str, **columns: Any) -> dict[str, Any]:
    return {"data_source": "letters", "prompt": prompt, "reward_model": {"ground_truth": "z"}} | columns


def write_jsonl(file: Path, rows: list[Any]) -> str:
    file.write_text("".join(json.dumps(item) + "\n" for item in rows))
    return str(file)


def load(file: str | list[str], **settings: Any) -> list[PromptRow]:
    files = (file,) if isinstance(file, str) else tuple(file)
    return read_rows(DataConfig(train_files=files, train_batch_size=1, **settings), "train")


def prompts(rows: list[PromptRow]) -> str:
    return "".join(str(row.prompt) for row in rows)


@pytest.mark.parametrize(
    ("columns", "what"),
    [
        ({"images": [{"bytes": "x"}]}, "actor.model has no vision tower, but column 'images' is not empty"),
        ({"videos": ["a.mp4"]}, "column 'videos' is not empty; models are trained on texts and images alone"),
        ({"images": [], "prompt": "<image>What is it?"}, "the prompt has 1 <image>, column 'images' has no images"),
        ({"videos": None, "prompt": [{"role": "user", "content": "See <video>."}]}, "the prompt has '<video>'; models"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "the prompt has 1 <image>, column 'images'"),
    ],
)
def test_a_row_with_more_than_text_is_refused_with_its_place(
    tmp_path: Path, columns: dict[str, Any], what: str
) -> None:
    rows = [row("a", images=[], videos=None), row("b") | columns]
    jsonl, parquet = write_jsonl(tmp_path / "t.jsonl", rows), tmp_path / "t.parquet"
    pq.write_table(pa.Table.from_pylist([rows[1]]), parquet)
    for file, place in ((jsonl, "line 2"), (str(parquet), "row 1")):
        with pytest.raises(ConfigError, match=f"{place}: {what}"):
            load(file)
    assert prompts(load(write_jsonl(tmp_path / "text.jsonl", rows[:1]))) == "a"


@pytest.mark.parametrize("sign", ["<image>", "<video>", "<audio>"])
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_signs_of_media_are_text_in_a_file_without_a_column_for_media(tmp_path: Path, sign: str, suffix: str) -> None:
    rows = [row(f"What does {sign} do in HTML?"), row([{"role": "user", "content": [{"type": "text", "text": sign}]}])]
    for number, content in enumerate(rows):
        (read,) = load(write(tmp_path / f"{number}.{suffix}", [content]))
        assert read.prompt == content["prompt"]


# Nulls, and texts that are none.


def write(file: Path, rows: list[Any]) -> str:
    if file.suffix == ".jsonl":
        return write_jsonl(file, rows)
    pq.write_table(pa.Table.from_pylist(rows), file)
    return str(file)


CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": {"word": "green"}}}
ANSWERED = [
    {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c", "style": "bold"}]},
    {"role": "assistant", "tool_calls": [CALL]},
    {"role": "tool", "name": "look", "content": [{"type": "text", "text": "d"}]},
]


def test_rows_of_a_parquet_file_have_no_keys_that_parquet_has_filled_in(tmp_path: Path) -> None:
    others = [{"name": "other", "arguments": {"place": "here", "near": {"by": 1}}}]
    extra = [{"level": 3, "tools": {"look": {"limit": 1}}}, {"seed": 4, "tools": {"find": {"depth": [1, 2]}}}]
    rows = [
        row(ANSWERED, extra_info=extra[0], reward_model={"ground_truth": {"word": "x"}}),
        row(
            [{"role": "user", "content": [], "name": "eve", "tool_calls": [{**CALL, "function": others[0]}]}],
            extra_info=extra[1],
            reward_model={"ground_truth": {"number": 2}},
        ),
    ]
    read = load(write(tmp_path / "rows.parquet", rows))
    assert [one.prompt for one in read] == [one.prompt for one in load(write(tmp_path / "rows.jsonl", rows))]
    assert read[0].prompt == [ANSWERED[0], {**ANSWERED[1], "content": None}, ANSWERED[2]]
    assert [one.fields for one in read] == [
        {**extra[0], "data_source": "letters", "ground_truth": {"word": "x"}},
        {**extra[1], "data_source": "letters", "ground_truth": {"number": 2}},
    ]


@pytest.mark.parametrize("truth", [None, float("nan"), {"target": None}, [None], {"target": {"word": None}}])
def test_a_ground_truth_that_is_missing_is_refused_with_its_row(tmp_path: Path, truth: Any) -> None:
    rows = [row("a"), row("b", reward_model={"style": "rule", "ground_truth": truth})]
    file = write_jsonl(tmp_path / "a.jsonl", rows)
    with pytest.raises(ConfigError, match=r"a\.jsonl, line 2: column 'reward_model' has no 'ground_truth'"):
        load(file)


def test_a_row_of_a_parquet_file_without_the_ground_truth_of_the_others_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "a.parquet", [row("a"), row("b", reward_model={"style": "rule"})])
    with pytest.raises(ConfigError, match=r"a\.parquet, row 2: column 'reward_model' has no 'ground_truth'"):
        load(file)


def test_rows_that_are_compared_with_nothing_need_no_ground_truth(tmp_path: Path) -> None:
    rows = [row("a", reward_model={"ground_truth": None}), row("b", reward_model={"style": "rule"}), row("c")]
    for suffix in ("jsonl", "parquet"):
        config = DataConfig(train_files=[write(tmp_path / f"a.{suffix}", rows)], train_batch_size=1)
        read = read_rows(config, "train", needs_truth=lambda source: source != "letters")
        assert [one.ground_truth for one in read] == [None, None, "z"]


HALF = "\ud83d"


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("prompt", f"sort {HALF} ab"),
        ("prompt", [{"role": "user", "content": "a"}, {"role": "user", "content": [{"text": HALF}]}]),
        ("prompt", [{"role": "user", "content": "a", HALF: "name"}]),
        ("data_source", f"letters{HALF}"),
        ("reward_model", {"ground_truth": ["x", f"y{HALF}"]}),
        ("extra_info", {"deep": [{"er": {HALF: 1}}]}),
    ],
)
def test_half_of_a_surrogate_pair_is_refused_with_its_row_and_column(tmp_path: Path, column: str, value: Any) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", [row("a \U0001f600"), row("b") | {column: value}])
    with pytest.raises(
        ConfigError, match=rf"a\.jsonl, line 2: column '{column}': it has half of a surrogate pair"
    ) as one:
        load(file)
    assert str(one.value).isascii()


def test_what_is_nested_more_than_100_deep_is_refused_with_its_row(tmp_path: Path) -> None:
    deep: list[Any] = []
    for _ in range(101):
        deep = [deep]
    file = write_jsonl(tmp_path / "a.jsonl", [row("a", extra_info={"deep": deep})])
    with pytest.raises(ConfigError, match=r"a\.jsonl, line 1: column .extra_info.: .*100 deep"):
        load(file)


def test_rows_that_unfold_to_much_more_than_their_file_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_files, "_MAX_CHARACTERS", 10**6)
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 3000, pa.int32()), pa.array(["x" * 1000]))
    columns = {"prompt": texts, "data_source": ["letters"] * 3000, "reward_model": [{"ground_truth": "z"}] * 3000}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet", compression="zstd")
    with pytest.raises(
        ConfigError, match=r"a\.parquet, row \d+: the rows up to this one have 1,000,\d+ characters, much"
    ):
        load(str(tmp_path / "a.parquet"))
    few = pa.table({name: values[:900] for name, values in columns.items()})
    pq.write_table(few, tmp_path / "few.parquet")
    assert len(load(str(tmp_path / "few.parquet"))) == 900


def test_a_parquet_file_with_a_text_that_is_no_utf_8_is_refused(tmp_path: Path) -> None:
    text = pa.Array.from_buffers(pa.string(), 1, pa.array([b"a\xff"], pa.binary()).buffers())
    table = pa.table({"prompt": text, "data_source": ["letters"], "reward_model": [{"ground_truth": "z"}]})
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=r"a\.parquet is not a readable parquet file: 'utf-8' codec can't decode"):
        load(str(tmp_path / "a.parquet"))


# Filters.


@pytest.fixture
def levels(tmp_path: Path) -> str:
    """Five prompts, a to e, with levels; the last is of another source."""
    rows = [row(letter, extra_info={"level": level}) for letter, level in zip("abcd", (1, 2, 3, 3.5), strict=True)]
    return write_jsonl(tmp_path / "levels.jsonl", [*rows, row("e", data_source="other", extra_info={"level": True})])


@pytest.mark.promise("prompts")
@pytest.mark.parametrize(
    ("filters", "left"),
    [
        ({"data_source": "letters"}, "abcd"),
        ({"data_source": ["other", "none"]}, "e"),
        ({"extra_info": {"level": [1, 3]}}, "ac"),
        ({"extra_info.level": {"min": 2, "max": 3}}, "bc"),
        ({"extra_info.level": {"max": 2}}, "ab"),
        ({"extra_info.level": True}, "e"),
        ({"data_source": "letters", "extra_info": {"level": {"min": 3}}}, "cd"),
    ],
)
def test_rows_that_do_not_pass_the_filters_are_left_out(levels: str, filters: dict[str, Any], left: str) -> None:
    assert prompts(load(levels, filters=filters)) == left
    assert len(load(levels, val_filters=filters)) == 5


def test_filters_look_at_columns_of_parquet_files_too(tmp_path: Path) -> None:
    rows = [row("a", ability="x", extra_info={"level": 1}), row("b", ability="y", extra_info={"level": None})]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    file = str(tmp_path / "a.parquet")
    assert prompts(load(file, filters={"ability": "y"})) == "b"
    assert prompts(load(file, filters={"extra_info.level": {"min": 0}})) == "a"
    with pytest.raises(ConfigError, match=r"a\.parquet, row 1: column 'abilty', which a filter names, is missing"):
        load(file, filters={"abilty": "y"})


@pytest.mark.promise("prompts")
def test_max_samples_counts_rows_that_pass_of_all_files_together(tmp_path: Path) -> None:
    files = [write_jsonl(tmp_path / f"{name}.jsonl", [row(letter) for letter in name]) for name in ("abz", "cde")]
    passing = {"filters": {"data_source": "letters"}}
    assert prompts(load(files, max_samples=4, **passing)) == "abzc"
    other = write_jsonl(tmp_path / "other.jsonl", [row("y", data_source="other")])
    assert prompts(load([other, *files], max_samples=2, **passing)) == "ab"


def test_filters_that_nothing_passes_are_named_with_the_number_of_rows(levels: str) -> None:
    passes = r"passes data_source: \['gsm8k'\], extra_info\.level: {'min': 2.0}"
    sentence = rf"data\.filters: none of the 5 rows of data\.train_files {passes}"
    with pytest.raises(ConfigError, match=sentence):
        load(levels, filters={"data_source": "gsm8k", "extra_info.level": {"min": 2}})


# A user's class in place of files.

DATASET = """
class Squares:
    def __init__(self, data_files, data_config, split):
        self.rows = [
            {"prompt": chr(97 + number), "data_source": split, "reward_model": {"ground_truth": str(number**2)}}
            for number in range(int(data_files[0]))
        ]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def generated(data_files, data_config, split):
    for letter in "xyz":
        yield {"prompt": letter, "data_source": "letters", "reward_model": {"ground_truth": data_config.prompt_key}}


def lists(data_files, data_config, split):
    return [["a", "b"]]


def half(data_files, data_config, split):
    return [*generated(data_files, data_config, split), {"prompt": "a", "data_source": "letters"}]


def fails(data_files, data_config, split):
    yield from generated(data_files, data_config, split)
    raise KeyError("no such shard")


def empty(data_files, data_config, split):
    return iter(())


no_class = 3
"""


@pytest.fixture
def custom(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(DATASET)
    return str(tmp_path / "mine.py")


def test_rows_may_come_from_a_class_of_the_users(custom: str) -> None:
    rows = load("4", custom_cls={"path": custom, "name": "Squares"}, max_samples=3)
    assert [(row.prompt, row.ground_truth, row.data_source) for row in rows] == [
        ("a", "0", "train"),
        ("b", "1", "train"),
        ("c", "4", "train"),
    ]
    assert prompts(load("4", custom_cls={"path": custom, "name": "generated"})) == "xyz"


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("absent", "key 'data.custom_cls.name': .*mine.py has no class or function 'absent'"),
        ("no_class", "key 'data.custom_cls.name': .*mine.py has no class or function 'no_class'"),
        ("Squares", "Squares of .*mine.py gave no train rows: ValueError: invalid literal for int"),
        ("fails", "fails of .*mine.py gave no train rows: KeyError: 'no such shard'"),
        ("lists", r"lists of .*mine.py \(train\), row 1: expected a mapping of columns, got \['a', 'b'\]"),
        ("half", r"half of .*mine.py \(train\), row 4: column 'reward_model' is missing"),
        ("empty", "data.custom_cls: empty of .*mine.py has no rows"),
    ],
)
def test_a_class_that_gives_no_rows_is_named(custom: str, name: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        load("train.parquet", custom_cls={"path": custom, "name": name})
    assert "\n" not in str(caught.value)


def test_a_file_of_the_users_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import no_such_package")
    for name, sentence in (
        ("broken.py", "importing .*broken.py failed: ModuleNotFoundError: No module named 'no_such_package'"),
        ("absent.py", "there is no file .*absent.py"),
    ):
        with pytest.raises(ConfigError, match=f"^key 'data.custom_cls.path': {sentence}"):
            load("x", custom_cls={"path": str(tmp_path / name), "name": "Rows"})
