"""What an engine goes through while it is served, in a line for each change."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from glm5ray.engine.client import EngineState
from glm5ray.errors import Glm5RayError

if TYPE_CHECKING:
    from collections.abc import Callable

    from glm5ray.engine.client import EngineClient

INTERVAL_S = 1.0


async def watch_state(
    client: EngineClient, tell: Callable[[str], None], *, engine: str = "default", interval_s: float = INTERVAL_S
) -> None:
    """Until it is cancelled. ``tell`` gets one line for each change of state: ``engine default: ready -> recovering
    (workers are replaced: ...)``, and one for a recovery that took less than ``interval_s``. An engine is taken to be
    ready at first."""
    state: str = EngineState.READY
    epoch: int | None = None
    while True:
        try:
            status = await client.status()
            now, detail = status.state.value, status.detail
            if now == state == EngineState.READY and epoch not in (None, status.epoch):
                tell(f"engine {engine}: workers were replaced, {status.num_restarts} times by now")
            epoch = status.epoch
        except Glm5RayError as error:
            now, detail = "unreachable", str(error)
        if now != state:
            tell(f"engine {engine}: {state} -> {now}" + (f" ({detail})" if detail else ""))
            state = now
        await asyncio.sleep(interval_s)
