"""LocalClient: an engine in a thread answers an event loop, tells the truth about itself, and leaves nobody waiting."""

from __future__ import annotations

import asyncio
import zlib
from typing import TYPE_CHECKING

import pytest

from glm5ray.config import CacheSection, SchedulerSection
from glm5ray.engine.client import EngineState
from glm5ray.engine.core import EngineCore
from glm5ray.engine.executor import FakeExecutor
from glm5ray.engine.local_client import LocalClient
from glm5ray.errors import CapacityError, CheckpointError, EngineUnavailable, RequestError
from glm5ray.protocol import Capacity, FinishReason, GenerateRequest, SamplingParams
from tests.engine.faults import DyingExecutor, GatedExecutor

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from glm5ray.engine.executor import Executor

CAPACITY = Capacity(num_pages=64, page_size=4, max_model_len=120, vocab_size=100, eos_token_ids=(0,))


def next_token(request_id: str, index: int, position: int) -> int:
    return 1 + zlib.crc32(f"{request_id}/{index}/{position}".encode()) % 99


def request(name: str, max_tokens: int = 5, n: int = 1) -> GenerateRequest:
    params = SamplingParams(max_tokens=max_tokens, n=n)
    return GenerateRequest(request_id=name, prompt_token_ids=(1, 2, 3), sampling=params)


def expected(name: str, max_tokens: int = 5, index: int = 0) -> list[int]:
    return [next_token(name, index, position) for position in range(3, 3 + max_tokens)]


def with_client(
    executor: Executor, body: Callable[[LocalClient], Awaitable[None]], *, overlap: bool = False, **options: float
) -> None:
    """Runs ``body`` in an event loop; every wait inside ends after 20 seconds."""

    async def run() -> None:
        section = SchedulerSection(max_num_seqs=8, max_num_batched_tokens=16)
        client = LocalClient(
            lambda: EngineCore(executor, section, CacheSection(), overlap=overlap), model_path="none", **options
        )
        async with asyncio.timeout(20), client:
            await body(client)

    asyncio.run(run())


async def tokens_of(client: LocalClient, asked: GenerateRequest) -> dict[int, tuple[list[int], str]]:
    answers: dict[int, tuple[list[int], str]] = {}
    async for event in client.generate(asked):
        tokens, reason = answers.get(event.index, ([], ""))
        assert reason == "", f"{event} after the end"
        answers[event.index] = (tokens + list(event.token_ids), event.finish_reason or "")
    return answers


@pytest.mark.parametrize("overlap", [False, True])
def test_many_requests_each_get_their_own_tokens(overlap: bool):
    async def body(client: LocalClient) -> None:
        answers = await asyncio.gather(*(tokens_of(client, request(f"r{i}", n=1 + i % 3)) for i in range(30)))
        for i, answer in enumerate(answers):
            assert answer == {k: (expected(f"r{i}", index=k), "length") for k in range(1 + i % 3)}
        status = await client.status()
        assert status.state is EngineState.READY
        assert (status.scheduler.num_running, status.scheduler.num_pages_held) == (0, 0)
        assert (await client.info()).capacity == CAPACITY

    with_client(FakeExecutor(CAPACITY, next_token), body, overlap=overlap)


def test_a_step_wakes_the_event_loop_once():
    wake_ups = 0

    async def body(client: LocalClient) -> None:
        loop = asyncio.get_running_loop()
        wake = loop.call_soon_threadsafe

        def counted(*args, **kwargs):
            nonlocal wake_ups
            wake_ups += 1
            return wake(*args, **kwargs)

        loop.call_soon_threadsafe = counted
        await asyncio.gather(*(tokens_of(client, request(f"r{i}", 50)) for i in range(8)))
        assert wake_ups <= (await client.status()).scheduler.num_steps + 1

    with_client(FakeExecutor(CAPACITY, next_token), body)
    assert wake_ups > 0


@pytest.mark.parametrize("after", [0, 1, 3])
def test_leaving_the_iterator_ends_the_request(after: int):
    executor = GatedExecutor(CAPACITY, next_token, stops_at=after)

    async def body(client: LocalClient) -> None:
        events = client.generate(request("long", 100, n=2))
        for _ in range(2 * after):
            await anext(events)
        if after == 0:
            task = asyncio.ensure_future(anext(events))
            while not executor.steps:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await events.aclose()
        executor.gate.set()
        assert await tokens_of(client, request("long")) == {0: (expected("long"), "length")}
        while (stats := (await client.status()).scheduler).num_running:
            await asyncio.sleep(0.01)
        assert stats.num_pages_held == 0
        assert stats.num_finished == {"abort": 2, "length": 1}

    with_client(executor, body)


