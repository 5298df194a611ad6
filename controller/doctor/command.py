"""The command `python -m controller doctor --config FILE [--json] [key.path=value ...]`: prints faults of a run."""

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from splitppo.config import load_config


def doctor(arguments: Sequence[str]) -> int:
    """Examines a run, prints facts and faults, and returns 0 without faults, else 1.

    Raises:
        ConfigError: the configuration cannot be used.
    """
    parser = argparse.ArgumentParser(
        prog="python -m controller doctor",
        allow_abbrev=False,
        description="Asks every group of a run for its state, without disturbing it; prints faults and advice.",
    )
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="YAML configuration of the run")
    parser.add_argument("--json", action="store_true", help="everything, for programs")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="changes to the configuration")
    options = parser.parse_intermixed_args(arguments)
    config = load_config(options.config, options.overrides)
    # The findings have what gRPC would log of failed handshakes. gRPC reads this variable when it is imported.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from controller.doctor.examination import examine_run
    from controller.doctor.findings import find
    from controller.doctor.report import as_json, as_text

    facts = asyncio.run(examine_run(config))
    findings = find(facts)
    sys.stdout.write(as_json(facts, findings) if options.json else as_text(facts, findings))
    return 1 if findings else 0
