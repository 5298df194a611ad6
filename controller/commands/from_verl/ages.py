"""Finds the verl version that a launch script or YAML file was written for, and lists defaults of older versions.

Hydra refuses a key that a version of verl does not have, and a `+` before a key that the version has. Therefore the
keys of a launch tell the version of verl.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from controller.commands.from_verl.run import VerlRun
from controller.commands.from_verl.settings import LATEST, NEXT, Settings, Version
from splitppo.config import ConfigError

# The last version with other defaults that change results.
_LAST_OLD: Version = (0, 3)
_ACTOR = "actor_rollout_ref.actor"

_FIRST: Version = (0, 1)
_OLD_LOSS = {
    "algorithm.use_kl_in_reward": f"${{verl_not:${{{_ACTOR}.use_kl_loss}}}}",
    f"{_ACTOR}.entropy_coeff": 0.001,
    f"{_ACTOR}.clip_ratio_low": f"${{{_ACTOR}.clip_ratio}}",
    f"{_ACTOR}.clip_ratio_high": f"${{{_ACTOR}.clip_ratio}}",
    f"{_ACTOR}.clip_ratio_c": None,
}
# Defaults that differ from the latest version: engine ("": all), first version, last version, defaults by key.
_OTHERS: tuple[tuple[str, Version, Version, dict[str, Any]], ...] = (
    ("", _FIRST, _LAST_OLD, _OLD_LOSS),
    ("", _FIRST, (0, 2), {"data.filter_overlong_prompts": True}),
    ("", _FIRST, (0, 1), {f"{_ACTOR}.shuffle": True, "trainer.test_freq": 2}),
    ("", (0, 4, 1), (0, 6), {"algorithm.rollout_correction.bypass_mode": False}),
    ("ppo_megatron_trainer", _FIRST, _LAST_OLD, {f"{_ACTOR}.shuffle": True, "trainer.test_freq": 2}),
    ("ppo_megatron_trainer", (0, 4, 1), (0, 4), {f"{_ACTOR}.optim.lr_decay_style": "linear"}),
    ("ppo_megatron_trainer", (0, 4, 1), (0, 5), {"critic.optim.lr_decay_style": "linear", "critic.optim.lr": 1e-6}),
    ("veomni", (0, 7), NEXT, {f"{model}.optim.lr_scheduler_type": "cosine" for model in (_ACTOR, "critic")}),
    ("torchtitan", (0, 7), NEXT, {f"{model}.optim.decay_type": "linear" for model in (_ACTOR, "critic")}),
)

# Keys since 0.4. Of verl's own scripts for 0.4 to 0.9, 99 in 100 set at least one.
_NEW = (
    r"algorithm\.(use_kl_in_reward|norm_adv_by_std_in_grpo|rollout_correction\..*|rollout_is.*)",
    r"trainer\.(val_before_train|device|log_val_generations|use_v1)",
    rf"{_ACTOR}\.(loss_agg_mode|clip_ratio_(low|high|c)|policy_loss\..*|checkpoint\.save_contents)",
    r"actor_rollout_ref\.(rollout\.calculate_log_probs|ref\.use_torch_compile)",
    r"actor_rollout_ref\.model\.(trust_remote_code|use_fused_kernels|lora_rank)|critic\.fsdp\..*|reward\..*",
)
# Keys that only 0.3 and older versions accept.
_OLD = (r"trainer\.val_generations_to_log_to_wandb|\+trainer\.val_before_train",)
# Keys that only 0.2 and older versions accept.
_OLDER = (
    r"(actor_rollout_ref\.actor|critic\.model)\.fsdp_config\.grad_offload",
    r"trainer\.remove_previous_ckpt_in_save",
)


@dataclass(frozen=True)
class Age:
    """The version of verl that a launch script or YAML file was written for, and the reason for this conclusion.

    Attributes:
        version: the version, (0, 4) for 0.4.0; None if the keys fit several versions, and the latest is assumed.
        why: the reason, as the end of a sentence.
        is_given: True if the user gave the version, or a checkout of verl has it.
    """

    version: Version | None
    why: str = ""
    is_given: bool = False

    def defaults(self, engine: str = "") -> dict[str, Any]:
        """Returns the defaults of verl at this version, for one engine, that differ from the latest version with FSDP.

        `engine` is a name that `engine_of_words` returns, e.g. "veomni"; "" takes only the defaults of all engines.
        """
        version = self.version or LATEST
        defaults: dict[str, Any] = {}
        for name, since, until, values in _OTHERS:
            defaults |= values if name in ("", engine) and since <= version and version[:2] <= until else {}
        return defaults

    def text(self, settings: Settings, engine: str = "") -> str:
        """Returns a sentence that names the verl version whose defaults are taken; "" if all versions agree on them."""
        if self.version and self.version[:2] <= _LAST_OLD:
            return f"defaults are those of verl {_name(self.version)}: {self.why} (--verl-version gives another)"
        last = (0, 4, 1) if self.version else _LAST_OLD
        others = Age(last).defaults(engine)
        open_keys = (key for key in others if key not in settings.given and VerlRun(settings).has_use_for(key))
        keys = ", ".join(key for key in open_keys if settings.value(key) != settings.resolved(others[key]))
        if not keys or self.is_given:
            return ""
        if self.version:
            return (
                f"defaults are those of verl {_name(LATEST)}; those of {keys} were others in some versions from 0.4.1"
                " to 0.6: if the script is that old, give --verl-version"
            )
        return (
            f"no key tells verl's version, and the defaults of {keys} were others up to {_name(_LAST_OLD)}: give"
            f" --verl-version {_name(_LAST_OLD)} or --verl-version {_name(LATEST)}"
        )


def age_of_release(text: str) -> Age:
    """Parses a release number of verl, such as 0.4.1, and returns the release as an `Age` that the user gave.

    Raises:
        ConfigError: the text is no release number of verl.
    """
    release = re.match(r"v?0\.(\d+)(?:\.(\d+)|\.|$)", text)
    if not release or not 1 <= int(release[1]) <= NEXT[1]:
        raise ConfigError(f"--verl-version: expected 0.1 to {_name(NEXT)}, got {text!r}")
    minor = int(release[1])
    patch = int(release[2] or 0)
    return Age((0, minor, patch) if patch else (0, minor), "as --verl-version says", is_given=True)


def age_of_checkout(source: Path) -> Age:
    """Returns the version of the checkout of verl that a script or YAML file lies in; an unknown version if in none.

    verl keeps its release number in the file verl/version/version.
    """
    for folder in source.absolute().parents:
        try:
            release = (folder / "verl" / "version" / "version").read_text(encoding="utf-8").strip()
            version = age_of_release(release).version
        except (OSError, UnicodeDecodeError, ConfigError):  # ConfigError: a later release than this table knows
            continue
        return Age(version, f"the file lies in verl {release}", is_given=True)
    return Age(None)


def age_of_words(words: Sequence[str]) -> Age:
    """Returns the last verl version that accepts these Hydra overrides (key=value), as an `Age`.

    The version in the `Age` is None if the keys fit several versions.
    """
    keys = [word.partition("=")[0] for word in words]
    for version, patterns in (((0, 2), _OLDER), (_LAST_OLD, _OLD), (LATEST, _NEW)):
        if telling := next((key for key in keys if any(re.fullmatch(pattern, key) for pattern in patterns)), ""):
            return Age(version, f"it sets {telling}")
    return Age(None)


def engine_of_words(words: Sequence[str]) -> str:
    """Returns the training engine that arguments of verl, or lines of a YAML file, choose: "dp" (FSDP) if none does.

    The older configuration of verl for Megatron is "ppo_megatron_trainer". A file chooses it by its name in the
    defaults list, or by the name of the actor's strategy.
    """
    if names := [word.removeprefix("model_engine=") for word in words if word.startswith("model_engine=")]:
        return names[-1]
    words = [word for word in words if not word.lstrip().startswith("#")]
    is_megatron = any("ppo_megatron_trainer" in word or word.endswith("actor.strategy=megatron") for word in words)
    return "ppo_megatron_trainer" if is_megatron else "dp"


def age_of_yaml(text: str) -> Age:
    """Returns the last version of verl that may have written this YAML, as an `Age`; the YAML should have all keys."""
    if "use_kl_in_reward" in text:
        return Age(LATEST)
    return Age(_LAST_OLD, "it has no algorithm.use_kl_in_reward") if "hybrid_engine" in text else Age(None)


def _name(version: Version) -> str:
    return ".".join(map(str, version))
