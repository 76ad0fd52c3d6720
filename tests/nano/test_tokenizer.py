"""The nano tokenizer: GLM's special tokens in GLM's order, byte-level BPE that loses nothing."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm5ray.nano import tokenizer
from glm5ray.nano.evaluate import CHECKPOINT, load_tokenizer

LOADED = load_tokenizer(CHECKPOINT)
GLM_IDS = {
    "<|endoftext|>": 154820,
    "[gMASK]": 154822,
    "<sop>": 154824,
    "<|system|>": 154826,
    "<|user|>": 154827,
    "<|assistant|>": 154828,
    "<|observation|>": 154829,
    "<think>": 154841,
    "</think>": 154842,
    "<tool_call>": 154843,
    "</tool_call>": 154844,
    "<arg_key>": 154847,
    "</arg_value>": 154850,
}


@pytest.mark.parametrize("token", GLM_IDS)
def test_special_tokens_keep_their_distances(token: str) -> None:
    assert LOADED.token_to_id(token) - tokenizer.FIRST_SPECIAL_ID == GLM_IDS[token] - 154820
    assert LOADED.encode(f"a{token}b").tokens[1] == token


def test_vocabulary_is_full() -> None:
    assert LOADED.get_vocab_size() == tokenizer.VOCAB_SIZE
    assert json.loads((CHECKPOINT / "config.json").read_text())["vocab_size"] == tokenizer.VOCAB_SIZE


def test_markers_are_shown_and_special_tokens_are_not() -> None:
    ids = LOADED.encode("<|user|>x<think>y</think><|assistant|>").ids
    assert LOADED.decode(ids) == "x<think>y</think>"


@given(st.text())
def test_bytes_survive(text: str) -> None:
    if not any(token in text for token in tokenizer.SPECIAL_TOKENS):
        assert LOADED.decode(LOADED.encode(text).ids) == text


@given(st.integers(min_value=0, max_value=10**9))
def test_digits_are_single(number: int) -> None:
    assert LOADED.encode(f"x{number}").tokens[1:] == list(str(number))
