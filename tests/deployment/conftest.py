"""A Docker engine and the images, made once for all deployments."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.deployment.stack import BASE_IMAGE, Stack, missing_engine
from tests.support.groups import PROJECT


@pytest.fixture(scope="session")
def engine() -> None:
    """Skips where no container can be started."""
    if reason := missing_engine():
        pytest.skip(f"no deployment here: {reason}")


@pytest.fixture(scope="session")
def images(engine: None) -> None:
    """Both images, as the source is now."""
    offer_wheels()
    stack = Stack(Path())
    stack.environment["BASE_IMAGE"] = BASE_IMAGE
    stack.compose("build", "--quiet", "certs", "prepare")


def offer_wheels() -> None:
    """Torch's CPU wheel, where pip finds it in a folder of this machine: a build sees no folder but the checkout's."""
    for folder in os.environ.get("PIP_FIND_LINKS", "").split():
        for wheel in Path(folder).glob("torch-*+cpu-*.whl"):
            target = PROJECT / "deploy" / "wheels" / wheel.name
            if not target.exists():
                shutil.copyfile(wheel, target)
