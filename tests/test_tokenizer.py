"""Tokenizer and detokenizer; the oracles are Hugging Face's decoder and ``bytes.decode``."""

from __future__ import annotations

import json
import string
from typing import TYPE_CHECKING

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from glm5ray.errors import CheckpointError, RequestError
from glm5ray.tokenizer import Detokenizer, Tokenizer
from tests.conftest import CHAT_TEMPLATE, byte_level_bpe

if TYPE_CHECKING:
    from pathlib import Path

BYTES = Tokenizer(byte_level_bpe())
EOS = 256


def run(
    token_ids: list[int], *, stop: tuple[str, ...] = (), step: int = 1, **options: object
) -> tuple[list[str], Detokenizer]:
    """The deltas of a sequence that came in pieces of ``step`` tokens, the last of them from ``finish``."""
    detokenizer = Detokenizer(BYTES, stop=stop, **options)  # type: ignore[arg-type]
    deltas = [detokenizer.push(token_ids[i : i + step]) for i in range(0, len(token_ids), step)]
    deltas.append(detokenizer.finish())
    assert "".join(deltas) == detokenizer.text
    return deltas, detokenizer


# --- the detokenizer --------------------------------------------------------------------------------------------------


def test_stop_string_across_tokens() -> None:
    deltas, detokenizer = run(list(b"DEFGHIJKL"), stop=("DEFGHIJ",))
    assert set(deltas) == {""}
    assert detokenizer.stopped == "DEFGHIJ"
    assert detokenizer.num_tokens_used == 7


def test_text_that_only_began_like_a_stop_string() -> None:
    _, detokenizer = run(list(b"DEFGHxIJ"), stop=("DEFGHIJ",))
    assert detokenizer.text == "DEFGHxIJ"
    assert detokenizer.stopped is None


def test_stop_string_can_be_kept() -> None:
    _, detokenizer = run(list(b"DEFGHIJKL"), stop=("DEFGHIJ",), include_stop=True)
    assert detokenizer.text == "DEFGHIJ"


def test_held_back_text_is_flushed() -> None:
    deltas, detokenizer = run([*b"abcST", EOS], stop=("STOP",))
    assert deltas[-1] == "ST"
    assert detokenizer.text == "abcST"


def test_characters_across_tokens() -> None:
    text = "삼겹살 🙂🙂 é"
    deltas, detokenizer = run(list(text.encode()))
    assert "\ufffd" not in detokenizer.text
    assert detokenizer.text == text
    assert all(delta == "" or delta in text for delta in deltas)


@pytest.mark.parametrize(
    ("data", "text"),
    [("삼".encode()[:2], "\ufffd"), (b"\xffa", "\ufffda"), ("\ufffd".encode(), "\ufffd"), (b"\xf0\x9f\x99", "\ufffd")],
)
def test_undecodable_bytes(data: bytes, text: str) -> None:
    assert run(list(data))[1].text == text


def test_special_token_inside_a_character_is_skipped() -> None:
    first, *rest = "é".encode()
    assert run([first, EOS, *rest])[1].text == "é"


def test_special_tokens_can_be_kept() -> None:
    assert run([*b"a", EOS], skip_special_tokens=False)[1].text == "a<eos>"


def test_the_stop_string_that_is_complete_first_wins() -> None:
    _, detokenizer = run(list(b"xabcd"), stop=("abcd", "bc"))
    assert (detokenizer.stopped, detokenizer.text) == ("bc", "xa")
    _, detokenizer = run(list(b"xabc"), stop=("bc", "abc"))
    assert (detokenizer.stopped, detokenizer.text) == ("abc", "x")


def test_stop_string_before_min_tokens_is_text() -> None:
    _, detokenizer = run(list(b"STOPabSTOPc"), stop=("STOP",), min_tokens=5)
    assert (detokenizer.text, detokenizer.num_tokens_used) == ("STOPab", 10)


byte_sequences = st.lists(
    st.one_of(st.integers(0, 255).map(lambda b: [b]), st.characters().map(lambda c: list(c.encode("utf-8", "replace"))))
)
stops = st.lists(st.text("abé🙂", min_size=1, max_size=4), max_size=3).map(tuple)


@given(byte_sequences, st.integers(1, 7))
def test_any_split_of_any_bytes_decodes_alike(pieces: list[list[int]], step: int) -> None:
    token_ids = [token for piece in pieces for token in piece]
    assert run(token_ids, step=step)[1].text == bytes(token_ids).decode("utf-8", errors="replace")
    assert BYTES.decode(token_ids) == bytes(token_ids).decode("utf-8", errors="replace")


