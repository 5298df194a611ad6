"""The page docs/from-verl.md: the table of verl's keys as people read it, and the names of the rest."""

from __future__ import annotations

from collections.abc import Iterator

from controller.from_verl.keys import ROWS, SECTIONS, VERL_DEFAULTS
from controller.from_verl.row import Row
from controller.from_verl.settings import Settings
from controller.from_verl.translation import translate

_HEAD = """# From verl

Data files, reward functions, models and dashboards stay as they are. This page is made by `python -m tools.docs` from
the table that translates (`controller/from_verl/keys.py`).

    python -m controller from-verl run_ppo.sh -o my.yaml                  # a launch script: evaluated, never run
    python -m controller from-verl outputs/.../.hydra/config.yaml -o my.yaml
    python -m controller --config my.yaml --check

It reads what a script passes to `verl.trainer.main_ppo` (variables and their defaults, arrays, branches, `"$@"`,
`+key=`, `++key=`, `~key`, `--config-name`), or a Hydra configuration, resolved or with interpolations, and says for
each key what becomes of it: taken, changed (how), not needed (why), not supported (what instead). `my.yaml` has what
differs from the defaults here, with a comment where a value is not the one of the script. Keys are those of verl
0.9's `ppo_trainer.yaml`; older names of most are known, too.

* `key=value` behind the file's name are verl's keys, as behind the script's own name. `MODEL_PATH=/models/mine python
  -m controller from-verl ...` gives a script its variables.
* No command in a script is run. Where a word or a branch depends on a command's output, one sentence says so, with
  its line, and which key or variable to give.
* `--gpus 6:2`: GPUs of actor and critic. verl puts both models on all GPUs; here each has its own, so that both work
  at the same time. By default the actor, which also generates, gets three of four, in whole vLLM engines; `python -m
  controller plan RUN_DIR` says what another split would take, once a few steps are measured.
* What is not supported and changes what is learned ends the translation with exit code 1, and nothing is written,
  unless it is dropped by name: `--drop algorithm.use_pf_ppo`. A file that cannot be understood, or numbers that do not
  fit together, are one sentence and exit code 2.

What is not a matter of keys: `ppo_mini_batch_size` counts prompts in both. Advantages are whitened over the whole
batch, losses are divided by what the whole mini-batch has, whatever the number of ranks and micro-batches. A reward
function gets the decoded response alone, in a process of its own, with a time limit. Seeds are `run.seed`'s: a run
repeats itself, but not verl's. Where verl's estimators depart from their formulas, ours do not
([ADR 033](adr/033-estimators.md)), and those that compare samples are refused where a prompt has one.
"""

_NAMES = (
    ("`python -m verl.trainer.main_ppo`", "`python -m controller --config my.yaml`"),
    (
        "worker groups, resource pools",
        "two torchrun groups, `services.actor` and `services.critic`; no cluster manager",
    ),
    (
        "`actor_rollout_ref`",
        "the actor's group: policy, rollouts, and by default the reference (`placement.reference`)",
    ),
    ("`reward_model`, reward loop", "`reward` (functions) and `reward_model` (a model), added up"),
    ("`ppo_micro_batch_size_per_gpu`, dynamic batches", "the same; dynamic unless the first is set"),
    ("`trainer.default_local_dir/global_step_N/{actor,critic}`", "`run.dir/checkpoints/global_step_N/{actor,critic}`"),
    ("logger `file`", "`run.dir/metrics.jsonl`, always"),
    ("model merger", "`checkpoint.save_hf_model`, `python -m services.engine.export`"),
    ("`verl.utils.reward_score`", "[scorers.md](scorers.md), by the same data sources"),
    ("profilers", "`run.dir/trace.json`, for Perfetto"),
)

