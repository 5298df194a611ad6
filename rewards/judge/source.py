"""Asks the judge over HTTP, with many requests at a time, and repeats requests that may still succeed."""

import asyncio
import hashlib
import json
import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx2

from rewards.judge.answers import Answers
from rewards.judge.questions import Questions, headers, shown
from rewards.samples import Failure, Sample, Scored
from rewards.source import NOT_SCORED, FailureLimit
from splitppo.config.subsections.judge import JudgeConfig

log = logging.getLogger(__name__)

_TEMPORARY = frozenset({408, 425, 429, *range(500, 600)})
_MAX_PAUSE_S = 60.0
_MAX_ANSWER_BYTES = 4 << 20


@dataclass(eq=False)
class _NoAnswer(Exception):
    """Raised when a request to the judge got no answer: with the reason, and whether another try may get one."""

    failure: Failure
    message: str
    is_temporary: bool = False
    retry_after_s: float = 0.0


@dataclass
class _Progress:
    """Counts, for one batch of samples, the requests to the judge that were sent again or got no answer in a row."""

    limit: FailureLimit
    num_repeated: int = 0
    num_lost: int = 0


class Judge:
    """Scores responses by asking a language model for a mark; an async context manager for the HTTP connections.

    An answer of the model is stored in `answers_file`, and its request is not sent again in this run. Failures are not
    stored: after an outage the judge is asked again when the run goes on.

    Raises:
        ConfigError: the template or the API key is missing or cannot be used.
    """

    def __init__(self, config: JudgeConfig, answers_file: Path | None = None) -> None:
        self._config = config
        self._questions = Questions(config)
        self._answers = Answers(answers_file)
        self._free = asyncio.Semaphore(config.concurrency)
        # `_request` limits the time of a whole request, and `_free` the number of connections.
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=config.concurrency)
        self._client = httpx2.AsyncClient(headers=headers(config), timeout=None, limits=limits)

    async def __aenter__(self) -> Self:
        """Reads the stored answers of the judge; sends no request yet."""
        logging.getLogger("httpx2").setLevel(logging.WARNING)  # below this level it logs every request
        self._answers.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def score(self, samples: Sequence[Sample], limit: FailureLimit) -> list[Scored]:
        """Scores samples with the judge and returns one result per sample, with a score in [0, 1].

        Samples with equal requests share one request. A sample whose request cannot be made has a failed result.

        Raises:
            OSError: an answer cannot be stored.
        """
        bodies = await asyncio.to_thread(lambda: [self._body(sample) for sample in samples])
        different: dict[bytes, list[Sample]] = defaultdict(list)
        for body, sample in zip(bodies, samples, strict=True):
            if isinstance(body, bytes):
                different[body].append(sample)
            else:  # the failed result of a sample without a request
                limit.add([sample], [body])
        progress = _Progress(limit)
        scores = await asyncio.gather(*(self._score(body, own, progress) for body, own in different.items()))
        by_body = dict(zip(different, scores, strict=True))
        if progress.num_repeated:
            log.info("judge: %d requests were sent again, of %d", progress.num_repeated, len(different))
        return [by_body[body] if isinstance(body, bytes) else body for body in bodies]

    def _body(self, sample: Sample) -> bytes | Scored:
        """Returns the request to the judge about a sample, or a failed result if the template cannot be filled in."""
        try:
            return self._questions.ask(sample)
        except ValueError as error:
            return Scored(0.0, failure=Failure.ERROR, message=str(error))

    async def _score(self, body: bytes, samples: Sequence[Sample], progress: _Progress) -> Scored:
        """Scores the samples that a request is about."""
        result = await self._ask_for_score(body, progress)
        progress.limit.add(samples, [result] * len(samples))
        return result

    async def _ask_for_score(self, body: bytes, progress: _Progress) -> Scored:
        """Returns the score of one request, from the stored answer if there is one; a failed result without any."""
        key = hashlib.sha256(body).hexdigest()
        answer = self._answers.find(key)
        if answer is None:
            try:
                answer = await self._ask(key, body, progress)
            except _NoAnswer as error:
                return Scored(0.0, failure=error.failure, message=error.message)
            self._answers.add(key, answer)
        return self._questions.score(answer)

    async def _ask(self, key: str, body: bytes, progress: _Progress) -> str:
        """Sends a request, with repetitions after temporary failures, and returns the model's answer; raises _NoAnswer.

        A request that waits for its next try still counts as one of the concurrent requests, so a busy judge gets no
        other request instead. After as many requests in a row without an answer as may run at a time, the others are
        not sent: with a judge that hangs, the step would wait for every try of every request.
        """
        config = self._config
        num_tries = 1 + config.retries
        async with self._free:
            if progress.limit.is_exceeded:
                raise _NoAnswer(Failure.UNAVAILABLE, NOT_SCORED)
            if progress.num_lost >= config.concurrency:
                lost = f"{config.concurrency} requests before got no answer in {num_tries} tries"
                raise _NoAnswer(Failure.UNAVAILABLE, f"the judge was not asked: {lost}")
            for attempt in range(num_tries):
                try:
                    answer = await self._request(body)
                except _NoAnswer as error:
                    if not error.is_temporary:
                        raise
                    last = error
                else:
                    progress.num_lost = 0
                    return answer
                if attempt + 1 < num_tries:
                    progress.num_repeated += 1
                    pause_s = max(retry_pause_s(config.backoff_s, key, attempt), last.retry_after_s)
                    await asyncio.sleep(min(pause_s, _MAX_PAUSE_S))
            progress.num_lost += 1
            last.message += f" ({num_tries} tries)"
            raise last

    async def _request(self, body: bytes) -> str:
        """Sends one HTTP request to the judge and returns the model's text; raises _NoAnswer if no text comes."""
        try:
            url = f"{self._config.url}/chat/completions"
            async with asyncio.timeout(self._config.timeout_s), self._client.stream("POST", url, content=body) as reply:
                return _content(reply, await _read(reply))
        except TimeoutError:
            message = f"the judge took longer than {self._config.timeout_s:g} s"
            raise _NoAnswer(Failure.TIMEOUT, message, is_temporary=True) from None
        except httpx2.RequestError as error:
            message = f"the judge cannot be reached: {type(error).__name__}: {error}"
            raise _NoAnswer(Failure.UNAVAILABLE, message, is_temporary=True) from error