@given(st.text("abé🙂", max_size=30), stops, st.integers(1, 9), st.booleans())
def test_stop_strings_by_definition(text: str, stop: tuple[str, ...], step: int, include_stop: bool) -> None:
    """The oracle looks at every beginning of the text for the first that ends with a stop string."""
    expected, expected_stop = text, None
    for end in range(len(text) + 1):
        endings = [s for s in stop if text[:end].endswith(s)]
        if endings:
            expected_stop = max(endings, key=len)
            expected = text[:end] if include_stop else text[: end - len(expected_stop)]
            break
    _, detokenizer = run(list(text.encode()), stop=stop, step=step, include_stop=include_stop)
    assert (detokenizer.text, detokenizer.stopped) == (expected, expected_stop)
    if expected_stop is not None:
        upto = expected if include_stop else expected + expected_stop
        assert detokenizer.num_tokens_used == len(upto.encode())


# --- the tokenizer ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a trained byte-level BPE, special tokens, and a chat template."""
    folder = tmp_path_factory.mktemp("checkpoint")
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    words = ["the sky is blue", "삼겹살 is good", "naïve café 🙂", string.printable] * 3
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|user|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(words, trainer)
    bpe.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|user|>"}}))
    return folder


@given(text=st.text())
def test_ids_and_text_are_those_of_hugging_face(checkpoint: Path, text: str) -> None:
    theirs = tokenizers.Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    ours = Tokenizer.from_checkpoint(checkpoint)
    ids = ours.encode(text)
    assert ids == theirs.encode(text, add_special_tokens=False).ids
    assert ours.decode(ids) == theirs.decode(ids) == text
    for length in range(len(ids)):
        assert ours.decode(ids[:length]) == theirs.decode(ids[:length])


def test_chat_template_is_rendered_as_hugging_face_does(checkpoint: Path) -> None:
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(checkpoint / "tokenizer.json"), chat_template=CHAT_TEMPLATE)
    ours = Tokenizer.from_checkpoint(checkpoint)
    messages = [
        {"role": "user", "content": "Hi <b> é"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"x": "é<"}}}]},
    ]
    tools = [{"type": "function", "function": {"name": "f"}}]
    for options in ({}, {"enable_thinking": True}, {"add_generation_prompt": False}):
        expected = theirs.apply_chat_template(
            messages, tools=tools, tokenize=False, **{"add_generation_prompt": True, **options}
        )
        assert ours.apply_chat_template(messages, tools, **options) == expected


def test_special_tokens_in_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("a<eos><think>") == [97, EOS, 257]
    assert tokenizer.is_special(EOS)
    assert not tokenizer.is_special(257)
    assert tokenizer.decode([97, EOS, 257]) == "a<think>"
    assert tokenizer.vocab_size == 265
    assert tokenizer.token_bytes(271) == b""
    assert tokenizer.token_id("<think>") == 257


def test_half_a_surrogate_pair_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="surrogate"):
        tokenizer.encode("a\ud800")


def test_bad_folders(tmp_path: Path, checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        Tokenizer.from_checkpoint(tmp_path)
    for damaged in ("{", "{}", '{"model": {"type": "BPE"}}', "\udcff"):
        (tmp_path / "tokenizer.json").write_text(damaged, errors="surrogateescape")
        with pytest.raises(CheckpointError, match=r"tokenizer\.json is no tokenizer"):
            Tokenizer.from_checkpoint(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((checkpoint / "tokenizer.json").read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(CheckpointError, match="template is not valid, line 1"):
        Tokenizer.from_checkpoint(tmp_path)


def test_a_vocabulary_of_another_kind_is_refused() -> None:
    with pytest.raises(CheckpointError, match="byte-level BPE"):
        Tokenizer(tokenizers.Tokenizer(models.BPE(vocab={"\u2581the": 0}, merges=[])))


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no') }}",
        "{{ messages.no.such }}",
        "{{ 1 // 0 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
    ],
)
def test_what_a_template_may_not_do(template: str) -> None:
    """Errors of a template are errors of the request; the sandbox keeps it from changing or reaching anything."""
    with pytest.raises(RequestError, match="chat template") as caught:
        Tokenizer(byte_level_bpe(), chat_template=template).apply_chat_template([])
    assert caught.value.param == "messages"
