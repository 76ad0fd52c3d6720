"""A line of figures in the scheduler's log, which Ray's dashboard shows on the actor's page."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from glm5ray.engine.client import EngineStatus

logger = logging.getLogger(__name__)

LOG_EVERY_S = 10.0


def status_line(status: EngineStatus) -> str:
    """``state=ready layout='tp 2' running=12 waiting=0 pages=0.42 steps_per_s=51.3 steps=1234 ...``."""
    stats = status.scheduler
    values = {
        "state": status.state.value,
        "layout": repr(status.layout),
        "running": stats.num_running,
        "waiting": stats.num_waiting,
        "pages": f"{stats.num_pages_held / max(1, stats.num_pages):.2f}",
        "steps_per_s": f"{status.steps_per_second:.1f}",
        "steps": stats.num_steps,
        "tokens": stats.num_tokens_sampled,
        "epoch": status.epoch,
        "restarts": status.num_restarts,
    }
    return " ".join(f"{name}={value}" for name, value in values.items())


class StatusLog:
    """Told the status again and again; writes a line every ten seconds in which something happened, and at once when
    the state changes."""

    def __init__(self) -> None:
        self._told_s = -LOG_EVERY_S
        self._told: tuple[object, ...] = ()

    def tell(self, status: EngineStatus) -> None:
        stats, now_s = status.scheduler, time.monotonic()
        told = (status.state, status.epoch, stats.num_steps, stats.num_running, stats.num_waiting)
        has_changed = told[:2] != self._told[:2]
        if has_changed or (told != self._told and now_s - self._told_s >= LOG_EVERY_S):
            self._told, self._told_s = told, now_s
            logger.info("%s", status_line(status))
            if has_changed and status.detail:
                logger.info("detail=%r", status.detail)
