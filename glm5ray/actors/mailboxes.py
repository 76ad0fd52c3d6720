"""The clients of a scheduler actor: whose request is whose, and the events that wait to be fetched."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from glm5ray.protocol import encode_events

if TYPE_CHECKING:
    from collections.abc import Iterable

    from glm5ray.protocol import GenerateRequest, TokenEvent

_MARK = "/"
"""Between a client's id and its request's, inside the engine. No client id has one."""


class Mailbox:
    """One client."""

    def __init__(self) -> None:
        self.last_call = 0
        """Number of the newest call that was carried out: an older one is a repetition."""
        self.open: dict[str, int] = {}
        """Engine's request_id -> answers without an end."""
        self.num_polls = 0
        """Polls that wait now."""
        self.last_seen_s = time.monotonic()
        self._events: list[TokenEvent] = []
        self._sent: tuple[int, bytes] = (0, b"")
        """Number and contents of the last letter; it is kept until the next poll says that it arrived."""
        self._news = asyncio.Event()

    def put(self, event: TokenEvent) -> None:
        self._events.append(event)
        self._news.set()

    def wake(self) -> None:
        """A poll that waits returns."""
        self._news.set()

    async def fetch(self, num_received: int, max_wait_s: float) -> tuple[int, bytes]:
        """The next letter (its number, encoded events), after at most ``max_wait_s``; the last one again if the client
        did not get it."""
        if self._sent[0] > num_received:
            return self._sent
        if not self._events:
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), max_wait_s)
        if self._events:
            events, self._events = self._events, []
            named = [event._replace(request_id=event.request_id.partition(_MARK)[2]) for event in events]
            self._sent = (num_received + 1, encode_events(named))
            return self._sent
        return num_received, b""


class Mailboxes:
    """For one event loop."""

    def __init__(self) -> None:
        self._boxes: dict[str, Mailbox] = {}

    def __contains__(self, client_id: str) -> bool:
        return client_id in self._boxes

    def __len__(self) -> int:
        return len(self._boxes)

    def __getitem__(self, client_id: str) -> Mailbox:
        return self._boxes[client_id]

    def add(self, client_id: str) -> None:
        """Harmless if it is there already."""
        self._boxes.setdefault(client_id, Mailbox())

    def remove(self, client_id: str) -> list[str]:
        """Returns the engine's ids of its unfinished requests."""
        box = self._boxes.pop(client_id)
        box.wake()
        return list(box.open)

    def take(self, client_id: str, request: GenerateRequest) -> GenerateRequest:
        """``request`` under the engine's id, from now on known as the client's."""
        name = engine_id(client_id, request.request_id)
        box = self._boxes[client_id]
        box.open[name] = box.open.get(name, 0) + request.sampling.n  # its earlier use may still be ending
        return replace(request, request_id=name)

    def deliver(self, events: Iterable[TokenEvent]) -> None:
        """Events of clients that are gone are dropped."""
        for event in events:
            box = self._boxes.get(event.request_id.partition(_MARK)[0])
            if box is None:
                continue
            if event.finish_reason is not None and event.request_id in box.open:
                box.open[event.request_id] -= 1
                if not box.open[event.request_id]:
                    del box.open[event.request_id]
            box.put(event)

    def wake_all(self) -> None:
        """Every poll that waits returns."""
        for box in self._boxes.values():
            box.wake()

    def silent(self, timeout_s: float) -> list[str]:
        """Clients that have not asked for anything for so long."""
        limit = time.monotonic() - timeout_s
        return [name for name, box in self._boxes.items() if not box.num_polls and box.last_seen_s < limit]


def engine_id(client_id: str, request_id: str) -> str:
    """A client's request as the engine knows it: clients choose their ids for themselves."""
    return f"{client_id}{_MARK}{request_id}"
