"""A rank of an actor's or a rollout group that samples with vLLM, the actor also with the policy; torchrun runs it.

Every rank writes what it found to `<output>/rank_<rank>.json`; the tests compare. Arguments: a folder with
config.yaml, a role, and for an actor names of scenarios, for a rollout group the versions of the weights as JSON.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist

from services.actor.role import ActorRole
from services.rollout.role import RolloutRole
from services.runtime.command import CommandCancelled
from services.runtime.context import RankContext
from splitppo.batch import Batch
from splitppo.config import Config, load_config
from splitppo.config.section import RoleName
from splitppo.v1 import conversation_pb2
from tests.support.conversations import ScriptedReplies, contexts_of, last, replies_of
from tests.support.image_rows import IMAGE_TOKEN, make_image_batch
from tests.support.roles import RecordedProgress, publish, sync
from tests.vllm.any_device import SCENARIOS_OF_ANY_DEVICE
from tests.vllm.inputs import (
    IMAGES_OF_PROMPTS,
    NUM_PROMPTS,
    lists,
    make_experience,
    make_prompts,
    make_prompts_with_images,
)
from tests.vllm.samplers import LENGTH, Actor, Sampler

TURN_LENGTH, TALK_LENGTH = 6, 36
# Of conversations whose contexts begin anew; a prompt has up to 129 tokens.
CONTEXT_LENGTH, CONTEXTS_LENGTH = 135, 90
STOP_TEXTS = ("ab", "k", "se")
SEGMENT_COLUMNS = ("prompts", "responses", "segments", "response_mask", "rollout_log_probs")


def greedy(actor: Actor) -> dict[str, Any]:
    """Tokens of both engines, before and after each of three updates, and how far log-probs differ."""
    found = []
    for step in range(4):
        if step:
            actor.update(make_experience(step))
        prompts = make_prompts()
        rows, rollouts = actor.generate(prompts, temperature=0.0)
        expected = actor.by_policy(prompts, rows)
        sampled = actor.generate(prompts)[1]
        drawn = actor.by_policy(prompts, rows, temperature=1.0)
        diff = np.abs(actor.log_probs(sampled) - sampled["rollout_log_probs"].values)
        found.append(
            {
                "rows": rows,
                "vllm": lists(rollouts) + lists(sampled),
                "hf": expected + drawn,
                "log_prob_diff": float(diff.max(initial=0.0)),
            }
        )
    return {"steps": found}


def images(actor: Actor) -> dict[str, Any]:
    """The same as `greedy` for the same prompts with images before and after updates, which change the tower, too."""
    folder = Path(actor.config.actor.model)
    prompts = make_prompts_with_images(folder)
    found = []
    for step in range(3):
        if step:
            actor.update(make_image_batch(folder, IMAGES_OF_PROMPTS, seed=step))
        rows, rollouts = actor.generate(prompts, temperature=0.0)
        sampled = actor.generate(prompts)[1]
        hf = actor.by_policy(prompts, rows) + actor.by_policy(prompts, rows, temperature=1.0)
        diff = np.abs(actor.log_probs(sampled) - sampled["rollout_log_probs"].values)
        found.append(
            {
                "rows": rows,
                "vllm": lists(rollouts) + lists(sampled),
                "hf": hf,
                "log_prob_diff": float(diff.max(initial=0.0)),
                "num_image_tokens": int((sampled["responses"].values == IMAGE_TOKEN).sum()),
            }
        )
    return {"steps": found}


def damaged_image(actor: Actor) -> dict[str, Any]:
    """Samples prompts one of whose images is damaged, and before and after that prompts with whole images."""
    prompts = make_prompts_with_images(Path(actor.config.actor.model))
    files = [file.copy() for file in prompts["images"].rows()]
    files[3][len(files[3]) // 2 :] = 0
    damaged = prompts.merge(Batch.from_rows(images=files))
    before = lists(actor.generate(prompts)[1])
    error = ""
    try:
        actor.generate(damaged)
    except ValueError as refused:
        error = str(refused)
    return {"error": error, "before": before, "after": lists(actor.generate(prompts)[1])}


def head(actor: Actor) -> dict[str, Any]:
    """Compares the logits that vLLM makes of bf16 hidden states with those of a float64 output layer."""
    backend = actor.role._generation._backend
    model = backend._engine.model_executor.driver_worker.model_runner.model
    processor = getattr(model, "language_model", model).logits_processor
    apply, errors = processor._apply_head, []

    def spy(lm_head: Any, hidden: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        logits = apply(lm_head, hidden, bias)
        errors.append(float((logits - hidden.double() @ lm_head.weight.double().T).abs().max()))
        return logits

    processor._apply_head = spy
    _, rollouts = actor.generate(make_prompts())
    diff = np.abs(actor.log_probs(rollouts) - rollouts["rollout_log_probs"].values)
    return {"logit_error": max(errors), "log_prob_diff": float(diff.max(initial=0.0))}


def skipped_sync(actor: Actor) -> dict[str, Any]:
    """Tries an engine that gets the number of a new version and keeps its old weights."""
    actor.generate(make_prompts(), temperature=0.0)
    actor.update(make_experience(1))
    backend = actor.role._generation._backend

    def lie(version: int) -> None:
        backend.policy_version = version

    backend.sync_weights = lie
    try:
        rows, rollouts = actor.generate(make_prompts(), temperature=0.0)
    finally:
        del backend.sync_weights
    diff = np.abs(actor.log_probs(rollouts) - rollouts["rollout_log_probs"].values)
    facts = {
        "vllm": lists(rollouts),
        "hf": actor.by_policy(make_prompts(), rows),
        "log_prob_diff": float(diff.max(initial=0.0)),
    }
    backend.policy_version = None
    return facts


def replay(actor: Actor) -> dict[str, Any]:
    """The same prompts and seeds twice: up to 128 x 4 x 16 tokens."""
    prompts = make_prompts(128, 4)
    rows, first = actor.generate(prompts)
    _, second = actor.generate(prompts)
    return {"rows": rows, "first": lists(first), "second": lists(second)}


def prefixes(actor: Actor) -> dict[str, Any]:
    """Answers behind a shared prefix of 300 tokens, before and after an update."""
    prompts, found = make_prompts(prefix=300), []
    for step in range(2):
        if step:
            actor.update(make_experience(7))
        rows, rollouts = actor.generate(prompts, temperature=0.0)
        again = actor.generate(prompts, temperature=0.0)[1]
        found.append({"vllm": lists(rollouts), "again": lists(again), "hf": actor.by_policy(prompts, rows)})
    return {"steps": found}


def sampling(actor: Actor) -> dict[str, Any]:
    """Truncated and tempered samples against their own distribution, several samples per prompt, seeds, stop texts."""
    prompts = make_prompts(4, 8)
    _, top_1 = actor.generate(prompts, top_k=1)
    _, greedy_ones = actor.generate(prompts, temperature=0.0)
    _, cold = actor.generate(prompts, temperature=0.01)
    _, nucleus = actor.generate(prompts, top_p=1e-4)
    rows, cut = actor.generate(prompts, top_p=0.6, top_k=9, temperature=0.8)
    _, hot = actor.generate(prompts, temperature=2.0)
    return {
        "top_k_1": lists(top_1),
        "greedy": lists(greedy_ones),
        "cold": lists(cold),
        "cold_by_policy": actor.by_policy(prompts, rows, temperature=0.01),
        "nucleus": lists(nucleus),
        "hot": lists(hot),
        "hot_by_policy": actor.by_policy(prompts, rows, temperature=2.0),
        "cut": lists(cut),
        "cut_by_policy": actor.by_policy(prompts, rows, top_p=0.6, top_k=9, temperature=0.8),
        "num_rows": greedy_ones.num_rows,
    }


def stop_texts(actor: Actor) -> dict[str, Any]:
    """Responses that end with the stop texts of the configuration, by both engines."""
    prompts = make_prompts(32)
    rows, rollouts = actor.generate(prompts, temperature=0.0)
    return {"vllm": lists(rollouts), "hf": actor.by_policy(prompts, rows)}


def conversations(actor: Actor) -> dict[str, Any]:
    """Conversations of both engines, replies of different delays, and what a command cancelled in a wait leaves."""
    prompts, found = make_prompts(NUM_PROMPTS, 2, prefix=110), []
    for reply_steps, most_late in ((0, 0), (0, 40), (8, 0), (8, 40), (3, 5)):
        report, by_policy = scripted(most_late), scripted()
        rows, rollouts = talk(actor, prompts, report, reply_steps)
        limits = {"max_turn_length": TURN_LENGTH, "max_response_length": TALK_LENGTH}
        expected = actor.converses(prompts, rows, by_policy, reply_steps=reply_steps, **limits)
        mask = rollouts["response_mask"].values == 1
        diff = np.abs(actor.log_probs(rollouts) - rollouts["rollout_log_probs"].values)
        facts = {
            "reply_steps": reply_steps,
            "vllm": [lists(rollouts), rollouts["response_mask"].values.tolist()],
            "hf": [lists(expected), expected["response_mask"].values.tolist()],
            "turns": turns_of(report),
            "hf_turns": turns_of(by_policy),
            "log_prob_diff": float(diff[mask].max(initial=0.0)),
            "log_probs": rollouts["rollout_log_probs"].values.tolist(),
        }
        found.append(facts)
    silent = ScriptedReplies(last, most_late=10**9, questions=100)
    try:
        talk(actor, prompts, silent, 8)
    except CommandCancelled:
        phase = silent.phases[-1]
    again = lists(talk(actor, prompts, scripted(), 8)[1])
    return {"rows": rows, "runs": found, "cancelled_in": phase, "again": again}


def contexts(actor: Actor) -> dict[str, Any]:
    """Conversations of several contexts of both engines, greedy and drawn, with limits of single turns.

    The script ends some turns by a text alone; log-probs are compared with those of each context and its turns alone.
    """
    prompts = make_prompts(NUM_PROMPTS, 2, prefix=110)
    places = range(0, 2 * NUM_PROMPTS, 3)
    first = [conversation_pb2.FirstTurn(place=p, limits=conversation_pb2.TurnLimits(stop=STOP_TEXTS)) for p in places]
    limits = {"max_context_length": CONTEXT_LENGTH, "first_turns": first, "with_log_probs": True, "reply_steps": 3}
    conversation = conversation_pb2.Conversation(**limits)
    found = []
    for temperature in (0.0, 1.0):
        report, by_policy = (
            ScriptedReplies(contexts_of(9, CONTEXTS_LENGTH, 16, stop=STOP_TEXTS), most_late=late) for late in (5, 0)
        )
        sampling = {"temperature": temperature, "max_response_length": CONTEXTS_LENGTH}
        rows, rollouts = actor.generate(prompts, report=report, conversation=conversation, **sampling)
        expected = actor.converses(prompts, rows, by_policy, 0, **limits, **sampling)
        facts = {
            "vllm": [lists(rollouts), rollouts["segments"].values.tolist()],
            "hf": [lists(expected), expected["segments"].values.tolist()],
            "turns": turns_of(report),
            "hf_turns": turns_of(by_policy),
            "log_prob_diff": largest_difference(actor, rollouts) if temperature == 1.0 else 0.0,
        }
        found.append(facts)
    return {"rows": rows, "runs": found}


def largest_difference(actor: Actor, rollouts: Batch) -> float:
    """How far log-probs of sampled tokens are from those of the policy, with each segment as a row. Collective."""
    rows = zip(*(rollouts[name].rows() for name in SEGMENT_COLUMNS), strict=True)
    contexts: list[Any] = []
    following: list[Any] = []
    sampled: list[Any] = []
    for prompt, response, segments, mask, log_probs in rows:
        starts = [0, *segments[::2].tolist(), len(response)]
        num_context_tokens = [0, *segments[1::2].tolist()]
        for number, (start, stop) in enumerate(itertools.pairwise(starts)):
            begin = start + num_context_tokens[number]
            contexts.append(response[start:begin] if number else prompt)
            following.append(response[begin:stop])
            sampled.append(np.where(mask[begin:stop], log_probs[begin:stop], np.nan))
    computed = actor.log_probs(Batch.from_rows(prompts=contexts, responses=following))
    diff = np.abs(computed - np.concatenate([*sampled, np.empty(0)]))
    return float(np.nanmax(diff, initial=0.0))


def turns_of(report: ScriptedReplies) -> list[Any]:
    return [[turn.place, turn.turn, list(turn.tokens), turn.is_last] for turn in report.turns]


def scripted(most_late: int = 0) -> ScriptedReplies:
    return ScriptedReplies(replies_of(4, TALK_LENGTH), most_late=most_late, seed=most_late)


def talk(actor: Actor, prompts: Batch, report: ScriptedReplies, reply_steps: int) -> tuple[list[int], Batch]:
    limits = conversation_pb2.Conversation(reply_steps=reply_steps, max_turn_length=TURN_LENGTH)
    return actor.generate(prompts, report=report, conversation=limits, max_response_length=TALK_LENGTH)


def cuts(actor: Actor) -> dict[str, Any]:
    """Responses in pieces and uncut, behind a prefix with which some cross a block of the cache; greedy and drawn."""
    prompts, found = make_prompts(prefix=110), []
    truncated = {"temperature": 0.8, "top_k": 9, "top_p": 0.7}
    for num_tokens, settings in ((1, {}), (3, {}), (5, truncated), (7, {"temperature": 0.0}), (LENGTH, {})):
        rows, whole = actor.generate(prompts, **settings)
        tokens, log_probs, num_cuts = actor.continued(prompts.take(np.array(rows, np.int64)), num_tokens, **settings)
        diff = np.abs(np.array(log_probs) - whole["rollout_log_probs"].values)
        facts = {
            "num_tokens": num_tokens,
            "whole": lists(whole),
            "pieces": tokens,
            "num_cuts": num_cuts,
            "log_prob_diff": float(diff.max(initial=0.0)),
        }
        found.append(facts)
    return {"runs": found}


def streaming(actor: Actor) -> dict[str, Any]:
    """Three parts, twice: which rows of the whole they hold, and their responses."""
    prompts, report, again = make_prompts(9, 2), RecordedProgress(), RecordedProgress()
    rows, rollouts = actor.generate(prompts, num_parts=3, report=report)
    actor.generate(prompts, num_parts=3, report=again)
    _, whole = actor.generate(prompts)

    def reported(report: RecordedProgress) -> list[Any]:
        return [[columns["places"].values.tolist(), lists(columns)] for columns in report.parts.values()]

    return {
        "rows": rows,
        "parts": reported(report),
        "again": reported(again),
        "streamed": lists(rollouts),
        "unstreamed": lists(whole),
    }


def cancellation(actor: Actor) -> dict[str, Any]:
    """A cancelled command ends early, and the next one is as if it had never been."""
    prompts = make_prompts(NUM_PROMPTS, 4)
    _, before = actor.generate(prompts)
    report = RecordedProgress(reports=3)
    try:
        actor.generate(prompts, report=report)
    except CommandCancelled:
        cancelled = True
    else:
        cancelled = False
    _, after = actor.generate(prompts)
    return {"cancelled": cancelled, "reports": report.num_reports, "before": lists(before), "after": lists(after)}


def samples(sampler: Sampler) -> dict[str, Any]:
    """Greedy and drawn responses, and greedy ones behind a shared prefix of 300 tokens, with the weights of a step."""
    rows, best = sampler.generate(make_prompts(), temperature=0.0)
    _, drawn = sampler.generate(make_prompts())
    _, behind = sampler.generate(make_prompts(prefix=300), temperature=0.0)
    log_probs = drawn["rollout_log_probs"].values.tolist()
    return {"rows": rows, "responses": [*map(lists, (best, drawn, behind))], "log_probs": log_probs}


def half(sampler: Sampler, first: int) -> list[list[int]]:
    """Drawn responses to every second prompt from the first one on, in two parts, after which the engine may sleep."""
    chosen = make_prompts().take(np.arange(first, NUM_PROMPTS, 2))
    return lists(sampler.generate(chosen, num_parts=2, sleep_after=True)[1])


def shared(actor: Actor) -> dict[str, Any]:
    """The weights of a step, and the responses that they sample: to one half of the prompts, and to all of them."""
    version = [actor.step, publish(actor.role, actor.step)]
    return {"version": version, "half": half(actor, 0), "all": lists(actor.generate(make_prompts())[1])}


def published(actor: Actor) -> dict[str, Any]:
    """The versions of three steps, and what the actor samples with each of them."""
    found = []
    for number in range(3):
        if number:
            actor.update(make_experience(10 + number))
        found.append({"version": actor.step, "sha256": publish(actor.role, actor.step), **samples(actor)})
    return {"versions": found}


def synced(sampler: Sampler, versions: list[Any]) -> dict[str, Any]:
    """What a rollout group samples with one version after the other, and with the last one once it was dropped."""
    found = []
    for sampler.step, manifest_sha256 in versions:
        sync(sampler.role, sampler.step, manifest_sha256, rank=sampler.rank)
        found.append(samples(sampler))
    sampler.role._generation._backend.policy_version = None  # as at sleep level 2 on a GPU
    return {"versions": found, "again": samples(sampler)["responses"], "half": half(sampler, 1)}


def random_state(actor: Actor) -> dict[str, Any]:
    """Returns the next numbers of the process's generators, after the engine was built and has sampled."""
    actor.generate(make_prompts())
    return {"draws": draws()}


