"""Wrong types, interrupts and closed engines: the one at fault hears of it, and the others go on."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest

from glm5ray.engine.interrupts import interrupts_held
from glm5ray.engine.llm import LLM
from glm5ray.engine.results import RequestFailure, RequestResult
from glm5ray.errors import ConfigError, Glm5RayError
from glm5ray.protocol import SamplingParams
from tests.engine.conftest import MakeLLM, settings

if TYPE_CHECKING:
    from pathlib import Path

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"temperature": None}, "temperature"),
        ({"min_p": None}, "min_p"),
        ({"top_p": None}, "top_p"),
        ({"presence_penalty": None}, "presence_penalty"),
        ({"frequency_penalty": "1"}, "frequency_penalty"),
        ({"repetition_penalty": None}, "repetition_penalty"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty"),
        ({"logit_bias": None}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"stop": None}, "stop"),
        ({"stop": (b"x",)}, "stop"),
        ({"stop": [["a"]]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop_token_ids": None}, "stop_token_ids"),
        ({"stop_token_ids": 5}, "stop_token_ids"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids"),
        ({"allowed_token_ids": 5}, "allowed_token_ids"),
        ({"ignore_eos": "no"}, "ignore_eos"),
        ({"min_tokens": None}, "min_tokens"),
        ({"seed": "x"}, "seed"),
    ],
)
def test_a_field_of_the_wrong_type_fails_its_request_alone(make_tiny: MakeLLM, params: dict[str, Any], param: str):
    llm = make_tiny()
    results = llm.generate(["one", "two", "three"], [GREEDY, SamplingParams(**params), GREEDY])
    assert isinstance(results[1], RequestFailure)
    assert results[1].error.param == param
    assert all(isinstance(results[i], RequestResult) for i in (0, 2))
    assert isinstance(llm.generate(["again"], GREEDY)[0], RequestResult)


@pytest.mark.parametrize("collection", [list, set, frozenset, tuple])
def test_any_collection_of_ids_will_do(make_tiny: MakeLLM, collection: Any):
    params = SamplingParams(
        temperature=0.0,
        max_tokens=4,
        min_tokens=2,
        stop_token_ids=collection([5]),
        allowed_token_ids=collection([65, 66]),
    )
    (result,) = make_tiny().generate(["a"], params)
    assert isinstance(result, RequestResult)
    assert set(result.choices[0].token_ids) <= {65, 66}


def test_one_stop_string_is_not_a_list_of_letters():
    assert SamplingParams(stop="END").stop == ("END",)


def test_a_text_that_cannot_be_encoded_fails_alone(make_tiny: MakeLLM):
    llm = make_tiny()
    results = llm.generate(["a", "\ud800", "b"], GREEDY)
    assert [type(r) for r in results] == [RequestResult, RequestFailure, RequestResult]
    good = [{"role": "user", "content": "hi"}]
    bad: list[Any] = [[{"role": "user", "content": "\ud800"}], [], ["text"], None]
    results = llm.chat([good, *bad, good], GREEDY)
    assert [type(r) for r in results] == [RequestResult, *[RequestFailure] * 4, RequestResult]


@pytest.mark.parametrize(
    "call",
    [
        lambda llm: llm.generate("a", "x"),
        lambda llm: llm.generate(["a"], [None]),
        lambda llm: llm.generate("a", {"max_tokens": 3}),
        lambda llm: llm.generate(5),
        lambda llm: llm.chat(None),
        lambda llm: llm.chat({"role": "user"}),
        lambda llm: next(llm.stream("a", "x")),
    ],
)
def test_a_call_that_makes_no_sense_is_an_error_of_ours(make_tiny: MakeLLM, call: Any):
    with pytest.raises(Glm5RayError):
        call(make_tiny())


def test_an_llm_of_the_wrong_kind(tiny_folder: Path):
    wrong: Any = 123
    with pytest.raises(ConfigError, match="model is 123"):
        LLM(wrong)
    wrong = {"cache": {}}
    with pytest.raises(ConfigError, match="config is a dict"):
        LLM(tiny_folder, config=wrong)
    with pytest.raises(ConfigError, match=r"parallel\.tp_size is 2"):
        LLM(tiny_folder, config=settings(parallel={"tp_size": 2}))
    with pytest.raises(ConfigError, match=r"cache\.num_pages"):
        LLM(tiny_folder, config=settings(cache={"num_pages": 2**31 - 1}))


@pytest.mark.parametrize("overlap", [False, True])
def test_an_interrupt_anywhere_leaves_the_engine_usable(make_tiny: MakeLLM, overlap: bool):
    """SIGINT at many moments of a run: KeyboardInterrupt comes out, and the next call gives the same tokens as ever."""
    llm = make_tiny(scheduler={"overlap": overlap})
    prompts = [f"prompt {i}" for i in range(12)]
    expected = [r.choices[0].token_ids for r in llm.generate(prompts, GREEDY) if isinstance(r, RequestResult)]
    for delay in range(1, 16):
        timer = threading.Timer(delay * 2e-3, signal.raise_signal, [signal.SIGINT])
        timer.start()
        try:
            for _ in range(100):
                llm.generate(prompts, GREEDY)
        except KeyboardInterrupt:
            pass
        else:
            raise AssertionError("the interrupt was lost")
        finally:
            timer.join()
        results = llm.generate(prompts, GREEDY)
        assert [r.choices[0].token_ids for r in results if isinstance(r, RequestResult)] == expected


def interrupted(times: int) -> list[str]:
    """What a block that is interrupted so often got done."""
    done = []
    try:
        with interrupts_held():
            for number in range(times):
                signal.raise_signal(signal.SIGINT)
                done.append(f"after {number + 1}")
    except KeyboardInterrupt:
        done.append("interrupt")
    return done


def test_held_interrupts_come_after_the_block_and_a_second_one_at_once():
    assert interrupted(0) == []
    assert interrupted(1) == ["after 1", "interrupt"]
    assert interrupted(3) == ["after 1", "interrupt"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_step_broken_off_by_a_second_interrupt_ends_the_engine_clearly(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    def broken_off() -> None:
        raise KeyboardInterrupt

    with LLM(tiny_folder, config=settings()) as llm:
        monkeypatch.setattr(llm._core, "step", broken_off)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a"], GREEDY)
        (result,) = llm.generate(["b"], GREEDY)
    assert isinstance(result, RequestFailure)
    assert "make a new LLM" in result.error.message


def test_a_closed_llm_says_so(make_tiny: MakeLLM):
    llm = make_tiny()
    llm.close()
    llm.close()
    (result,) = llm.generate(["a"], GREEDY)
    assert isinstance(result, RequestFailure)
    assert "closed" in result.error.message
    assert "failed" not in result.error.message
    with pytest.raises(Glm5RayError, match="closed"), llm:
        pass
    assert llm.stats().num_running == 0
