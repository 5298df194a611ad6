"""A chat template that loops or allocates without end is one sentence, and the next one is rendered."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2
import pytest

from controller.data import template_process
from controller.data.chat_template import load_chat_template
from controller.data.template_process import Template
from tests.support.groups import wait_until

pytestmark = pytest.mark.slow

MESSAGES = [{"role": "user", "content": "sort cadb"}]


@pytest.fixture(autouse=True)
def low_limits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(template_process, "MAX_S", 0)
    monkeypatch.setattr(template_process, "MAX_BYTES", 2**28)
    template_process.close()
    yield
    template_process.close()


def rendered(source: str) -> str:
    template = load_chat_template(Path(), {"chat_template": source}, None, {})
    return template.render(MESSAGES)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% set ns = namespace(a=3) %}{% for i in range(99) %}{% set ns.a = ns.a * ns.a %}{% endfor %}",
        "{{ lipsum(n=10**9) }}",
    ],
)
def test_a_template_that_does_not_end_is_refused_and_the_next_one_is_rendered(source: str) -> None:
    with pytest.raises(ValueError, match="the chat template refuses the messages: it takes "):
        rendered(source)
    assert rendered("{{ messages[0].content }}!") == "sort cadb!"


@pytest.mark.parametrize(
    "source",
    [
        "{% set x = 'x' * 10**10 %}",
        "{% set ns = namespace(a='x') %}{% for i in range(40) %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}",
        "{{ (messages[0].content * 10**5) | replace('s', messages[0].content * 10**5) }}",
        "{{ '%999999999999d' % 1 }}",
        "{{ messages[0].content.ljust(10**10) }}",
        "{{ messages[0].content * 10**7 }}",
        "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_template_that_allocates_without_end_is_refused(source: str) -> None:
    with pytest.raises(ValueError, match="the chat template refuses the messages: "):
        rendered(source)
    assert rendered("{{ messages[0].content }}!") == "sort cadb!"


def test_a_template_that_is_a_bomb_already_for_the_compiler_is_refused() -> None:
    with pytest.raises(ValueError, match="the chat template"):
        rendered("{{ 7 ** (9 ** 9) ** 9 }}{{ 'x' * 99999999999 }}")


def test_a_process_that_is_stopped_is_ended_and_the_next_template_is_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    template = Template("{{ x }}")
    os.kill(template_process._renderers[0]._process.pid, signal.SIGSTOP)
    monkeypatch.setattr(template_process, "MAX_WALL_S", 0.2)
    [error] = template.render_all([{"x": 1}])
    assert str(error) == "the process that renders it has not answered for 0.2 s"
    monkeypatch.setattr(template_process, "MAX_WALL_S", 60.0)
    assert template.render_all([{"x": 1}]) == ["1"]


def test_a_process_that_is_killed_is_replaced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    template = Template("{{ x }}")
    os.kill(template_process._renderers[0]._process.pid, signal.SIGKILL)
    assert template.render_all([{"x": 1}]) == ["1"]
    start = subprocess.Popen

    def start_and_kill(*command: Any, **settings: Any) -> subprocess.Popen[bytes]:
        process = start(*command, **settings)
        process.kill()
        return process

    template_process.close()
    monkeypatch.setattr(subprocess, "Popen", start_and_kill)
    with pytest.raises(
        ChildProcessError, match=r"^the process that renders chat templates was ended by SIGKILL, 2 times"
    ):
        template.render_all([{"x": 1}])


def test_each_text_is_rendered_up_to_the_first_that_is_refused() -> None:
    template = Template("{{ raise_exception('no b') if a == 'b' else a }}")
    given: list[dict[str, Any]] = [{"a": each} for each in "acbd"]
    *texts, error = template.render_all(given)
    assert texts == ["a", "c"]
    assert isinstance(error, jinja2.TemplateError)
    assert str(error) == "no b"
    assert template.render_all(given[:1]) == ["a"]
    [unsent] = template.render_all([{"a": lambda: None}])
    assert "cannot be sent to the process that renders" in str(unsent)


def test_the_process_ends_with_the_one_that_uses_it() -> None:
    uses = (
        "import os; from controller.data.template_process import Template, _renderers;"
        "Template('a').render_all([{}]); print(_renderers[0]._process.pid, flush=True); os._exit(1)"
    )
    done = subprocess.run([sys.executable, "-c", uses], stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    wait_until(lambda: not Path(f"/proc/{int(done.stdout)}/cmdline").exists())
