"""Runs that go wrong in a way that is known: from the table of runs, few clicks lead to what shows the cause."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

from tests.support.browser import Page, viewer
from tests.support.seeds import shifted
from tests.support.viewed_runs import Shape, gae, half, make_run, metrics, response, write_live, write_rows
from tests.support.viewed_traces import spans_of, write_trace

pytestmark = pytest.mark.browser

STEPS, MOST_CLICKS = 8, 5
COPIED = "The answer is 28, as everybody knows. #### 28"
Row = dict[str, Any]


def dead_critic(row: Row, step: int) -> None:
    """Every token has the same value."""
    row["value"] = np.full(row["length"], 0.5)
    advantage = gae(row["rewards"], row["value"], row["flags"] > 0)
    row |= {"advantage": half(advantage), "ret": half(advantage + 0.5), "value_first": 0.5, "value_last": 0.5}


def long_is_good(row: Row, step: int) -> None:
    """The score is the length."""
    row["score"] = row["length"] / 100


def copied(row: Row, step: int) -> None:
    """One text for every second prompt has the best score; all others fail."""
    row["score"] = float(row["prompt_index"] % 2 == 0)
    if row["score"]:
        same_text(row)


def collapsed(row: Row, step: int) -> None:
    """In the end all texts are equal, and no token is in doubt."""
    if step > STEPS // 2:
        same_text(row)
        row["entropy_tokens"] = np.zeros(row["length"])


def stale(row: Row, step: int) -> None:
    """The rollout backend has the weights of the first step: the farther the policy goes, the less do they agree."""
    noise = np.random.default_rng(shifted(row["row"])).normal(0, 0.02 * step**2, row["length"])
    row["rollout"] = half(row["old"] + noise)
    row["mismatch"] = float(np.abs(row["old"] - row["rollout"]).mean())


def same_text(row: Row) -> None:
    ends = np.linspace(1, len(COPIED), row["length"]).astype(int)
    row |= {"response": COPIED, "text_hash": 1234, "ends": ends}


def planted(folder: Path, change: Callable[[Row, int], None], known: Callable[[int], dict[str, float]]) -> Path:
    """Makes a run of which `change` alters every response, and `known` the metrics of each step."""
    make_run(folder, Shape(steps=0))
    lines = []
    for step in range(1, STEPS + 1):
        shape = Shape(mean_tokens=10 + 6 * step if change is long_is_good else 24, with_update=True)
        rng = np.random.default_rng(shifted(step))
        rows = [response(rng, row, step, shape) for row in range(shape.prompts * shape.samples)]
        for row in rows:
            change(row, step)
        write_rows(folder, step, rows, shape, seed=1)
        lines.append(json.dumps({"step": step, **metrics(rows, step), **known(step)}) + "\n")
    (folder / "metrics.jsonl").write_text("".join(lines))
    write_live(folder, step=STEPS, total=STEPS, phase="ended")
    return folder


@pytest.fixture(scope="module")
def defects(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("defects")
    made = [
        planted(folder / "dead-critic", dead_critic, lambda _: {"critic/vf_explained_var": 0.0}),
        planted(folder / "long-is-good", long_is_good, lambda _: {"val/accuracy": 0.25}),
        planted(folder / "copied", copied, lambda _: {}),
        planted(folder / "collapsed", collapsed, lambda step: {"actor/entropy": max(0.0, 1 - 2 * step / STEPS)}),
    ]
    made.append(make_run(folder / "slow-critic", Shape(steps=STEPS)))
    spans = [span for step in range(1, STEPS + 1) for span in spans_of(step, critic_s=1.8, step_s=2.4)]
    write_trace(made[-1], spans)  # all else takes 0.6 s
    made.append(planted(folder / "stale", stale, lambda _: {"actor/ppo_kl": 0.001}))
    with viewer(made) as address:
        yield address


class Way:
    """Clicks from the table of runs on, and their number."""

    def __init__(self, page: Page) -> None:
        self.page, self.clicks = page, 0

    def click(self, selector: str, text: str = "") -> None:
        """Clicks on the first element that begins with a text."""

        def found() -> list[WebElement]:
            return [one for one in self.page.all(selector) if one.text.startswith(text)]

        self.page.until(found, f"{selector} with {text!r}")[0].click()
        self.clicks += 1
        assert self.clicks <= MOST_CLICKS

    def caption(self, selector: str, name: str) -> dict[str, float]:
        """The numbers below a chart, by their names, as soon as `name` is among them."""

        def numbers() -> dict[str, float] | None:
            texts = [one.text.rpartition(" ") for one in self.page.all(f"{selector} figcaption span:not(.dim)")]
            found = {name.strip(): number for name, _, number in texts}
            return {name: float(number) for name, number in found.items()} if found.get(name, "–") != "–" else None

        return self.page.until(numbers, f"{name} below {selector}")  # type: ignore[no-any-return]

    def column(self, title: str) -> list[float]:
        """A column of the table of responses, from top to bottom."""
        heads = [re.sub(r" [▴▾]", "", head.text) for head in self.page.all("table.responses th")]
        rows = self.page.script(
            "return [...document.querySelectorAll('table.responses tbody tr')]"
            ".map((row) => row.children[arguments[0]].textContent)",
            heads.index(title),
        )
        return [float(text) for text in rows]


@pytest.fixture
def way(open_page: Callable[[str], Page], defects: str) -> Way:
    return Way(open_page(defects))


def test_a_dead_critic_explains_nothing_and_foresees_nothing(way: Way) -> None:
    way.click("table.runs a", "dead-critic")
    way.click("nav a", "Critic")
    shown = way.caption('[data-card="explained"]', "explained variance")
    assert shown["explained variance"] == pytest.approx(0, abs=1e-3)
    assert shown["2.5 %"] < 0 < shown["97.5 %"]
    way.page.until_shown("0.5: chance")
    assert "AUC 0.5\n" in way.page.text()
    way.page.until(lambda: way.page.all("table.worst tbody td:nth-child(3)"), "the responses that it judged worst")
    assert set(way.page.script("return [...document.querySelectorAll('table.worst tbody td:nth-child(3)')]"
                               ".map((cell) => cell.textContent)")) == {"0.5"}  # fmt: skip


def test_a_score_that_is_won_by_length_rises_without_accuracy_and_sorts_as_length(way: Way) -> None:
    way.click("table.runs a", "long-is-good")
    shown = way.caption('[data-card="critic/score/mean"]', "held-out accuracy")
    assert shown["score"] > 0.5
    assert shown["held-out accuracy"] == 0.25
    assert way.caption('[data-card="response_length/mean"]', "p50")["p50"] > 50
    way.click('[data-card="response_length/mean"] .u-over')
    way.click("table.responses th button", "score")
    way.page.until(lambda: way.page.all('th[aria-sort="descending"]'), "the order")
    lengths = way.column("tokens")
    assert len(lengths) == 32
    assert lengths == sorted(lengths, reverse=True)


def test_an_answer_that_is_copied_for_many_prompts_is_named_and_read(way: Way) -> None:
    way.click("table.runs a", "copied")
    way.click("nav a", "Responses")
    way.click('input[type="search"]')
    way.page.driver.switch_to.active_element.send_keys("same text")
    way.page.until_shown("16 of 32 responses")
    assert set(way.column("score")) == {1}
    assert way.page.text().count("same text for 3 other prompts") == 16
    way.click("table.responses tbody a")
    way.page.until_shown(COPIED)


def test_a_collapse_has_no_entropy_and_one_text_for_all_prompts(way: Way) -> None:
    way.click("table.runs a", "collapsed")
    assert way.caption('[data-card="actor/entropy"]', "entropy") == {"entropy": 0}
    way.click("nav a", "Responses")
    way.page.until_shown("32 of 32 responses")
    assert way.page.text().count("same text for 7 other prompts") == 32
    way.click("table.responses tbody a")
    way.click(".tok")
    assert re.search(r"entropy 0\b(?!\.)", way.page.one(".details").text)
    assert COPIED in way.page.text()


def test_a_slow_critic_is_what_a_step_waits_for_while_the_actor_is_idle(way: Way) -> None:
    way.click("table.runs a", "slow-critic")
    way.click("nav a", "Timeline")
    way.click(".bar a", "a typical step")
    [waited] = way.page.until(
        lambda: [row.text for row in way.page.all("table.critical tbody tr") if row.text.startswith("critic update")],
        "the update of the critic on the critical path",
    )
    assert float(waited.split()[-2]) >= 70
    busy = {row.text.split()[0]: float(row.text.split()[2]) for row in way.page.all("table.busy tbody tr")}
    assert busy["critic"] > 80
    assert busy["actor"] < 45


def test_stale_weights_of_the_rollout_backend_are_a_mismatch_that_grows_from_step_to_step(way: Way) -> None:
    way.click("table.runs a", "stale")
    way.click("nav a", "Policy")
    mismatch = way.page.one('[data-card="mismatch"] canvas')
    mismatch.send_keys(Keys.HOME)
    seen = []
    for step in range(1, STEPS + 1):
        way.page.until_shown(f"Step {step}: p10")
        told = way.page.one('[data-card="mismatch"] p').text
        seen.append([float(number) for number in re.findall(r"p[159]0 (-?[\d.]+)", told)])
        mismatch.send_keys(Keys.ARROW_RIGHT)
    widths = [p90 - p10 for p10, _, p90 in seen]
    assert widths == sorted(widths)
    assert widths[-1] > 10 * widths[0]
    kl = way.page.one('[data-card="kl"] p').text  # the policy itself has not gone far
    assert all(abs(float(number)) < 0.2 for number in re.findall(r"p[159]0 (-?[\d.]+)", kl))
    mismatch.click()  # in the middle
    way.clicks += 1
    way.page.one("table.responses")
    assert int(way.page.driver.current_url.rpartition("/responses/train/")[2]) in (STEPS // 2, STEPS // 2 + 1)
    way.click("table.responses th button", "mismatch")
    way.page.until(lambda: way.page.all('th[aria-sort="descending"]'), "the order")
    assert min(way.column("mismatch")) > 0.05
