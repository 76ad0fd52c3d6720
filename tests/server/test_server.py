"""Real clients against a real server: the same texts as LLM, OpenAI's errors, and nobody left running."""

from __future__ import annotations

import asyncio
import json
import random
import time
from typing import TYPE_CHECKING

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from glm5ray.engine.executor import FakeExecutor
from glm5ray.engine.results import RequestResult
from glm5ray.metrics import METRICS
from glm5ray.openai_api.answers import parse_answer
from glm5ray.openai_api.chunks import AnswerSplitter
from glm5ray.protocol import Capacity, SamplingParams
from tests.server.conftest import serving

if TYPE_CHECKING:
    from glm5ray.engine.llm import LLM

PROMPT = "The sky is"
CHAT = [{"role": "user", "content": "What is 3 plus 4?"}]


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30)


def figures(url: str) -> dict[str, float]:
    """Sums over labels of every sample of ``/metrics``."""
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics").text):
        assert family.name.removesuffix("_created") in METRICS, family.name  # the library adds when a counter began
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0) + sample.value
    return sums


def test_completions_are_those_of_llm(nano_url: str, nano: LLM) -> None:
    expected = nano.generate([PROMPT, "A dog"], SamplingParams(max_tokens=12, temperature=0.0))
    texts = [result.text for result in expected if isinstance(result, RequestResult)]
    with client_of(nano_url) as client:
        options = {"model": "nano", "max_tokens": 12, "temperature": 0.0}
        whole = client.completions.create(prompt=[PROMPT, "A dog"], **options)
        assert [choice.text for choice in whole.choices] == texts
        ids = client.completions.create(prompt=nano.tokenizer.encode(PROMPT), **options)
        assert ids.choices[0].text == texts[0]
        pieces = ["", ""]
        usage = None
        chunks = client.completions.create(
            prompt=[PROMPT, "A dog"], stream=True, stream_options={"include_usage": True}, **options
        )
        for chunk in chunks:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                pieces[choice.index] += choice.text
        assert pieces == texts
        assert usage is not None
        assert whole.usage is not None
        assert usage.completion_tokens == whole.usage.completion_tokens


def test_streamed_logprobs_are_those_of_the_whole(nano_url: str) -> None:
    options = {"model": "nano", "prompt": PROMPT, "max_tokens": 6, "temperature": 0.0, "logprobs": 2}
    with client_of(nano_url) as client:
        whole = client.completions.create(**options).choices[0].logprobs
        chunks = [c.choices[0].logprobs for c in client.completions.create(stream=True, **options)]
    assert whole is not None
    parts = [chunk for chunk in chunks if chunk is not None]
    assert [x for part in parts for x in part.tokens or ()] == whole.tokens
    assert [x for part in parts for x in part.text_offset or ()] == whole.text_offset
    joined = [x for part in parts for x in part.token_logprobs or ()]
    assert joined == pytest.approx(whole.token_logprobs, abs=1e-5)


def test_chat_streams_what_it_answers_at_once(nano_url: str) -> None:
    options = {
        "model": "nano",
        "messages": CHAT,
        "max_tokens": 20,
        "temperature": 0.0,
        "n": 2,
        "extra_body": {"chat_template_kwargs": {"enable_thinking": False}},
    }
    with client_of(nano_url) as client:
        whole = client.chat.completions.create(**options)
        texts: list[str] = ["", ""]
        reasons: list[str | None] = [None, None]
        for chunk in client.chat.completions.create(stream=True, **options):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]


def test_stream_framing(nano_url: str) -> None:
    body = {"model": "nano", "messages": CHAT, "max_tokens": 3, "stream": True}
    answer = httpx.post(f"{nano_url}/v1/chat/completions", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert chunks[-1]["choices"][0]["finish_reason"] is not None
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_errors_are_the_sdks_classes(nano_url: str) -> None:
    with client_of(nano_url) as client:
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="other", prompt="x")
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="nano", prompt="x", temperature=-1)
        assert caught.value.param == "temperature"
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model="nano", prompt=[1] * 100_000, stream=True)
    assert httpx.post(f"{nano_url}/v1/completions", content=b"{").status_code == 400
    wrong_type = httpx.post(f"{nano_url}/v1/completions", content=b"{}", headers={"content-type": "text/plain"})
    assert wrong_type.status_code == 415
    assert httpx.get(f"{nano_url}/nowhere").json()["error"]["type"] == "invalid_request_error"


def test_health_models_metrics(nano_url: str) -> None:
    assert httpx.get(f"{nano_url}/health").json()["state"] == "ready"
    assert httpx.get(f"{nano_url}/v1/models").json()["data"][0]["id"] == "nano"
    with openai.OpenAI(base_url=f"{nano_url}/v1", api_key="none", max_retries=0) as client:
        for listed in client.models.list():
            assert client.models.retrieve(listed.id) == listed
        with pytest.raises(openai.NotFoundError, match="served: nano"):
            client.models.retrieve("other/model")
    httpx.post(f"{nano_url}/v1/completions", json={"prompt": PROMPT, "max_tokens": 2})
    assert figures(nano_url)["vllm:generation_tokens_total"] >= 2


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
_NAMES = st.sampled_from(["prompt", "messages", "n", "stop", "stream", "stream_options", "logprobs", "tools", "seed"])


