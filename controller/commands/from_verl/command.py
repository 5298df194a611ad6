"""The command `python -m controller from-verl SCRIPT_OR_YAML`: turns a verl launch into a SplitPPO configuration."""

import argparse
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path

from controller.commands.from_verl.ages import (
    Age,
    age_of_checkout,
    age_of_release,
    age_of_words,
    age_of_yaml,
    engine_of_words,
)
from controller.commands.from_verl.keys import SECTIONS, VERL_DEFAULTS, row_of
from controller.commands.from_verl.report import report_text, yaml_text
from controller.commands.from_verl.settings import LATEST, Settings
from controller.commands.from_verl.shell.script import Launch, Word, read_script
from controller.commands.from_verl.translation import Translation, translate
from splitppo.atomic_write import write_atomically
from splitppo.config import ConfigError
from splitppo.config.batch_plan import batch_plan
from splitppo.config.load import validate
from splitppo.config_error import config_errors
from splitppo.dotted_keys import nested
from splitppo.our_commands import our_command
from splitppo.printable import printable

_OPTION = re.compile(r"--?(config-path|config-name|config-dir|cp|cn|cd)(?:=(.*))?$")
_LONG_NAMES = {"cp": "config-path", "cn": "config-name"}
_NO_FILE = Path("-")
_TO_DECIDE = {
    "unknown": "no version of verl's PPO trainer has {}, and nothing is written: correct the name",
    "to be decided": "without {} the run would learn something else, and nothing is written: give another value after"
    " the file's name (key=value)",
}


def from_verl(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> int:
    """Runs the command from-verl: writes the report and the configuration; returns exit code 0, or 1 without a file.

    Exit code 1: the user must first decide about keys that cannot be translated.

    Raises:
        ConfigError: the script or YAML file cannot be used.
    """
    parser.add_argument(
        "source", type=Path, metavar="SCRIPT_OR_YAML", help="launch script or Hydra configuration; -: only overrides"
    )
    parser.add_argument("--gpus", type=_gpus, metavar="A:C", help="GPUs of actor and critic; default: verl's GPUs, 3:1")
    parser.add_argument("-o", dest="output", type=Path, metavar="FILE", help="default: standard output")
    parser.add_argument(
        "--drop", action="append", default=[], metavar="KEY", help="leave this key out, although results change"
    )
    parser.add_argument("--verl-version", dest="version", default="", help="whose defaults to take, e.g. 0.3")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="keys of verl; they override the script's")
    options = parser.parse_intermixed_args([*arguments])
    settings = read_settings(
        options.source, options.overrides, os.environ, datetime.now().astimezone(), options.version
    )
    translation = translate(settings, gpus=options.gpus, drop=options.drop)
    out = sys.stderr if options.output is None else sys.stdout
    out.write(printable(report_text(translation, settings)))
    if undecided := [*_undecided(translation, settings)]:
        sys.stderr.write(printable("".join(f"error: {sentence}\n" for sentence in undecided)))
        return 1
    text = translated_yaml(translation, settings.source)
    if options.output is None:
        sys.stdout.write(text)
    else:
        with config_errors(OSError, before=f"cannot write {options.output}: "):
            write_atomically(options.output, text)
        check = our_command("controller", "--config", options.output, "--check")
        out.write(f"\n{options.output} is written; next: {check}\n")
    return 0


def read_settings(
    source: Path, overrides: Sequence[str], environment: Mapping[str, str], now: datetime, verl_version: str = ""
) -> Settings:
    """Reads a YAML file or a launch script of verl, applies overrides last, and returns verl's keys as `Settings`.

    Keys that are not given have the defaults of `verl_version`, else of the version that the given keys tell, else of
    the latest version.

    Raises:
        ConfigError: the file cannot be read or understood.
    """
    name = "the command line" if source == _NO_FILE else source.name
    text = "" if source == _NO_FILE else _read(source)
    is_yaml = source.suffix in (".yaml", ".yml")
    launch = Launch([], ()) if is_yaml or not text else read_script(source, text, environment, now)
    words = [*launch.words, *(Word(override, 0) for override in overrides)]
    texts = [word.text for word in words]
    age = age_of_release(verl_version) if verl_version else age_of_checkout(source) if text else Age(None)
    if age.version is None:
        age = age_of_yaml(text) if is_yaml else age_of_words(texts)
    options, overriding = _take_options(name, words)
    file = _config_file(options, source, name)
    file_text = "" if file is None else _read(file)
    engine = engine_of_words([*texts, *(text if is_yaml else file_text).splitlines()])
    settings = Settings(name, VERL_DEFAULTS | age.defaults(engine), SECTIONS)
    settings.version = age.version or LATEST
    settings.from_environment = launch.from_environment
    settings.unread = launch.unread
    if is_yaml:
        settings.add_yaml(text, name)
    if file is not None:
        settings.add_yaml(file_text, file.name)
    _add_words(settings, overriding)
    if not settings.given:
        raise ConfigError(f"{name} sets none of verl's keys")
    settings.age = age.text(settings, engine)
    settings.asks_age = age.version is None and bool(settings.age)
    return settings


