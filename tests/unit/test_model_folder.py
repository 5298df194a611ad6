"""A name that is no folder is one of the hub, and a sentence says why the hub gave nothing."""

from __future__ import annotations

from typing import Any, NoReturn

import huggingface_hub
import pytest

from splitppo.model_folder import local_folder


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("Got: ConnectError: Name or service not known\nPlease check your connection.", "ConnectError: Name or"),
        ("404 Client Error. (Request ID: 1)\n\nRepository Not Found", r"404 Client Error\."),
        ("", "OSError$"),
    ],
)
def test_what_the_hub_says_ends_a_whole_sentence(monkeypatch: pytest.MonkeyPatch, said: str, reason: str) -> None:
    def fail(*_: Any, **__: Any) -> NoReturn:
        raise OSError(said)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    sentence = "^there is no model folder 'nowhere/model', and the Hugging Face hub gave no model of this name: "
    with pytest.raises(ValueError, match=sentence + reason) as error:
        local_folder("nowhere/model", ["config.json"])
    assert "\n" not in str(error.value)
