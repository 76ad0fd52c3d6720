"""Engines small enough for a test: the tiny model, and one whose logits the test writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch

from glm5ray.config import EngineConfig, config_from_dict
from glm5ray.engine.executor import InProcessExecutor
from glm5ray.engine.llm import LLM
from glm5ray.kernels.select import select_kernels
from glm5ray.model.cache import PagedCache
from glm5ray.model.tiny import write_tiny
from glm5ray.model_config import ModelConfig
from glm5ray.parallel import ParallelContext
from glm5ray.protocol import Capacity
from glm5ray.worker.worker import Worker

if TYPE_CHECKING:
    from pathlib import Path

    from glm5ray.tokenizer import Tokenizer

EOS = 256
VOCAB = 272
LIMITS = {
    "cache": {"page_size": 16, "num_pages": 24},
    "scheduler": {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 128},
}

MakeLLM = Callable[..., LLM]


def settings(**changes: Any) -> EngineConfig:
    """The limits of the cases (24 pages of 16, 128 tokens a sequence, 8 sequences, 64 tokens a step), with changes such
    as
    ``cache={"num_pages": 200}``."""
    values: dict[str, Any] = {name: dict(section) for name, section in LIMITS.items()}
    for name, section in changes.items():
        values[name] = {**values.get(name, {}), **section}
    return config_from_dict(values)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "model"
    write_tiny(folder, format="fp32", style="glm5.2", seed=11, with_mtp=False)
    return folder


@pytest.fixture
def make_tiny(tiny_folder: Path) -> Iterator[MakeLLM]:
    """``make_tiny(**changes)`` -> LLM of the tiny model; closed, with its ledger checked, at the end of the test."""
    made: list[LLM] = []

    def make(**changes: Any) -> LLM:
        made.append(LLM(str(tiny_folder), config=settings(**changes)))
        return made[-1]

    yield make
    for llm in made:
        settle(llm)
        llm.close()


class WrittenModel:
    """A model whose logits after (token, position) are a function of the test's."""

    def __init__(self, logits: Callable[[int, int], torch.Tensor]) -> None:
        self._logits = logits
        self.parallel = ParallelContext()
        self.kernels = select_kernels({}, "cpu")

    def forward_hidden(self, batch: Any, cache: Any) -> torch.Tensor:
        return torch.stack([batch.token_ids_T, batch.positions_T], dim=1).float()

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.stack([self._logits(int(token), int(position)) for token, position in hidden])


@pytest.fixture
def make_written(tiny_folder: Path, tokenizer: Tokenizer) -> Iterator[MakeLLM]:
    """``make_written(logits, **changes)`` -> LLM over a :class:`WrittenModel`."""
    made: list[LLM] = []

    def make(logits: Callable[[int, int], torch.Tensor], **changes: Any) -> LLM:
        config = settings(**changes)
        num_pages = config.cache.num_pages
        assert isinstance(num_pages, int)
        capacity = Capacity(
            num_pages=num_pages, page_size=16, max_model_len=128, vocab_size=VOCAB, eos_token_ids=(EOS,)
        )
        cache = PagedCache(ModelConfig.from_checkpoint(tiny_folder), num_pages, 16, torch.float32)
        model: Any = WrittenModel(logits)
        worker = Worker(model, cache, capacity, max_num_seqs=config.scheduler.max_num_seqs)
        made.append(
            LLM.from_executor(
                InProcessExecutor(lambda: worker, threaded=config.scheduler.overlap is True), tokenizer, config
            )
        )
        return made[-1]

    yield make
    for llm in made:
        settle(llm)
        llm.close()


def script(prompt: bytes, answer: bytes, *, then_eos: bool = True) -> Callable[[int, int], torch.Tensor]:
    """Logits that answer a prompt of ``len(prompt)`` bytes with ``answer``, +20 on each next token, then ``<eos>``."""
    tokens = [*answer, *([EOS] if then_eos else [])]

    def logits(token: int, position: int) -> torch.Tensor:
        at = position + 1 - len(prompt)
        values = torch.zeros(VOCAB)
        values[tokens[at] if 0 <= at < len(tokens) else EOS] = 20.0
        return values

    return logits


def settle(llm: LLM) -> None:
    """Runs the engine until it is idle and checks the ledger: no sequence left, every page free or cached, owned by
    none."""
    for _ in range(100):
        if not llm._core.has_work:
            break
        llm._pump()
    assert not llm._core.has_work
    scheduler = llm._core.scheduler
    scheduler.check()
    stats = scheduler.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.num_pages_held == 0
