"""The scheduler by example: limits, order, sharing, preemption, endings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from glm5ray.config import SchedulerSection
from glm5ray.errors import CapacityError, RequestError
from glm5ray.protocol import FinishReason, GenerateRequest, SamplingParams, StepOutput
from glm5ray.scheduler.admission import OLDEST_EVERY
from glm5ray.scheduler.scheduler import Scheduler
from glm5ray.scheduler.sequence import State
from tests.builders import EOS, make_capacity, make_request, make_scheduler
from tests.scheduler.steps import Loop

if TYPE_CHECKING:
    from collections.abc import Callable

    from glm5ray.protocol import StepInput


# --- what is refused, and that nothing of it stays --------------------------------------------------------------------


def refused(scheduler: Scheduler, request: GenerateRequest) -> RequestError:
    before = (repr(scheduler), scheduler.stats())
    with pytest.raises(RequestError) as caught:
        scheduler.add(request)
    assert (repr(scheduler), scheduler.stats()) == before
    scheduler.check()
    return caught.value


@pytest.mark.parametrize("prompt_len", [129, 1000])
def test_a_prompt_past_the_limit_is_refused_with_both_numbers(prompt_len: int) -> None:
    error = refused(make_scheduler(), make_request(prompt=prompt_len, max_tokens=1))
    assert isinstance(error, CapacityError)
    assert (error.param, error.code, error.status) == ("prompt", "context_length_exceeded", 400)
    assert str(prompt_len) in error.message
    assert "128" in error.message


@pytest.mark.parametrize("max_tokens", [None, 1])
def test_a_prompt_at_the_limit_leaves_no_room(max_tokens: int | None) -> None:
    error = refused(make_scheduler(), make_request(prompt=128, max_tokens=max_tokens))
    assert (error.param, error.code) == ("prompt", "context_length_exceeded")


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "num_new"), [(127, None, 1), (128, 0, 0), (28, None, 100), (28, 100, 100)]
)
def test_as_many_tokens_as_the_limit_allows(prompt_len: int, max_tokens: int | None, num_new: int) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request(prompt=prompt_len, max_tokens=max_tokens))
    loop = Loop(scheduler).finish()
    assert len(loop.tokens("r0")) == num_new
    assert loop.events[-1].finish_reason is FinishReason.LENGTH


def test_max_tokens_past_the_limit_names_all_three_numbers() -> None:
    error = refused(make_scheduler(), make_request(prompt=28, max_tokens=101))
    assert error.param == "max_tokens"
    assert all(number in error.message for number in ("28", "101", "128", "at most 100"))


def test_the_setting_narrows_the_capacity() -> None:
    for setting, limit in (("auto", 128), (20, 20), (500, 128)):
        scheduler = Scheduler(SchedulerSection(max_model_len=setting), make_capacity(max_model_len=128))
        assert scheduler.limits.max_model_len == limit
        assert refused(scheduler, make_request(prompt=limit + 1)).code == "context_length_exceeded"


BAD_REQUESTS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": []}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [1, 100]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [1.0]}, "prompt"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"n": 0}, "n"),
    ({"stop_token_ids": (151645,), "min_tokens": 2}, "stop_token_ids"),
    ({"logit_bias": {100: 5.0}}, "logit_bias"),
    ({"logit_bias": {97: 101.0}}, "logit_bias"),
    ({"allowed_token_ids": ()}, "allowed_token_ids"),
    ({"min_tokens": 9, "max_tokens": 5}, "min_tokens"),
    ({"logprobs": 21}, "logprobs"),
    ({"priority": 0.5}, "priority"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_REQUESTS)
def test_a_bad_value_names_its_field_and_leaves_others_alone(fields: dict[str, Any], param: str) -> None:
    scheduler = make_scheduler()
    for i in range(3):
        scheduler.add(make_request(f"good{i}", max_tokens=6))
    loop = Loop(scheduler)
    loop.turn()
    error = refused(scheduler, make_request("bad", **fields))
    assert error.param == param
    loop.finish()
    assert [len(loop.tokens(f"good{i}")) for i in range(3)] == [6, 6, 6]


def test_what_needs_more_pages_than_there_are_is_refused_at_once() -> None:
    scheduler = make_scheduler(num_pages=4)
    assert refused(scheduler, make_request(prompt=17, max_tokens=0)).param == "prompt"
    error = refused(scheduler, make_request(prompt=10, max_tokens=8))
    assert isinstance(error, CapacityError)
    assert error.param == "max_tokens"
    assert "at most 7" in error.message
    scheduler.add(make_request("a", prompt=10, max_tokens=7))
    scheduler.add(make_request("b", prompt=10, max_tokens=None))
    loop = Loop(scheduler).finish()
    assert [len(loop.tokens(name)) for name in "ab"] == [7, 7]


def test_a_request_id_may_be_used_again_only_after_its_end() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request())
    assert refused(scheduler, make_request()).param == "request_id"
    Loop(scheduler).finish()
    scheduler.add(make_request())


# --- steps ------------------------------------------------------------------------------------------------------------


def slices(step: StepInput | None) -> list[tuple[int, int, int]]:
    assert step is not None
    return [tuple(row) for row in step.slices()]


def test_decodes_come_first_and_prefills_share_the_rest() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=10)
    scheduler.add(make_request("a", prompt=4))
    scheduler.add(make_request("b", prompt=13))
    scheduler.add(make_request("c", prompt=4))
    loop = Loop(scheduler)
    assert slices(loop.schedule()) == [(0, 0, 4), (1, 0, 6)]
    loop.update()
    assert slices(loop.schedule()) == [(0, 4, 1), (1, 6, 7), (2, 0, 2)]
    loop.update()
    assert slices(loop.schedule()) == [(0, 5, 1), (1, 13, 1), (2, 2, 2)]
    assert [new.pages for step in loop.steps for new in step.new_sequences] == [(0,), (1, 2, 3, 4), (6,)]
    assert loop.steps[1].new_pages == {0: [5]}


def test_no_more_sequences_run_than_a_step_has_tokens() -> None:
    scheduler = make_scheduler(max_num_seqs=8, max_num_batched_tokens=3)
    for name in "abcde":
        scheduler.add(make_request(name, prompt=2))
    loop = Loop(scheduler).finish()
    assert max(step.total_tokens for step in loop.steps) == 3
    assert sorted(len(loop.tokens(name)) for name in "abcde") == [4] * 5


def test_with_one_step_in_flight_no_slice_goes_past_a_limit_known_ahead() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request(prompt=3, max_tokens=3))
    loop = Loop(scheduler)
    assert slices(loop.schedule()) == [(0, 0, 3)]
    assert slices(loop.schedule()) == [(0, 3, 1)]
    loop.update()
    assert slices(loop.schedule()) == [(0, 4, 1)]
    loop.update()
    assert loop.schedule() is None
    assert scheduler.has_unfinished
    assert loop.update()[0].finish_reason is FinishReason.LENGTH


def test_a_third_step_in_flight_is_refused() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request(max_tokens=9))
    scheduler.schedule()
    scheduler.schedule()
    with pytest.raises(AssertionError, match="in flight already"):
        scheduler.schedule()


@pytest.mark.parametrize("overlapped", [False, True])
def test_a_stop_token_ends_the_answer_and_is_not_part_of_it(overlapped: bool) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("stops", prompt=4, max_tokens=20))
    scheduler.add(make_request("ignores", prompt=4, max_tokens=5, ignore_eos=True))
    scheduler.add(make_request("own", prompt=4, max_tokens=20, stop_token_ids=(7,)))
    scheduler.add(make_request("late", prompt=4, max_tokens=20, min_tokens=3))
    loop = Loop(
        scheduler, next_token=lambda name, _, at: 7 if name == "own" and at == 6 else EOS if at in (5, 9) else 1
    )
    loop.finish(overlapped=overlapped)
    ends = {event.request_id: event for event in loop.events if event.finish_reason is not None}
    assert loop.tokens("stops") == [1]
    assert (ends["stops"].finish_reason, ends["stops"].stop_token_id, ends["stops"].token_ids) == ("stop", EOS, ())
    assert loop.tokens("ignores") == [1, EOS, 1, 1, 1]
    assert loop.tokens("own") == [1]  # the model's own end, at 5, came first
    assert loop.tokens("late") == [1, EOS, 1, 1, 1]  # a stop token before min_tokens is a token


def test_results_of_workers_that_are_gone_change_nothing() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", prompt=6, max_tokens=4))
    loop = Loop(scheduler)
    loop.turn()
    loop.schedule()
    late = loop.in_flight.popleft()
    scheduler.restart(epoch=1)
    scheduler.check()
    assert scheduler.update(*late) == []
    step = loop.schedule()
    assert step is not None
    assert (step.epoch, step.step_id, step.dropped) == (1, 0, [])
    assert slices(step) == [(0, 0, 7)]  # prompt and the token that was sent
    loop.update()
    loop.finish()
    assert loop.tokens("a") == [1, 1, 1, 1]
    with pytest.raises(AssertionError, match="epoch 1 follows 1"):
        scheduler.restart(epoch=1)


def test_a_result_out_of_order_is_refused() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request(max_tokens=9))
    loop = Loop(scheduler)
    loop.schedule()
    loop.schedule()
    with pytest.raises(AssertionError, match="result 1 of step 1, the oldest in flight is 0"):
        scheduler.update(*loop.in_flight.pop())
    step, output = loop.in_flight.popleft()
    with pytest.raises(AssertionError, match=r"no token for sequences \[0\]"):
        scheduler.update(step, StepOutput(epoch=0, step_id=output.step_id, seq_ids=[], token_ids=[]))


# --- the prefix cache -------------------------------------------------------------------------------------------------


def test_a_prompt_seen_before_is_not_computed_again() -> None:
    scheduler = make_scheduler()
    for name in ("first", "second"):
        scheduler.add(make_request(name, prompt=list(range(10))))
        loop = Loop(scheduler).finish()
        first_event = loop.events[0]
        assert first_event.num_cached_tokens == (0 if name == "first" else 8)
    stats = scheduler.stats()
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (20, 8)


def test_pages_are_found_only_when_their_tokens_are_computed() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=16)
    scheduler.add(make_request("a", prompt=list(range(12))))
    loop = Loop(scheduler)
    loop.schedule()
    scheduler.add(make_request("b", prompt=list(range(12))))
    step = loop.schedule()  # a's prompt is still in flight
    assert step is not None
    assert slices(step) == [(0, 12, 1), (1, 0, 12)]


@pytest.mark.parametrize("overlapped", [False, True])
def test_what_was_decoded_is_found_too_and_at_once(overlapped: bool) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", prompt=[5, 6], max_tokens=8))
    loop = Loop(scheduler)
    cached = []
    for _ in range(8):
        while len(loop.in_flight) <= overlapped and loop.schedule() is not None:
            pass
        loop.update()
        cached.append(scheduler.stats().num_pages_cached)
    # Tokens computed: 2 with the first step, one more with each; page k is full with token 4 k.
    assert cached == [0, 0, 1, 1, 1, 1, 2, 2]


def test_the_last_token_is_computed_even_if_all_pages_are_cached() -> None:
    scheduler = make_scheduler()
    for name in "ab":
        scheduler.add(make_request(name, prompt=list(range(8))))
        loop = Loop(scheduler).finish()
    assert slices(loop.steps[0]) == [(1, 4, 4)]


def test_scoring_a_prompt_reads_no_cache_and_arrives_once() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", prompt=list(range(8))))
    Loop(scheduler).finish()
    scheduler.add(make_request("b", prompt=list(range(8)), prompt_logprobs=0))
    loop = Loop(scheduler)
    assert slices(loop.schedule()) == [(1, 0, 8)]


def test_one_prompt_of_many_answers_is_computed_once() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request(prompt=list(range(10)), n=3))
    loop = Loop(scheduler, next_token=lambda _, index, __: index)
    assert slices(loop.schedule()) == [(0, 0, 10)]
    assert scheduler.num_waiting == 2
    loop.update()
    assert slices(loop.schedule()) == [(0, 10, 1), (1, 8, 2), (2, 8, 2)]
    loop.update()
    loop.finish()
    assert [loop.tokens("r0", index) for index in range(3)] == [[0] * 4, [1] * 4, [2] * 4]


def test_without_a_prefix_cache_every_answer_computes_the_prompt() -> None:
    scheduler = make_scheduler(prefix_caching=False)
    scheduler.add(make_request(prompt=list(range(10)), n=3))
    assert slices(Loop(scheduler).schedule()) == [(0, 0, 10), (1, 0, 10), (2, 0, 10)]


@pytest.mark.parametrize("how", ["abort", "fail", "restart"])
def test_the_other_answers_go_on_when_the_first_one_ends_in_its_prompt(how: str) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    scheduler.add(make_request(prompt=list(range(10)), n=3))
    loop = Loop(scheduler, fails=lambda step: {0: "nan"} if how == "fail" and 0 in step.seq_ids else {})
    loop.turn()
    if how == "abort":
        assert [event.index for event in scheduler.abort("r0", 0)] == [0]
    if how == "restart":
        scheduler.restart(1)
    loop.finish()
    assert [len(loop.tokens("r0", index)) for index in (1, 2)] == [4, 4]


# --- failures and aborts ----------------------------------------------------------------------------------------------


def test_a_failed_sequence_ends_alone_and_poisons_nobody() -> None:
    prompt = list(range(20))
    scheduler = make_scheduler(max_num_batched_tokens=9)
    scheduler.add(make_request("good", prompt=[50, 51], max_tokens=9))
    scheduler.add(make_request("bad", prompt=prompt))
    loop = Loop(scheduler, fails=lambda step: {1: "not finite in layer 3"} if step.step_id == 2 else {})
    loop.turn()
    loop.turn()
    assert scheduler.stats().num_pages_cached > 0
    (failed,) = [event for event in loop.turn() if event.request_id == "bad"]
    assert (failed.finish_reason, failed.error_code, failed.error) == (
        "error",
        "numerical_error",
        "not finite in layer 3",
    )
    assert scheduler.stats().num_corrupted == 1
    scheduler.add(make_request("again", prompt=prompt))
    loop.finish()
    first = next(event for event in loop.events if event.request_id == "again")
    assert first.num_cached_tokens == 0
    assert len(loop.tokens("good")) == 9


def test_after_an_abort_only_confirmed_pages_are_reused() -> None:
    prompt = list(range(16))
    scheduler = make_scheduler(max_num_batched_tokens=4)
    scheduler.add(make_request("a", prompt=prompt))
    loop = Loop(scheduler)
    loop.turn()
    loop.schedule()  # the second chunk is in flight
    scheduler.abort("a")
    scheduler.check()
    loop.update()
    scheduler.add(make_request("b", prompt=prompt))
    loop.finish()
    assert next(event for event in loop.events if event.request_id == "b").num_cached_tokens == 4


@pytest.mark.parametrize("num_turns", [0, 1, 3])
@pytest.mark.parametrize("overlapped", [False, True])
def test_an_abort_gives_everything_back_and_twice_is_once(num_turns: int, overlapped: bool) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=16)
    scheduler.add(make_request("a", prompt=20, max_tokens=50, n=3))
    scheduler.add(make_request("b", prompt=5, max_tokens=3))
    loop = Loop(scheduler)
    for _ in range(num_turns):
        loop.schedule()
        if len(loop.in_flight) > overlapped:
            loop.update()
    events = scheduler.abort("a")
    scheduler.check()
    assert [(event.index, event.finish_reason, event.token_ids) for event in events] == [
        (index, FinishReason.ABORT, ()) for index in range(3)
    ]
    assert scheduler.abort("a") == scheduler.abort("never seen") == []
    while loop.in_flight:
        assert all(event.request_id == "b" for event in loop.update())
    loop.finish()
    stats = scheduler.stats()
    assert stats.num_pages_held == 0
    assert stats.num_finished == {"abort": 3, "length": 1}


def test_an_answer_ends_with_the_reason_that_the_engine_gives() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request(n=2))
    (event,) = scheduler.abort("r0", 1, FinishReason.STOP)
    assert (event.index, event.finish_reason) == (1, FinishReason.STOP)
    assert scheduler.num_unfinished == 1


def test_workers_forget_what_ended_with_the_next_step() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", max_tokens=1))
    scheduler.add(make_request("b", max_tokens=3))
    loop = Loop(scheduler).finish()
    assert [step.dropped for step in loop.steps] == [[], [0], []]


# --- order ------------------------------------------------------------------------------------------------------------


def test_first_come_first_served_ignores_priority() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    for name, priority in (("a", 5), ("b", 0), ("c", -5)):
        scheduler.add(make_request(name, priority=priority))
    assert Loop(scheduler).finish().started() == ["a", "b", "c"]


def test_lower_priority_values_run_earlier() -> None:
    scheduler = make_scheduler(max_num_seqs=1, policy="priority")
    for name, priority in (("a", 5), ("b", 0), ("c", -5), ("d", 0)):
        scheduler.add(make_request(name, priority=priority))
    assert Loop(scheduler).finish().started() == ["c", "b", "d", "a"]


def test_a_stream_of_urgent_requests_starves_nobody() -> None:
    scheduler = make_scheduler(max_num_seqs=1, policy="priority")
    scheduler.add(make_request("patient", priority=100, max_tokens=1))
    loop = Loop(scheduler)
    for number in range(OLDEST_EVERY + 2):
        scheduler.add(make_request(f"urgent{number}", priority=0, max_tokens=1))
        loop.turn()
    assert "patient" in loop.started()


def test_small_requests_pass_a_large_one_that_does_not_fit_but_not_for_ever() -> None:
    scheduler = make_scheduler(num_pages=12, max_num_seqs=32, max_skips=3, prefix_caching=False)
    scheduler.add(make_request("running", prompt=16, max_tokens=30))
    loop = Loop(scheduler)
    loop.turn()
    scheduler.add(make_request("large", prompt=32, max_tokens=1))  # 8 pages; 8 are free, less the spare one
    for number in range(20):
        scheduler.add(make_request(f"small{number}", prompt=3, max_tokens=1))
    loop.finish()
    started = loop.started()
    assert started.index("large") == 1 + 3
    assert len(started) == 22


def test_the_latest_is_preempted_and_loses_nothing() -> None:
    scheduler = make_scheduler(num_pages=9, max_num_batched_tokens=32, prefix_caching=False)
    for name in "abc":
        scheduler.add(make_request(name, prompt=8, max_tokens=12))
    loop = Loop(scheduler, next_token=lambda _, __, at: at).finish()
    assert scheduler.stats().num_preemptions >= 1
    assert loop.started()[:3] == ["a", "b", "c"]
    assert "a" not in loop.started()[1:]
    for name in "abc":
        assert loop.tokens(name) == list(range(8, 20))
    back = [new for step in loop.steps[1:] for new in step.new_sequences if new.request_id == "c"]
    assert back[0].num_prompt_tokens == 8
    assert len(back[0].token_ids) > 8


def test_of_two_priorities_the_less_urgent_is_preempted() -> None:
    scheduler = make_scheduler(num_pages=9, policy="priority", prefix_caching=False)
    scheduler.add(make_request("mild", prompt=8, max_tokens=12, priority=1))
    scheduler.add(make_request("urgent1", prompt=8, max_tokens=12))
    scheduler.add(make_request("urgent2", prompt=8, max_tokens=12))
    loop = Loop(scheduler).finish()
    assert loop.started().count("mild") > 1
    assert loop.started().count("urgent1") == 1


def test_a_hundred_thousand_may_wait() -> None:
    """A step that looked at all that wait would make this take minutes."""
    scheduler = make_scheduler(num_pages=4, max_num_seqs=4, max_num_batched_tokens=8)
    prompt = (1, 2, 3)
    sampling = SamplingParams(max_tokens=1)
    for number in range(100_000):
        scheduler.add(GenerateRequest(request_id=str(number), prompt_token_ids=prompt, sampling=sampling))
    for number in range(0, 100_000, 2):
        scheduler.abort(str(number))
    loop = Loop(scheduler)
    for _ in range(3):
        loop.turn()
    assert loop.started()[:2] == ["1", "3"]


# --- looking ----------------------------------------------------------------------------------------------------------


def running_scheduler() -> Scheduler:
    scheduler = make_scheduler(max_num_batched_tokens=20, max_num_seqs=3)
    scheduler.add(make_request("a", prompt=list(range(9)), max_tokens=20, n=3))
    scheduler.add(make_request("b", prompt=30, max_tokens=20))
    scheduler.add(make_request("c", prompt=6, max_tokens=20))
    Loop(scheduler).turn()
    scheduler.check()
    return scheduler


def _decoding(scheduler: Scheduler) -> Any:
    return scheduler._decodes.sequences[0]


CORRUPTIONS: list[tuple[Callable[[Scheduler], object], str]] = [
    (lambda s: _decoding(s).pages.pop(), "committed"),
    (lambda s: _decoding(s).pages.append(63), "free and owned"),
    (lambda s: s._pages.cache.pool._free.append(63), "duplicates"),
    (lambda s: s._pages.cache.pool._counts.__setitem__(63, 1), "reference count"),
    (lambda s: s._prefilling[0].pages.clear(), "committed"),
    (lambda s: setattr(_decoding(s), "state", State.WAITING), "decodes"),
    (lambda s: s._admission.waiting._by_urgency.clear(), "in no heap"),
    (lambda s: s._decodes.starts.__setitem__(0, 3), "has phase"),
    (lambda s: s._decodes._request_ids.__setitem__(0, "x"), "request_ids"),
    (lambda s: setattr(_decoding(s), "output", []), "another output"),
    (lambda s: setattr(_decoding(s), "last_step", 7), "ends at 7"),
    (lambda s: s._live.stop_ids.clear(), "stop tokens"),
    (lambda s: s._live._of_request.pop("b"), "requests hold"),
    (lambda s: _decoding(s).output.extend([0] * 30), "at most 29"),
    (lambda s: setattr(s._live, "num_parked", 1), "parked"),
    (lambda s: setattr(s._pages, "_may_grow", 1), "may grow by"),
    (lambda s: setattr(s._admission.waiting._members[4], "num_passes", 17), "was passed 17 times"),
    (lambda s: setattr(s._admission, "max_running", 1), "at most 1 may"),
]


@pytest.mark.parametrize(("corrupt", "message"), CORRUPTIONS)
def test_check_sees_a_corrupt_scheduler(corrupt: Callable[[Scheduler], object], message: str) -> None:
    scheduler = running_scheduler()
    corrupt(scheduler)
    with pytest.raises(AssertionError, match=message):
        scheduler.check()


def test_what_a_log_line_shows() -> None:
    scheduler = running_scheduler()
    assert repr(_decoding(scheduler)) == "Sequence(a[0] #0, prompt 9, out 1/20, 3 pages, DECODE)"
    shown = "Scheduler(step 1, 1 decode, 1 prefill, 3 waiting, PrefixCache(4 pages, 0 idle, PagePool(53 free of 64)))"
    assert repr(scheduler) == shown
    assert repr(scheduler._admission.waiting) == "WaitingQueue(3 waiting)"
    assert repr(scheduler._decodes) == "DecodeBatch(1 sequences)"
