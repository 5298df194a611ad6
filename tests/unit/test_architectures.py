"""The comparison of architectures finds what is exact, what is refused and what is wrong, and changes what matters."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from services.engine.model import forward
from tools.architectures import comparison
from tools.architectures.__main__ import MUTATED, main
from tools.architectures.tiny_configs import mutation, tiny_config

pytestmark = pytest.mark.slow


def test_exact_and_refused_architectures_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, page = tmp_path / "lines.jsonl", tmp_path / "page.md"
    assert main(["llama", "doge", "phi3", "--output", str(output)]) == 0
    assert capsys.readouterr().out.endswith("2 exact, 1 refused\n")
    llama, doge, phi3 = (json.loads(line)["results"] for line in output.read_text().splitlines())
    assert set(llama.values()) == {"exact"}
    assert all("not those of the model itself" in doge[use] for use in ("packed", "padded"))
    assert (phi3["packed"], phi3["padded"]) == ("exact", "exact")
    assert "longrope" in phi3["hf"]
    assert main(["--output", str(output), "--page", str(page)]) == 0
    text = page.read_text()
    assert "Of 3 architectures 2 can be trained, 1 are refused, 0 are wrong." in text
    assert "| llama | = | = | = | = | = |" in text


def test_a_difference_that_no_start_refuses_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The proof is left out, and with it a factor of the logits.
    monkeypatch.setattr(forward, "_factor", lambda *_: 1.0)
    for engine in ("services.engine.train_engine", "services.engine.frozen_model"):
        monkeypatch.setattr(f"{engine}.prove_forward", lambda *_, **__: None)
    verdict = comparison.compare("cohere", tiny_config("cohere"), tmp_path)
    assert verdict.is_wrong
    assert verdict.results["packed"].startswith("WRONG by ")


@pytest.mark.parametrize("model_type", MUTATED)
def test_changed_fields_are_of_the_configuration_and_come_back_with_the_seed(model_type: str) -> None:
    def drawn() -> list[dict[str, Any]]:
        rng = random.Random(5)
        return [mutation(model_type, rng) for _ in range(4)]

    changes = drawn()
    assert changes == drawn()
    assert all(changes)
    for change in changes:
        assert all(hasattr(tiny_config(model_type), name) for name in change)