def retry_pause_s(backoff_s: float, key: str, attempt: int) -> float:
    """Returns the pause in seconds before the next try of a request: backoff_s * 2^attempt * f, with f in [0.5, 1.5).

    f depends on a hash of the request's key and the attempt.
    """
    digest = hashlib.sha256(f"{key} {attempt}".encode()).digest()
    return backoff_s * 2.0**attempt * (0.5 + int.from_bytes(digest[:4]) / 2**32)


async def _read(response: httpx2.Response) -> str:
    """Reads the body of the judge's HTTP response; raises _NoAnswer if it has more than _MAX_ANSWER_BYTES bytes.

    No compressed body is read: a few of its bytes may stand for gigabytes. The request asks for none.
    """
    encoding = response.headers.get("Content-Encoding", "identity")
    if encoding != "identity":
        raise _NoAnswer(
            Failure.UNPARSABLE, f"the judge's answer is compressed, which was not asked for: {encoding!r:.60}"
        )
    content = bytearray()
    async for chunk in response.aiter_raw():
        content += chunk
        if len(content) > _MAX_ANSWER_BYTES:
            start = shown(content[:1000].decode(errors="replace"))
            raise _NoAnswer(Failure.UNPARSABLE, f"the judge answered more than {_MAX_ANSWER_BYTES} bytes: {start}")
    return content.decode(errors="replace")


def _content(response: httpx2.Response, body: str) -> str:
    """Returns the model's text from a chat completion of OpenAI's API; raises _NoAnswer for anything else."""
    if response.status_code != 200:
        message = f"the judge answered HTTP {response.status_code}: {shown(body)}"
        if response.status_code in _TEMPORARY:
            raise _NoAnswer(Failure.UNAVAILABLE, message, True, _seconds(response.headers.get("Retry-After")))
        raise _NoAnswer(Failure.ERROR, message)
    try:
        reply: Any = json.loads(body)
        content = reply["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError, RecursionError):
        content = None
    if not isinstance(content, str):
        raise _NoAnswer(Failure.UNPARSABLE, f"the judge answered something else than a chat completion: {shown(body)}")
    return content


def _seconds(retry_after: str | None) -> float:
    """Parses the HTTP header Retry-After; 0 if it is missing or not a number of seconds."""
    return float(retry_after) if retry_after is not None and retry_after.isdecimal() else 0.0
