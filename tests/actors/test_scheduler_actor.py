"""An engine behind a scheduler actor: the same events as in one process, whatever happens to clients and scheduler."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from typing import TYPE_CHECKING

import pytest

from glm5ray.engine.client import EngineState
from glm5ray.errors import CapacityError, ConfigError, EngineUnavailable, RequestError
from glm5ray.protocol import GenerateRequest, SamplingParams
from tests.actors import engines
from tests.actors.engines import make_spec, next_token

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from glm5ray.actors.client import RayEngineClient
    from glm5ray.actors.spec import EngineSpec

pytestmark = [
    pytest.mark.ray,
    pytest.mark.usefixtures("ray_cluster"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


def request(name: str, max_tokens: int = 5, n: int = 1) -> GenerateRequest:
    params = SamplingParams(max_tokens=max_tokens, n=n)
    return GenerateRequest(request_id=name, prompt_token_ids=(1, 2, 3), sampling=params)


def expected(name: str, max_tokens: int = 5, index: int = 0) -> list[int]:
    return [next_token(name, index, position) for position in range(3, 3 + max_tokens)]


@contextlib.contextmanager
def running(spec: EngineSpec, **options: bool) -> Iterator[None]:
    from glm5ray.actors.launch import start_from_spec, stop_engine

    start_from_spec(spec, timeout_s=60.0, **options)
    try:
        yield
    finally:
        assert stop_engine(spec.engine)
        assert not stop_engine(spec.engine), "the second stop finds nothing to stop"


def with_client(engine: str, body: Callable[[RayEngineClient], Awaitable[None]], timeout_s: float = 60) -> None:
    from glm5ray.actors.launch import connect

    async def run() -> None:
        async with asyncio.timeout(timeout_s), connect(engine) as client:
            await body(client)

    asyncio.run(run())


async def tokens_of(client: RayEngineClient, asked: GenerateRequest) -> dict[int, tuple[list[int], str]]:
    answers: dict[int, tuple[list[int], str]] = {}
    async for event in client.generate(asked):
        tokens, reason = answers.get(event.index, ([], ""))
        assert reason == "", f"{event} after the end"
        answers[event.index] = (tokens + list(event.token_ids), event.error_code or event.finish_reason or "")
    return answers


async def idle(client: RayEngineClient) -> None:
    """Until nothing runs."""
    stats = (await client.status()).scheduler
    while stats.num_running or stats.num_waiting:
        await asyncio.sleep(0.02)
        stats = (await client.status()).scheduler
    assert stats.num_pages_held == 0


def test_requests_get_their_tokens_and_leaving_ends_them():
    async def body(client: RayEngineClient) -> None:
        answers = await asyncio.gather(*(tokens_of(client, request(f"r{i}", 20, n=1 + i % 3)) for i in range(20)))
        for i, answer in enumerate(answers):
            assert answer == {k: (expected(f"r{i}", 20, k), "length") for k in range(1 + i % 3)}
        info = await client.info()
        assert (info.engine, info.model_path, info.capacity) == ("plain", "nano", engines.CAPACITY)
        with pytest.raises(CapacityError, match="max_tokens may be at most 117"):
            await tokens_of(client, request("long", 500))

        events = client.generate(request("left", 110))
        await anext(events)
        with pytest.raises(RequestError, match="in use"):
            await tokens_of(client, request("left"))
        await events.aclose()
        assert await tokens_of(client, request("left")) == {0: (expected("left"), "length")}
        await idle(client)
        assert (await client.status()).scheduler.num_finished["abort"] == 1

    with running(make_spec("plain")):
        from glm5ray.actors.launch import list_engines, start_from_spec

        assert "plain" in list_engines()
        with pytest.raises(ConfigError, match="runs already"):
            start_from_spec(make_spec("plain"))
        with_client("plain", body)
        with_client("plain", body_of_a_second_client)
        with_client("plain", body_of_a_client_that_pauses, timeout_s=20)


async def body_of_a_client_that_pauses(client: RayEngineClient) -> None:
    """It is made known anew, while its last poll may still wait for news of what it was before."""
    from glm5ray.actors.client import FRESH_S

    for i in range(3):
        assert await tokens_of(client, request(f"p{i}")) == {0: (expected(f"p{i}"), "length")}
        await asyncio.sleep(FRESH_S + 0.1)


async def body_of_a_second_client(client: RayEngineClient) -> None:
    """Another client may use the same ids, at the same time as well."""
    from glm5ray.actors.launch import connect

    async with connect("plain") as other:
        ends = await asyncio.gather(tokens_of(client, request("same", 30)), tokens_of(other, request("same", 30)))
    assert ends == [{0: (expected("same", 30), "length")}] * 2


@pytest.mark.slow
def test_dead_workers_are_a_pause_and_poison_fails_alone():
    async def body(client: RayEngineClient) -> None:
        names = [f"r{i}" for i in range(6)]
        *answers, poison = await asyncio.gather(
            *(tokens_of(client, request(name, 30)) for name in names), tokens_of(client, request("poison", 30))
        )
        assert answers == [{0: (expected(name, 30), "length")} for name in names]
        assert poison[0] == ([], "quarantined")
        status = await client.status()
        assert status.state is EngineState.READY
        assert status.num_restarts >= 3

    with running(make_spec("dying", engines.dying)):
        with_client("dying", body)


@pytest.mark.slow
def test_a_client_that_vanishes_leaves_nothing_running():
    async def body(client: RayEngineClient) -> None:
        events = client.generate(request("left", 110))
        await anext(events)
        gone, client._client_id = client._client_id, None  # as a process that was killed: it says nothing more
        assert gone is not None
        assert client._poller is not None
        client._poller.cancel()
        await idle(client)
        assert (await client.status()).scheduler.num_finished == {"abort": 1}
        await events.aclose()

    with running(make_spec("vanish", client_timeout_s=0.2)):
        with_client("vanish", body)


@pytest.mark.slow
def test_a_scheduler_that_dies_comes_back_and_nobody_hangs(tmp_path):
    async def body(client: RayEngineClient) -> None:
        before = (await client.status()).epoch
        ends = await asyncio.gather(
            *(tokens_of(client, request(f"r{i}", 60)) for i in range(4)), return_exceptions=True
        )
        assert [type(end) for end in ends] == [EngineUnavailable] * 4
        while True:
            try:
                answer = await tokens_of(client, request("later", 60))
                break
            except EngineUnavailable:
                await asyncio.sleep(0.1)
        assert answer == {0: (expected("later", 60), "length")}
        assert (await client.status()).epoch > before

    spec = make_spec("suicidal", partial(engines.suicidal, str(tmp_path / "died")))
    with running(spec):
        with_client("suicidal", body)


@pytest.mark.slow
def test_an_engine_that_does_not_start_says_why_and_leaves_nothing():
    from glm5ray.actors.launch import connect, list_engines, start_from_spec

    told: list[str] = []
    with pytest.raises(EngineUnavailable, match="no such file"):
        start_from_spec(make_spec("broken", engines.unloadable), progress=told.append, timeout_s=60.0)
    assert told
    assert "broken" not in list_engines()
    with pytest.raises(EngineUnavailable, match="no engine called 'broken'"):
        connect("broken")


@pytest.mark.slow
def test_workers_do_not_inherit_that_the_scheduler_sees_no_gpu():
    from glm5ray.actors.launch import start_from_spec

    with pytest.raises(EngineUnavailable, match="workers inherit") as told:
        start_from_spec(make_spec("inherits", engines.telling_what_workers_inherit), timeout_s=60.0)
    assert "CUDA_VISIBLE_DEVICES" not in str(told.value)


@pytest.mark.slow
def test_stopping_ends_open_requests():
    from glm5ray.actors.launch import stop_engine

    async def body(client: RayEngineClient) -> None:
        events = client.generate(request("r", 110))
        await anext(events)
        stopped = asyncio.ensure_future(asyncio.to_thread(stop_engine, "stops"))
        with pytest.raises(EngineUnavailable):
            async for _ in events:
                pass
        assert await stopped

    from glm5ray.actors.launch import start_from_spec

    start_from_spec(make_spec("stops"), timeout_s=60.0)
    with_client("stops", body)