@given(st.dictionaries(_NAMES, _VALUES, max_size=5) | _VALUES, st.sampled_from(["completions", "chat/completions"]))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_body_breaks_the_server(nano_url: str, body: object, route: str) -> None:
    if isinstance(body, dict) and route == "completions":
        body = {"max_tokens": 1, **body}
    data = json.dumps(body).encode()
    answer = httpx.post(f"{nano_url}/v1/{route}", content=data, headers={"content-type": "application/json"})
    assert answer.status_code < 500
    if answer.status_code != 200:
        assert answer.json()["error"]["message"]


CAPACITY = Capacity(num_pages=4096, page_size=16, max_model_len=2000, vocab_size=4096, eos_token_ids=(0,))


def next_token(request_id: str, index: int, position: int) -> int:
    return 97 + position % 26


class SlowExecutor(FakeExecutor):
    """Steps that take a while, as on a device."""

    def submit(self, step):
        time.sleep(0.002)
        return super().submit(step)


def test_key_and_size_are_checked() -> None:
    with serving(FakeExecutor(CAPACITY, next_token), api_key="secret", max_body_bytes=1000) as url:
        with pytest.raises(openai.AuthenticationError), client_of(url) as client:
            client.models.list()
        headers = {"Authorization": "Bearer secret"}
        assert httpx.get(f"{url}/v1/models", headers=headers).status_code == 200
        big = {"prompt": "x" * 1000}
        assert httpx.post(f"{url}/v1/completions", json=big, headers=headers).status_code == 413


async def _leave(url: str, streams: bool) -> None:
    body = {"prompt": "abcdef", "max_tokens": 1500, "ignore_eos": True, "stream": streams}
    async with httpx.AsyncClient(timeout=30) as client:
        if not streams:
            with pytest.raises(httpx.ReadTimeout):
                await client.post(f"{url}/v1/completions", json=body, timeout=0.05)
            return
        async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
            seen = 0
            async for line in answer.aiter_lines():
                seen += line.startswith("data:")
                if seen == 3:
                    return


@pytest.mark.parametrize("times", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_a_client_that_leaves_ends_its_request(times: int) -> None:
    """Case B22."""
    kinds = [i % 2 == 0 for i in range(times)]
    random.Random(0).shuffle(kinds)

    async def run(url: str) -> None:
        for start in range(0, times, 10):
            await asyncio.gather(*(_leave(url, kind) for kind in kinds[start : start + 10]))

    with serving(SlowExecutor(CAPACITY, next_token)) as url:
        asyncio.run(run(url))
        until_s = time.monotonic() + 10
        while (now := figures(url))["vllm:num_requests_running"] + now["vllm:num_requests_waiting"]:
            assert time.monotonic() < until_s, now
            time.sleep(0.02)
        # on a busy machine some leave before the server has seen them
        assert times / 2 < now["glm5ray:requests_aborted_total"] <= times
        assert now["vllm:kv_cache_usage_perc"] == 0


def test_256_streams_at_once() -> None:
    async def one(client: openai.AsyncOpenAI) -> int:
        stream = await client.completions.create(model="nano", prompt="abc", max_tokens=8, stream=True)
        return len([chunk async for chunk in stream])

    async def run(url: str) -> list[int]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
            return await asyncio.gather(*(one(client) for _ in range(256)))

    with serving(FakeExecutor(CAPACITY, next_token)) as url:
        assert all(asyncio.run(run(url)))


def test_what_a_late_reader_gets_at_once_is_whole(nano_url: str):
    """Many streams side by side: the server falls behind, and joins the tokens of an answer."""
    body = {"model": "nano", "prompt": PROMPT, "max_tokens": 24, "temperature": 0.0, "logprobs": 1, "ignore_eos": True}
    whole = httpx.post(f"{nano_url}/v1/completions", json=body).json()["choices"][0]

    async def one(client: httpx.AsyncClient) -> list[dict]:
        async with client.stream("POST", f"{nano_url}/v1/completions", json={**body, "stream": True}) as answer:
            await asyncio.sleep(0.2)
            lines = [line.removeprefix("data: ") async for line in answer.aiter_lines() if line.startswith("data: {")]
        return [json.loads(line)["choices"][0] for line in lines]

    async def run() -> list[list[dict]]:
        async with httpx.AsyncClient(timeout=60) as client:
            return await asyncio.gather(*(one(client) for _ in range(12)))

    for choices in asyncio.run(run()):
        assert "".join(choice["text"] for choice in choices) == whole["text"]
        assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
        parts = [choice["logprobs"] for choice in choices if choice["logprobs"]]
        for field in ("tokens", "text_offset"):
            assert [value for part in parts for value in part[field]] == whole["logprobs"][field]


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"type": "string"}}}}}]
CALL_TEXT = "<tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>"


@pytest.mark.parametrize(
    "text", ["why</think>because", f"why</think>so {CALL_TEXT}", f"why{CALL_TEXT}", "a < b</think>c <"]
)
@given(data=st.data())
@settings(max_examples=25)
def test_any_split_of_an_answer_gives_its_parts(text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    splitter = AnswerSplitter(starts_in_reasoning=True, tools=TOOLS)
    parts = [splitter.push(text[a:b]) for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    *rest, calls = splitter.finish(is_complete=True)
    reasoning, content = ("".join(x) for x in zip(*parts, rest, strict=True))
    whole = parse_answer(text, starts_in_reasoning=True, is_complete=True, tools=TOOLS)
    assert (reasoning, content.strip()) == (whole.reasoning, whole.content or "")
    assert [(c["name"], json.loads(c["arguments"])) for c in calls] == [tuple(c) for c in whole.tool_calls]
