"""Makes docs/from-verl.md and the pages of verl's keys, from the table that translates."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from controller.commands.from_verl.keys import ROWS, SECTIONS, VERL_DEFAULTS
from controller.commands.from_verl.keys_engines import ENGINES
from controller.commands.from_verl.row import Row
from controller.commands.from_verl.settings import Settings
from controller.commands.from_verl.translation import translate

_HEAD = """# From verl

| question | short answer |
|---|---|
| What stays as it is? | data files, reward functions, models, dashboards |
| How do I translate a script, or a configuration? | `python -m controller from-verl run_ppo.sh`, then `--check` |
| [Which input](#which-input-is-best) is best? | the resolved configuration, else the script |
| [What does a script get](#what-a-launch-script-gets)? | a sandbox without a network |
| What is [not in keys](#differences-that-are-not-in-keys)? | whitening, denominators, seeds |
| Which [defaults](#defaults-that-differ) differ? | dtype, batch sizes, gradient checkpointing, vLLM |
| Do I need `param_offload`? | only beside vLLM on the actor's GPUs, or a rollout group on the critic's |
| What is [a key](#keys), [a word](#names), [a metric](#metrics) here? | mostly verl's last word; tables have each |

    python -m controller from-verl run_ppo.sh --verl-version 0.9 -o my.yaml   # a launch script, written for verl 0.9
    python -m controller from-verl outputs/.../.hydra/config.yaml -o my.yaml
    python -m controller --config my.yaml --check

It reads what a script passes to `main_ppo` of `verl.trainer` or `one_step_off_policy`, or a Hydra configuration. For
each key the report says if it is taken, changed (how), not needed (why), not supported (what to do instead) or unknown;
`my.yaml` has the values that differ from our defaults. Keys are those of verl 0.9's `ppo_trainer.yaml`, and most older
names. A key that is unknown, or is not supported and changes what is learned, ends the command with exit code 1 and
without a file, unless you drop it by name: `--drop algorithm.use_pf_ppo`. A file that cannot be understood, or numbers
that do not fit together, give one sentence and exit code 2.

* `key=value` after the file's name are keys of verl, and override the script's. `MODEL_PATH=/models/mine python -m
  controller from-verl ...` sets a variable of a script.
* Bash itself runs a script, with tools such as `basename` and `sed`. All other commands are skipped. If a word or a
  branch depends on a skipped command, on a file that is not read, or on a variable that is not set, one sentence gives
  the line, and the key or variable to set.
* Defaults are those of `--verl-version`, of the checkout of verl that the file lies in (`verl/version/version`), or
  of the version that the keys tell; otherwise the command asks for `--verl-version` (exit code 1). Up to 0.3 the KL was
  in the reward unless `use_kl_loss`, `entropy_coeff` was 0.001, and there was no dual clip. With Megatron the critic's
  learning rate decayed to 0 by default in 0.4.1 and 0.5, and the actor's in 0.4.1, as the report says.
* `--gpus 6:2` sets the GPUs of actor and critic, each its own. By default the actor, which also generates, gets three
  of four, in whole vLLM engines, and no more than a mini-batch has rows. `python -m controller plan RUN_DIR` predicts
  other splits; [which number is which GPU](hosts.md#which-gpus).
* `actor_rollout_ref.hybrid_engine=False`, as in `one_step_off_policy`: verl's `rollout.n_gpus_per_node` GPUs on
  `rollout.nnodes` machines are those of `services.rollout`, which samples one step ahead with `rollout.staleness: 1`
  ([rollout-groups.md](rollout-groups.md#staleness-1)); `--gpus` divides the GPUs of `trainer`. The log-probs of
  sampling are the old ones (`bypass_mode`), as in verl 0.7 and newer; with `--verl-version 0.6` give
  `algorithm.rollout_correction.rollout_is=token`. A validation is by the weights after its step, in verl by those
  before it. The keys of `fully_async_policy` are refused: which weights sample there depends on who is faster.
* With LoRA the reference is the policy without its adapters, and rollouts get merged weights. Weights that are
  offloaded move whole between commands, moments in buckets; with actor and critic on GPUs of their own, [less of it is
  needed](operations.md#weights-and-moments-in-main-memory).
* Tools (`multi_turn`): the files of `tool_config_path` and `function_tool_path` are used unchanged, by all rows, with
  `tools_kwargs` of a row ([environments-adapters.md](environments-adapters.md#tools-for-verl)). Rewards of tools count
  here. Of agent loops, `tool_agent` is what the tools do; for another one, and for interactions, name an environment of
  your own in `rollout.multi_turn.environments` and drop verl's key. `data_source` chooses the environment, not
  `agent_name`. An agent loop that returns several outputs, of which the last one gets the reward, is here one
  conversation with several contexts ([environments.md](environments.md)): `data.max_response_length` bounds all of them
  together, and a `max_model_len` under prompt and response becomes `rollout.multi_turn.max_context_length`.

## Which input is best

* **verl's resolved configuration**, in YAML, where verl is installed and you trust the script: exactly as verl reads
  it, with the defaults of your version. Nothing is asked for, nothing is guessed.
* **The launch script**, where verl is not installed or the script is not yours: the words that bash passes. What
  depends on a skipped command, or on a file or variable that the script does not get, is named, and you give it.
* **`-` and `key=value ...`**, where bubblewrap is not installed or the script needs what it cannot get: the words that
  you paste.

Hydra prints the resolved configuration and trains nothing. Most scripts end in `"$@"`, which passes the two options on;
else write them behind the arguments of `main_ppo`. Lines that packages log before the first section must be deleted.

    bash run_ppo.sh --cfg job --resolve > resolved.yaml
    python -m controller from-verl resolved.yaml -o my.yaml

### What a launch script gets

A script runs in bubblewrap (`apt-get install bubblewrap`), in a user namespace of its own and with the filter of system
calls of [code answers](rewards.md#code-answers), also if root starts it ([ADR 030](adr/030-from-verl.md)). It gets:

* **Files.** Shell files (`.sh`, `.bash`) in its own folder and below, unless a part of the path is hidden or a link
  leads out. Of other regular files it learns if they exist and if they are empty; folders exist, and are empty.
  Sockets, FIFOs, devices and programs do not exist. If it would run a file that is not read, such as `~/.bashrc` or
  `prod.env`, the report names the file: set the variables yourself.
* **Variables** of the environment that the script or these files name. If the name ends like that of a secret
  (`_API_KEY`, `TOKEN`, `SECRET`, `PASSWORD`, ...) or the value is an address with a password, the variable is set, but
  its value is not known: a key that depends on it must be given.
* **The machine**: shared libraries and the tools, read-only; its name and kernel, its time zone. Scripts with `<(...)`
  or `>(...)` also have a `/proc` of their own processes and mounts.
* **Limits**: 30 seconds for all runs of the script together, 64 processes, 512 MiB of memory, 64 MiB of files, 1 MiB of
  each file, of its trace and of its error messages. What it writes is deleted with the sandbox.

## Differences that are not in keys

`ppo_mini_batch_size` counts prompts in both. Advantages are whitened over the whole
batch, and losses are divided by totals of the whole mini-batch, for any number of ranks and micro-batches. A reward
function gets the decoded response alone, in a process of its own, with a time limit. All seeds are derived from
`run.seed`: a run repeats itself, but not verl's run. Where verl's estimators depart from their formulas, ours do not
([ADR 033](adr/033-estimators.md)). Estimators that compare samples are refused if a prompt has only one; with grpo
and rloo the advantages are the scores then.

`python -m benchmarks.verl_scripts CLONE` translates the launch scripts of all releases in a clone of verl, and counts.
"""

_NAMES = (
    ("`python -m verl.trainer.main_ppo`", "`python -m controller --config my.yaml`"),
    (
        "`python -m verl.experimental.one_step_off_policy.main_ppo`",
        "the same, with `services.rollout` and `rollout.staleness: 1`",
    ),
    (
        "worker groups, resource pools",
        "torchrun groups: `services.actor`, `services.critic`, with GPUs for rollouts alone also `services.rollout`; no"
        " cluster manager",
    ),
    (
        "`actor_rollout_ref`",
        "the actor's group: policy, rollouts, and by default the reference (`placement.reference`)",
    ),
    (
        "`reward_model`, reward loop",
        "`reward` (functions) and `reward_model` (a model), added up; the model alone with `reward_model.rule_coef: 0`",
    ),
    ("`ppo_micro_batch_size_per_gpu`, dynamic batches", "the same; dynamic unless the first is set"),
    ("`trainer.default_local_dir/global_step_N/{actor,critic}`", "`run.dir/checkpoints/global_step_N/{actor,critic}`"),
    ("logger `file`", "`run.dir/metrics.jsonl`, always"),
    ("model merger", "`checkpoint.save_hf_model`, `python -m services.engine.export`"),
    ("`verl.utils.reward_score`", "[scorers.md](scorers.md), by the same data sources"),
    ("profilers", "`run.dir/trace.json`, for Perfetto"),
)

# verl's metrics, and ours where the name is another one or there is none.
METRICS = (
    ("critic/{score,rewards,advantages,returns,values}/{mean,max,min}", "the same; scores of all responses"),
    ("critic/{vf_explained_var,vf_loss,vf_clipfrac,vpred_mean,grad_norm,lr}", "the same"),
    ("actor/{pg_loss,pg_clipfrac,pg_clipfrac_lower,ppo_kl,kl_loss,kl_coef,grad_norm,lr}", "the same"),
    (
        "actor/entropy",
        "the same, but measured in the update and per token; verl's is measured before it, by `loss_agg_mode`",
    ),
    ("actor/{reward_kl_penalty,reward_kl_penalty_coeff}", "the same"),
    ("{response_length,response_length_non_aborted,prompt_length}/{mean,max,min,clip_ratio}", "the same"),
    ("response/aborted_ratio", "the same"),
    ("global_seqlen/{min,max,minmax_diff,balanced_min,balanced_max,mean}", "the same, over the actor's ranks"),
    ("timing_s/{step,gen,reward,old_log_prob,ref,values,adv,update_actor,update_critic,update_weights}", "the same"),
    ("timing_s/{testing,save_checkpoint}", "the same"),
    ("timing_per_token_ms/{gen,ref,values,adv,update_critic,update_actor}", "the same"),
    ("perf/{total_num_tokens,time_per_step,throughput}", "the same"),
    ("perf/mfu/{actor,critic,actor_infer}", "the same, of the tokens without padding"),
    ("perf/{max_memory_allocated_gb,max_memory_reserved_gb,cpu_memory_used_gb}", "the same, of each group"),
    ("training/{global_step,epoch}", "the same"),
    ("training/rollout_probs_diff_{max,mean,std}", "the same"),
    ("rollout_corr/*", "the same as verl 0.8 and newer, [rollout_correction.md](rollout_correction.md)"),
    ("val-core/<source>/<variable>/*, val-aux/<source>/<variable>/*", "the same"),
    ("{actor,critic}/mfu", "`perf/mfu/{actor,critic}`"),
    (
        "{num_turns,tool_call_counts,training/num_turns}/*",
        "`{num_turns,tool_call_counts}/*`; of turns the policy's alone",
    ),
    ("training/filter_groups/*", "the same; `evicted_samples` also by what was alike"),
    ("train/num_gen_batches", "the same"),
    (
        "training/{off_policy,rollout_failure}/*",
        "none: `training/staleness` is 0 or 1; `reward/num_*` counts what has no score",
    ),
    ("rollout/*", "none"),
)

# Pages of the keys, each with its sections: title, and how the keys of the section begin. A key belongs to the first
# section that fits.
_OF_ENGINES = tuple(
    f"{part}.{ENGINES}" for part in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "reward_model")
)
KEY_PAGES = {
    "from-verl/engines": {"training engines": _OF_ENGINES},
    "from-verl/models": {
        "actor_rollout_ref.actor and .model": (
            "actor_rollout_ref.actor",
            "actor_rollout_ref.model",
            "{actor_rollout_ref.actor",
        ),
        "actor_rollout_ref.ref": ("actor_rollout_ref.ref",),
        "critic": ("critic", "{critic"),
    },
    "from-verl/rollout": {"actor_rollout_ref.rollout": ("actor_rollout_ref.rollout",)},
    "from-verl/run": {
        "data": ("data.",),
        "reward, reward_model, custom_reward_function": ("reward", "custom_reward", "{reward", "{sandbox"),
        "algorithm": ("algorithm",),
        "trainer": ("trainer",),
        "the rest": ("",),
    },
}


def from_verl_page() -> str:
    """Returns the page on the translation as a whole, with the names that are no keys."""
    lines = [_HEAD, "## Keys", "", "| page | verl's keys |", "|---|---|"]
    lines += [f"| [{page}]({page}.md) | {'; '.join(sections)} |" for page, sections in KEY_PAGES.items()]
    lines += ["", "## Names", "", "| verl | here |", "|---|---|"]
    lines += [f"| {theirs} | {ours} |" for theirs, ours in _NAMES]
    lines += ["", "## Defaults that differ", "", "The translation sets these values if the file does not set them.", ""]
    lines += ["| verl | there | here |", "|---|---|---|", *_defaults()]
    lines += ["", "## Metrics", "", "Your dashboards stay as they are; [metrics.md](metrics.md) lists all metrics.", ""]
    lines += ["| verl | here |", "|---|---|", *(f"| `{theirs}` | {ours} |" for theirs, ours in METRICS)]
    return "\n".join(lines) + "\n"


def from_verl_keys_page(page: str) -> str:
    """Returns a page with the keys of some of verl's sections, and what becomes of each."""
    lines = [f"# From verl: {', '.join(KEY_PAGES[page])}", ""]
    lines += ["Made by `python -m tools.docs`; [from-verl.md](../from-verl.md) says how a run is translated."]
    rows = [row for row in ROWS if not _is_like_the_actors(row)]
    for sections_page, sections in KEY_PAGES.items():
        for title, beginnings in sections.items():
            mine = [row for row in rows if row.key.startswith(beginnings)]
            rows = [row for row in rows if row not in mine]
            if sections_page == page:
                lines += ["", f"## {title}", "", *_table(title, mine)]
    return "\n".join(lines) + "\n"


_NOTES = {
    "critic": "The keys that the actor has, too, are converted as the actor's; FSDP's are under `critic.fsdp`.",
    "training engines": "The engines of critic, reference and reward model have the actor's keys, and those below.",
}


def _table(title: str, rows: Sequence[Row]) -> list[str]:
    """Returns the keys that are called the same here, then a row for all that become the same."""
    same = [row for row in rows if row.outcome == "taken" and row.to == row.key and not row.note]
    alike: dict[str, list[str]] = {}
    for row in rows:
        if row not in same:
            alike.setdefault(_what(row), []).append(f"`{row.key}`")
    lines = [_NOTES[title], ""] if title in _NOTES else []
    if same:
        keys = ", ".join(f"`{row.key}`" for row in same)
        lines += [*textwrap.wrap(f"The same here: {keys}.", 120, break_on_hyphens=False), ""]
    lines += ["| verl | here |", "|---|---|"]
    return [*lines, *(f"| {_cell(', '.join(keys))} | {_cell(what)} |" for what, keys in alike.items())]


def _what(row: Row) -> str:
    ours = f"`{row.to}`" if row.to else ""
    if row.outcome in ("taken", "changed") and row.to:
        return f"{ours}{': ' if row.note else ''}{row.note}"
    if row.outcome == "changed":
        return row.note
    if row.outcome == "not needed":
        return f"not needed: {row.note}"
    effect = "" if row.changes_results else " (the same is learned)"
    return f"not supported{effect}: {row.note}"


def _is_like_the_actors(row: Row) -> bool:
    """Returns True if a row of the critic, or of an engine of a frozen model, equals a row of the actor."""
    for theirs, ours in (
        ("critic.model", "actor_rollout_ref.model"),
        ("critic.fsdp", "actor_rollout_ref.actor.fsdp_config"),
        ("critic", "actor_rollout_ref.actor"),
        (f"actor_rollout_ref.ref.{ENGINES}", f"actor_rollout_ref.actor.{ENGINES}"),
        (f"reward_model.{ENGINES}", f"actor_rollout_ref.actor.{ENGINES}"),
    ):
        if row.key.startswith(theirs):
            key = row.key.replace(theirs, ours, 1)
            return any(other.key == key and other.outcome == row.outcome for other in ROWS)
    return row.key.startswith(("{critic.fsdp", "{critic"))


def _defaults() -> Iterator[str]:
    """Yields rows on the defaults that differ, for a run that sets only its model, data and steps."""
    settings = Settings("", VERL_DEFAULTS, SECTIONS)
    for override in (
        "actor_rollout_ref.model.path=m",
        "data.train_files=t",
        "data.val_files=v",
        "trainer.total_training_steps=1",
    ):
        settings.add_override(override)
    for finding in translate(settings, gpus=None, drop=()).findings:
        if finding.outcome == "default" and "." in finding.to and not finding.to.startswith("run."):
            yield f"| `{finding.key}` | {_plain(finding.value)} | `{finding.to}` {_plain(finding.new)} |"


def _plain(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _cell(text: str) -> str:
    return text.replace("|", r"\|")
