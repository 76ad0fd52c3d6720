"""Text to token ids and back: byte-level BPE, the chat template, and the incremental detokenizer.

A checkpoint brings ``tokenizer.json``, ``tokenizer_config.json`` and a chat template (``chat_template.jinja`` or
inside the config). Decoding works on bytes: each token stands for exact bytes, and text is their UTF-8 with one
U+FFFD for each undecodable piece (``bytes.decode("utf-8", errors="replace")``), whether it is decoded at once or
token by token.
"""

from __future__ import annotations

import codecs
import json
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox
import tokenizers

from glm5ray.errors import CheckpointError, RequestError
from glm5ray.model_config import is_there, read_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

MAX_TEMPLATE_MESSAGE = 500
"""Characters of a template's own error message that are passed on."""
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""What code of a template raises when it meets a value that it was not written for."""


class Tokenizer:
    """The tokenizer and the chat template of one checkpoint."""

    def __init__(
        self,
        bpe: tokenizers.Tokenizer,
        *,
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
        where: str = "the tokenizer",
    ) -> None:
        """``special_tokens`` are the template's variables of that kind, as ``eos_token``; ``where`` names the source
        in errors.
        """
        self._bpe = bpe
        self._special_tokens = dict(special_tokens or {})
        self._where = where
        self._template = None if chat_template is None else _compile(chat_template, where)
        added = bpe.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._bytes = _token_bytes(bpe, {token_id: token.content for token_id, token in added.items()}, where)

    @classmethod
    def from_checkpoint(cls, folder: str | Path) -> Tokenizer:
        """Reads the tokenizer of a checkpoint folder. Raises :class:`CheckpointError` that names the file at fault."""
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"{path} is missing; copy the tokenizer's files beside the weights")
        try:
            bpe = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises the bare class for every damaged file
            raise CheckpointError(f"{path} is no tokenizer: {error}") from error
        config_path = folder / "tokenizer_config.json"
        config = read_json(config_path) if is_there(config_path) else {}
        names = {name: _token_text(config[name]) for name in config if name.endswith("_token")}
        return cls(
            bpe,
            chat_template=_read_template(folder, config),
            special_tokens={name: text for name, text in names.items() if text is not None},
            where=str(folder),
        )

    @property
    def vocab_size(self) -> int:
        """One more than the highest id. The model's own ``vocab_size`` may be larger (padding)."""
        return len(self._bytes)

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``, nothing added. Raises :class:`RequestError` for text that is no Unicode (lone
        surrogates).

        The names of special tokens (``<|user|>``) in the text become those tokens: a rendered chat template needs
        that, and other engines do the same. Text of strangers can therefore imitate a role; who must rule that out
        removes such names first.
        """
        try:
            return self._bpe.encode(text, add_special_tokens=False).ids
        except (TypeError, UnicodeEncodeError) as error:
            raise RequestError("the text has half of a surrogate pair, which no UTF-8 can hold; remove it") from error

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of ``token_ids``; bytes that are no UTF-8 become U+FFFD."""
        skipped = self._special_ids if skip_special_tokens else frozenset()
        return b"".join(self.token_bytes(i) for i in token_ids if i not in skipped).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; of a special token, its name; of an id in the padding, none."""
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else b""

    def is_special(self, token_id: int) -> bool:
        """Whether decoding leaves this token out by default."""
        return token_id in self._special_ids

    def token_id(self, text: str) -> int | None:
        """The id of a token by its exact name, as ``<|user|>``."""
        return self._bpe.token_to_id(text)

    def apply_chat_template(
        self,
        /,  # a variable of the template may be called self, too
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The text of a conversation, up to where the model goes on. ``kwargs`` are further variables
        (``enable_thinking``).

        The template is code of the checkpoint and runs in jinja's sandbox. Raises :class:`RequestError` for messages
        that it refuses, and :class:`CheckpointError` if there is no template.
        """
        if self._template is None:
            raise CheckpointError(f"{self._where} has no chat template (chat_template.jinja); use /v1/completions")
        try:
            return self._template.render(
                {
                    **self._special_tokens,
                    **kwargs,
                    "messages": messages,
                    "tools": tools,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except _TEMPLATE_ERRORS as error:
            why = str(error)[:MAX_TEMPLATE_MESSAGE]  # it may quote a message of any length
            raise RequestError(f"the chat template refuses these messages: {why}", param="messages") from error


class Detokenizer:
    """Text of one sequence, token by token, up to a stop string.

    Text is final once it has been returned: an incomplete character, and text that may turn out to be the start of a
    stop string, are held back. Of several stop strings the one that is complete first counts; of those that end
    at the same character, the longest.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        """A stop string that is complete before the ``min_tokens``-th token is ordinary text."""
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._skip_special_tokens = skip_special_tokens
        self._min_tokens = min_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self._final: list[str] = []
        self.stopped: str | None = None
        """The stop string that ended the text."""
        self.num_tokens_used = 0
        """Tokens up to and including the one that completed the stop string; later ones are ignored."""

    @property
    def text(self) -> str:
        """All text that is final."""
        return "".join(self._final)

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens made final."""
        new = [self._push_one(token_id) for token_id in token_ids if self.stopped is None]
        return "".join(new)

    def finish(self) -> str:
        """The text that was held back; an incomplete character becomes one U+FFFD. The sequence has ended."""
        if self.stopped is not None:
            return ""
        new = self._advance(self._decoder.decode(b"", final=True))
        rest, self._held = self._held, ""
        self._final.append(rest)
        return new + rest

    def _push_one(self, token_id: int) -> str:
        self.num_tokens_used += 1
        if self._skip_special_tokens and self._tokenizer.is_special(token_id):
            return ""
        return self._advance(self._decoder.decode(self._tokenizer.token_bytes(token_id)))

    def _advance(self, characters: str) -> str:
        """Adds decoded characters; returns what became final."""
        if not characters:
            return ""
        if not self._stop:
            self._final.append(characters)
            return characters
        pending = self._held + characters
        match = self._find_stop(pending) if self.num_tokens_used >= self._min_tokens else None
        if match is not None:
            start, self.stopped = match
            cut, self._held = start + len(self.stopped) if self._include_stop else start, ""
        else:
            cut = len(pending) - self._possible_start(pending)
            self._held = pending[cut:]
        self._final.append(pending[:cut])
        return pending[:cut]

    def _find_stop(self, pending: str) -> tuple[int, str] | None:
        """Start and text of the stop string that ends first, among those that end in new characters."""
        best: tuple[int, int, str] | None = None
        for stop in self._stop:
            start = pending.find(stop, max(0, len(self._held) - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return None if best is None else (best[1], best[2])

    def _possible_start(self, pending: str) -> int:
        """Length of the longest end of ``pending`` that a stop string begins with."""
        longest = max(len(stop) for stop in self._stop) - 1
        for length in range(min(longest, len(pending)), 0, -1):
            end = pending[-length:]
            if any(len(stop) > length and stop.startswith(end) for stop in self._stop):
                return length
        return 0


# --- reading a checkpoint ---------------------------------------------------------------------------------------------


def _byte_of_character() -> dict[str, int]:
    """The alphabet of byte-level BPE: printable Latin-1 stands for itself, the other bytes for characters from
    U+0100 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def _token_bytes(bpe: tokenizers.Tokenizer, added: Mapping[int, str], where: str) -> list[bytes]:
    """The bytes of each id; none for an id without a token."""
    alphabet = _byte_of_character()
    vocab = bpe.get_vocab(with_added_tokens=True)
    if not vocab:
        raise CheckpointError(f"{where}: the vocabulary is empty")
    table = [b""] * (max(vocab.values()) + 1)
    for piece, token_id in vocab.items():
        if token_id in added:
            table[token_id] = added[token_id].encode()
            continue
        try:
            table[token_id] = bytes(alphabet[character] for character in piece)
        except KeyError as error:
            raise CheckpointError(
                f"{where}: token {token_id}, {piece!r}, is not of byte-level BPE, which the GLM-5 family uses"
            ) from error
    return table


def _token_text(value: Any) -> str | None:
    """A special token in ``tokenizer_config.json`` is a text or an object with ``content``."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _read_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if is_there(path):
        try:
            return path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise CheckpointError(
            f"{folder / 'tokenizer_config.json'}: chat_template is a {type(template).__name__}; it must be a text"
        )
    return template


def _compile(source: str, where: str) -> jinja2.Template:
    """With the settings, filters and functions that templates of Hugging Face models rely on."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise CheckpointError(
            f"{where}: the chat template is not valid, line {error.lineno}: {error.message}"
        ) from error


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Jinja's own filter escapes for HTML, which a model has not been trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
