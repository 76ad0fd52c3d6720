"""The wire format: every message comes back as it went, and strangers are refused."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm5ray.errors import RequestError
from glm5ray.protocol import (
    FinishReason,
    GenerateRequest,
    NewSequence,
    SamplingParams,
    StepInput,
    StepOutput,
    TokenEvent,
    TokenLogprobs,
    decode_events,
    decode_output,
    decode_request,
    decode_step,
    encode_events,
    encode_output,
    encode_request,
    encode_step,
)

ids = st.integers(0, 2**40)
id_lists = st.lists(ids, max_size=5)
floats = st.floats(-100, 100)
samplings = st.builds(
    SamplingParams,
    max_tokens=st.none() | ids,
    temperature=floats,
    logit_bias=st.dictionaries(ids, floats, max_size=3),
    allowed_token_ids=st.none() | id_lists.map(tuple),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    stop=st.lists(st.text(max_size=4), max_size=2).map(tuple),
    stop_token_ids=id_lists.map(tuple),
    ignore_eos=st.booleans(),
)
new_sequences = st.builds(
    NewSequence,
    seq_id=ids,
    request_id=st.text(max_size=8),
    index=ids,
    token_ids=id_lists.map(tuple),
    num_prompt_tokens=ids,
    sampling=samplings,
    pages=id_lists.map(tuple),
)


@st.composite
def steps(draw: Any) -> StepInput:
    count = draw(st.integers(0, 5))
    column = st.lists(ids, min_size=count, max_size=count)
    return StepInput(
        epoch=draw(ids),
        step_id=draw(ids),
        seq_ids=draw(column),
        starts=draw(column),
        num_tokens=draw(column),
        new_sequences=tuple(draw(st.lists(new_sequences, max_size=2))),
        new_pages=draw(st.dictionaries(ids, id_lists, max_size=3)),
        dropped=draw(id_lists),
    )


logprobs = st.builds(TokenLogprobs, ids, floats, st.lists(st.tuples(ids, floats), max_size=2).map(tuple), ids)
outputs = st.builds(
    StepOutput,
    epoch=ids,
    step_id=ids,
    seq_ids=id_lists,
    token_ids=id_lists,
    logprobs=st.dictionaries(ids, logprobs, max_size=2),
    prompt_logprobs=st.dictionaries(ids, st.lists(logprobs, max_size=2).map(tuple), max_size=2),
    failed=st.dictionaries(ids, st.text(max_size=8), max_size=2),
    duration_s=floats,
    from_graph=st.booleans(),
)
requests = st.builds(
    GenerateRequest,
    request_id=st.text(max_size=8),
    prompt_token_ids=id_lists.map(tuple),
    sampling=samplings,
    priority=st.integers(-10, 10),
)


@given(steps())
def test_steps_come_back(step: StepInput) -> None:
    assert decode_step(encode_step(step)) == step
    assert step.total_tokens == sum(entry.num_tokens for entry in step.slices())


@given(outputs)
def test_outputs_come_back(output: StepOutput) -> None:
    assert decode_output(encode_output(output)) == output


@given(requests)
def test_requests_come_back(request: GenerateRequest) -> None:
    decoded = decode_request(encode_request(request))
    assert decoded == request
    assert isinstance(decoded.sampling.stop, tuple)


@pytest.mark.parametrize(
    ("encode", "decode", "message"),
    [
        (encode_step, decode_step, StepInput(epoch=0, step_id=0, seq_ids=[], starts=[], num_tokens=[])),
        (encode_output, decode_output, StepOutput(epoch=0, step_id=0, seq_ids=[], token_ids=[])),
        (encode_request, decode_request, GenerateRequest(request_id="r", prompt_token_ids=(1,))),
    ],
)
def test_another_version_is_refused(encode: Any, decode: Any, message: Any) -> None:
    values = msgpack.unpackb(encode(message), strict_map_key=False)
    holder = values if isinstance(values[0], int) else values[0]
    holder[0] += 1
    with pytest.raises(ValueError, match="protocol version"):
        decode(msgpack.packb(values))


@pytest.mark.parametrize(
    ("field", "value", "part"),
    [
        ("temperature", 2.5, "from 0 to 2"),
        ("top_k", 2**40, "from -1 to 2147483647"),
        ("top_p", 0.0, "above 0"),
        ("n", 0, "from 1 to 128"),
        ("repetition_penalty", 0.0, "from 0.01 to 10"),
        ("logprobs", 21, "at most 20"),
        ("prompt_logprobs", -1, "at least 0"),
        ("seed", "x", "whole number"),
        ("stop_token_ids", (272,), "from 0 to 271"),
        ("logit_bias", {97: 101.0}, "-100 to 100"),
        ("allowed_token_ids", (), "is empty"),
        ("stop", ("",), "empty string"),
    ],
)
def test_params_out_of_range(field: str, value: Any, part: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value}).validate(vocab_size=272)
    assert caught.value.param == field
    assert part in caught.value.message


events = st.builds(
    TokenEvent,
    request_id=st.sampled_from(["a", "b", "ü/3"]),
    index=st.integers(0, 3),
    token_ids=id_lists.map(tuple),
    finish_reason=st.none() | st.sampled_from(FinishReason),
    stop_token_id=st.none() | ids,
    logprobs=st.lists(logprobs, max_size=2).map(tuple),
    prompt_logprobs=st.lists(logprobs, max_size=2).map(tuple),
    num_cached_tokens=ids,
    error=st.none() | st.text(max_size=8),
    error_code=st.none() | st.text(max_size=8),
)
plain_events = st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 3), id_lists.map(tuple)).map(
    lambda values: TokenEvent(*values)
)


@given(st.lists(events | plain_events, max_size=12))
def test_events_come_back_as_they_went(sent: list[TokenEvent]):
    received = decode_events(encode_events(sent))
    assert received == sent
    assert all(
        type(event.finish_reason) is type(other.finish_reason) for event, other in zip(received, sent, strict=True)
    )


def test_events_of_another_version_are_refused():
    with pytest.raises(ValueError, match="protocol version"):
        decode_events(msgpack.packb([99, [], [], []]))
