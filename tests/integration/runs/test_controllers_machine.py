"""An environment made from requirements/controller.txt is enough for a controller."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.environments import make_environment
from tests.support.groups import PROJECT


@pytest.mark.timeout(600)
def test_a_controller_checks_a_run_in_an_environment_without_torch(config: dict[str, Any], tmp_path: Path) -> None:
    own_python, config_file = make_environment(tmp_path / "venv", "controller"), tmp_path / "config.yaml"
    config_file.write_text(yaml.safe_dump(config))

    def python(*arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
        command = [str(own_python), *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    found = "import controller, importlib.util as util; print(*map(util.find_spec, ['torch', 'transformers']))"
    assert python("-c", found).stdout == "None None\n"
    check = python("-m", "controller", "--config", str(config_file), "--check", f"run.dir={tmp_path / 'run'}")
    assert check.returncode == 0, check.stderr
    assert "step: 8 prompts x 4 samples = 32 responses" in check.stdout
