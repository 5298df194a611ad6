"""Run folders for the viewer, made by the description of the files alone: small or large, also with conversations.

All numbers of a response follow from its arrays as docs/run-folder.md says, in float64, so that a page can be checked.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from splitppo.run_folder.critic_texts import write_critic_texts
from tests.support.seeds import shifted
from tests.support.viewed_traces import spans_of, write_trace

Array = npt.NDArray[Any]
GAMMA, LAM = 0.99, 0.95
TEXT = "So we have 12 · 4 = 48 apples , then she sells 20 → 28 left . Größe naïve 日本 🙂 ####"
BINS, POSITIONS, CALIBRATION = 48, 16, 10


@dataclass(frozen=True)
class Shape:
    """How much a generated run has."""

    steps: int = 12
    prompts: int = 8
    samples: int = 4
    mean_tokens: int = 24
    with_conversations: bool = False
    with_contexts: bool = False  # three turns, the second in a context that begins anew, the third back to the first
    with_critic: bool = True
    with_privileged: bool = False
    with_update: bool = False
    with_trace: bool = False
    texts: Sequence[str] = ()
    images: Sequence[bytes] = ()  # files; the prompts have one each, in turns, and every third one two


def make_run(folder: Path, shape: Shape = Shape(), *, seed: int = 1, ended: bool = True) -> Path:
    """Writes a whole run into a folder that is made; returns the folder."""
    folder.mkdir(parents=True)
    run = f"run:\n  name: {json.dumps(folder.name)}\n  seed: {seed}\n"
    estimator = "gae" if shape.with_critic else "grpo"
    (folder / "config.yaml").write_text(f"{run}algorithm:\n  adv_estimator: {estimator}\n")
    for step in range(1, shape.steps + 1):
        add_step(folder, step, shape, seed=seed)
    if shape.with_trace:
        spans = [span for step in range(1, shape.steps + 1) for span in spans_of(step)]
        write_trace(folder, spans)
        lost = [[pool, name, step, start - 3, end - 3] for pool, name, step, start, end in spans_of(2)]
        add_event(folder, {"kind": "cut", "spans": lost}, step=2)
    add_event(folder, {"kind": "start", "resumed_at": 0, "pid": 1, "host": "here", "version": "0", "changes": []})
    if ended:
        summary = {"exit_reason": "completed", "finished": True, "global_step": shape.steps}
        (folder / "summary.json").write_text(json.dumps(summary))
    write_live(folder, step=shape.steps, total=shape.steps, phase="ended" if ended else "training")
    return folder


def add_step(folder: Path, step: int, shape: Shape = Shape(), *, seed: int = 1) -> list[dict[str, Any]]:
    """Appends a step: a line of metrics and the parquet of its responses, which are returned."""
    rng = np.random.default_rng((shifted(seed), step))
    rows = [response(rng, row, step, shape) for row in range(shape.prompts * shape.samples)]
    write_rows(folder, step, rows, shape, seed)
    for image in shape.images:
        (folder / "rollouts" / "images").mkdir(exist_ok=True)
        (folder / "rollouts" / "images" / name_of(image)).write_bytes(image)
    if shape.with_privileged:
        write_critic_texts(folder / "rollouts", step, {row["row"]: f"Answer: {row['response']}" for row in rows})
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, **metrics(rows, step)}) + "\n")
    if step % 4 == 0:
        keys = ("row", "prompt_index", "sample", "data_source", "place", "score", "extra", "length", "has_eos")
        texts = ("prompt", "response", "ground_truth", "messages", "images")
        kept = [{**{key: row[key] for key in (*keys, *texts)}, "fixed": True} for row in rows[:64]]
        (folder / "rollouts" / "val").mkdir(exist_ok=True)
        pq.write_table(pa.Table.from_pylist(kept), folder / "rollouts" / "val" / f"{step}.parquet")
    return rows


def write_live(folder: Path, *, step: int, total: int, phase: str, age_s: float = 0.0, **more: Any) -> None:
    """Writes live.json as a controller in this process would, `age_s` seconds ago."""
    started = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    pool = {"method": "Generate", "phase": "generate", "done": 3, "total": 8, "since_s": 1.0, "state": "ready"}
    value = {
        "unix_s": time.time() - age_s,
        "run_id": "generated",
        "epoch": 1,
        "pid": os.getpid(),
        "pid_started": int(started),
        "host": socket.gethostname(),
        "step": step,
        "total_steps": total,
        "phase": phase,
        "pools": {"actor": pool, "critic": {**pool, "method": "", "phase": ""}},
        **more,
    }
    new = folder / "live.json.new"
    new.write_text(json.dumps(value))
    new.rename(folder / "live.json")


def add_event(folder: Path, event: Mapping[str, Any], *, step: int = 0) -> None:
    """Appends a line to events.jsonl."""
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps({"unix_s": time.time(), "epoch": 1, "step": step, **event}) + "\n")


def go_back(folder: Path, step: int) -> None:
    """Removes all steps after `step` as a recovery does: another file of metrics, and no parquet of these steps."""
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    new = folder / "metrics.jsonl.new"
    new.write_text("".join(line for line in lines if json.loads(line)["step"] <= step))
    new.rename(folder / "metrics.jsonl")
    for file in (folder / "rollouts" / "train").glob("*.parquet"):
        if int(file.stem) > step:
            file.unlink()


def response(rng: np.random.Generator, row: int, step: int, shape: Shape) -> dict[str, Any]:
    """Makes one response with everything that the files hold of it."""
    length = max(3, int(rng.poisson(shape.mean_tokens)))
    words = [str(rng.choice(TEXT.split())) + " " for _ in range(length)]
    if shape.texts:
        text = shape.texts[row % len(shape.texts)]
        third = max(1, len(text) // 3)
        words[:4] = [text[:third], text[third : 2 * third], text[2 * third :], " "]
        length = len(words)
    counts = np.ones(length, bool)
    turn = np.ones(length, np.int16)
    segments, followed = None, None
    if shape.with_contexts:
        fifth = length // 5
        turn[fifth:] = np.repeat([0, 2, 0, 3], [fifth, fifth, fifth, length - 4 * fifth])
        counts = turn > 0
        segments, followed = [fifth, fifth, 3 * fifth, fifth], [0, 1]
        if shape.texts:
            words[fifth] = shape.texts[row % len(shape.texts)]
    elif shape.with_conversations:
        third = length // 3
        counts[third : 2 * third] = False
        turn[third : 2 * third], turn[2 * third :] = 0, 2
    learned = counts.copy()
    score = float(rng.random() < 0.2 + 0.6 * step / (step + 6))
    numbers = signals(rng, counts, score, step, shape)
    ends = np.cumsum([len(word) for word in words])
    turn_ends = [int(np.flatnonzero(turn == number)[-1]) for number in (1, 2, 3) if (turn == number).any()]
    truncated = length > shape.mean_tokens * 1.3
    text, prompt = "".join(words), f"Question {row // shape.samples}: how many apples are left?"
    calls = [{"function": {"name": "calculator", "arguments": '{"expression": "12 * 4"}'}}]
    messages = [
        {"role": "user", "content": prompt},
        {"role": "assistant", "content": "Let me see.", "tool_calls": calls},
        {"role": "tool", "content": "48"},
        {"role": "assistant", "content": text[-20:]},
    ]
    if shape.with_contexts:
        summary = words[fifth] if shape.texts else "48 apples"
        messages += [{"role": "user", "content": summary, "begins_context": True}, messages[-1]]
    source = shape.texts[row % len(shape.texts)] if shape.texts else ("gsm8k", "sort_letters")[row % 2]
    return {
        "row": row,
        "prompt_index": row // shape.samples,
        "sample": row % shape.samples,
        "data_source": source,
        "place": f"train.jsonl:{row // shape.samples + 1}",
        "score": score,
        "reward": float(numbers["rewards"].sum()),
        "extra": json.dumps({"acc": score}),
        "failure": "",
        "length": length,
        "prompt_length": 12,
        "has_eos": not truncated,
        "is_truncated": truncated,
        "learned": int(learned.sum()),
        "turns": int(turn.max()),
        "lost": False,
        "repetition": float(rng.random() * 0.2),
        "text_hash": int(rng.integers(-(2**62), 2**62)),
        "why": (1 if row % 2 == 0 else 2 + 64 * (row % 3 == 0)) if row % 5 != 4 else 0,
        "prompt": prompt,
        "response": text,
        "ground_truth": "28",
        "ends": ends,
        "ids": rng.integers(0, 32000, length),
        "flags": counts.astype(np.uint8) + 2 * learned.astype(np.uint8),
        "turn": turn,
        "turn_ends": turn_ends,
        "turn_rewards": [0.0, 0.0, score][-len(turn_ends) :],
        "contexts": 1 + len(followed or ()),
        "segments": segments,
        "followed_turns": followed,
        "messages": json.dumps(messages) if shape.with_conversations else None,
        "images": " ".join(map(name_of, images_of(row // shape.samples, shape))) or None,
        **numbers,
    }


def images_of(prompt: int, shape: Shape) -> list[bytes]:
    """The images of a prompt."""
    num_images = min(len(shape.images), 2 if prompt % 3 == 2 else 1)
    return [shape.images[(prompt + number) % len(shape.images)] for number in range(num_images)]


def name_of(image: bytes) -> str:
    """The name of an image in a run folder."""
    return xxhash.xxh3_128_hexdigest(image)


def signals(
    rng: np.random.Generator, counts: npt.NDArray[np.bool_], score: float, step: int, shape: Shape
) -> dict[str, Any]:
    """Makes the arrays of a response, at the precision of the files, and the scalars that follow from them."""
    length = len(counts)
    old = np.where(counts, -rng.exponential(0.6, length), 0)
    ref = np.where(counts, old - rng.normal(0.02 * step / 10, 0.1, length), 0)
    rollout = np.where(counts, old + rng.normal(0, 0.01, length), 0)
    kl = old - ref
    reward = np.where(counts, -0.001 * kl, 0)
    reward[np.flatnonzero(counts)[-1]] += score
    old, ref, rollout, reward = (half(values) for values in (old, ref, rollout, reward))
    share = np.linspace(0, 1, length)
    value = half(np.where(counts, score * share + 0.5 * (1 - share) + rng.normal(0, 0.12, length), 0))
    if not shape.with_critic:
        value = np.zeros(length)
    advantage = gae(reward, value, counts)
    ret = half(np.where(counts, advantage + value, 0))
    new = half(old + rng.normal(0, 0.1, length)) if shape.with_update else None
    first, last = np.flatnonzero(counts)[[0, -1]]
    return {
        "old": old,
        "ref": ref,
        "rollout": rollout,
        "rewards": reward,
        "value": value,
        "ret": ret,
        "new": new,
        "advantage": half(advantage),
        "kl": float((old - ref)[counts].mean()),
        "k3": float(np.abs(kl).mean() / 2),
        "mismatch": float(np.abs(old - rollout)[counts].mean()),
        "value_first": float(value[first]),
        "value_last": float(value[last]),
        "return_first": float(ret[first]),
        "value_error": float(np.sqrt(np.mean((value - ret)[counts] ** 2))),
        "advantage_sum": float(advantage.sum()),
        "entropy_tokens": half(rng.exponential(0.5, length)) if shape.with_update else None,
        "clip": np.where(np.abs(new - old) > 0.18, 1, 0) if new is not None else None,
        "entropy": 0.5 if shape.with_update else None,
    }


def gae(reward: Array, value: Array, counts: npt.NDArray[np.bool_]) -> Array:
    """GAE by its recursion, token by token, over those that count (Schulman et al., 2016, eq. 16)."""
    advantage, following, following_value = np.zeros(len(reward)), 0.0, 0.0
    for t in reversed(np.flatnonzero(counts)):
        following = reward[t] + GAMMA * following_value - value[t] + GAMMA * LAM * following
        advantage[t], following_value = following, value[t]
    return advantage


def half(values: Array) -> Array:
    """The numbers that a file of float16 gives back."""
    return values.astype(np.float16).astype(np.float64)


def metrics(rows: Sequence[Mapping[str, Any]], step: int) -> dict[str, float | None]:
    """A line of metrics.jsonl with what the pages draw."""
    scores, lengths = (np.array([row[name] for row in rows], float) for name in ("score", "length"))
    line: dict[str, float | None] = {
        "critic/score/mean": float(scores.mean()),
        "critic/vf_explained_var": 1 - 1 / step,
        "critic/returns/mean": 0.5,
        "actor/entropy": 1 / step,
        "actor/reward_kl_penalty": float(np.mean([row["kl"] for row in rows])),
        "actor/ppo_kl": 0.001,
        "actor/pg_clipfrac": 0.05,
        "actor/pg_clipfrac_lower": 0.0,
        "response_length/mean": float(lengths.mean()),
        "response_length/max": float(lengths.max()),
        "response_length/min": float(lengths.min()),
        "response_length/clip_ratio": 0.1,
        "response/no_eos_ratio": float(np.mean([not row["has_eos"] for row in rows])),
        **{f"timing_s/{part}": 0.1 + 0.01 * step for part in ("gen", "reward", "values", "update_actor", "step")},
        "perf/total_num_tokens": float(lengths.sum()),
        "perf/time_per_step": 0.5,
    }
    if step % 4 == 0:
        line["val/accuracy"] = float(scores.mean()) * 0.9
    return line


FLOATS = ("old", "ref", "rollout", "value", "ret", "advantage", "rewards", "new", "entropy_tokens")
SAMPLED = ("prompt", "response", "ground_truth", "messages", "images", "ids", "ends", "flags", "clip", *FLOATS)
OF_TURNS = ("turn", "turn_rewards", "turn_ends", "segments", "followed_turns")
TYPES = {
    **dict.fromkeys(FLOATS, pa.list_(pa.float16())),
    "ids": pa.list_(pa.int32()),
    "ends": pa.list_(pa.int32()),
    "flags": pa.list_(pa.uint8()),
    "clip": pa.list_(pa.uint8()),
    "turn": pa.list_(pa.int16()),
    "turn_rewards": pa.list_(pa.float32()),
    **dict.fromkeys(("turn_ends", "segments", "followed_turns"), pa.list_(pa.int32())),
    "row": pa.int32(),
    "prompt_index": pa.int64(),
    "sample": pa.int16(),
    **dict.fromkeys(("length", "prompt_length", "learned", "why"), pa.int32()),
    **dict.fromkeys(("score", "reward", "kl", "k3", "entropy", "mismatch", "value_first", "value_last"), pa.float32()),
    **dict.fromkeys(("return_first", "value_error", "advantage_sum", "repetition"), pa.float32()),
    **dict.fromkeys(("prompt", "response", "ground_truth", "messages", "images", "data_source", "place"), pa.string()),
    "extra": pa.string(),
    "failure": pa.string(),
    "text_hash": pa.int64(),
    "turns": pa.int16(),
    "contexts": pa.int32(),
    **dict.fromkeys(("has_eos", "is_truncated", "lost"), pa.bool_()),
}
OF_CRITIC = ("value", "value_first", "value_last", "value_error")


def write_rows(folder: Path, step: int, rows: Sequence[Mapping[str, Any]], shape: Shape, seed: int) -> None:
    """Writes the parquet of a step."""
    absent = {*(() if shape.with_critic else OF_CRITIC), *(() if shape.with_conversations else OF_TURNS)}
    columns: dict[str, list[Any]] = {}
    for name in TYPES:
        is_sampled_only = name in SAMPLED or name in OF_TURNS
        columns[name] = [
            None if name in absent or (is_sampled_only and row["why"] == 0) else listed(row[name], TYPES[name])
            for row in rows
        ]
    table = pa.table({name: pa.array(values, TYPES[name]) for name, values in columns.items()})
    table = table.replace_schema_metadata({b"splitppo": json.dumps(footer(rows, step, seed, shape)).encode()})
    train = folder / "rollouts" / "train"
    train.mkdir(parents=True, exist_ok=True)
    new = train / f"{step}.parquet.new"
    pq.write_table(table, new, compression="zstd")
    new.rename(train / f"{step}.parquet")


def listed(value: Any, kind: Any) -> Any:
    """Python values of an array, in the precision of its column."""
    if isinstance(value, np.ndarray):
        return list(value.astype(np.float16)) if kind == pa.list_(pa.float16()) else value.tolist()
    return value


def footer(rows: Sequence[Mapping[str, Any]], step: int, seed: int, shape: Shape) -> dict[str, Any]:
    """What a file says about all tokens of its step."""

    def tokens(name: str) -> Array:
        return np.concatenate([row[name][row["flags"] > 0] for row in rows])

    lists = {name: tokens(name) for name in ("ret", "advantage", "old")} | {"reward": tokens("rewards")}
    lists |= {"log_ratio_ref": tokens("old") - tokens("ref"), "log_ratio_rollout": tokens("old") - tokens("rollout")}
    scores = np.array([row["score"] for row in rows], float)
    lists |= {"score": scores, "length": np.array([row["length"] for row in rows], float)}
    found: dict[str, Any] = {
        "version": 1,
        "step": step,
        "num_rows": len(rows),
        "num_sampled": sum(row["why"] > 0 for row in rows),
        "seed": seed,
        "unix_s": time.time(),
        "adv_estimator": "gae" if shape.with_critic else "grpo",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "gamma": GAMMA,
        "lam": LAM,
        "kl_coef": 0.001,
    }
    share = np.concatenate([np.linspace(0, 1, len(row["flags"]))[row["flags"] > 0] for row in rows])
    place = np.minimum((share * POSITIONS).astype(int), POSITIONS - 1)

    def by_position(values: Array) -> list[float | None]:
        return [float(values[place == k].mean()) if (place == k).any() else None for k in range(POSITIONS)]

    found["by_position"] = {
        "edges": np.linspace(0, 1, POSITIONS + 1).tolist(),
        "count": [int((place == k).sum()) for k in range(POSITIONS)],
        "kl": by_position(lists["log_ratio_ref"]),
        "mismatch": by_position(np.abs(lists["log_ratio_rollout"])),
    }
    if shape.with_critic:
        value, ret = tokens("value"), tokens("ret")
        lists["value"] = value
        found["by_position"] |= {
            "ev": [explained(value[place == k], ret[place == k]) for k in range(POSITIONS)],
            "value": by_position(value),
            "ret": by_position(ret),
        }
        order = np.array_split(np.argsort(value), CALIBRATION)
        found["calibration"] = {
            "edges": [float(value[part[0]]) for part in order] + [float(value.max())],
            "value": [float(value[part].mean()) for part in order],
            "ret": [float(ret[part].mean()) for part in order],
            "count": [len(part) for part in order],
        }
        point = explained(value, ret) or 0.0
        found["explained_variance"] = {"value": point, "se": 0.05, "low": point - 0.1, "high": point + 0.1}
        found["auc_first_value"] = auc(np.array([row["value_first"] for row in rows]), scores > scores.mean())
    lengths = np.quantile(lists["length"], (0.1, 0.5, 0.9)).tolist()
    found["lengths"] = dict(zip(("p10", "p50", "p90"), lengths, strict=True))
    histograms = {name: np.histogram(values, BINS) for name, values in lists.items()}
    found["histograms"] = {
        name: {
            "edges": edges.tolist(),
            "counts": counts.tolist(),
            "quantiles": np.quantile(lists[name], (0.01, 0.1, 0.5, 0.9, 0.99)).tolist(),
        }
        for name, (counts, edges) in histograms.items()
    }
    return found


def explained(value: Array, ret: Array) -> float | None:
    """The explained variance, 1 - var(returns - values) / var(returns)."""
    return float(1 - np.var(ret - value) / np.var(ret)) if len(ret) > 1 and np.var(ret) > 0 else None


def auc(value: Array, is_good: npt.NDArray[np.bool_]) -> float | None:
    """The share of pairs of a good and a bad response of which the good one has the larger value; equal ones: half."""
    good, bad = value[is_good][:, None], value[~is_good][None]
    return float(((good > bad) + 0.5 * (good == bad)).mean()) if good.size and bad.size else None
