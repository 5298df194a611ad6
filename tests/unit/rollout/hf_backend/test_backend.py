"""The Hugging Face rollout backend on tiny random models."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import (
    AutoTokenizer,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from services.rollout.begun_responses import BEGUN_COLUMNS
from services.rollout.hf_backend.backend import HfRollout
from services.rollout.protocol import DecodingStep, Sampling
from services.rollout.stopping import StopRule
from services.rollout.streamed_parts import response_rows
from services.runtime.command import CommandCancelled
from splitppo.batch import Batch
from splitppo.config.subsections.response_lengths import UniformLengths
from tests.support.models import VOCABULARY, save_tokenizer
from tests.support.seeds import shifted

pytestmark = pytest.mark.slow

VOCAB = 23
FAMILIES = ("qwen2", "llama", "mistral-sliding-window", "gemma3-hybrid-window", "lfm2-convolution", "gpt2")
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": None,
}


def build(family: str = "qwen2") -> Any:
    torch.manual_seed(shifted(0))
    match family:
        case "qwen2":
            model = Qwen2ForCausalLM(Qwen2Config(**SHAPE))
        case "llama":
            model = LlamaForCausalLM(LlamaConfig(**SHAPE))
        case "mistral-sliding-window":
            model = MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=4))
        case "gemma3-hybrid-window":
            layers = ["sliding_attention", "full_attention"]
            model = Gemma3ForCausalLM(Gemma3TextConfig(**SHAPE, head_dim=8, sliding_window=4, layer_types=layers))
        case "lfm2-convolution":
            model = Lfm2ForCausalLM(Lfm2Config(**SHAPE, layer_types=["conv", "full_attention"]))
        case _:
            model = GPT2LMHeadModel(
                GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.3)
            )
    return model.eval()


def saying(following: Mapping[int, int]) -> Any:
    """A model that has no doubt which token follows each: the next one, and the first after the last, or as told."""
    model, table = build(), torch.arange(1, VOCAB + 1) % VOCAB
    for token, next_token in following.items():
        table[token] = next_token

    def say(_: nn.Module, __: Any, given: dict[str, Any], output: Any) -> Any:
        rows = torch.nn.functional.one_hot(table[given["input_ids"]], VOCAB)
        output.logits = 100.0 * rows[:, -output.logits.shape[1] :].float()
        return output

    model.register_forward_hook(say, with_kwargs=True)
    return model


def ending(token: int, length: int = 5) -> Any:
    """A prompt of so many tokens, with this one at its end."""
    return np.array([*range(length - 1), token], np.int32)


def backend(model: nn.Module, stop: Sequence[int] = (), max_batch_size: int = 64) -> HfRollout:
    return HfRollout(
        lambda: nullcontext(model),
        stop_rule=StopRule(stop),
        max_batch_size=max_batch_size,
        device=torch.device("cpu"),
    )


def random_prompts(lengths: Sequence[int], seed: int = 0) -> list[Any]:
    rng = np.random.default_rng(shifted(seed))
    return [rng.integers(0, VOCAB, length).astype(np.int32) for length in lengths]


def steps_of(
    rollout: HfRollout,
    prompts: list[Any],
    seeds: Sequence[Sequence[int]],
    length: int = 8,
    *,
    cancel_after: int | None = None,
    begun: Batch | None = None,
    **drawing: Any,
) -> Iterator[DecodingStep]:
    """Is cancelled once that many steps have come. `begun`: columns of tokens that the responses have already."""
    settings = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, **drawing}
    rows = Batch.from_rows(prompts=prompts, seeds=seeds)
    if begun is not None:
        rows = rows.merge(begun)
    asked = itertools.count()
    cancelled = (lambda: next(asked) >= cancel_after) if cancel_after is not None else lambda: False
    return rollout.generate(rows, Sampling(**settings, max_response_length=length), cancelled)


def generate(rollout: HfRollout, prompts: list[Any], seeds: Sequence[Sequence[int]], **settings: Any) -> Batch:
    return response_rows(response for step in steps_of(rollout, prompts, seeds, **settings) for response in step.ended)


def continued(
    rollout: HfRollout, prompts: list[Any], seeds: Sequence[Sequence[int]], num_tokens: int, **settings: Any
) -> tuple[Batch, int]:
    """Samples responses, at most `num_tokens` of each at a time, until none is unfinished; and how often it did so."""
    repeated = [prompt for prompt, row in zip(prompts, seeds, strict=True) for _ in row]
    seed_of = [seed for row in seeds for seed in row]
    names = ("responses", "rollout_log_probs")
    so_far = [(np.empty(0, np.int32), np.empty(0, np.float32)) for _ in repeated]
    pending = [*range(len(repeated))]
    for number in itertools.count(1):
        begun = dict(zip(BEGUN_COLUMNS, zip(*(so_far[row] for row in pending), strict=True), strict=True))
        steps = steps_of(
            rollout,
            [repeated[row] for row in pending],
            [[seed_of[row]] for row in pending],
            begun=Batch.from_rows(**begun),
            max_step_tokens=num_tokens,
            **settings,
        )
        made = response_rows((response for step in steps for response in step.ended), may_go_on=True)
        for row, tokens, log_probs in zip(pending, *(made[name].rows() for name in names), strict=True):
            had_tokens, had_log_probs = so_far[row]
            assert tokens[: len(had_tokens)].tolist() == had_tokens.tolist()
            assert log_probs[: len(had_tokens)].tobytes() == had_log_probs.tobytes()
            assert 1 <= len(tokens) - len(had_tokens) <= num_tokens
            so_far[row] = tokens, log_probs
        pending = [row for row, goes_on in zip(pending, made["unfinished"].values, strict=True) if goes_on]
        if not pending:
            columns = zip(names, zip(*so_far, strict=True), strict=True)
            return Batch.from_rows(**dict(columns)), number
    raise AssertionError("unreachable")


def responses(rollout: Batch) -> list[list[int]]:
    return [row.tolist() for row in rollout["responses"].rows()]


def test_forced_lengths_end_every_response_where_they_say_and_nothing_ends_it_before() -> None:
    forced = UniformLengths(kind="uniform", low=2, high=9)
    rollout = HfRollout(
        lambda: nullcontext(build()), StopRule((), forced=forced), max_batch_size=3, device=torch.device("cpu")
    )
    seeds = [[1, 2], [3, 4], [5, 6], [7, 8]]

    made = generate(rollout, random_prompts([3, 1, 4, 1]), seeds, length=8)

    wanted = [min(8, forced.of(seed)) for row in seeds for seed in row]
    assert made["responses"].lengths.tolist() == wanted
    assert len(set(wanted)) > 1


@pytest.mark.parametrize("max_batch_size", [2, 64])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_generate_of_hugging_face(family: str, max_batch_size: int) -> None:
    model, stop = build(family), [3, 7]
    prompts = random_prompts([5, 1, 9, 5, 3, 7])

    ours = responses(generate(backend(model, stop, max_batch_size), prompts, [[0]] * 6, length=12, temperature=0.0))

    for prompt, response in zip(prompts, ours, strict=True):
        ids = torch.from_numpy(prompt.astype(np.int64))[None]
        theirs = model.generate(
            ids, do_sample=False, max_new_tokens=12, eos_token_id=stop, pad_token_id=0, attention_mask=ids >= 0
        )
        assert response == theirs[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_equal_those_of_a_plain_forward_over_the_whole_row(temperature: float) -> None:
    model, prompts = build(), random_prompts([5, 1, 9, 4])

    rollout = generate(backend(model, [3]), prompts, [[1, 2], [3], [4, 5, 6], [7]], temperature=temperature)

    rows = zip(
        np.repeat(np.arange(4), [2, 1, 3, 1]),
        rollout["responses"].rows(),
        rollout["rollout_log_probs"].rows(),
        strict=True,
    )
    for prompt, response, log_probs in rows:
        ids = torch.from_numpy(np.concatenate([prompts[prompt], response]).astype(np.int64))[None]
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, -len(response) - 1 : -1].float() / temperature
        expected = logits.log_softmax(-1).gather(-1, ids[0, -len(response) :, None])[:, 0]
        np.testing.assert_allclose(log_probs, expected.numpy(), atol=2e-5)


def test_long_responses_stay_equal_to_a_plain_forward_while_rows_leave() -> None:
    model, prompts, seeds = build(), random_prompts([5, 2]), [list(range(6)), list(range(6, 12))]
    ends = StopRule((), forced=UniformLengths(kind="uniform", low=10, high=100))
    device = torch.device("cpu")

    rollout = generate(HfRollout(lambda: nullcontext(model), ends, 64, device=device), prompts, seeds, length=100)

    lengths = rollout["responses"].lengths
    assert min(lengths) < 30
    assert max(lengths) > 70, "no response outlived the first room of the cache"
    for index, response in enumerate(rollout["responses"].rows()):
        ids = torch.from_numpy(np.concatenate([prompts[index // 6], response]).astype(np.int64))[None]
        with torch.no_grad():
            log_softmax = model(input_ids=ids).logits[0, -len(response) - 1 : -1].log_softmax(-1)
        expected = log_softmax.gather(-1, ids[0, -len(response) :, None])[:, 0]
        np.testing.assert_allclose(rollout["rollout_log_probs"].rows()[index], expected.numpy(), atol=5e-5)


def test_rows_are_ordered_by_prompt_then_sample_whatever_the_lengths() -> None:
    model, prompts = build(), random_prompts([9, 2, 6])
    seeds = [[1, 2], [3, 4], [5, 6]]

    together = responses(generate(backend(model), prompts, seeds))

    alone = [responses(generate(backend(model), [prompts[i]], [[seed]]))[0] for i in range(3) for seed in seeds[i]]
    assert together == alone


@pytest.mark.parametrize("max_batch_size", [3, *(pytest.param(size, marks=pytest.mark.extended) for size in (1, 7))])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_response_does_not_depend_on_the_batch_it_is_decoded_in(family: str, max_batch_size: int) -> None:
    model, prompts = build(family), random_prompts([3, 1, 15, 5, 5, 2])
    seeds = [[10 * row + sample for sample in range(4)] for row in range(6)]

    whole = generate(backend(model, [3, 7], max_batch_size=64), prompts, seeds, length=20)
    split = generate(backend(model, [3, 7], max_batch_size=max_batch_size), prompts, seeds, length=20)

    assert responses(whole) == responses(split)
    np.testing.assert_allclose(whole["rollout_log_probs"].values, split["rollout_log_probs"].values, atol=2e-5)


def test_a_replay_gives_the_same_tokens_and_bit_identical_log_probs() -> None:
    model, prompts = build(), random_prompts([3, 8, 1])

    first, second = (generate(backend(model, [3]), prompts, [[1, 2], [3, 4], [5, 6]]) for _ in range(2))

    assert responses(first) == responses(second)
    assert first["rollout_log_probs"].values.tobytes() == second["rollout_log_probs"].values.tobytes()


def test_different_seeds_give_different_responses_and_equal_seeds_equal_ones() -> None:
    rows = responses(generate(backend(build()), random_prompts([4]), [[1, 2, 3, 1]], length=12))

    assert rows[0] == rows[3]
    assert len({tuple(row) for row in rows}) == 3


def test_the_stop_token_ends_its_row_and_is_part_of_it() -> None:
    stop = [3, 7, 11]
    seeds = [list(range(20 * row, 20 * row + 20)) for row in range(3)]

    rows = responses(generate(backend(build(), stop), random_prompts([2, 5, 3]), seeds, length=10))

    assert any(len(row) < 10 for row in rows)
    assert any(len(row) == 10 and row[-1] not in stop for row in rows)
    for row in rows:
        assert all(token not in stop for token in row[:-1])
        assert row[-1] in stop or len(row) == 10


def test_without_stop_tokens_every_response_has_the_maximal_length() -> None:
    rollout = generate(backend(build()), random_prompts([2, 5]), [[1], [2]], length=6)

    assert rollout["responses"].lengths.tolist() == [6, 6]


def test_no_prompts_give_an_empty_rollout() -> None:
    rollout = generate(backend(build()), [], [])

    assert rollout["responses"].num_rows == 0
    assert rollout["rollout_log_probs"].num_rows == 0


def test_progress_is_told_at_every_position_and_an_early_end_counts_as_done() -> None:
    seeds = [list(range(5)) for _ in range(3)]

    steps = list(steps_of(backend(build(), [3, 7], 4), random_prompts([3] * 3), seeds, length=12))

    done = [step.done for step in steps]
    assert {step.total for step in steps} == {15 * 12}
    assert done == sorted(set(done))
    assert done[0] >= 4
    assert done[-1] == 15 * 12 > sum(len(response.tokens) for step in steps for response in step.ended)


def test_the_policy_version_is_that_of_the_last_sync() -> None:
    rollout = backend(build())

    assert rollout.policy_version is None
    rollout.sync_weights(3)
    rollout.sleep()
    assert rollout.policy_version == 3


@pytest.mark.parametrize("max_batch_size", [2, 5, 64])
def test_each_response_ends_once(max_batch_size: int) -> None:
    prompts, seeds = random_prompts([9, 2, 6, 1, 4]), [[1, 2], [3, 4], [5, 6], [7, 8], [9, 10]]

    steps = steps_of(backend(build(), [3], max_batch_size), prompts, seeds)

    ended = sorted((response for step in steps for response in step.ended), key=lambda response: response.index)
    assert [(response.index, response.seed) for response in ended] == list(enumerate(range(1, 11)))


def test_responses_are_told_in_the_step_in_which_they_end_the_same_in_every_run() -> None:
    def reports() -> list[list[tuple[int, int]]]:
        rollout, seeds = backend(build(), stop=range(8), max_batch_size=24), [list(range(4)) for _ in range(6)]
        steps = steps_of(rollout, random_prompts([3] * 6), seeds)
        return [[(response.index, len(response.tokens)) for response in step.ended] for step in steps]

    steps = reports()
    assert all(length == number for number, step in enumerate(steps, start=1) for _, length in step)
    assert len([step for step in steps if step]) > 2
    assert reports() == steps


def test_it_is_cancelled_at_the_next_token_and_the_backend_stays_usable() -> None:
    rollout, prompts, seeds = backend(build(), max_batch_size=2), random_prompts([3, 5, 2]), [[1, 2], [3, 4], [5, 6]]
    steps = steps_of(rollout, prompts, seeds, cancel_after=3)

    assert len(list(itertools.islice(steps, 3))) == 3
    with pytest.raises(CommandCancelled):
        next(steps)
    assert responses(generate(rollout, prompts, seeds)) == responses(generate(backend(build()), prompts, seeds))


def test_ended_rows_leave_the_batch() -> None:
    model, stop = build(), list(range(12))
    batch_sizes: list[int] = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: batch_sizes.append(kwargs["input_ids"].shape[0]), with_kwargs=True
    )

    generate(backend(model, stop), random_prompts([4]), [list(range(64))], length=12)

    assert batch_sizes[0] == 1  # one prefill for all samples of the prompt
    assert batch_sizes[1] < 64
    assert batch_sizes[1:] == sorted(batch_sizes[1:], reverse=True)
    assert batch_sizes[-1] < 16


def test_waiting_rows_take_the_places_of_ended_ones_and_the_batch_stays_full() -> None:
    model, decoded = build(), []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: decoded.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    prompts = random_prompts([4] * 40)

    rollout = generate(backend(model, [3, 7], max_batch_size=8), prompts, [[seed] for seed in range(40)], length=30)

    one_by_one = [shape for shape in decoded if shape[1] == 1]
    num_full = sum(num_rows == 8 for num_rows, _ in one_by_one)
    assert decoded[0] == (8, 4)
    assert sum(num_rows for num_rows, length in decoded if length == 4) == 40  # every prompt is prefilled once
    assert one_by_one == sorted(one_by_one, reverse=True)  # rows leave only once none waits
    assert num_full * 8 * 0.8 < rollout["responses"].values.size


def test_a_stop_text_ends_its_response_with_the_token_that_completes_it(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    model = saying({VOCAB - 1: VOCABULARY.index("a")})  # the letters from a to t, again and again
    rollout = HfRollout(
        lambda: nullcontext(model),
        stop_rule=StopRule([], ["fg"], tokenizer),
        max_batch_size=2,
        device=torch.device("cpu"),
    )
    prompts = [ending(VOCABULARY.index(letter)) for letter in "akodg"]

    rows = responses(generate(rollout, prompts, [[seed] for seed in range(5)], length=12))

    texts = [tokenizer.decode(row, skip_special_tokens=True) for row in rows]
    assert texts == ["bcdefg", "lmnopqrstabc", "pqrstabcdefg", "efg", "hijklmnopqrs"]


def check_cuts(family: str, num_tokens_of: Callable[[Any], Sequence[int]], **settings: Any) -> None:
    """Cut and continued responses have the tokens of uncut ones; `num_tokens_of` says from their lengths where to cut.

    Rows that go on leave others behind, and meet them in batches of another size.
    """
    model, prompts = build(family), random_prompts([3, 1, 15, 5])
    seeds = [[10 * row + sample for sample in range(3)] for row in range(4)]
    whole = generate(backend(model, [3, 7]), prompts, seeds, **settings)
    lengths = whole["responses"].lengths

    for num_tokens, max_batch_size in zip(num_tokens_of(lengths), itertools.cycle((5, 64))):
        rollout = backend(model, [3, 7], max_batch_size)
        made, num_rounds = continued(rollout, prompts, seeds, num_tokens, **settings)
        assert responses(made) == responses(whole)
        log_probs = (batch["rollout_log_probs"].values for batch in (made, whole))
        np.testing.assert_allclose(*log_probs, rtol=0, atol=1e-5)
        assert num_rounds == -(-lengths.max() // num_tokens)


@pytest.mark.parametrize(
    "drawing",
    [{}, {"temperature": 0.0}, {"temperature": 0.7, "top_k": 9, "top_p": 0.8}],
    ids=["plain", "greedy", "truncated"],
)
def test_a_response_that_is_cut_and_goes_on_has_the_tokens_of_one_that_is_not_cut(drawing: dict[str, Any]) -> None:
    check_cuts("qwen2", lambda lengths: (1, 3, int(np.median(lengths)), 12, 20), length=12, **drawing)


@pytest.mark.parametrize("family", FAMILIES[1:])
def test_models_of_every_kind_go_on_after_a_cut(family: str) -> None:
    """Also those whose rows cannot join others, and windows that are shorter than what a row has already."""
    check_cuts(family, lambda _: (5,), length=12)


def test_a_cut_that_leaves_nothing_out_changes_no_bit() -> None:
    model, prompts, seeds = build(), random_prompts([3, 8, 1]), [[1, 2], [3, 4], [5, 6]]

    uncut = generate(backend(model, [3], 4), prompts, seeds, length=8)
    made = generate(backend(model, [3], 4), prompts, seeds, length=8, max_step_tokens=8)

    assert responses(made) == responses(uncut)
    assert made["rollout_log_probs"].values.tobytes() == uncut["rollout_log_probs"].values.tobytes()


@pytest.mark.parametrize("num_tokens", [1, 2, 5, 6, 12])
def test_a_stop_text_is_found_across_the_cut(tmp_path: Path, num_tokens: int) -> None:
    save_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    model = saying({VOCAB - 1: VOCABULARY.index("a")})  # the letters from a to t, again and again
    rule = StopRule([], ["efg"], tokenizer)
    rollout = HfRollout(lambda: nullcontext(model), stop_rule=rule, max_batch_size=2, device=torch.device("cpu"))
    prompts = [ending(VOCABULARY.index(letter)) for letter in "akoeg"]  # efg begins in the fourth, and does not count

    made, _ = continued(rollout, prompts, [[seed] for seed in range(5)], num_tokens, length=12)

    texts = [tokenizer.decode(row, skip_special_tokens=True) for row in responses(made)]
    assert texts == ["bcdefg", "lmnopqrstabc", "pqrstabcdefg", "fghijklmnopq", "hijklmnopqrs"]


@pytest.mark.parametrize("num_tokens", [1, 2, 4, 9])
def test_a_response_of_forced_length_goes_on_up_to_it(num_tokens: int) -> None:
    """The number of rounds says that it is finished in the round that reaches its length, and in no later one."""
    model, forced = build(), UniformLengths(kind="uniform", low=2, high=9)
    rollout = HfRollout(lambda: nullcontext(model), StopRule((), forced=forced), 3, device=torch.device("cpu"))
    prompts, seeds = random_prompts([3, 1, 4, 1]), [[1, 2], [3, 4], [5, 6], [7, 8]]

    made, num_rounds = continued(rollout, prompts, seeds, num_tokens, length=8)

    wanted = [min(8, forced.of(seed)) for row in seeds for seed in row]
    assert made["responses"].lengths.tolist() == wanted
    assert num_rounds == -(-max(wanted) // num_tokens)
    assert responses(made) == responses(generate(rollout, prompts, seeds, length=8))


def test_progress_counts_the_tokens_that_may_be_sampled_now() -> None:
    prompts, seeds = random_prompts([3] * 4), [[seed] for seed in range(4)]
    had = [np.arange(length, dtype=np.int32) + 8 for length in (0, 2, 4, 6)]
    begun = Batch.from_rows(begun_responses=had, begun_log_probs=[np.full(len(row), -1.0) for row in had])

    rollout = backend(build(), stop=[3], max_batch_size=2)
    steps = list(steps_of(rollout, prompts, seeds, length=8, begun=begun, max_step_tokens=5))

    done = [step.done for step in steps]
    assert {step.total for step in steps} == {5 + 5 + 4 + 2}
    assert done == sorted(set(done))
    assert done[-1] == 5 + 5 + 4 + 2


def test_the_longest_responses_are_decoded_first_and_each_batch_is_prefilled_once() -> None:
    model, shapes = build(), []
    prompts, seeds = random_prompts([4] * 6), [[seed] for seed in range(6)]
    had = [np.zeros(length, np.int32) for length in (0, 3, 9, 0, 6, 3)]
    begun = Batch.from_rows(begun_responses=had, begun_log_probs=had)
    model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )

    list(steps_of(backend(model, max_batch_size=2), prompts, seeds, length=12, begun=begun, max_step_tokens=3))

    assert [shape for shape in shapes if shape[1] > 1] == [(2, 13), (2, 7), (2, 4)]


def test_responses_that_begin_share_their_prompt_though_each_has_a_row() -> None:
    model, shapes = build(), []
    first, second = random_prompts([4, 4])
    prompts = [first, second, first.copy(), second.copy(), first.copy()]
    begun = Batch.from_rows(begun_responses=[()] * 5, begun_log_probs=[()] * 5)
    expected = generate(backend(build()), [first, second], [[0, 2, 4], [1, 3]])
    model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )

    steps = steps_of(backend(model), prompts, [[seed] for seed in range(5)], begun=begun, max_step_tokens=8)
    made = response_rows(response for step in steps for response in step.ended)

    assert shapes[0] == (2, 4)
    assert [responses(made)[row] for row in (0, 2, 4, 1, 3)] == responses(expected)


def test_a_policy_that_gives_nan_is_an_error_not_a_token() -> None:
    model = build()
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))

    with pytest.raises(FloatingPointError, match="no finite log-prob"):
        generate(backend(model), random_prompts([4]), [[1]])