def test_a_stop_string_ends_one_answer():
    executor = GatedExecutor(CAPACITY, next_token, stops_at=2)

    async def body(client: LocalClient) -> None:
        reasons = {}
        async for event in client.generate(request("r", 100, n=2)):
            if event.index == 0 and event.finish_reason is None:
                await client.abort("r", 0, FinishReason.STOP)
                executor.gate.set()
            if event.finish_reason is not None:
                reasons[event.index] = event.finish_reason
        assert reasons == {0: "stop", 1: "length"}

    with_client(executor, body)


def test_a_request_that_cannot_be_served_is_refused_before_its_first_event():
    executor = GatedExecutor(CAPACITY, next_token, stops_at=2)

    async def body(client: LocalClient) -> None:
        with pytest.raises(CapacityError, match="max_tokens may be at most 117"):
            await tokens_of(client, request("r", 500))
        running = client.generate(request("same", 100))
        await anext(running)
        with pytest.raises(RequestError, match="in use"):
            await tokens_of(client, request("same"))
        executor.gate.set()
        await running.aclose()

    with_client(executor, body)


def test_the_status_answers_while_a_step_hangs():
    executor = GatedExecutor(CAPACITY, next_token, stops_at=3)

    async def body(client: LocalClient) -> None:
        events = client.generate(request("r", 20))
        await anext(events)
        status = await client.status()
        while status.state is EngineState.READY:
            await asyncio.sleep(0.01)
            status = await client.status()
        assert status.state is EngineState.RECOVERING
        assert status.seconds_since_step > 0.1
        assert "a step has been running for" in status.detail
        executor.gate.set()
        async for _ in events:
            pass
        assert (await client.status()).state is EngineState.READY

    with_client(executor, body, stalled_after_s=0.1)


def test_a_dead_worker_that_is_replaced_is_a_pause():
    executor = DyingExecutor(CAPACITY, next_token, lambda ex, step: ex.num_restarts < 2 and step.step_id == 4)

    async def body(client: LocalClient) -> None:
        answers = await asyncio.gather(*(tokens_of(client, request(f"r{i}", 20)) for i in range(6)))
        assert answers == [{0: (expected(f"r{i}", 20), "length")} for i in range(6)]
        status = await client.status()
        assert (status.state, status.epoch, status.num_restarts) == (EngineState.READY, 2, 2)

    with_client(executor, body)


def test_a_dead_worker_that_cannot_be_replaced_leaves_nobody_waiting():
    executor = DyingExecutor(
        CAPACITY, next_token, lambda _, step: step.step_id == 4, restarts_fail=frozenset(range(99))
    )

    async def body(client: LocalClient) -> None:
        ends = await asyncio.gather(
            *(tokens_of(client, request(f"r{i}", 20)) for i in range(12)), return_exceptions=True
        )
        assert all(isinstance(end, EngineUnavailable) and "did not come up" in str(end) for end in ends)
        status = await client.status()
        assert (status.state, status.num_restarts) == (EngineState.FAILED, 3)
        with pytest.raises(EngineUnavailable, match="is failed"):
            await tokens_of(client, request("later"))

    with_client(executor, body)


def test_closing_ends_what_runs():
    async def run() -> None:
        section = SchedulerSection(max_num_seqs=8, max_num_batched_tokens=16)
        executor = GatedExecutor(CAPACITY, next_token, stops_at=3)
        client = LocalClient(lambda: EngineCore(executor, section, CacheSection(), overlap=False), model_path="none")
        with pytest.raises(EngineUnavailable, match="not started"):
            await client.status()
        await client.start()
        events = client.generate(request("r", 110))
        await anext(events)
        closing = asyncio.ensure_future(client.close())
        while (await client.status()).state is not EngineState.STOPPED:
            await asyncio.sleep(0.01)
        executor.gate.set()
        await closing
        with pytest.raises(EngineUnavailable, match="is stopped"):
            async for _ in events:
                pass
        await client.close()
        assert (await client.status()).state is EngineState.STOPPED

    asyncio.run(run())


def test_an_engine_that_does_not_load_says_why():
    def broken() -> EngineCore:
        raise CheckpointError("model.safetensors: no such file")

    async def run() -> None:
        client = LocalClient(broken, model_path="none")
        with pytest.raises(EngineUnavailable, match="no such file"):
            await client.start(20.0)
        assert (await client.status()).state is EngineState.FAILED

    asyncio.run(run())
