"""How fast a checkpoint is loaded, against reading its files with nothing done to the bytes.

    python scripts/bench_loading.py [FOLDER] [--device cpu|cuda] [--repetitions 3] [--json FILE]

Without FOLDER a checkpoint of about 1 GB is written to a temporary one. Each repetition does both, from a cold page
cache (the kernel is asked to forget the files) and from a warm one, in turns; medians are reported. ``plain`` reads
each file from its begin to its end into one buffer of 16 MiB, with one thread and with as many as loading has. NVFP4
experts stay packed. For the peak of memory: ``pytest -m slow tests/model/test_weights.py -k peak_memory``.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import torch

from glm5ray.bench.report import environment
from glm5ray.model.packed import packs_experts
from glm5ray.model.streaming import MAX_READERS
from glm5ray.model.tiny import write_tiny
from glm5ray.model.weights import ShardSpec, load_shard
from glm5ray.model_config import ModelConfig

SIZES = {"hidden_size": 2048, "moe_intermediate_size": 1024, "n_routed_experts": 64, "vocab_size": 16384}
BUFFER = 16 * 2**20


def forget(files: list[Path]) -> None:
    for file in files:
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_plainly(files: list[Path], readers: int) -> float:
    def read(file: Path) -> None:
        buffer = bytearray(BUFFER)
        with file.open("rb", buffering=0) as handle:
            while handle.readinto(buffer):
                pass

    started = time.perf_counter()
    with ThreadPoolExecutor(readers) as pool:
        list(pool.map(read, files))
    return time.perf_counter() - started


def load_once(folder: Path, device: str) -> float:
    """Seconds."""
    config = ModelConfig.from_checkpoint(folder)
    packed = packs_experts("auto", config, "cuda", "bfloat16")
    started = time.perf_counter()
    load_shard(folder, config, ShardSpec(), dtype=torch.bfloat16, device=device, packed_experts=packed)
    return time.perf_counter() - started


def measure(folder: Path, device: str, repetitions: int) -> dict[str, Any]:
    files = sorted(folder.glob("*.safetensors"))
    size = sum(file.stat().st_size for file in files)
    readers = min(MAX_READERS, os.cpu_count() or 1)
    times: dict[str, list[float]] = {}
    load_once(folder, device)
    for _ in range(repetitions):
        for state in ("cold", "warm"):
            kinds = {"plain": lambda: read_plainly(files, 1), f"plain_{readers}": lambda: read_plainly(files, readers)}
            for name, run in kinds.items():
                if state == "cold":
                    forget(files)
                times.setdefault(f"{name}_{state}", []).append(run())
            if state == "cold":
                forget(files)
            times.setdefault(f"load_{state}", []).append(load_once(folder, device))
    rates = {name: round(size / median(values) / 1e9, 3) for name, values in times.items()}
    return {
        "bytes": size,
        "files": len(files),
        "gb_per_s": rates,
        "load_over_plain": {
            state: round(rates[f"load_{state}"] / rates[f"plain_{state}"], 2) for state in ("cold", "warm")
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--format", default="nvfp4", help="of the checkpoint that is written")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    report: dict[str, Any] = {"benchmark": "loading", "environment": environment(), "device": arguments.device}
    if arguments.folder:
        report |= measure(arguments.folder, arguments.device, arguments.repetitions)
    else:
        with tempfile.TemporaryDirectory() as folder:
            tiny = Path(folder) / "tiny"
            write_tiny(tiny, format=arguments.format, num_shards=8, with_mtp=False, sizes=SIZES)
            report |= {"format": arguments.format} | measure(tiny, arguments.device, arguments.repetitions)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
