"""Every file of a run folder: what it holds, who writes it and when, and who reads it.

docs/run-folder.md has the table. A new file gets a row here: tests compare the table to what runs leave.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """Some files of one kind.

    Attributes:
        paths: below the run folder; `{role}` stands for a name, `N` for a number, a last `/` for all that is inside.
        content: what they hold, for the page.
        writer: who writes them, and when.
        readers: which parts of SplitPPO read them; "" for those that are for people alone.
    """

    paths: tuple[str, ...]
    content: str
    writer: str
    readers: str


ENTRIES = (
    # What people open first.
    Entry(
        ("metrics.jsonl",),
        "one line per step. [Metric names](metrics.md) are verl's; `overlap/*` and `rpc/*` are SplitPPO's own",
        "controller, when a step and its checkpoint are done; a way back removes lines",
        "controller when it resumes, trackers, report, doctor, plan, viewer",
    ),
    Entry(
        ("rollouts/train/N.parquet", "rollouts/val/N.parquet", "rollouts/val_only/N.parquet"),
        "every response of step N, or of the validation after it, as numbers; of some the text and the numbers of each"
        " token; what trackers show. `val_only`: of an `evaluation.val_only` that [samples in another"
        " way](prompts.md#validation) than the run",
        "controller's record, after each step and validation; a way back removes files",
        "trackers, viewer",
    ),
    Entry(
        ("report.png",),
        "plots of reward, accuracy, KL, value loss, explained variance and entropy; a timeline of one step",
        "controller, at the end, with `tracking.report`",
        "trackers",
    ),
    Entry(
        ("summary.json",),
        "the result in numbers, for scripts: accuracy before and after, times, overlap, sha256 of the weights, exit"
        " reason and, of a run that failed, `why`. `finished` is true once the last step is done. The numbers cover all"
        " starts of the run, except those under `this_start`",
        "controller, at the end of a start, except after SIGKILL",
        "controller when it resumes, trackers, doctor, viewer",
    ),
    Entry(
        ("checkpoints/global_step_N/",),
        "a checkpoint of both models (`actor`, `critic`), the controller's state in `controller.json`. It is complete"
        " when `COMMITTED` is there, and is [verified](operations.md#checkpoints) when it is loaded;"
        " `damaged_global_step_N` is one that was not as it was written",
        "ranks in the background, then the controller; `checkpoint.save_freq`",
        "controller and ranks when they resume, doctor, export",
    ),
    Entry(
        ("checkpoints/latest", "checkpoints/best"),
        "the step of the newest complete checkpoint, a number; with `checkpoint.best_metric` a link to the best one",
        "controller, with each checkpoint",
        "",
    ),
    Entry(
        ("huggingface/global_step_N/",),
        "the [policy's weights](operations.md#weights-alone) after step N, as a Hugging Face folder",
        "actor, with `checkpoint.weights_save_freq`",
        "",
    ),
    Entry(
        ("logs/controller_0.log", "logs/{role}_N.log", "logs/{role}_N.log.old"),
        "the log of the controller and of every rank; `.old`: of the start before, in a run whose group was started"
        " again",
        "controller, ranks",
        "viewer",
    ),
    Entry(
        ("logs/{role}_torchrun.log",),
        "what torchrun, its ranks and their libraries print, of a group that the controller has started",
        "torchrun",
        "controller when a group fails, viewer",
    ),
    Entry(
        ("logs/environments.log", "logs/trackers.log"),
        "what your tools and environments, and the clients of trackers, print",
        "their processes",
        "",
    ),
    Entry(
        ("config.yaml",),
        "the resolved configuration",
        "controller, at each start",
        "ranks; controller when it resumes, doctor, plan, sync, viewer",
    ),
    Entry(
        ("tensorboard/", "wandb/", "swanlog/"),
        "what the clients of [trackers](trackers.md) write",
        "tracker process",
        "TensorBoard, `wandb sync` and others",
    ),
    Entry(
        ("trace.json",),
        "the timeline of every step, with validations, checkpoints and restores; open it in Perfetto. It can be read"
        " after a kill, too",
        "controller, after each step; a way back removes spans",
        "report, plan, viewer",
    ),
    Entry(
        ("rollouts/train/N.jsonl",),
        "every response of step N as JSON lines",
        "controller, with `tracking.dump_rollouts`",
        "",
    ),
    Entry(
        ("rollouts/val/N.jsonl", "rollouts/val_only/N.jsonl"),
        "every response of the validation after step N as JSON lines",
        "controller, with `evaluation.dump_generations` (on by default)",
        "",
    ),
    Entry(
        ("rollouts/images/DIGEST",),
        "an image of the prompt of a response whose text is recorded, as the data files have it; the name is the"
        " XXH3-128 of the file, in hexadecimal, so that each image is there once",
        "controller's record, with the first such response; a quarter of `tracking.rollouts.max_gb` at most, and no"
        " image after that",
        "viewer",
    ),
    Entry(
        ("rollouts/critic/N.jsonl",),
        "the texts that the critic alone has read of responses of step N whose tokens are recorded"
        " ([privileged()](environments.md#what-the-critic-alone-may-know)); no other file has them",
        "controller's record, with `critic.privileged_prompt` and `tracking.rollouts.enable`; a way back removes files",
        "viewer",
    ),
    Entry(
        ("events.jsonl",),
        "starts, losses, recoveries, validations, checkpoints, the end",
        "controller's record, when they happen; nothing is ever removed",
        "viewer",
    ),
    Entry(
        ("live.json",),
        "what the run does now",
        "controller's record, on a change and every 5 s",
        "viewer",
    ),
    Entry(
        ("processes.json",),
        "role, rank, machine and pid of every rank and of the controller, made from what the groups tell",
        "controller, when all groups answer",
        "doctor",
    ),
    # What keeps the run right, and what its parts tell each other.
    Entry(
        ("rollouts/shown_train/N.parquet", "rollouts/shown_val/N.parquet", "rollouts/shown_val_only/N.parquet"),
        "the responses alone that trackers show",
        "controller's record, with `tracking.rollouts.enable: false`",
        "trackers",
    ),
    Entry(
        ("weights/version_N/",),
        "the policy's weights after step N, on their way to a [rollout"
        " group](rollout-groups.md#weights-as-files) or to `huggingface/`; not needed to resume. `rollout.sync_dir`"
        " names another folder",
        "actor, after each update; removed once newer ones are loaded",
        "rollout group",
    ),
    Entry(
        ("judge.jsonl",),
        "the answers of a [judge](rewards.md#a-judge), by the sha256 of their requests",
        "controller, when an answer comes",
        "controller, when it asks the same again",
    ),
    Entry(
        ("episodes/N.jsonl",),
        "what environments that are not deterministic have [answered](environments.md#answers-that-are-recorded) in"
        " step N",
        "controller, when a conversation is over; removed with the checkpoints before it",
        "controller, when it repeats the step",
    ),
    Entry(
        ("services/{role}.json",),
        "address, instance and ranks of a group that takes calls",
        "its rank 0, which removes it at its end",
        "controller (`services.launch: local`), doctor",
    ),
    Entry(
        ("services/{role}.failure.json", "services/{role}.end.json"),
        "why the last group that failed has ended; the rank that ended first, and how, until the group starts again",
        "the rank that sees the failure; torchrun",
        "controller",
    ),
    Entry(
        ("services/token",),
        "the token of calls, readable by its owner alone, while groups run that the controller has started",
        "controller",
        "doctor",
    ),
    Entry(
        ("services/writer_{host}_N.lock",),
        "locked by a rank of this machine while it writes to storage",
        "ranks, with `checkpoint.max_writers`",
        "ranks",
    ),
    Entry(
        ("training_rows.json",),
        "for each training file the number of its rows, and a sha256 of what prompts and rewards are made of; a run"
        " that [resumes](running.md#stopping-and-resuming) with other rows is refused",
        "controller, at each start",
        "controller when it resumes",
    ),
    Entry(
        ("controller.epoch",),
        "the id of the run, and the number of its starts; workers refuse calls of an earlier start",
        "controller, at each start",
        "ranks, doctor, sync",
    ),
    Entry(
        ("controller.lock", "nonce-{digits}"),
        "locked while a controller runs in the folder; a file by which a worker shows that it sees the same folder",
        "controller, at its start",
        "controller, doctor; ranks",
    ),
    Entry(
        ("logs/{roles}_template.log",),
        "what the process prints from which torchrun and ranks of these roles are forked; empty, unless it cannot"
        " import something",
        "template",
        "controller when it fails",
    ),
    Entry(
        ("trackers/{name}.json", "trackers/lock"),
        "the last step that a tracker has received; locked while a process feeds them",
        "tracker process, after each step",
        "tracker process, sync",
    ),
    Entry(
        ("failpoints/",),
        "marks of faults that `debug.failpoints` has injected",
        "controller, ranks",
        "",
    ),
)
