"""Drives a scheduler with random arrivals, aborts, failures and restarts, in both loops, against the shadow worker."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import replace
from typing import TYPE_CHECKING

from glm5ray.config import SchedulerSection
from glm5ray.errors import RequestError
from glm5ray.protocol import FinishReason, GenerateRequest, SamplingParams, decode_step, encode_step, merge_outputs
from glm5ray.scheduler.data_parallel import DataParallelScheduler
from glm5ray.scheduler.scheduler import Scheduler
from tests.builders import make_capacity
from tests.scheduler.client_record import ClientRecord
from tests.scheduler.shadow_worker import ShadowWorker

if TYPE_CHECKING:
    from random import Random

    from glm5ray.protocol import StepInput, StepOutput, TokenEvent

VOCAB_SIZE = 8
EOS = 7


def next_token(request_id: str, index: int, position: int) -> int:
    """Few different tokens, so that outputs share prefixes too; about one in twelve is the end."""
    mixed = (int(request_id) * 7919 + index * 104729 + position * 1299709) % 1009
    return EOS if mixed % 12 == 0 else mixed % 3


class RandomRun:
    """One engine's life. ``rng`` decides everything, so a seed (or Hypothesis) repeats it."""

    def __init__(self, rng: Random, dp_size: int = 1) -> None:
        self.rng = rng
        self.dp_size = dp_size
        self.counts: Counter[str] = Counter()
        self.trace: list[bytes] = []
        page_size = rng.randint(1, 16)
        self.capacity = make_capacity(
            num_pages=rng.randint(2, 24),
            page_size=page_size,
            max_model_len=rng.randint(2, 48),
            vocab_size=VOCAB_SIZE,
            eos=EOS,
        )
        self.config = SchedulerSection(
            max_num_seqs=rng.randint(1, 8),
            max_num_batched_tokens=rng.randint(1, 40),
            policy=rng.choice(["fcfs", "priority"]),
            max_skips=rng.randint(0, 3),
        )
        self.is_overlapped = rng.random() < 0.6
        self.fails_often = rng.random() < 0.3
        prefix_caching = rng.random() < 0.8
        self.scheduler = (
            Scheduler(self.config, self.capacity, prefix_caching=prefix_caching)
            if dp_size == 1
            else DataParallelScheduler(self.config, self.capacity, dp_size, prefix_caching=prefix_caching)
        )
        num_slots = self.capacity.num_pages * page_size
        self.client = ClientRecord(next_token, EOS, self.capacity.max_model_len, num_slots)
        self.prefixes = [[rng.randint(0, 2) for _ in range(40)] for _ in range(2)]
        self.epoch = 0
        self.next_request = 0
        self._start_worker()

    def _start_worker(self) -> None:
        self.workers = [
            ShadowWorker(
                self.capacity,
                next_token,
                max_num_seqs=self.config.max_num_seqs,
                max_tokens=self.config.max_num_batched_tokens,
            )
            for _ in range(self.dp_size)
        ]
        self.in_flight: deque[tuple[StepInput, StepOutput]] = deque()
        self.tokens_at_start: dict[int, int] = {}
        self.names: dict[int, tuple[str, int]] = {}

    # --- one random thing at a time ---

    def run(self, num_requests: int) -> Counter[str]:
        """Until ``num_requests`` were tried and all that were accepted have ended."""
        while self.next_request < num_requests or self.scheduler.has_unfinished:
            if self.next_request < num_requests and self.rng.random() < 0.3:
                self.add()
            chance = self.rng.random()
            if chance < 0.015:
                self.abort()
            elif chance < 0.02:
                self.restart()
            else:
                self.turn()
            self.scheduler.check()
        while self.in_flight:
            self.update()
        self._check_empty()
        return self.counts

    def turn(self) -> None:
        """What an engine's loop does: keeps one step in flight, or none, while it schedules."""
        if len(self.in_flight) > (1 if self.is_overlapped and self.rng.random() < 0.8 else 0):
            self.update()
            return
        was_idle = not self.in_flight
        must_run = self.scheduler.has_unfinished and was_idle
        step = self.scheduler.schedule()
        assert step is not None or not must_run, f"nothing runs, nothing is in flight: {self.scheduler!r}"
        if step is None:
            if self.in_flight:
                self.update()
            return
        self.counts["steps"] += 1
        self._check_progress(step)
        data = encode_step(step)
        assert decode_step(data) == step
        self.trace.append(data)
        outputs = [
            worker.execute(part, fails=self._fails)
            for worker, part in zip(self.workers, step.parts or (step,), strict=True)
            if part.seq_ids
        ]
        self.in_flight.append((step, merge_outputs([replace(output, step_id=step.step_id) for output in outputs])))

    def update(self) -> None:
        step, output = self.in_flight.popleft()
        if self.rng.random() < 0.2:  # the order of the answer's columns is the worker's
            order = self.rng.sample(range(len(output.seq_ids)), len(output.seq_ids))
            output.seq_ids[:] = [output.seq_ids[i] for i in order]
            output.token_ids[:] = [output.token_ids[i] for i in order]
        events = self.scheduler.update(step, output)
        self._see(events)
        # A failure of a slice that is void already concerns nobody: only those that became an event poison their pages.
        failed = {(event.request_id, event.index) for event in events if event.finish_reason is FinishReason.ERROR}
        for seq_id in output.failed:
            if self.names[seq_id] in failed:
                self.workers[seq_id % self.dp_size].poison(seq_id)

    def add(self) -> None:
        request = self._random_request(str(self.next_request))
        self.next_request += 1
        before = (repr(self.scheduler), self.scheduler.stats())
        try:
            self.scheduler.add(request)
        except RequestError:
            assert (repr(self.scheduler), self.scheduler.stats()) == before
            assert self.scheduler.abort(request.request_id) == []
            self.counts["refused"] += 1
            return
        self.client.add(request)

    def abort(self) -> None:
        unfinished = self.client.unfinished
        if not unfinished:
            return
        request_id = self.rng.choice(unfinished)
        index = self.rng.choice([None, 0, 1])
        alive = [key for key, a in self.client.answers.items() if key[0] == request_id and a.reason is None]
        expected = [key for key in alive if index is None or key[1] == index]
        events = self.scheduler.abort(request_id, index)
        assert [(event.request_id, event.index) for event in events] == expected
        assert self.scheduler.abort(request_id, index) == []
        self.counts["aborted"] += len(events)
        self._see(events)

    def restart(self) -> None:
        self.epoch += 1
        late = list(self.in_flight)
        events = self.scheduler.restart(self.epoch)
        self.counts["quarantined"] += len(events)
        self._see(events)
        self._start_worker()
        self.counts["restarts"] += 1
        for step, output in late:
            assert self.scheduler.update(step, output) == []

    # --- what the loop checks ---

    def _see(self, events: list[TokenEvent]) -> None:
        for event in self.client.see(events):
            assert event.finish_reason is not None
            self.counts[event.finish_reason.value] += 1
            self.counts["cached"] += event.num_cached_tokens

    def _check_progress(self, step: StepInput) -> None:
        """Between two preemptions each sequence gains a token."""
        for new in (new for part in step.parts or (step,) for new in part.new_sequences):
            num_tokens = len(new.token_ids)
            assert num_tokens > self.tokens_at_start.get(new.seq_id, 0), f"{new.seq_id} came back with nothing gained"
            self.tokens_at_start[new.seq_id] = num_tokens
            self.names[new.seq_id] = (new.request_id, new.index)

    def _check_empty(self) -> None:
        stats = self.scheduler.stats()
        assert self.client.unfinished == []
        assert stats.num_running == stats.num_waiting == stats.num_pages_held == 0
        assert stats.num_pages_free + stats.num_pages_idle == self.capacity.num_pages * self.dp_size
        assert sum(stats.num_finished.values()) == len(self.client.answers)
        assert stats.num_corrupted + stats.num_quarantined == self.counts["error"]
        assert stats.num_finished.get("error", 0) == self.counts["error"]
        assert stats.num_quarantined == self.counts["quarantined"]
        self.counts["preemptions"] += stats.num_preemptions
        self.counts["hits"] += stats.prefix_hit_tokens

    def _fails(self, request_id: str, index: int, position: int) -> bool:
        return self.fails_often and (int(request_id) * 31 + index * 17 + position * 13) % 61 == 0

    def _random_request(self, request_id: str) -> GenerateRequest:
        rng = self.rng
        prompt = rng.choice(self.prefixes)[: rng.randint(0, 30)] + [rng.randint(0, 2) for _ in range(rng.randint(0, 6))]
        max_tokens = rng.choice([None, 0, 1, 2, 5, 12, 30])
        sampling = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=0 if max_tokens is None or rng.random() < 0.8 else rng.randint(0, max_tokens),
            n=rng.choice([1, 1, 1, 2, 4]),
            ignore_eos=rng.random() < 0.3,
            stop_token_ids=(2,) if rng.random() < 0.05 else (),
            logprobs=0 if rng.random() < 0.2 else None,
            prompt_logprobs=0 if rng.random() < 0.15 else None,
        )
        return GenerateRequest(
            request_id=request_id,
            prompt_token_ids=tuple(prompt),
            sampling=sampling,
            priority=rng.randint(-2, 2),
        )
