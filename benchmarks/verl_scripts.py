r"""How many launch scripts of verl's releases from-verl translates as they are.

    git clone https://github.com/verl-project/verl /tmp/verl
    python -m benchmarks.verl_scripts /tmp/verl [--every 10] [--reasons]

A script is a file *.sh at the tag of a release that names main_ppo, main_dapo or fully_async_main. Scripts of the same
content count once, at the newest release that has them. Each is read in the tree of its release, without any variable
but HOME and USER, and without options; translated is what from-verl writes a configuration for. A traceback ends the
program. All scripts take about half an hour of one CPU.
"""

import argparse
import io
import os
import re
import subprocess
import tarfile
import tempfile
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

from controller.commands.from_verl.command import read_settings, translated_yaml
from controller.commands.from_verl.translation import translate
from splitppo.config import ConfigError

_NAMES = "main_(ppo|dapo)|fully_async_main"
_ENVIRONMENT = {"HOME": "/home/user", "USER": "user"}
_RELEASE = re.compile(r"v(\d+)\.(\d+)(?:\.(\d+))?(?:\.post(\d+))?")


def releases(clone: Path) -> list[str]:
    """Returns the tags of releases in a clone, from the oldest to the newest; without candidates."""
    tags = [match for tag in _git(clone, "tag").split() if (match := _RELEASE.fullmatch(tag))]
    return [match[0] for match in sorted(tags, key=lambda match: [int(part or 0) for part in match.groups()])]


def scripts(clone: Path, tags: list[str]) -> dict[str, tuple[str, str]]:
    """Returns (tag, path) of each script by the hash of its content; of the newest tag that has it."""
    found: dict[str, tuple[str, str]] = {}
    for tag in tags:
        listed = subprocess.run(
            ["git", "-C", clone, "grep", "-lE", _NAMES, tag, "--", "*.sh"], capture_output=True, text=True, check=False
        )
        for line in listed.stdout.splitlines():
            path = line.removeprefix(f"{tag}:")
            found[_git(clone, "rev-parse", f"{tag}:{path}").strip()] = (tag, path)
    return found


def outcome(script: Path) -> tuple[str, list[str]]:
    """Translates a script; returns "translated", "to be decided" or "not understood", and the reasons."""
    try:
        settings = read_settings(script, (), _ENVIRONMENT, datetime.now(UTC))
        translation = translate(settings, gpus=None, drop=())
        undecided = [f"{finding.key}: {finding.note}" for finding in translation.stopping]
        undecided += [settings.age] if settings.asks_age else []
        if not undecided:
            translated_yaml(translation, settings.source)
        return ("to be decided" if undecided else "translated"), undecided
    except ConfigError as error:
        return "not understood", [str(error)]


def main() -> None:
    """Counts the scripts that are translated, for each release and in all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clone", type=Path, help="a clone of verl's repository, with its tags")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only every Nth script")
    parser.add_argument("--reasons", action="store_true", help="prints each script that is not translated, and why")
    options = parser.parse_args()
    clone = options.clone.absolute()
    tags = releases(clone)
    chosen = sorted(scripts(clone, tags).values())[:: options.every]
    counts = Counter[str]()
    for tag in tags:
        of_tag = [path for its_tag, path in chosen if its_tag == tag]
        with tempfile.TemporaryDirectory() as tree:
            with tarfile.open(fileobj=io.BytesIO(_archive(clone, tag))) as archive:
                archive.extractall(tree, filter="data")
            os.chdir(tree)
            here = Counter[str]()
            for path in of_tag:
                kind, reasons = outcome(Path(path))
                here[kind] += 1
                if options.reasons and reasons:
                    print(f"{tag} {path}: {'; '.join(reasons)}")
            os.chdir(clone)
        counts += here
        print(f"{tag}: {here['translated']} of {len(of_tag)}", flush=True)
    num = counts.total()
    print(f"{counts['translated']} of {num} ({counts['translated'] / num:.3f}); {dict(counts)}")


def _archive(clone: Path, tag: str) -> bytes:
    return subprocess.run(["git", "-C", clone, "archive", tag], capture_output=True, check=True).stdout


def _git(clone: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", clone, *words], capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    main()