def seed_all() -> None:
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)


def draws() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]  # noqa: NPY002


SCENARIOS: dict[str, Callable[[Actor], dict[str, Any]]] = {
    scenario.__name__: scenario
    for scenario in (
        head,
        images,
        damaged_image,
        random_state,
        greedy,
        skipped_sync,
        replay,
        prefixes,
        sampling,
        stop_texts,
        conversations,
        contexts,
        streaming,
        cuts,
        cancellation,
        published,
        shared,
        *SCENARIOS_OF_ANY_DEVICE,
    )
}


def join_group(config: Config, role: RoleName) -> torch.device:
    """Joins the torchrun group, and returns the device of this rank: its GPU, if the group has GPUs."""
    if not config.services.of(role).devices:
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    return device


def main(folder: Path, role: RoleName, arguments: list[str]) -> None:
    torch.set_num_threads(1)
    config = load_config(folder / "config.yaml")
    device = join_group(config, role)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    context = RankContext(role, rank, world_size, device, dist.new_group(backend="gloo"), config)
    seed_all()
    if role == "rollout":
        found = synced(Sampler(config, RolloutRole(context), rank, world_size, device), json.loads(arguments[0]))
    else:
        actor = Actor(config, ActorRole(context), rank, world_size, device)
        found = {name: SCENARIOS[name](actor) for name in arguments}
    (folder / f"rank_{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), cast(RoleName, sys.argv[2]), sys.argv[3:])
