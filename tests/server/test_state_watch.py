"""One line for each change of state, and none without."""

from __future__ import annotations

import asyncio

from glm5ray.config import load_config
from glm5ray.engine.core import EngineCore
from glm5ray.engine.local_client import LocalClient
from glm5ray.protocol import Capacity, GenerateRequest, SamplingParams
from glm5ray.server.state_watch import watch_state
from tests.engine.faults import DyingExecutor, GatedExecutor

CAPACITY = Capacity(num_pages=64, page_size=16, max_model_len=200, vocab_size=300, eos_token_ids=(0,))


def test_a_step_that_hangs_and_goes_on_is_told_once_each():
    settings = load_config(None, ())
    executor = GatedExecutor(CAPACITY, lambda request_id, index, position: 65, stops_at=2)
    lines: list[str] = []

    async def run() -> None:
        client = LocalClient(
            lambda: EngineCore(executor, settings.scheduler, settings.cache, overlap=False),
            model_path="nano",
            stalled_after_s=0.05,
        )
        async with client, asyncio.timeout(30):
            watch = asyncio.create_task(watch_state(client, lines.append, interval_s=0.01))
            params = SamplingParams(max_tokens=4, ignore_eos=True)
            request = GenerateRequest(request_id="r", prompt_token_ids=(1, 2, 3), sampling=params)
            tokens = []
            async for event in client.generate(request):
                tokens += event.token_ids
                if len(tokens) == 2:
                    while not lines:
                        await asyncio.sleep(0.01)
                    executor.gate.set()
            assert len(tokens) == 4
            while len(lines) < 2:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            watch.cancel()

    asyncio.run(run())
    went, came = lines
    assert went.startswith("engine default: ready -> recovering (a step has been running for")
    assert came.startswith("engine default: recovering -> ready")


def test_a_recovery_between_two_looks_is_told():
    settings = load_config(None, ())
    executor = DyingExecutor(
        CAPACITY,
        lambda request_id, index, position: 65,
        lambda executor, step: executor.epoch == 0 and step.step_id == 3,
    )
    lines: list[str] = []

    async def run() -> None:
        client = LocalClient(
            lambda: EngineCore(executor, settings.scheduler, settings.cache, overlap=False), model_path="nano"
        )
        async with client, asyncio.timeout(30):
            watch = asyncio.create_task(watch_state(client, lines.append, interval_s=0.3))
            await asyncio.sleep(0.1)
            params = SamplingParams(max_tokens=8, ignore_eos=True)
            request = GenerateRequest(request_id="r", prompt_token_ids=(1, 2, 3), sampling=params)
            assert sum([len(event.token_ids) async for event in client.generate(request)]) == 8
            while not lines:
                await asyncio.sleep(0.01)
            watch.cancel()

    asyncio.run(run())
    assert any("replaced" in line for line in lines), lines
