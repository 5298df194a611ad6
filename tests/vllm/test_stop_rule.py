"""SplitPPO's rule for the end of a response, against that of vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from services.rollout.stopping import StopRule
from tests.support.seeds import shifted

pytestmark = pytest.mark.vllm

PIECES = ("END", "EN", "D", "ab", "cd", "x", "Ġ", "Ġa")


def byte_level_tokenizer() -> Any:
    """PIECES, then every single byte, then a special token."""
    pieces = list(dict.fromkeys([*PIECES, *sorted(pre_tokenizers.ByteLevel.alphabet())]))
    backend = Tokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


def length_with_vllm(tokenizer: Any, texts: list[str], prompt: list[int], tokens: list[int]) -> int | None:
    """Tokens of the response with which vLLM's detokenizer finds a stop text; None: it finds none."""
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    sampling = SimpleNamespace(
        stop=texts,
        min_tokens=0,
        include_stop_str_in_output=True,
        skip_special_tokens=True,
        spaces_between_special_tokens=True,
    )
    request = SimpleNamespace(sampling_params=sampling, request_id="0", prompt_token_ids=prompt)
    watch = IncrementalDetokenizer.from_new_request(tokenizer, request)
    return next((index + 1 for index, token in enumerate(tokens) if watch.update([token], False) is not None), None)


@pytest.mark.parametrize("texts", [["END"], ["bc", "→"], [" a", "D D"], ["x"], ["ENDEND", "DxE", "é"]])
def test_a_response_ends_with_the_token_with_which_vllm_ends_it(texts: list[str]) -> None:
    tokenizer, rng = byte_level_tokenizer(), np.random.default_rng(shifted(0))
    pool = np.array([*tokenizer.convert_tokens_to_ids(PIECES), *tokenizer("→é")["input_ids"], tokenizer.eos_token_id])
    rule, num_ended = StopRule([], texts, tokenizer), 0
    for _ in range(300):
        prompt, tokens = rng.choice(pool, 3), rng.choice(pool, 40).tolist()
        watch = rule.begin(prompt.astype(np.int32))
        length = next((index + 1 for index, token in enumerate(tokens) if watch.ends_with(token)), None)
        assert length == length_with_vllm(tokenizer, texts, prompt.tolist(), tokens)
        num_ended += length is not None
    assert num_ended > 10