# verl's metrics, and ours where the name is another one or there is none.
METRICS = (
    ("critic/{score,rewards,advantages,returns,values}/{mean,max,min}", "the same"),
    ("critic/{vf_explained_var,vf_loss,vf_clipfrac,vpred_mean,grad_norm,lr}", "the same"),
    ("actor/{pg_loss,pg_clipfrac,pg_clipfrac_lower,ppo_kl,entropy,kl_loss,kl_coef,grad_norm,lr}", "the same"),
    ("actor/{reward_kl_penalty,reward_kl_penalty_coeff}", "the same"),
    ("{response_length,prompt_length}/{mean,max,min,clip_ratio}", "the same"),
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
    ("rollout_corr/*", "the same, [rollout_correction.md](rollout_correction.md)"),
    ("val-core/<source>/<variable>/*, val-aux/<source>/<variable>/*", "the same"),
    ("{actor,critic}/mfu", "`perf/mfu/{actor,critic}`"),
    ("response_length_non_aborted/*", "none: `response/aborted_ratio` has those without a token"),
    ("{num_turns,tool_call_counts,training/num_turns}/*", "none: one turn"),
    ("training/filter_groups/*", "the same; `evicted_samples` also by what was alike"),
    ("train/num_gen_batches", "the same"),
    ("training/{off_policy,rollout_failure}/*", "none: on-policy; `reward/num_*` counts what has no score"),
    ("rollout/*", "none"),
)

# Title, and how the keys of a section begin; the first that fits.
_SECTIONS = (
    ("data", ("data.",)),
    (
        "actor_rollout_ref.actor and .model",
        ("actor_rollout_ref.actor", "actor_rollout_ref.model", "{actor_rollout_ref.actor"),
    ),
    ("actor_rollout_ref.ref", ("actor_rollout_ref.ref",)),
    ("actor_rollout_ref.rollout", ("actor_rollout_ref.rollout",)),
    ("critic", ("critic", "{critic")),
    ("reward, reward_model, custom_reward_function", ("reward", "custom_reward", "{reward", "{sandbox")),
    ("algorithm", ("algorithm",)),
    ("trainer", ("trainer",)),
    ("the rest", ("",)),
)


def from_verl_page() -> str:
    """Everything, with the keys by verl's sections."""
    lines = [_HEAD, "## Names", "", "| verl | here |", "|---|---|"]
    lines += [f"| {theirs} | {ours} |" for theirs, ours in _NAMES]
    lines += ["", "## Defaults that differ", "", "Set by the translation, where the file does not say otherwise.", ""]
    lines += ["| verl | there | here |", "|---|---|---|", *_defaults()]
    rows = [row for row in ROWS if not _is_like_the_actors(row)]
    for title, beginnings in _SECTIONS:
        mine = [row for row in rows if row.key.startswith(beginnings)]
        rows = [row for row in rows if row not in mine]
        lines += ["", f"## {title}", ""]
        if title == "critic":
            lines += [
                "The keys that the actor has, too, are converted as the actor's; FSDP's are under `critic.fsdp`.",
                "",
            ]
        lines += ["| verl | here |", "|---|---|", *(f"| `{_cell(row.key)}` | {_cell(_what(row))} |" for row in mine)]
    lines += ["", "## Metrics", "", "Dashboards stay; [metrics.md](metrics.md) has the ones that are new.", ""]
    lines += ["| verl | here |", "|---|---|", *(f"| `{theirs}` | {ours} |" for theirs, ours in METRICS)]
    return "\n".join(lines) + "\n"


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
    """Whether a row of the critic says what one of the actor says."""
    for theirs, ours in (
        ("critic.model", "actor_rollout_ref.model"),
        ("critic.fsdp", "actor_rollout_ref.actor.fsdp_config"),
        ("critic", "actor_rollout_ref.actor"),
    ):
        if row.key.startswith(theirs):
            key = row.key.replace(theirs, ours, 1)
            return any(other.key == key and other.outcome == row.outcome for other in ROWS)
    return row.key.startswith(("{critic.fsdp", "{critic"))


def _defaults() -> Iterator[str]:
    """Of a run that sets nothing but its model, data and steps."""
    settings = Settings("", VERL_DEFAULTS, SECTIONS)
    for override in (
        "actor_rollout_ref.model.path=m",
        "data.train_files=t",
        "data.val_files=v",
        "trainer.total_training_steps=1",
    ):
        settings.add_override(override)
    for finding in translate(settings, gpus=None, drop=()).findings:
        if finding.is_default and "." in finding.to and not finding.to.startswith("run."):
            yield f"| `{finding.key}` | {_plain(finding.value)} | `{finding.to}` {_plain(finding.new)} |"


def _plain(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _cell(text: str) -> str:
    return text.replace("|", r"\|")
