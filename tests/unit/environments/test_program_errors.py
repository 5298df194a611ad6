"""What is told of the error output of a program that has failed: the error itself, and the user's own line."""

import pytest

from environments.programs.errors import reason_in

CLIENT = "/venv/lib/python3.11/site-packages/openai/_base_client.py"
TRACEBACK = f"""Traceback (most recent call last):
  File "/home/me/agent.py", line 12, in <module>
    client.chat.completions.create(
        n=2,
        ^^^^
  File "{CLIENT}", line 1248, in post
    return self.request()
           {"^" * 80}
openai.UnprocessableEntityError: Error code: 422 - {"x" * 700}: ask again""".splitlines()
OLDER = ["Traceback (most recent call last):", '  File "/home/me/old.py", line 3, in <module>', "KeyError: 'a'"]
NODE = """/home/me/agent.js:3
    throw new Error("no tools")
    ^
Error: no tools
    at ask (/home/me/node_modules/openai/index.js:9:1)
    at main (file:///home/me/agent.js:3:11)
    at node:internal/main/run_main_module:28:49
Node.js v20.1.0""".splitlines()


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (TRACEBACK, f"{TRACEBACK[-1]} (in /home/me/agent.py, line 12)"),
        ([*OLDER, "During handling of the above exception:", *TRACEBACK[:-1], "ValueError: two", "lines"],
         "ValueError: two lines (in /home/me/agent.py, line 12)"),
        (["Traceback (most recent call last):", f'  File "{CLIENT}", line 9, in f', "OSError"], "OSError"),
        (["Traceback (most recent call last):"], "Traceback (most recent call last):"),
        (NODE, "Error: no tools (in /home/me/agent.js, line 3)"),
        (["one", "  two", "three", "four", "five"], "two / three / four / five"),
        (["a" * 590, "b" * 20, "five"], f"{'b' * 20} / five"),
        (["first", "a" * 1500], f"{'a' * 1000}..."),
    ],
)  # fmt: skip
def test_the_error_is_told_whole_with_the_line_of_the_user(lines: list[str], told: str) -> None:
    assert reason_in(lines) == told
