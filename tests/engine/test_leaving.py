"""Case B22, counted in steps: a request whose client leaves is computed in at most two more."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from glm5ray.config import CacheSection, SchedulerSection
from glm5ray.engine.core import EngineCore
from glm5ray.engine.executor import FakeExecutor
from glm5ray.engine.local_client import LocalClient
from glm5ray.protocol import Capacity, GenerateRequest, SamplingParams

if TYPE_CHECKING:
    from glm5ray.engine.executor import PendingStep
    from glm5ray.protocol import StepInput, StepOutput

CAPACITY = Capacity(num_pages=200, page_size=4, max_model_len=400, vocab_size=100, eos_token_ids=(0,))
MOST_STEPS = 2


class HeldExecutor(FakeExecutor):
    """Notes whose tokens each step has. While ``goes_on`` is not set, no step ends."""

    def __init__(self) -> None:
        super().__init__(CAPACITY, lambda request_id, index, position: 1 + position % 99)
        self.log: list[set[str]] = []
        self.goes_on = threading.Event()
        self.goes_on.set()
        self._names: dict[int, str] = {}

    def submit(self, step: StepInput) -> PendingStep:
        self._names |= {new.seq_id: new.request_id for new in step.new_sequences}
        self.log.append({self._names[seq_id] for seq_id in step.seq_ids})
        pending, goes_on = super().submit(step), self.goes_on

        class Held:
            def result(self, timeout_s: float | None = None) -> StepOutput:
                assert goes_on.wait(30.0), "nobody lets the step end"
                time.sleep(0.0005)  # lets the clients have a turn
                return pending.result()

        return Held()


async def leave(client: LocalClient, executor: HeldExecutor, number: int, kind: str, turn: asyncio.Lock) -> int:
    """Asks, leaves when it is time, and returns how many steps had been begun then."""
    name, prompt = f"r{number}", tuple(range(1, 4)) if kind == "tokens" else tuple(range(1, 91))
    params = SamplingParams(max_tokens=300, ignore_eos=True)
    events = client.generate(GenerateRequest(request_id=name, prompt_token_ids=prompt, sampling=params))
    first = asyncio.ensure_future(anext(events))
    if kind == "tokens":
        await first
        for _ in range(2):
            await anext(events)
    elif kind == "prefill":
        while not any(name in names for names in executor.log[-30:]) and not first.done():
            await asyncio.sleep(0)
    else:
        await asyncio.sleep(0)  # it was just sent
    async with turn:
        executor.goes_on.clear()
        before = len(executor.log)
        first.cancel()
        with suppress(asyncio.CancelledError):
            await first
        await events.aclose()
        executor.goes_on.set()
    return before


@pytest.mark.parametrize("overlap", [False, True])
def test_b22_a_request_whose_client_left_is_in_two_more_steps_at_most(overlap: bool) -> None:
    executor = HeldExecutor()
    kinds = ["tokens", "prefill", "queued", "tokens"] * 50
    random.Random(int(overlap)).shuffle(kinds)

    async def run() -> None:
        section = SchedulerSection(max_num_seqs=4, max_num_batched_tokens=16)
        client = LocalClient(lambda: EngineCore(executor, section, CacheSection(), overlap=overlap), model_path="none")
        turn = asyncio.Lock()
        left_at: list[int] = []
        async with asyncio.timeout(60), client:
            for start in range(0, len(kinds), 10):
                wave = [leave(client, executor, i, kinds[i], turn) for i in range(start, start + 10)]
                left_at += await asyncio.gather(*wave)
            while (stats := (await client.status()).scheduler).num_running or stats.num_waiting:
                await asyncio.sleep(0.01)
            assert stats.num_pages_held == 0
            assert stats.num_finished == {"abort": len(kinds)}
        more = [sum(f"r{i}" in names for names in executor.log[at:]) for i, at in enumerate(left_at)]
        assert max(more) <= MOST_STEPS, list(zip(kinds, more, strict=True))
        ran = [sum(f"r{i}" in names for names in executor.log) for i in range(len(kinds))]
        assert min(ran) == 0, "some left while they waited"
        assert {kind for kind, steps in zip(kinds, ran, strict=True) if steps} >= {"tokens", "prefill"}

    asyncio.run(run())
