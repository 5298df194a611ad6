"""Which groups have compiled layers, and what is said where nothing can compile them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from splitppo.config import Config, ConfigError
from splitppo.config.compiled import check_compiler, compile_keys
from splitppo.config.section import RoleName
from tests.support.fake_services import make_config


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """A run whose critic's group also has the frozen reference model, which is compiled as the actor is."""
    return make_config(
        tmp_path, actor__compile=True, actor__use_kl_loss=True, critic__compile=True, placement__reference="critic"
    )


@pytest.mark.parametrize(
    ("role", "keys"), [("actor", ["actor.compile"]), ("critic", ["actor.compile", "critic.compile"])]
)
def test_a_group_compiles_the_models_that_it_holds(config: Config, role: RoleName, keys: list[str]) -> None:
    assert compile_keys(config, role) == keys


def test_a_missing_compiler_is_named_with_the_key(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    sentence = r"^actor\.compile: torch\.compile needs a C\+\+ compiler, and the PATH of this machine has no 'g\+\+'"
    with pytest.raises(ConfigError, match=sentence):
        check_compiler(config, "actor")
    mine = tmp_path / "mine"
    mine.write_text("")
    mine.chmod(0o755)
    monkeypatch.setenv("CXX", "mine")
    check_compiler(config, "actor")


@pytest.mark.parametrize("change", [{"actor__compile": False}, {"services__actor__devices": [0]}])
def test_a_group_that_compiles_nothing_on_cpus_needs_no_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    check_compiler(make_config(tmp_path, **{"actor__compile": True, **change}), "actor")
