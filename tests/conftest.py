"""Fixtures that more than one folder of tests needs."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

# Before anything imports torch: on a machine whose cores are busy, two OpenMP threads spin for each other, and a test
# takes up to twenty times as long as with one.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Before anything imports triton: without an NVIDIA driver, Triton kernels run in its interpreter, on CPU tensors.
if not Path("/proc/driver/nvidia/version").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from glm5ray.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator

SPECIAL_TOKENS = (
    "<eos>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
)
"""Ids 256 to 264 of the byte tokenizer; only ``<eos>`` is skipped when text is decoded, as in GLM-5."""

CHAT_TEMPLATE = """\
{%- for tool in tools or [] %}T:{{ tool.function.name }};{% endfor %}
{%- for m in messages %}{{ m.role[0] }}:{{ m.content }};
{%- for call in m.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments | tojson }};{% endfor %}
{%- endfor %}
{%- if add_generation_prompt %}a:{% if enable_thinking is defined and enable_thinking %}<think>{% endif %}{% endif %}"""


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """One token a byte, id = byte, then :data:`SPECIAL_TOKENS`: every non-ASCII character spans tokens."""
    return Tokenizer(byte_level_bpe(), chat_template=CHAT_TEMPLATE)


def byte_level_bpe() -> tokenizers.Tokenizer:
    """Byte-level BPE without merges, made with Hugging Face's own pieces."""
    letters = {piece: ids[0] for piece, ids in _byte_pieces().items()}
    bpe = tokenizers.Tokenizer(models.BPE(vocab=letters, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_tokens([AddedToken(text, normalized=False, special=text == "<eos>") for text in SPECIAL_TOKENS])
    return bpe


def _byte_pieces() -> dict[str, bytes]:
    """Piece -> its byte, found by asking the library: each character of its alphabet decodes to one byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    pieces = {chr(byte): bytes([byte]) for byte in printable}
    others = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(pieces))
    rest = sorted(set(range(256)) - set(printable))
    return pieces | {piece: bytes([byte]) for piece, byte in zip(others, rest, strict=True)}


@pytest.fixture(autouse=True)
def _same_start() -> Iterator[None]:
    """Each test starts from torch's default type and one seed, and leaves neither behind."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    dtype, rng_state = torch.get_default_dtype(), torch.get_rng_state()
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(dtype)
    torch.set_rng_state(rng_state)
