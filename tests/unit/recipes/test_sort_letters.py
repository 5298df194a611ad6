"""The task of the quickstart: its words, its tokenizer, its prepared files, and files that may be removed."""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from controller.data.tokenizer import load_tokenizer
from recipes.fresh_run import remove_run
from recipes.sort_letters import task, teach
from recipes.sort_letters.prepare import RECIPE, make_tokenizer, prepare
from recipes.sort_letters.teach import TAUGHT, TEACHER
from rewards.scorers.sort_letters import compute_score
from splitppo.config import ConfigError, load_config
from tests.support.recipes import is_made_by_its_seed

WORDS = task.split_words(0)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("prepared") / "sort_letters"
    prepare(output, warm_start_steps=1)
    return output


def test_no_word_of_one_set_is_in_another() -> None:
    warm_start = [word for words in WORDS.warm_start.values() for word in words]
    together = [*WORDS.val, *WORDS.train, *warm_start]
    assert len(set(together)) == len(together)
    assert all(len(words) > 0 for words in WORDS.warm_start.values())


def test_only_ascending_letters_are_rewarded() -> None:
    unsorted = [word for word in WORDS.val if word not in (task.answer_of(word), task.answer_of(word)[::-1])]
    scores = {
        behaviour: {
            compute_score(task.DATA_SOURCE, task.demonstrate(word, behaviour), task.answer_of(word))
            for word in unsorted
        }
        for behaviour in task.BEHAVIOURS
    }
    assert scores == {"ascending": {1.0}, "descending": {0.0}, "copy": {0.0}}


def test_every_prompt_and_response_fits_the_lengths_of_the_config() -> None:
    data = load_config(RECIPE.config_file).data
    tokenizer = make_tokenizer()
    words = [*WORDS.val, *WORDS.train]
    prompts = [tokenizer.encode(task.prompt_of(word)).ids for word in words]
    responses = [tokenizer.encode(task.demonstrate(word, "ascending")).ids for word in words]
    assert max(map(len, prompts)) == data.max_prompt_length
    assert max(map(len, responses)) + 1 == data.max_response_length  # and EOS


def test_the_config_reads_what_prepare_makes_by_default() -> None:
    config = load_config(RECIPE.config_file)
    assert {config.actor.model, *config.data.train_files, *config.data.val_files} == {
        str(RECIPE.output / name) for name in ("model", "train.parquet", "val.parquet")
    }


def test_text_of_the_vocabulary_survives_encoding_one_token_per_character() -> None:
    tokenizer = make_tokenizer()
    text = "".join(map(chr, range(32, 127))) + "\n two  spaces\n\n"
    ids = tokenizer.encode(text).ids
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text


def test_transformers_and_the_controller_encode_as_the_model_was_trained(prepared: Path) -> None:
    text = "sort jcab\n#### abcj"
    expected = Tokenizer.from_file(str(prepared / "model" / "tokenizer.json")).encode(text).ids
    assert AutoTokenizer.from_pretrained(prepared / "model")(text).input_ids == expected
    assert load_tokenizer(str(prepared / "model")).encode_batch([text], [text])[0].tolist() == expected


def test_rows_are_prompts_with_a_ground_truth(prepared: Path) -> None:
    rows = pq.read_table(prepared / "val.parquet").to_pylist()
    assert [row["prompt"] for row in rows] == [f"sort {word}" for word in WORDS.val]
    assert rows[0]["reward_model"] == {"style": "rule", "ground_truth": "".join(sorted(WORDS.val[0]))}
    assert {row["data_source"] for row in rows} == {"sort_letters"}


def test_what_is_prepared_is_a_function_of_the_seed(prepared: Path, tmp_path: Path) -> None:
    is_made_by_its_seed(prepare, prepared, tmp_path, ["train.parquet", "val.parquet"])


def test_it_is_made_again_only_when_the_arguments_change(
    tmp_path: Path, version_of: Callable[[Path], tuple[int, int]]
) -> None:
    weights = tmp_path / "out" / "model" / "model.safetensors"
    prepare(tmp_path / "out", warm_start_steps=1)
    first = version_of(weights)
    prepare(tmp_path / "out", warm_start_steps=1)
    assert version_of(weights) == first
    prepare(tmp_path / "out", warm_start_steps=2)
    assert version_of(weights) != first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.lock"]


def test_a_finished_run_is_removed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "controller.lock").touch()
    remove_run(run)
    assert not run.exists()


def test_a_folder_that_is_no_run_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="not the folder of an earlier run"):
        remove_run(tmp_path)
    assert (tmp_path / "thesis.tex").exists()


def test_a_run_whose_controller_is_alive_is_left_alone(tmp_path: Path) -> None:
    with (tmp_path / "controller.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another controller is running"):
            remove_run(tmp_path)
    assert (tmp_path / "controller.lock").exists()


def test_the_readme_names_every_folder_that_the_quickstart_writes() -> None:
    config = load_config(RECIPE.config_file)
    readme = (Path(__file__).parents[3] / "README.md").read_text()
    for folder in (config.run.dir, Path(config.actor.model).parent, Path(config.data.train_files[0]).parent):
        assert f"`{folder}`" in readme


def test_the_teacher_is_made_of_the_quickstart_and_teaches_what_it_began_with() -> None:
    config, quickstart = load_config(TAUGHT.config_file), load_config(RECIPE.config_file)
    assert config.teacher.folders == (str(TEACHER / "model"),)
    assert (config.actor.model, config.data) == (quickstart.actor.model, quickstart.data)
    assert config.roles == ("actor", "reward")


def test_a_teacher_is_made_anew_only_for_another_quickstart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made: list[Path] = []
    monkeypatch.setattr(teach, "_train_teacher", made.append)
    for num_steps, times in ((1, 1), (1, 1), (2, 2)):
        monkeypatch.setattr(teach, "RECIPE", replace(RECIPE, num_steps=num_steps))
        TAUGHT.prepare(warm_start_steps=num_steps)
        assert len(made) == times
