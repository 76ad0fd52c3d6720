"""Without a GPU: what :class:`Beside` promises where there is no graph to branch."""

from __future__ import annotations

import torch

from glm5ray.model.beside import Beside


def test_outside_a_graph_it_is_computed_when_it_is_asked_for() -> None:
    """So that it needs memory only then."""
    calls: list[int] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        calls.append(len(x))
        return x + 1

    beside = Beside(function, torch.zeros(3))
    assert calls == []
    assert beside.result().tolist() == [1.0, 1.0, 1.0]
    assert calls == [3]
