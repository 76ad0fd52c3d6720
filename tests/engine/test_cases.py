"""Faults that users reported of other engines, as tests through LLM. The numbers are those of the project's list of
cases."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from glm5ray.engine.results import RequestFailure, RequestResult
from glm5ray.protocol import FinishReason, GenerateRequest, SamplingParams
from tests.engine.conftest import EOS, VOCAB, MakeLLM, script, settle

if TYPE_CHECKING:
    from glm5ray.engine.llm import LLM

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def ok(result: RequestResult | RequestFailure) -> RequestResult:
    assert isinstance(result, RequestResult), result
    return result


def failed(result: RequestResult | RequestFailure) -> RequestFailure:
    assert isinstance(result, RequestFailure), result
    return result


def one(llm: LLM, prompt, params: SamplingParams) -> RequestResult:
    return ok(llm.generate([prompt], params)[0])


def tokens(result: RequestResult | RequestFailure) -> tuple[int, ...]:
    return ok(result).choices[0].token_ids


# --- lengths ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [129, 1000])
def test_b01_a_prompt_longer_than_the_limit(make_tiny: MakeLLM, length: int):
    llm = make_tiny()
    error = failed(llm.generate(["a" * length], SamplingParams(max_tokens=1))[0]).error
    assert error.code == "context_length_exceeded"
    assert error.status == 400
    assert str(length) in error.message
    assert "128" in error.message
    assert len(tokens(llm.generate(["a"], GREEDY)[0])) == 8


def test_b01_the_limit_is_what_fits(make_tiny: MakeLLM):
    llm = make_tiny(cache={"num_pages": 6}, scheduler={"max_model_len": "auto"})
    assert llm.capacity.max_model_len == 96
    error = failed(llm.generate(["a" * 100], SamplingParams(max_tokens=1))[0]).error
    assert error.code == "context_length_exceeded"
    assert "100" in error.message
    assert "96" in error.message


def test_b02_a_prompt_exactly_at_the_limit(make_tiny: MakeLLM):
    llm = make_tiny()
    almost = one(llm, "a" * 127, SamplingParams(temperature=0.0, ignore_eos=True))
    assert len(almost.choices[0].token_ids) == 1
    assert almost.choices[0].finish_reason is FinishReason.LENGTH
    failed(llm.generate(["a" * 128], SamplingParams())[0])
    failed(llm.generate(["a" * 128], SamplingParams(max_tokens=1))[0])
    scored = one(llm, "a" * 128, SamplingParams(max_tokens=0, prompt_logprobs=1))
    assert len(scored.prompt_logprobs) == 127
    assert scored.choices[0].token_ids == ()


def test_b03_one_bad_prompt_does_not_take_the_others(make_tiny: MakeLLM):
    llm = make_tiny()
    prompts = ["one", "two", "x" * 1000, "four", "five"]
    results = llm.generate(prompts, GREEDY)
    assert [isinstance(r, RequestFailure) for r in results] == [False, False, True, False, False]
    for prompt, result in zip(prompts, results, strict=True):
        if isinstance(result, RequestResult):
            assert tokens(result) == tokens(llm.generate([prompt], GREEDY)[0])


@pytest.mark.parametrize("bad", [None, 7, {"a": 1}, [1, "x"], [1.5], ["a"], b"bytes", [], ""])
def test_b03_a_prompt_of_the_wrong_kind(make_tiny: MakeLLM, bad):
    results = make_tiny().generate(["one", bad, "two"], GREEDY)
    assert failed(results[1]).error.param == "prompt"
    assert len(tokens(results[0])) == len(tokens(results[2])) == 8


@pytest.mark.parametrize(("max_tokens", "expected"), [(None, 100), (0, 0), (100, 100), (3, 3)])
def test_b04_max_tokens(make_tiny: MakeLLM, max_tokens, expected):
    result = one(make_tiny(), "p" * 28, SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens))
    assert len(result.choices[0].token_ids) == expected
    assert result.choices[0].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("max_tokens", [101, -1, "ten", 1.5, True])
def test_b04_max_tokens_refused(make_tiny: MakeLLM, max_tokens):
    error = failed(make_tiny().generate(["p" * 28], SamplingParams(max_tokens=max_tokens))[0]).error
    assert error.param == "max_tokens"
    assert error.status == 400
    if max_tokens == 101:
        assert all(number in error.message for number in ("28", "101", "128"))


# --- ids --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "params", "param"),
    [
        ([-1], SamplingParams(), "prompt"),
        ([272], SamplingParams(), "prompt"),
        ("a", SamplingParams(stop_token_ids=(151645,), min_tokens=2), "stop_token_ids"),
        ("a", SamplingParams(logit_bias={272: 5}), "logit_bias"),
        ("a", SamplingParams(logit_bias={"abc": 1}), "logit_bias"),  # pyright: ignore[reportArgumentType]
        ("a", SamplingParams(logit_bias={97: 101}), "logit_bias"),
        ("a", SamplingParams(allowed_token_ids=()), "allowed_token_ids"),
        ("a", SamplingParams(allowed_token_ids=(EOS,), min_tokens=1), "allowed_token_ids"),
        ("a", SamplingParams(temperature=float("nan")), "temperature"),
        ("a", SamplingParams(top_p=0.0), "top_p"),
        ("a", SamplingParams(n=0), "n"),
        ("a", SamplingParams(logprobs=-1), "logprobs"),
        ("a", SamplingParams(logprobs=21), "logprobs"),
        ("a", SamplingParams(seed=2**63), "seed"),
        ("a", SamplingParams(stop=("",)), "stop"),
    ],
)
def test_b06_ids_and_ranges(make_tiny: MakeLLM, prompt, params, param):
    llm = make_tiny()
    good = ["first", "second", "third"]
    undisturbed = [tokens(r) for r in llm.generate(good, GREEDY)]
    results = llm.generate([*good, prompt], [GREEDY, GREEDY, GREEDY, params])
    assert [tokens(r) for r in results[:3]] == undisturbed
    assert failed(results[3]).error.param == param


# --- text -------------------------------------------------------------------------------------------------------------

ALPHABET = b"Here is the English alphabet: ABC"


@pytest.mark.parametrize("overlap", [False, True])
def test_b09_a_stop_string_across_tokens(make_written: MakeLLM, overlap: bool):
    prompt = ALPHABET.decode()
    llm = make_written(script(ALPHABET, b"DEFGHIJKL"), scheduler={"overlap": overlap})
    params = SamplingParams(temperature=0.0, stop=("DEFGHIJ",))
    choice = one(llm, prompt, params).choices[0]
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("", FinishReason.STOP, "DEFGHIJ")
    assert len(choice.token_ids) == 7
    deltas = list(llm.stream(prompt, params))
    assert "".join(d.text for d in deltas) == ""
    assert deltas[-1].finish_reason is FinishReason.STOP
    kept = one(llm, prompt, replace(params, include_stop_str_in_output=True)).choices[0]
    assert kept.text == "DEFGHIJ"


def test_b09_almost_a_stop_string(make_written: MakeLLM):
    llm = make_written(script(ALPHABET, b"DEFGHxIJ"))
    params = SamplingParams(temperature=0.0, stop=("DEFGHIJ",))
    choice = one(llm, ALPHABET.decode(), params).choices[0]
    assert (choice.text, choice.finish_reason) == ("DEFGHxIJ", FinishReason.STOP)
    assert "".join(d.text for d in llm.stream(ALPHABET.decode(), params)) == "DEFGHxIJ"


@pytest.mark.parametrize(("then_eos", "reason"), [(False, FinishReason.LENGTH), (True, FinishReason.STOP)])
def test_b10_text_held_back_at_the_end(make_written: MakeLLM, then_eos: bool, reason: FinishReason):
    llm = make_written(script(b"p", b"abcST", then_eos=then_eos))
    params = SamplingParams(temperature=0.0, stop=("STOP",), max_tokens=6 if then_eos else 5)
    choice = one(llm, "p", params).choices[0]
    assert (choice.text, choice.finish_reason) == ("abcST", reason)
    deltas = list(llm.stream("p", params))
    assert "".join(d.text for d in deltas) == "abcST"
    assert deltas[-1].finish_reason is reason


def test_b18_a_stop_string_before_min_tokens_does_not_end_the_text(make_written: MakeLLM):
    llm = make_written(script(b"p", b"abSTOPabSTOP"))
    choice = one(llm, "p", SamplingParams(temperature=0.0, stop=("STOP",), min_tokens=8, max_tokens=20)).choices[0]
    assert (choice.text, choice.stop_reason) == ("abSTOPab", "STOP")


# --- seeds and many answers -------------------------------------------------------------------------------------------


def test_b15_a_seed_with_neighbours(make_tiny: MakeLLM):
    prompt = "The capital of France is"
    seeded = SamplingParams(seed=42, temperature=0.8, max_tokens=16, ignore_eos=True)
    alone = tokens(make_tiny().generate([prompt], seeded)[0])
    other = SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True)
    for overlap in (False, True):
        llm = make_tiny(scheduler={"overlap": overlap})
        for neighbours in (1, 7):
            crowd = [prompt] + [f"neighbour {i} " * (i + 1) for i in range(neighbours)]
            results = llm.generate(crowd, [seeded, *[other] * neighbours])
            assert tokens(results[0]) == alone
    tight = make_tiny(cache={"num_pages": 8})
    crowd = ["a long neighbour " * 2, "another long one " * 2, prompt]
    long = replace(other, max_tokens=60)
    assert tokens(tight.generate(crowd, [long, long, seeded])[2]) == alone


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_b17_several_answers(make_tiny: MakeLLM, policy: str):
    llm = make_tiny(scheduler={"policy": policy})
    prompt = "x" * 40
    params = SamplingParams(n=3, seed=7, temperature=1.0, max_tokens=12, ignore_eos=True)
    request = GenerateRequest(request_id="r", prompt_token_ids=tuple(prompt.encode()), sampling=params, priority=1)
    first = ok(next(iter(llm.run([request]))))
    assert [c.index for c in first.choices] == [0, 1, 2]
    assert len({c.token_ids for c in first.choices}) == 3
    assert first.num_prompt_tokens == 40
    again = ok(next(iter(llm.run([request]))))
    assert [c.token_ids for c in again.choices] == [c.token_ids for c in first.choices]
    greedy = one(llm, prompt, replace(params, temperature=0.0))
    assert len({c.token_ids for c in greedy.choices}) == 1


def test_b17_the_prompt_is_prefilled_once(make_tiny: MakeLLM):
    llm = make_tiny()
    result = one(llm, "y" * 40, SamplingParams(n=3, seed=7, max_tokens=4, ignore_eos=True))
    assert result.num_cached_tokens == 0
    # two whole pages come from the first answer; the eight tokens of the last, partial page are computed by each
    prompt_tokens, decodes = 40 + 2 * 8, 3 * 3
    assert llm.stats().num_tokens_scheduled == prompt_tokens + decodes


def test_b17_leaving_frees_all_answers(make_tiny: MakeLLM):
    llm = make_tiny()
    stream = llm.stream("z" * 40, SamplingParams(n=3, max_tokens=80, ignore_eos=True))
    for _ in range(4):
        next(stream)
    stream.close()
    settle(llm)


def test_b18_min_tokens(make_written: MakeLLM):
    prompt = b"q" * 40
    llm = make_written(script(prompt, b"x"))
    base = SamplingParams(temperature=0.0, min_tokens=5, max_tokens=20)
    assert len(tokens(llm.generate([prompt.decode()], base)[0])) >= 5
    with_stop = one(llm, prompt.decode(), replace(base, stop_token_ids=(120,)))
    assert len(with_stop.choices[0].token_ids) >= 5
    assert 120 not in with_stop.choices[0].token_ids[:5]
    assert len(tokens(llm.generate([prompt.decode()], replace(base, ignore_eos=True))[0])) == 20
    error = failed(llm.generate(["q"], SamplingParams(min_tokens=9, max_tokens=5))[0]).error
    assert error.param == "min_tokens"


# --- log-probabilities ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [16, 17, 33])
@pytest.mark.parametrize("chunk", [8, 64])
def test_b20_prompt_logprobs_on_a_warm_cache(make_tiny: MakeLLM, length: int, chunk: int):
    llm = make_tiny(scheduler={"max_num_batched_tokens": chunk, "max_num_seqs": 8})
    prompt = ("logprobs of a prompt " * 4)[:length]
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=2, prompt_logprobs=2, ignore_eos=True)
    first, second = one(llm, prompt, params), one(llm, prompt, params)
    for result in (first, second):
        assert len(result.prompt_logprobs) == length - 1
        assert [entry.token_id for entry in result.prompt_logprobs] == list(prompt.encode()[1:])
        assert len(result.choices[0].logprobs) == 1
    for a, b in zip(
        first.prompt_logprobs + first.choices[0].logprobs,
        second.prompt_logprobs + second.choices[0].logprobs,
        strict=True,
    ):
        assert a.logprob == pytest.approx(b.logprob, abs=1e-5)
        assert len(a.top) == 2
    assert one(llm, prompt, replace(params, logprobs=0)).choices[0].logprobs[0].top == ()


# --- penalties with the overlapped loop -------------------------------------------------------------------------------

FLAT = torch.full((VOCAB,), -100.0)
FLAT[[97, 98, 99]] = torch.tensor([5.0, 4.5, 4.0])


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"frequency_penalty": 0.4}, "aababcab"),
        ({"presence_penalty": 2.0}, "abcaaaaa"),
        ({"repetition_penalty": 1.3}, "abcaaaaa"),
        ({"logit_bias": {98: 1.0}}, "bbbbbbbb"),
        ({"min_p": 0.9, "temperature": 0.5}, "aaaaaaaa"),
    ],
)
def test_b21_penalties(make_written: MakeLLM, overlap: bool, batch: int, changes: dict, expected: str):
    llm = make_written(lambda token, position: FLAT, scheduler={"overlap": overlap})
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 8, "seed": 5, **changes})
    assert [ok(r).text for r in llm.generate(["P"] * batch, params)] == [expected] * batch


@pytest.mark.parametrize("overlap", [False, True])
def test_b21_penalties_across_a_preemption(make_written: MakeLLM, overlap: bool):
    llm = make_written(lambda token, position: FLAT, cache={"num_pages": 9}, scheduler={"overlap": overlap})
    params = SamplingParams(temperature=0.0, frequency_penalty=0.4, max_tokens=40)
    alone = ok(llm.generate(["P" * 14], params)[0]).text
    assert alone.startswith("aababcab")
    results = llm.generate(["P" * 14] * 4, params)
    assert [ok(r).text for r in results] == [alone] * 4
    assert llm.stats().num_preemptions > 0


# --- preemption -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
def test_b24_preemption_does_not_change_the_text(make_tiny: MakeLLM, overlap: bool):
    prompts = [f"request number {i}: ".ljust(40, "abcdefgh"[i]) for i in range(8)]
    params = [
        SamplingParams(
            temperature=0.0 if i % 2 else 0.9,
            seed=i,
            max_tokens=60,
            ignore_eos=True,
            frequency_penalty=0.2 * (i % 3),
            logprobs=1 if i % 4 == 0 else None,
            stop=("never there",) if i == 5 else (),
        )
        for i in range(8)
    ]
    roomy = make_tiny(cache={"num_pages": 200}, scheduler={"overlap": overlap}).generate(prompts, params)
    tight = make_tiny(scheduler={"overlap": overlap})
    preempted = 0
    for _ in range(4):
        results = tight.generate(prompts, params)
        for expected, result in zip(roomy, results, strict=True):
            a, b = ok(expected).choices[0], ok(result).choices[0]
            assert (a.token_ids, a.text) == (b.token_ids, b.text)
            assert [x.logprob for x in a.logprobs] == pytest.approx([x.logprob for x in b.logprobs], abs=1e-5)
        preempted = tight.stats().num_preemptions
        if preempted >= 10:
            break
    assert preempted >= 10


def test_b24_no_token_twice_in_a_stream(make_tiny: MakeLLM):
    llm = make_tiny(cache={"num_pages": 10})
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    alone = tokens(llm.generate(["s" * 40], params)[0])
    noise = llm.stream("t" * 40, params)
    stream = llm.stream("s" * 40, params)
    streamed: list[int] = []
    for delta in stream:
        streamed += delta.token_ids
        next(noise, None)
    assert tuple(streamed) == alone
    noise.close()


# --- poisoned prefixes ------------------------------------------------------------------------------------------------


def test_b25_an_aborted_prefill_leaves_nothing_wrong(make_tiny: MakeLLM):
    prompt = "p" * 20 + "q" * 44
    cold = tokens(make_tiny().generate([prompt], GREEDY)[0])
    llm = make_tiny(scheduler={"max_num_batched_tokens": 16})
    request = GenerateRequest(request_id="r1", prompt_token_ids=tuple(prompt.encode()), sampling=GREEDY)
    llm._core.add(request)
    llm._pump()
    llm._core.abort("r1")
    assert tokens(llm.generate([prompt], GREEDY)[0]) == cold


def test_b25_a_prefix_shared_while_it_is_computed(make_tiny: MakeLLM):
    llm = make_tiny(scheduler={"max_num_batched_tokens": 16})
    prompts = ["p" * 64, "p" * 60 + "tail", "p" * 64 + "more"]
    cold = [tokens(make_tiny().generate([p], GREEDY)[0]) for p in prompts]
    assert [tokens(r) for r in llm.generate(prompts, GREEDY)] == cold


@pytest.mark.parametrize("overlap", [False, True])
def test_b25_a_sequence_of_nan_ends_alone(make_tiny: MakeLLM, monkeypatch: pytest.MonkeyPatch, overlap: bool):
    llm = make_tiny(scheduler={"overlap": overlap, "max_num_batched_tokens": 16})
    good, bad = "g" * 40, "b" * 63 + "!"
    cold_good, cold_bad = (tokens(make_tiny().generate([p], GREEDY)[0]) for p in (good, bad))
    model = llm._core._executor._worker._model  # pyright: ignore[reportAttributeAccessIssue]
    forward = model.forward_hidden

    def poisoned(batch, cache):
        hidden = forward(batch, cache)
        rows = batch.token_ids_T == ord("!")
        cache.latent[0][batch.slots_T[rows]] = torch.nan  # what a broken kernel would leave behind
        hidden[rows] = torch.nan
        return hidden

    monkeypatch.setattr(model, "forward_hidden", poisoned)
    results = llm.generate([good, bad, good + "x"], GREEDY)
    assert tokens(results[0]) == cold_good
    error = failed(results[1]).error
    assert (error.code, error.status) == ("numerical_error", 500)
    assert llm.stats().num_corrupted == 1
    monkeypatch.undo()
    again = one(llm, bad, GREEDY)
    assert again.choices[0].token_ids == cold_bad
    assert again.num_cached_tokens == 0


# --- stalls -----------------------------------------------------------------------------------------------------------


def test_b27_small_requests_pass_a_large_one_but_not_for_ever(make_tiny: MakeLLM):
    llm = make_tiny(cache={"num_pages": 9, "prefix_caching": False}, scheduler={"max_num_batched_tokens": 128})
    short = replace(GREEDY, max_tokens=4)
    holder = GenerateRequest(request_id="holder", prompt_token_ids=(65,) * 20, sampling=replace(GREEDY, max_tokens=60))
    head = GenerateRequest(request_id="head", prompt_token_ids=(66,) * 120, sampling=short)
    small = [GenerateRequest(request_id=f"s{i}", prompt_token_ids=(67,) * 8, sampling=short) for i in range(60)]
    order = [ok(r).request_id for r in llm.run([holder, head, *small])]
    assert sorted(order) == sorted(["holder", "head", *(r.request_id for r in small)])
    assert 1 <= order.index("head") <= 1 + 16 + 8