def translated_yaml(translation: Translation, name: str) -> str:
    """Validates the translated configuration and returns it as YAML text; `name` is the file it was translated from.

    Raises:
        ConfigError: the configuration does not pass its checks.
    """
    batch_plan(validate(nested(translation.values), name))
    dropped = [finding.key for finding in translation.findings if finding.outcome == "dropped"]
    header = f"From {name}, by python -m controller from-verl{'; dropped: ' + ', '.join(dropped) if dropped else ''}."
    return yaml_text(translation.values, translation.comments, header)


def _read(file: Path) -> str:
    with config_errors(OSError, UnicodeDecodeError, before=f"cannot read {file}: "):
        return file.read_text(encoding="utf-8")


def _take_options(name: str, words: Sequence[Word]) -> tuple[dict[str, str], list[Word]]:
    """Divides the words of verl's command line into its options, by their long names, and overrides."""
    rest: list[Word] = []
    options: dict[str, str] = {}
    remaining = iter(words)
    for word in remaining:
        if option := _OPTION.match(word.text):
            value = option[2] if option[2] is not None else _known(name, next(remaining, Word("", 0)))
            options[_LONG_NAMES.get(option[1], option[1])] = value
        elif word.text.startswith("-"):
            raise ConfigError(f"{name}, line {word.line}: option {word.text} is not supported here")
        else:
            rest.append(word)
    return options, rest


def _config_file(options: Mapping[str, str], source: Path, name: str) -> Path | None:
    """Returns the file that --config-name names; None if it is one of verl's own. ConfigError if it is not here."""
    config = re.sub("^(one_step_off|fully_async)_ppo", "ppo", options.get("config-name", "").removesuffix(".yaml"))
    if not config or config in ("ppo_trainer", "ppo_megatron_trainer"):
        return None
    file = Path(options.get("config-path", ".")) / f"{config}.yaml"
    places = (file, source.parent / file, source.parent / "config" / file.name)  # the last is Hydra's usual folder
    place = next(filter(Path.is_file, places), file)
    if not place.is_file():
        raise ConfigError(f"{name} starts from {file}, which is not here; run this command where it is")
    return place


def _add_words(settings: Settings, words: Sequence[Word]) -> None:
    """Adds Hydra overrides to the settings, the last one wins; ConfigError if that one has an unknown value."""
    for number, word in enumerate(words, 1):
        is_overridden = any(_key(later) == _key(word) and not later.unknown for later in words[number:])
        if word.unknown and _is_not_needed(_key(word)):
            settings.add_override(f"{_key(word)}=null", word.line)
        elif not word.unknown or not is_overridden:
            settings.add_override(_known(settings.source, word), word.line)


def _is_not_needed(key: str) -> bool:
    """Returns True if verl's key needs no counterpart, whatever its value is."""
    row = row_of(key)
    return row is not None and row.outcome == "not needed"


def _known(name: str, word: Word) -> str:
    """Returns the text of an argument for verl; ConfigError if it depends on what cannot be known here."""
    if not word.unknown:
        return word.text
    key = _key(word) if "=" in word.text else ""
    give = f"give {key}=... here" if key else "set it in the environment"
    raise ConfigError(f"{name}, line {word.line}: {key or 'a word'} is not known, as {word.unknown}; {give}")


def _key(word: Word) -> str:
    return word.text.partition("=")[0].lstrip("+")


def _undecided(translation: Translation, settings: Settings) -> Iterator[str]:
    """Yields one error sentence per kind of decision that the user must make before a configuration file is written."""
    if settings.asks_age:
        yield settings.age
    for outcome, sentence in _TO_DECIDE.items():
        if keys := [finding.key for finding in translation.stopping if finding.outcome == outcome]:
            more = f" and {len(keys) - 5} more" if len(keys) > 5 else ""
            yield f"{sentence.format(', '.join(keys[:5]) + more)}, or go on without it (--drop KEY)"


def _gpus(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"expected A:C, GPUs of the actor and of the critic, got {text!r}")
    return int(match[1]), int(match[2])
