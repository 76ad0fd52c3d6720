"""What a checkpoint folder holds and what a rank would take of it, from the headers alone: ``glm5ray weights
inspect``."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glm5ray.model.load_plan import plan_weights
from glm5ray.model.matching import match_weights
from glm5ray.model.name_table import ShardSpec, check_shard, place_weight
from glm5ray.model.safetensors_reader import CheckpointFiles
from glm5ray.model_config import ModelConfig
from glm5ray.quantization.formats import PLAIN, parse_claim

if TYPE_CHECKING:
    from glm5ray.model.matching import MatchedWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class DtypeTotal:
    """Tensors of one type."""

    dtype: str
    num_tensors: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatTotal:
    """Weights of one part of the model that are stored alike."""

    part: str
    format: str
    num_weights: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFile:
    """One safetensors file."""

    name: str
    num_tensors: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointReport:
    """All that ``inspect_checkpoint`` finds out."""

    folder: str
    quantization: str
    """What config.json says: ``plain``, ``fp8-block``, ``nvfp4`` or ``nvfp4-ct``."""
    num_parameters: int
    """Of the model, MTP not counted."""
    num_mtp_parameters: int
    """0 where the checkpoint has no MTP layer."""
    num_tensors: int
    num_bytes: int
    """Of all tensors."""
    dtypes: tuple[DtypeTotal, ...]
    formats: tuple[FormatTotal, ...]
    shards: tuple[ShardFile, ...]
    skipped: tuple[str, ...]
    """Tensors that loading leaves out."""
    unlisted_files: tuple[str, ...]
    """safetensors files in the folder that the index does not name; nobody reads them."""
    disagreements: tuple[str, ...]
    """Linear layers that are stored in another format than config.json says; the files count."""
    tp_size: int
    ep_size: int
    rank_bytes_stored: int
    """Of rank 0's part, as it lies in the files; MTP not counted. Others differ at most by the edges of FP8 blocks."""
    rank_bytes_loaded: int
    """Of any rank's part, dequantised to the checkpoint's type; MTP not counted."""

    @property
    def has_mtp(self) -> bool:
        return self.num_mtp_parameters > 0

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**asdict(self), "has_mtp": self.has_mtp}


def inspect_checkpoint(folder: Path, *, tp: int = 1, ep: int = 1) -> CheckpointReport:
    """Reads ``config.json``, the index and the headers of all files, and checks them as loading does.

    ``tp`` and ``ep`` are the sizes of the layout for which a rank's bytes are given. Raises :class:`CheckpointError`
    and :class:`ConfigError` as :func:`glm5ray.model.weights.load_shard` does.
    """
    folder = Path(folder)
    config = ModelConfig.from_checkpoint(folder)
    claim = parse_claim(config.quantization, f"{folder}: quantization")
    shard = ShardSpec(tp_size=tp, ep_size=ep)
    check_shard(config, shard)
    files = CheckpointFiles.open(folder)
    matched = match_weights(files, config)
    per_file = Counter(entry.file for entry in files.entries.values())
    linears = [weight for weight in matched.weights + matched.mtp if weight.spec.is_linear]
    stored = sum(w.bytes_to_read(p) for w in matched.weights if (p := place_weight(w.spec, config, shard)))
    with_mtp = plan_weights(config, with_mtp=bool(matched.mtp)).num_parameters
    without_mtp = plan_weights(config).num_parameters
    return CheckpointReport(
        folder=str(folder),
        quantization=claim.format.name,
        num_parameters=without_mtp,
        num_mtp_parameters=with_mtp - without_mtp,
        num_tensors=len(files.entries),
        num_bytes=sum(entry.num_bytes for entry in files.entries.values()),
        dtypes=_dtype_totals(files),
        formats=_format_totals(matched),
        shards=tuple(
            ShardFile(name=file.name, num_tensors=per_file[file], num_bytes=file.stat().st_size) for file in files.files
        ),
        skipped=tuple(entry.name for entry in matched.skipped),
        unlisted_files=tuple(f.name for f in sorted(folder.glob("*.safetensors")) if f not in files.files),
        disagreements=tuple(w.spec.module for w in linears if w.format is not claim.format_of(w.spec.module)),
        tp_size=tp,
        ep_size=ep,
        rank_bytes_stored=stored,
        rank_bytes_loaded=plan_weights(config, shard, dtype=config.dtype).total_bytes,
    )


def _dtype_totals(files: CheckpointFiles) -> tuple[DtypeTotal, ...]:
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for entry in files.entries.values():
        counts[entry.dtype] += 1
        sizes[entry.dtype] += entry.num_bytes
    return tuple(DtypeTotal(dtype=d, num_tensors=counts[d], num_bytes=size) for d, size in sizes.most_common())


def _format_totals(matched: MatchedWeights) -> tuple[FormatTotal, ...]:
    counts: Counter[tuple[str, str]] = Counter()
    sizes: defaultdict[tuple[str, str], int] = defaultdict(int)
    for weight in matched.weights + matched.mtp:
        part = "mtp" if weight.spec.is_mtp else str(weight.spec.part)
        form = weight.first.dtype.lower() if weight.format is PLAIN else weight.format.name
        counts[part, form] += 1
        sizes[part, form] += sum(entry.num_bytes for entry in weight.parts.values())
    return tuple(
        FormatTotal(part=part, format=form, num_weights=count, num_bytes=sizes[part, form])
        for (part, form), count in counts.items()
    )
