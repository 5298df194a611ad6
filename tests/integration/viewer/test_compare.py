"""Several runs over each other, and one prompt from validation to validation."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from selenium.webdriver.common.keys import Keys

from tests.integration.viewer.test_hostile import visible
from tests.support.browser import Page, viewer
from tests.support.hostile_texts import HOSTILE
from tests.support.viewed_runs import Shape, add_step, make_run

pytestmark = pytest.mark.browser

SMALL = Shape(steps=4, prompts=3, samples=2)
SCORE, ENTROPY = '[data-card="critic/score/mean"]', '[data-card="actor/entropy"]'
SPANS = "return [...document.querySelectorAll(`${arguments[0]} figcaption span:has(b)`)].map((one) => one.textContent)"
DRAWN = '[aria-label="runs that are drawn"] input'


def configured(run: Path, text: str) -> Path:
    (run / "config.yaml").write_text(text)
    return run


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """In this order: three seeds, of which one is longer; another learning rate; older than the record; hostile."""
    folder = tmp_path_factory.mktemp("compared")
    config = "run: {{name: s{0}, dir: runs/s{0}, seed: {0}}}\nactor: {{lr: {1}, token: abc{0}}}\n"
    shapes = {1: SMALL, 2: SMALL, 3: Shape(steps=8, prompts=3, samples=2)}
    seeds = [
        configured(make_run(folder / f"s{seed}", shape, seed=seed), config.format(seed, "1.0e-06"))
        for seed, shape in shapes.items()
    ]
    other = configured(make_run(folder / "other", SMALL, seed=4), config.format(1, "2.0e-06"))
    bare = folder / "bare"
    bare.mkdir()
    (bare / "metrics.jsonl").write_text(
        '{"step": 1, "critic/score/mean": 0.25}\n{"step": 2, "critic/score/mean": 0.5}\n'
    )
    hostile = make_run(folder / HOSTILE[2].replace("/", "_"), Shape(steps=8, prompts=21, samples=2, texts=HOSTILE))
    keys = "".join(f"{json.dumps(text)}: {json.dumps(text)}\n" for text in HOSTILE)
    return [*seeds, other, bare, configured(hostile, keys)]


@pytest.fixture(scope="module")
def address(folders: list[Path]) -> Iterator[str]:
    with viewer(folders) as address:
        yield address


@pytest.fixture
def page(open_page: Callable[[str], Page], address: str) -> Page:
    return open_page(address)


def metric(run: Path, name: str) -> dict[int, float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line[name] for line in lines if name in line}


def caption(page: Page, card: str, wanted: Mapping[str, float]) -> None:
    """Waits until the caption of a card has these numbers, and no others."""

    def is_there() -> bool:
        shown = [re.fullmatch(r"(.*?) (\S+)(?: at step \d+)?", text) for text in page.script(SPANS, card)]
        found = {one[1]: float(one[2]) for one in shown if one is not None and one[2] != "–"}
        return found == pytest.approx(dict(wanted), rel=6e-3, abs=1e-9)

    page.until(is_there, f"{card}: {wanted}")


def test_curves_lie_over_each_other_with_the_numbers_of_their_metrics(page: Page, folders: list[Path]) -> None:
    page.go("compare/0-3-4")
    named = {"s1": folders[0], "other": folders[3], "bare": folders[4]}
    scores = {name: metric(run, "critic/score/mean") for name, run in named.items()}
    caption(page, SCORE, {name: list(values.values())[-1] for name, values in scores.items()})
    caption(page, ENTROPY, {name: metric(named[name], "actor/entropy")[4] for name in ("s1", "other")})
    page.one(f"{SCORE} .plot").send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    page.until(lambda: page.one(f"{SCORE} figcaption .dim").text == "step 2", "step 2")
    caption(page, SCORE, {name: values[2] for name, values in scores.items()})
    page.all(DRAWN)[0].click()
    caption(page, ENTROPY, {"other": metric(folders[3], "actor/entropy")[4]})
    rows = {row.text.split()[0]: row.text.split()[1:] for row in page.all("table.last tbody tr")}
    assert float(rows["other"][0]) == pytest.approx(scores["other"][4], rel=6e-3)
    assert rows["bare"][1:6] == ["–"] * 5


def swatches(page: Page) -> list[str]:
    """The colours beside the runs to choose from."""
    styles = [key.get_attribute("style") for key in page.all('[aria-label="runs that are drawn"] .key')]
    return [style[style.index("--") : style.index(")")] for style in styles if style]


def test_runs_that_differ_in_their_seed_are_mean_and_range(page: Page, folders: list[Path]) -> None:
    page.go("compare/0-1-2-3")
    name = "critic/score/mean"
    seeds = [metric(run, name) for run in folders[:3]]

    def joined(step: int) -> dict[str, float]:
        values = np.array([one[step] for one in seeds])
        numbers = (values.mean(), values.max(), values.min())
        return dict(zip(("mean of 3: s1, s2, s3", "s1… highest", "s1… lowest"), numbers, strict=True))

    caption(page, SCORE, joined(4) | {"other": metric(folders[3], name)[4]})
    assert swatches(page) == ["--c1", "--c1", "--c1", "--c4"]
    page.one(f"{SCORE} .plot").send_keys(*[Keys.ARROW_RIGHT] * 3)
    caption(page, SCORE, joined(3) | {"other": metric(folders[3], name)[3]})
    page.one(f"{SCORE} .plot").send_keys(*[Keys.ARROW_RIGHT] * 2)
    caption(page, SCORE, {})  # at step 5, which two of the three do not have
    page.one(".bar label input[type=checkbox]").click()
    page.until(lambda: swatches(page) == ["--c1", "--c2", "--c3", "--c4"], "a colour for each run")
    named = zip(("s1", "s2", "s3", "other"), (*seeds, metric(folders[3], name)), strict=True)
    caption(page, SCORE, {run: list(values.values())[-1] for run, values in named})
    page.one(".bar select").send_keys("tokens")
    page.until(lambda: not page.one(".bar label input[type=checkbox]").is_enabled(), "an axis without means")


def test_on_an_axis_of_tokens_a_curve_stands_where_the_run_had_sampled_so_many(page: Page, folders: list[Path]) -> None:
    page.go("compare/0-3-4")
    page.one(f"{SCORE} figcaption b")
    page.one(".bar select").send_keys("tokens")
    page.until_shown("bare has no perf/total_num_tokens, and so no place on this axis.")
    sums = {
        run.name: np.cumsum(list(metric(run, "perf/total_num_tokens").values())) for run in (folders[0], folders[3])
    }
    scores = {run.name: list(metric(run, "critic/score/mean").values()) for run in (folders[0], folders[3])}
    page.one(f"{SCORE} .plot").send_keys(*[Keys.ARROW_RIGHT] * 4)
    at = sorted(np.concatenate(list(sums.values())))[3]
    page.until(lambda: page.one(f"{SCORE} figcaption .dim").text == f"tokens {at:,.0f}", f"{at} tokens")
    before = {name: int((sums[name] <= at).sum()) for name in sums}
    caption(page, SCORE, {name: scores[name][num - 1] for name, num in before.items() if num})


def test_keys_that_differ_have_a_row_and_secrets_are_hidden(page: Page) -> None:
    page.go("compare/0-2-3-4")
    page.one("table.differences")
    rows = [[cell.text for cell in row.find_elements("css selector", "td")] for row in page.all("table.differences tr")]
    assert rows[1:] == [["run.seed", "1", "3", "1", "–"], ["actor.lr", "1.0e-06", "1.0e-06", "2.0e-06", "–"]]
    page.until_shown("without run.dir and run.name. Values that look like secrets are hidden")
    page.until_shown("bare: config.yaml cannot be read")
    assert "abc1" not in page.text()


def test_a_metric_that_is_searched_joins_the_curves(page: Page, folders: list[Path]) -> None:
    page.go("compare/0-3")
    page.one(f"{SCORE} figcaption b")
    page.driver.switch_to.active_element.send_keys("/")
    page.driver.switch_to.active_element.send_keys("returns mean")
    page.until(lambda: len(page.all("button.link")) == 1, "the metric")
    page.one("button.link").click()
    caption(page, '[data-card="critic/returns/mean"]', {"s1": 0.5, "other": 0.5})


def test_a_run_that_trains_a_run_that_is_deleted_and_runs_that_are_not_there(
    open_page: Callable[[str], Page], tmp_path: Path
) -> None:
    live, lost = make_run(tmp_path / "live", SMALL, ended=False), make_run(tmp_path / "lost", SMALL)
    with viewer([live, lost]) as address:
        page = open_page(address)
        page.go("compare/0-1-7")
        page.until_shown("There is no run 7")
        before = metric(lost, "critic/score/mean")[4]
        caption(page, SCORE, {"live": metric(live, "critic/score/mean")[4], "lost": before})
        add_step(live, 5, SMALL)
        caption(page, SCORE, {"live": metric(live, "critic/score/mean")[5], "lost": before})
        shutil.rmtree(lost)
        page.until_shown(f"The run folder {lost} cannot be read.")
        caption(page, SCORE, {"live": metric(live, "critic/score/mean")[5]})
        page.go("compare/" + "-".join(map(str, range(30))))
        page.until_shown("These are 30 runs; the first 20 are compared.")
        page.go("compare/")
        page.until_shown("No run is named")
        page.driver.get("about:blank")
        page.script("window.watched = []")
        page.forget()  # the browser logs that there is no run 7


def responses(run: Path, prompt: int, sample: int = 0) -> dict[int, str]:
    """The responses to a prompt by step."""
    files = (run / "rollouts" / "val").glob("*.parquet")
    rows = {int(file.stem): pq.read_table(file).to_pylist() for file in files}
    wanted = (prompt, sample)
    return {
        step: next(row["response"] for row in found if (row["prompt_index"], row["sample"]) == wanted)
        for step, found in rows.items()
    }


def parts(page: Page) -> list[list[tuple[str, str]]]:
    """What each answer shows, as (name of the element, text)."""
    code = (
        "return [...document.querySelectorAll('.answer')]"
        ".map((one) => [...one.childNodes].map((part) => [part.nodeName, part.textContent]))"
    )
    return [[(name, text) for name, text in one] for one in page.script(code)]


def whole(shown: Sequence[tuple[str, str]], *names: str) -> str:
    return "".join(text for name, text in shown if name in names)


def test_the_answers_to_a_prompt_are_marked_against_the_validation_before(page: Page, folders: list[Path]) -> None:
    page.go("run/2/prompt/2")
    page.one("table.answers")
    assert page.one('[aria-label="prompt"].text').text == "Question 1: how many apples are left?"
    for sample in (0, 1):
        texts = responses(folders[2], 1, sample)
        page.until(lambda texts=texts: whole(parts(page)[1], "#text") == texts[4], "the sample")  # type: ignore[misc]
        newest, first = parts(page)
        assert whole(newest, "#text", "INS") == texts[8]
        assert "".join(whole(newest, "#text", "DEL").split()) == "".join(texts[4].split())
        assert {name for name, _ in newest} == {"#text", "INS", "DEL"}
        assert {name for name, _ in first} == {"#text"}
        page.one(".bar select:not(.chooser *)").send_keys("2")
    scores = [row["score"] for row in pq.read_table(folders[2] / "rollouts" / "val" / "8.parquet").to_pylist()][2:4]
    caption(page, '[data-card="prompt"]', {"s3": float(np.mean(scores))})
    page.driver.switch_to.active_element.send_keys(Keys.ESCAPE)


def test_one_prompt_of_several_runs_is_found_by_what_it_is(page: Page, folders: list[Path]) -> None:
    page.go("run/2/prompt/2/with/0-5-4")
    page.one("table.answers")
    page.until_shown("does not record this prompt")
    page.until_shown("bare: This run has no record of a validation: tracking.rollouts.enable turns it on")
    assert [head.text for head in page.all("table.answers th")] == ["step", "s3", "s1"]
    shown = [whole(one, "#text", "INS") for one in parts(page)]
    assert shown == [responses(folders[2], 1)[8], responses(folders[2], 1)[4], responses(folders[0], 1)[4]]
    page.driver.switch_to.active_element.send_keys("j")
    page.until(lambda: page.driver.current_url.endswith("prompt/3/with/0-5-4"), "the next prompt")
    page.go("run/2/prompt/77")
    page.until_shown("Prompt 77 is none of the 3 prompts")
    page.go("run/4/prompt")
    page.until_shown("tracking.rollouts.enable turns it on")


def test_hostile_texts_stay_texts_in_answers_and_in_keys(page: Page, folders: list[Path]) -> None:
    page.go("compare/0-5")
    page.one("table.differences")
    content = page.one("table.differences").get_property("textContent")
    # What YAML itself has no sign for stands in its own escapes, or not at all.
    assert [text for text in HOSTILE if visible(text) not in content and "\x00" not in text] == []
    for prompt in range(20):
        page.go(f"run/5/prompt/{prompt + 1}")
        for sample in (0, 1):
            texts = responses(folders[5], prompt, sample)
            page.until(lambda texts=texts: whole(parts(page)[0], "#text", "INS") == visible(texts[8]), "answers")  # type: ignore[misc]
            if sample == 0:
                page.one(".bar select:not(.chooser *)").send_keys("2")
