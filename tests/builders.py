"""Short ways to make the objects that many tests need. The defaults are small enough that limits are reached."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from glm5ray.config import SchedulerSection
from glm5ray.protocol import Capacity, GenerateRequest, SamplingParams
from glm5ray.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Sequence

EOS = 99


def make_capacity(
    *, num_pages: int = 64, page_size: int = 4, max_model_len: int = 128, vocab_size: int = 100, eos: int = EOS
) -> Capacity:
    return Capacity(
        num_pages=num_pages,
        page_size=page_size,
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        eos_token_ids=(eos,),
    )


def make_scheduler(
    *,
    num_pages: int = 64,
    page_size: int = 4,
    max_model_len: int = 128,
    prefix_caching: bool = True,
    **settings: Any,
) -> Scheduler:
    """``settings`` are those of :class:`SchedulerSection`."""
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": 64, **settings}
    capacity = make_capacity(num_pages=num_pages, page_size=page_size, max_model_len=max_model_len)
    return Scheduler(SchedulerSection(**settings), capacity, prefix_caching=prefix_caching)


def make_request(
    request_id: str = "r0",
    prompt: int | Sequence[int] = 8,
    *,
    priority: int = 0,
    max_tokens: int | None = 4,
    **sampling: Any,
) -> GenerateRequest:
    """``prompt`` is the token ids, or a length: then requests of different ids share no prefix."""
    if isinstance(prompt, int):
        first = sum(request_id.encode()) % 89
        prompt = [(first + i) % 98 for i in range(prompt)]
    return GenerateRequest(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(max_tokens=max_tokens, **sampling),
        priority=priority,
    )
