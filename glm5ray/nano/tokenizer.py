"""Builds the tokenizer of glm5-nano: byte-level BPE, with GLM's special tokens in GLM's order at the end."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

VOCAB_SIZE = 4096

SPECIAL_TOKENS: tuple[str, ...] = (
    "<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>", "<|assistant|>",
    "<|observation|>", "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>",
    "<|begin_of_audio|>", "<|end_of_audio|>", "<|begin_of_transcription|>", "<|end_of_transcription|>",
    "<|code_prefix|>", "<|code_middle|>", "<|code_suffix|>",
)  # fmt: skip
"""In the order of the real ids 154820 to 154840; skipped when text is decoded."""

MARKERS: tuple[str, ...] = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
)  # fmt: skip
"""In the order of the real ids 154841 to 154850; not special, so that decoding prints them and parsers see them."""

FIRST_SPECIAL_ID = VOCAB_SIZE - len(SPECIAL_TOKENS) - len(MARKERS)
EOS_TOKENS = ("<|endoftext|>", "<|user|>", "<|observation|>")
SPLIT = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
"""Words with their space, single digits (so that numbers can be added and copied), runs of punctuation."""


def build(texts: Iterable[str], folder: Path) -> None:
    """Train on `texts` and write tokenizer.json, tokenizer_config.json into `folder`. Deterministic."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=FIRST_SPECIAL_ID, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    assert tokenizer.get_vocab_size() == FIRST_SPECIAL_ID, tokenizer.get_vocab_size()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in MARKERS])
    assert tokenizer.token_to_id("</arg_value>") == VOCAB_SIZE - 1
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(), indent=2) + "\n")


def tokenizer_config() -> dict[str, Any]:
    """The tokenizer_config.json that transformers reads; the chat template lies beside it in chat_template.jinja."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "additional_special_tokens": list(SPECIAL_TOKENS),
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
        "padding_side": "left",
    }
