"""The tokenizer of the tiny models: ids 0 to 255 are the bytes of UTF-8, then the markers of GLM's chat format.

Nothing is merged, so a text has as many tokens as bytes, and every character beyond ASCII spans several. There is no
token for the roles: the chat template writes ``<|user|>`` and the like as text.
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from glm5ray.tokenizer import Tokenizer

EOS_TOKEN_ID = 256
MARKERS = (
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
"""Ids 256 and up. As in GLM's own tokenizer only the end token is special, so that decoding prints the others."""
MIN_VOCAB_SIZE = 256 + len(MARKERS)

_CHAT_TEMPLATE = """\
{%- macro text(content) -%}
{%- if content is string -%}{{ content }}
{%- elif content is sequence -%}
{%- for part in content -%}{{ part if part is string else part.text }}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- if tools -%}
<|system|># Tools
{% for tool in tools -%}
{{ (tool.function or tool) | tojson }}
{% endfor -%}
Call one as <tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>
{%- endif -%}
{%- set last = namespace(user=-1) -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{%- set last.user = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{%- set content = text(message.content) -%}
{%- set reasoning = message.reasoning_content or '' -%}
{%- if not reasoning and '</think>' in content -%}
{%- set reasoning = content.split('</think>')[0].split('<think>')[-1] -%}
{%- set content = content.split('</think>')[-1] -%}
{%- endif -%}
<|assistant|><think>{{ reasoning.strip() if loop.index0 > last.user }}</think>{{ content.strip() }}
{%- for call in message.tool_calls or [] -%}
{%- set function = call.function or call -%}
<tool_call>{{ function.name }}
{%- for key, value in function.arguments.items() -%}
<arg_key>{{ key }}</arg_key><arg_value>{{ value if value is string else value | tojson }}</arg_value>
{%- endfor -%}
</tool_call>
{%- endfor -%}
{%- elif message.role == 'tool' -%}
{%- if loop.first or loop.previtem.role != 'tool' -%}<|observation|>{%- endif -%}
<tool_response>{{ text(message.content) }}</tool_response>
{%- elif message.role in ('system', 'user') -%}
<|{{ message.role }}|>{{ text(message.content) }}
{%- else -%}
{{ raise_exception('role ' ~ message.role ~ ' is none of system, user, assistant and tool') }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|assistant|><think>{{ '</think>' if enable_thinking is defined and not enable_thinking }}
{%- endif -%}
"""


def write_byte_tokenizer(folder: Path, max_length: int) -> None:
    """Writes ``tokenizer.json``, ``tokenizer_config.json`` and ``chat_template.jinja``."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": MARKERS[0],
        "pad_token": MARKERS[0],
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer(), indent=1), "utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), "utf-8")
    (folder / "chat_template.jinja").write_text(_CHAT_TEMPLATE, "utf-8")


def _tokenizer() -> dict[str, Any]:
    """A byte-level BPE of the ``tokenizers`` library that has no merges."""
    markers = [
        {
            "id": 256 + i,
            "content": marker,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": i == 0,
        }
        for i, marker in enumerate(MARKERS)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {letter: byte for byte, letter in enumerate(_letters_of_bytes())},
        "merges": [],
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": markers,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": model,
    }


def _letters_of_bytes() -> list[str]:
    """GPT-2's printable letter for each byte: itself where it prints in Latin-1, else the next one from 256 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]


def tokenizer_of(folder: Path, load_format: str, max_length: int = 2**20) -> Tokenizer:
    """The checkpoint's tokenizer; under ``model.load_format=dummy``, where a folder may have none, one of bytes.

    Raises :class:`CheckpointError` as :meth:`Tokenizer.from_checkpoint`."""
    if load_format != "dummy" or (folder / "tokenizer.json").exists():
        return Tokenizer.from_checkpoint(folder)
    with TemporaryDirectory(prefix="glm5ray-") as scratch:
        write_byte_tokenizer(Path(scratch), max_length)
        return Tokenizer.from_checkpoint(scratch)
