"""Checkpoint folder -> this rank's weights. Strict both ways: each tensor is used or knowingly left out, each
parameter filled once.

Everything is checked from the headers before the first weight is read, then the weights are read in the order in
which they lie in the files, each rank's piece alone, into parameters that are allocated beforehand
(:mod:`glm5ray.model.streaming`).

What is checked: names, types and shapes of all tensors; of the values read, that scales are finite and not negative,
and that vectors (norms, biases) are finite. The values of matrices are not looked at.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from glm5ray.errors import CheckpointError
from glm5ray.model import packed
from glm5ray.model.matching import match_weights
from glm5ray.model.name_table import ShardSpec, check_shard, place_weight
from glm5ray.model.safetensors_reader import CheckpointFiles
from glm5ray.model.streaming import cut, stream_weights

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from glm5ray.model.matching import StoredWeight
    from glm5ray.model_config import ModelConfig

__all__ = ["ShardSpec", "load_shard"]

logger = logging.getLogger(__name__)


def load_shard(
    folder: Path,
    config: ModelConfig,
    shard: ShardSpec,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    with_mtp: bool = False,
    packed_experts: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Tensor]:
    """The parameters of one rank: ``{name: tensor on device}``, in the order of the forward pass.

    Names are the checkpoint's; routed experts are stacked as ``mlp.experts.gate_up_proj [E_local, 2 I_local, H]``
    (gate rows first) and ``mlp.experts.down_proj [E_local, H, I_local]``. Quantised weights are dequantised to
    ``dtype``; router and index head weights are float32. MTP layers, at ``model.layers.{num_hidden_layers}``, are
    read only ``with_mtp``. ``packed_experts`` stay in NVFP4, as three tensors for each stack
    (:mod:`glm5ray.model.packed`). Beside the parameters themselves, memory holds a few buffers. ``progress(done,
    total)`` is called with bytes of the files, of this rank's part.

    Raises :class:`CheckpointError` for what is wrong with the files and :class:`ConfigError` for a shard that the
    sizes do not allow.
    """
    check_shard(config, shard)
    files = CheckpointFiles.open(folder)
    matched = match_weights(files, config)
    if with_mtp and not matched.mtp:
        raise CheckpointError(f"{folder} has no MTP layer; switch off drafting, or name a checkpoint that has one")
    weights = matched.weights + (matched.mtp if with_mtp else [])
    _warn_of_coarse_router(weights)
    placed = [(w, place) for w in weights if (place := place_weight(w.spec, config, shard)) is not None]
    parameters: dict[str, Tensor] = {}
    for weight, place in placed:
        if packed_experts and weight.spec.expert is not None:
            packed.require_nvfp4(weight)
            packed.allocate(parameters, place, weight.spec.parameter, device)
        elif weight.spec.parameter not in parameters:
            kind = torch.float32 if weight.spec.keep_float32 else dtype
            parameters[weight.spec.parameter] = torch.empty(place.parameter_shape, dtype=kind, device=device)
    in_file_order = sorted(placed, key=lambda pair: (pair[0].first.file, pair[0].first.start))
    total = sum(piece.num_bytes for weight, place in in_file_order for piece in cut(weight, place))
    done, file = 0, None
    with files:
        for group in stream_weights(files, in_file_order, parameters):
            done += group.num_bytes
            if file is not None and file != group.pieces[-1].weight.first.file:
                files.release(file)
            file = group.pieces[-1].weight.first.file
            if progress is not None:
                progress(done, total)
    return parameters


def _warn_of_coarse_router(weights: list[StoredWeight]) -> None:
    for weight in weights:
        if weight.spec.name.endswith("e_score_correction_bias") and weight.first.dtype != "F32":
            logger.warning(
                "%s is %s; routing is as coarse as that, F32 is usual", weight.first.name, weight.first.dtype
            )
            return
