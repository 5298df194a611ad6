"""Bearer tokens: read from a file or a variable, compared, never printed."""

from __future__ import annotations

from pathlib import Path

import pytest

from splitppo.config import ConfigError
from splitppo.config.subsections.security import SecurityConfig
from splitppo.rpc.bearer_tokens import RUN_TOKEN_VARIABLE, BearerTokens, load_tokens
from splitppo.rpc.secret_files import write_secret

OLD, NEW = "the-old-token-0123", "the-new-token-0123"


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


def test_a_file_gives_the_token_to_show_and_all_that_are_taken(tmp_path: Path) -> None:
    file = tmp_path / "token"
    write_secret(file, f"{NEW}\n{OLD}\n")
    tokens = load_tokens(SecurityConfig(token_file=file), {})
    assert tokens is not None
    assert tokens.metadata == bearer(NEW)
    assert [tokens.why_refused(bearer(token)) for token in (NEW, OLD, NEW + "x", "")] == [
        *("", ""),
        *("wrong token", "wrong token"),
    ]


def test_a_variable_gives_it_as_well() -> None:
    tokens = load_tokens(SecurityConfig(token_env="MY_TOKEN"), {"MY_TOKEN": NEW})
    assert tokens is not None
    assert tokens.why_refused(bearer(NEW)) == ""


def test_without_a_setting_the_launchers_token_counts() -> None:
    handed_down = load_tokens(SecurityConfig(), {RUN_TOKEN_VARIABLE: NEW})
    assert handed_down == BearerTokens((NEW,))
    assert load_tokens(SecurityConfig(), {}) is None


@pytest.mark.parametrize(
    ("metadata", "because"),
    [
        ((), "no token"),
        ((("other", "Bearer x"),), "no token"),
        ((*bearer(NEW), *bearer(NEW)), "more than one token"),
        ((("authorization", NEW),), "wrong token"),
        ((("authorization", b"Bearer \xff\x00"),), "wrong token"),
        ((("authorization", "Bearer \udcff"),), "wrong token"),
    ],
)
def test_a_call_is_refused_for_a_reason(metadata: tuple[tuple[str, str], ...], because: str) -> None:
    assert BearerTokens((NEW,)).why_refused(metadata) == because


@pytest.mark.parametrize("text", ["short", "with spaces in between", "x" * 513, "ümläute-0123456789"])
def test_a_token_that_cannot_be_used_is_refused_without_being_repeated(tmp_path: Path, text: str) -> None:
    file = tmp_path / "token"
    write_secret(file, text)
    with pytest.raises(ConfigError, match=f"{file}: token 1 must be 16 to 512 printable") as refused:
        load_tokens(SecurityConfig(token_file=file), {})
    assert text not in str(refused.value)


def test_a_file_or_variable_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"services.security.token_file: cannot read .*nowhere: No such file"):
        load_tokens(SecurityConfig(token_file=tmp_path / "nowhere"), {})
    with pytest.raises(ConfigError, match="environment variable MY_TOKEN is not set"):
        load_tokens(SecurityConfig(token_env="MY_TOKEN"), {})
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        load_tokens(SecurityConfig(token_file=tmp_path / "empty"), {})


def test_a_file_that_others_can_read_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "token"
    file.write_text(NEW)
    file.chmod(0o640)
    load_tokens(SecurityConfig(token_file=file), {})
    assert "others can read" in caplog.text
    assert NEW not in caplog.text


def test_tokens_do_not_show_themselves() -> None:
    assert NEW not in repr(BearerTokens((NEW,)))


def test_a_secret_is_its_owners_alone_also_where_a_file_was(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("old")
    file.chmod(0o666)
    write_secret(file, NEW)
    assert (file.read_text(), file.stat().st_mode & 0o777) == (NEW, 0o600)
