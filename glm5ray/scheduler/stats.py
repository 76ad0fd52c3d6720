"""Figures of the scheduler, for metrics and log lines."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerStats:
    """Figures of this moment, and counters since the start."""

    num_running: int
    num_waiting: int
    num_pages: int
    num_pages_free: int
    """Neither held nor cached."""
    num_pages_held: int
    """Held by sequences, shared ones counted once."""
    num_pages_idle: int
    """In the prefix cache only: available, if need be."""
    num_pages_cached: int
    """In the prefix cache, idle or held as well."""
    num_steps: int
    num_tokens_scheduled: int
    num_tokens_sampled: int
    num_admissions: int
    num_preemptions: int
    prefix_query_tokens: int
    """Tokens of admitted sequences that were looked up."""
    prefix_hit_tokens: int
    """Of these, tokens whose pages were found."""
    num_finished: dict[str, int]
    """Sequences by finish reason."""
    num_corrupted: int
    """Sequences that ended because their numbers went wrong."""
    num_quarantined: int = 0
    """Sequences that ended because the workers died with them again and again."""
