"""The judge with a real HTTP server: slow, wrong, busy or unreachable; and the answers that it has stored."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rewards.judge.answers import Answers
from rewards.judge.questions import Questions
from rewards.judge.source import Judge, retry_pause_s
from rewards.samples import Failure, Sample, Scored
from rewards.source import FailureLimit
from splitppo.config import ConfigError
from splitppo.config.subsections.judge import JudgeConfig
from tests.support.local_judge import CLOSED, HTML, SERVER_ERROR, LocalJudge, Reply, says


def config(url: str = "http://127.0.0.1:1/v1", **keys: Any) -> JudgeConfig:
    return JudgeConfig.model_validate({"url": url, "model": "tiny", "backoff_s": 0.001, **keys})


def samples(*responses: str) -> list[Sample]:
    return [
        Sample("essays", response, "the truth", messages=[{"role": "user", "content": "Why?"}])
        for response in responses
    ]


async def ask(judge: JudgeConfig, asked: Sequence[Sample], file: Path | None = None) -> list[Scored]:
    async with Judge(judge, file) as source:
        return await source.score(asked, FailureLimit())


def mark_of(question: str, _: int) -> Reply:
    """Returns a mark: the number that is the response."""
    response = question.split("[the answer to be marked]\n")[1].split("\n")[0]
    return says(f"I thought of Score: 3 at first. Score: {response}")


@pytest.mark.promise("a judge")
async def test_the_last_mark_becomes_a_score_between_0_and_1() -> None:
    with LocalJudge(mark_of) as server:
        scored = await ask(config(server.url), samples("0", "10", "2.5"))
        other = await ask(config(server.url, score_range=[-5, 5]), samples("-5", "0"))
    assert [result.score for result in scored] == [0.0, 1.0, 0.25]
    assert scored[2].extra == {"judge_answer": "I thought of Score: 3 at first. Score: 2.5"}
    assert [result.score for result in other] == [0.0, 0.5]
    assert not any(result.failure for result in (*scored, *other))


@pytest.mark.promise("a judge")
async def test_the_request_is_a_chat_completion_that_asks_about_prompt_response_and_truth() -> None:
    with LocalJudge(mark_of) as server:
        await ask(config(server.url, max_tokens=9), samples("4"))
    [body] = server.bodies
    question = body.pop("messages")[0]["content"]
    assert body == {"model": "tiny", "temperature": 0.0, "max_tokens": 9}
    assert "[user]\nWhy?" in question
    assert "[a correct answer, for comparison]\nthe truth" in question
    assert "from 0 (useless) to 10 (perfect)" in question


async def test_samples_that_make_the_same_request_share_one_answer() -> None:
    with LocalJudge(mark_of) as server:
        scored = await ask(config(server.url), samples("1", "2", "1", "1"))
    assert [result.score for result in scored] == [0.1, 0.2, 0.1, 0.1]
    assert len(server.asked) == 2


@pytest.mark.parametrize(
    ("reply", "failure", "message"),
    [
        (
            Reply(HTML),
            Failure.UNPARSABLE,
            "something else than a chat completion: '<!DOCTYPE html> <html><body>Sign in",
        ),
        (Reply(HTML, status=404), Failure.ERROR, "HTTP 404: '<!DOCTYPE html>"),
        (Reply('{"error": "bad key"}', status=401), Failure.ERROR, """HTTP 401: '{"error": "bad key"}'"""),
        (Reply("", 302, {"Location": "/login"}), Failure.ERROR, "HTTP 302: ''"),
        (Reply('{"choices": []}'), Failure.UNPARSABLE, """chat completion: '{"choices": []}'"""),
        (Reply("[1]"), Failure.UNPARSABLE, "chat completion: '[1]'"),
        (Reply("x" * (5 << 20)), Failure.UNPARSABLE, "more than 4194304 bytes: 'xxx"),
        (
            Reply("plain", headers={"Content-Encoding": "gzip"}),
            Failure.UNPARSABLE,
            "is compressed, which was not asked for: 'gzip'",
        ),
        (Reply("[" * 100_000), Failure.UNPARSABLE, "something else than a chat completion: '[[["),
        (Reply('{"choices":' * 100_000), Failure.UNPARSABLE, "something else than a chat completion"),
        (says(None), Failure.UNPARSABLE, "something else than a chat completion"),
        (says("I would say it is good."), Failure.UNPARSABLE, "has no mark: 'I would say it is good.'"),
        (says("Score: 11"), Failure.UNPARSABLE, "the judge's mark is 11, expected 0 to 10"),
    ],
)
async def test_an_answer_without_a_mark_is_counted_and_not_asked_for_again(
    reply: Reply, failure: Failure, message: str
) -> None:
    with LocalJudge(lambda *_: reply) as server:
        [scored] = await ask(config(server.url), samples("5"))
    assert (scored.score, scored.failure) == (0.0, failure)
    assert message in scored.message
    assert len(scored.message) < 250
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("first", "keys"),
    [
        (SERVER_ERROR, {}),
        (Reply(HTML, status=503), {}),
        (Reply("slow down", 429, {"Retry-After": "0"}), {}),
        (CLOSED, {}),
        (says("Score: 9", after_s=3.0), {"timeout_s": 0.5}),
    ],
)
async def test_what_may_pass_is_asked_again(first: Reply, keys: dict[str, Any]) -> None:
    with LocalJudge(lambda question, n: first if n <= 2 else mark_of(question, n)) as server:
        [scored] = await ask(config(server.url, **keys), samples("5"))
    assert (scored.score, scored.failure) == (0.5, None)
    assert len(server.asked) == 3


async def test_a_time_out_leaves_the_connections_usable() -> None:
    """More requests hang than may run at a time; then the same client goes on."""
    hangs = threading.Event()

    def answer(question: str, n: int) -> Reply:
        if not hangs.is_set():
            hangs.wait(5.0)
        return mark_of(question, n)

    with LocalJudge(answer) as server:
        async with Judge(config(server.url, concurrency=2, timeout_s=0.4, retries=2)) as judge:
            lost = await judge.score(samples("1", "2"), FailureLimit())
            hangs.set()
            later = await judge.score(samples("1", "2", "3"), FailureLimit())
    assert [result.failure for result in lost] == [Failure.TIMEOUT] * 2
    assert "the judge took longer than 0.4 s (3 tries)" in lost[0].message
    assert [result.score for result in later] == [0.1, 0.2, 0.3]


async def test_a_judge_that_is_away_costs_its_samples_and_is_soon_left_alone() -> None:
    with LocalJudge(lambda *_: SERVER_ERROR) as server:
        scored = await ask(config(server.url, concurrency=2, retries=1), samples(*map(str, range(10))))
    assert [result.failure for result in scored] == [Failure.UNAVAILABLE] * 10
    assert scored[0].message == "the judge answered HTTP 500: 'overloaded' (2 tries)"
    assert scored[9].message == "the judge was not asked: 2 requests before got no answer in 2 tries"
    assert len(set(server.asked)) <= 3  # two were given up, and one was under way
    gone = await ask(config(server.url, retries=1), samples("1"))  # its port is closed now
    assert gone[0].failure is Failure.UNAVAILABLE
    assert gone[0].message.startswith("the judge cannot be reached: ConnectError: ")


async def test_as_many_requests_as_allowed_are_under_way_at_once() -> None:
    together = threading.Barrier(3)

    def answer(question: str, n: int) -> Reply:
        together.wait(20.0)
        return mark_of(question, n)

    with LocalJudge(answer) as server:
        scored = await ask(config(server.url, concurrency=3), samples(*map(str, range(9))))
    assert [result.score for result in scored] == pytest.approx([number / 10 for number in range(9)])
    assert server.most_at_once == 3


def test_pauses_double_and_differ_between_requests_but_not_between_runs() -> None:
    pauses = [[retry_pause_s(2.0, f"request {number}", attempt) for attempt in range(4)] for number in range(50)]
    assert pauses[0] == [retry_pause_s(2.0, "request 0", attempt) for attempt in range(4)]
    for attempt in range(4):
        longest = 2.0 * 2**attempt
        of_attempt = [of_request[attempt] for of_request in pauses]
        assert all(0.5 * longest <= pause < 1.5 * longest for pause in of_attempt)
        assert len(set(of_attempt)) == 50


async def test_the_key_goes_along_and_into_no_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret-of-the-judge\n")
    with LocalJudge(mark_of) as server:
        await ask(config(server.url, api_key_env="JUDGE_KEY"), samples("1"), tmp_path / "judge.jsonl")
        await ask(config(server.url), samples("2"))
    assert server.authorizations == ["Bearer secret-of-the-judge", None]
    assert "secret" not in (tmp_path / "judge.jsonl").read_text()


@pytest.mark.parametrize(("value", "sentence"), [(None, "JUDGE_KEY is not set"), ("clé", "JUDGE_KEY holds no API key")])
def test_a_key_that_is_not_there_is_a_config_error(
    monkeypatch: pytest.MonkeyPatch, value: str | None, sentence: str
) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("JUDGE_KEY", value)
    with pytest.raises(ConfigError, match=rf"key 'reward\.judge\.api_key_env': .* {sentence}"):
        Judge(config(api_key_env="JUDGE_KEY"))


# The template.


def test_a_template_of_ones_own_sees_the_sample(tmp_path: Path) -> None:
    file = tmp_path / "ask.jinja"
    file.write_text(
        "{{ prompt }}|{{ response }}|{{ ground_truth }}|{{ data_source }}|{{ extra_info.level }}|{{ highest }}"
    )
    sample = Sample("essays", "it is", "it was", {"level": 3}, prompt="<user>Is it?")
    request = Questions(config(prompt_template=file)).ask(sample)
    assert json.loads(request)["messages"][0]["content"] == "<user>Is it?|it is|it was|essays|3|10"


def test_of_a_conversation_the_whole_or_the_last_turn_is_asked_about(tmp_path: Path) -> None:
    (file := tmp_path / "ask.jinja").write_text("{{ response }}")
    sample = Sample("games", "up, wall, down", None, last_turn="down")

    def asked(**keys: Any) -> str:
        return str(json.loads(Questions(config(prompt_template=file, **keys)).ask(sample))["messages"][0]["content"])

    assert asked() == "up, wall, down"
    assert asked(conversation="last_turn") == "down"
    sample = replace(sample, last_context="wall, down")
    assert asked() == "wall, down"
    assert asked(conversation="last_turn") == "down"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "cannot read .*ask.jinja"),
        ("{% if %}", "ask.jinja is no valid Jinja"),
        ("{{ respnse }}", "ask.jinja uses 'respnse'; known: messages, prompt, response"),
    ],
)
def test_a_template_that_cannot_be_used_is_a_config_error(tmp_path: Path, text: str | None, sentence: str) -> None:
    file = tmp_path / "ask.jinja"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=rf"^key 'reward\.judge\.prompt_template': .*{sentence}"):
        Questions(config(prompt_template=file))


async def test_a_sample_that_the_template_cannot_show_costs_that_sample(tmp_path: Path) -> None:
    file = tmp_path / "ask.jinja"
    file.write_text("{{ extra_info.level }}")
    asked = [Sample("essays", "x", "y", {"level": 3}), Sample("essays", "x", "y", {})]
    with LocalJudge(lambda *_: says("Score: 5")) as server:
        scored = await ask(config(server.url, prompt_template=file), asked)
    assert [result.failure for result in scored] == [None, Failure.ERROR]
    assert "has no attribute 'level'" in scored[1].message


# The answers.


async def test_what_was_answered_is_not_asked_again_by_a_later_start(tmp_path: Path) -> None:
    file = tmp_path / "judge.jsonl"
    with LocalJudge(mark_of) as server:
        first = await ask(config(server.url), samples("1", "2"), file)
        second = await ask(config(server.url, timeout_s=9.0, concurrency=1), samples("2", "3", "1"), file)
        await ask(config(server.url, temperature=0.5), samples("1"), file)  # another request
    assert second[2] == first[0]
    assert second[0] == first[1]
    assert len(server.asked) == 4


async def test_failures_are_asked_again_by_a_later_start(tmp_path: Path) -> None:
    file = tmp_path / "judge.jsonl"
    with LocalJudge(lambda question, n: Reply(HTML) if n == 1 else mark_of(question, n)) as server:
        [first] = await ask(config(server.url), samples("1"), file)
        [second] = await ask(config(server.url), samples("1"), file)
    assert (first.failure, second.failure, second.score) == (Failure.UNPARSABLE, None, 0.1)


@pytest.mark.parametrize("tail", [b'{"request": "ab', b"\0\0\0\0\n", b'{"request": "zz", "answer": "x"}\n', b"[]\n"])
def test_a_torn_end_is_cut_off_and_later_answers_are_kept(tmp_path: Path, tail: bytes) -> None:
    file, keys = tmp_path / "judge.jsonl", [f"{number:064x}" for number in range(3)]
    answers = Answers(file).open()
    answers.add(keys[0], "früh\n")
    answers.add(keys[1], "später")
    whole = file.read_bytes()
    file.write_bytes(whole + tail)
    answers = Answers(file).open()
    assert file.read_bytes() == whole
    assert [answers.find(key) for key in keys] == ["früh\n", "später", None]
    answers.add(keys[2], "zuletzt")
    assert [Answers(file).open().find(key) for key in keys] == ["früh\n", "später", "zuletzt"]


async def test_once_more_have_failed_than_may_the_judge_is_not_asked() -> None:
    with LocalJudge(lambda *_: says("no idea")) as server:
        limit = FailureLimit(1)
        async with Judge(config(server.url, concurrency=1)) as judge:
            asked = [replace(sample, number=number) for number, sample in enumerate(samples(*map(str, range(9))))]
            scored = await judge.score(asked, limit)
    assert [one.failure for one in scored] == [Failure.UNPARSABLE] * 2 + [Failure.UNAVAILABLE] * 7
