"""Engines of Ray actors on GPUs against one process on the CPU: tokens, a killed rank, the cost of a step.

    python scripts/gpu_ray_record.py [--json FILE] [--layouts tp1,tp2,ep2,dp2ep2] [--set section.field=value]

For each layout a Ray engine of the nano model in float32 is started on the GPUs of this machine and generates 8 prompts
greedily twice; in the second run one rank is killed by SIGKILL once it has done some steps. Both runs must give the
CPU's tokens. A layout with more ranks than there are GPUs shares them over gloo (``parallel.ranks_per_gpu``), which
NCCL refuses: the record says so. Last, ``glm5ray serve --address`` answers a completion over HTTP.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from random import Random
from typing import Any

import ray
import torch

from glm5ray.actors.handles import SchedulerHandle
from glm5ray.actors.launch import open_llm
from glm5ray.actors.names import NAMESPACE
from glm5ray.bench.report import environment
from glm5ray.config import load_config
from glm5ray.engine.client import EngineState, EngineStatus
from glm5ray.engine.llm import LLM
from glm5ray.engine.results import RequestFailure
from glm5ray.errors import EngineUnavailable, Glm5RayError
from glm5ray.protocol import GenerateRequest, SamplingParams

SETTINGS = ["model.dtype=float32", "cache.num_pages=256", "scheduler.max_num_seqs=16"]
LAYOUTS = {
    "tp1": [],
    "tp2": ["parallel.tp_size=2"],
    "ep2": ["parallel.ep_size=2"],
    "dp2ep2": ["parallel.dp_size=2", "parallel.ep_size=2"],
    "tp2ep2": ["parallel.tp_size=2", "parallel.ep_size=2"],
}
MAX_TOKENS = 64
PROMPT = "The engine reads"


def requests() -> list[GenerateRequest]:
    rng = Random(1)
    return [
        GenerateRequest(
            request_id=str(i),
            prompt_token_ids=tuple(rng.randrange(256) for _ in range(20 + 40 * i)),
            sampling=SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True),
        )
        for i in range(8)
    ]


def tokens_of(llm: LLM) -> list[tuple[int, ...]]:
    results: dict[str, tuple[int, ...]] = {}
    for result in llm.run(requests()):
        if isinstance(result, RequestFailure):
            raise result.error
        results[result.request_id] = result.choices[0].token_ids
    return [results[str(i)] for i in range(len(results))]


class Killer(threading.Thread):
    """Kills one rank of an engine once it has done ten steps more. No other engine runs."""

    def __init__(self, engine: str) -> None:
        super().__init__(daemon=True)
        self.killed: int | None = None
        self._engine = engine

    def run(self) -> None:
        handle = SchedulerHandle(self._engine)
        pid = pid_of_a_rank()
        until = handle.call("status").scheduler.num_steps + 10
        while handle.call("status").scheduler.num_steps < until:
            time.sleep(0.01)
        os.kill(pid, signal.SIGKILL)
        self.killed = pid


def pid_of_a_rank() -> int:
    """The newest process that computes steps, by the title that Ray gives it."""
    listed = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout
    pids = [int(line.split()[0]) for line in listed.splitlines() if "ray::WorkerActor.run" in line]
    if not pids:
        raise EngineUnavailable("no rank runs on this machine")
    return max(pids)


def record_layout(
    name: str, settings: list[str], device: str, num_gpus: int, expected: list[tuple[int, ...]]
) -> dict[str, Any]:
    settings = [*SETTINGS, *settings, f"model.device={device}"]
    size = load_config(None, settings).parallel.world_size
    shared = -(-size // num_gpus) if num_gpus else 1
    config = load_config(None, [*settings, f"parallel.ranks_per_gpu={shared}"])
    row: dict[str, Any] = {"layout": name, "ranks": size, "ranks_per_gpu": shared}
    row["collectives"] = "none" if size == 1 else "gloo" if shared > 1 or device == "cpu" else "nccl"
    started = time.perf_counter()
    with open_llm(config, engine=name) as llm:
        row["start_s"] = round(time.perf_counter() - started, 2)
        tokens_of(llm)  # compiles
        started = time.perf_counter()
        row["tokens_equal_cpu"] = tokens_of(llm) == expected
        row["ms_per_step"] = round((time.perf_counter() - started) / MAX_TOKENS * 1000, 2)
        killer = Killer(name)
        killer.start()
        started = time.perf_counter()
        row["tokens_equal_cpu_after_kill"] = tokens_of(llm) == expected
        row["with_a_kill_s"] = round(time.perf_counter() - started, 2)
        killer.join(10.0)
        status: EngineStatus = SchedulerHandle(name).call("status")
        row["killed"] = killer.killed is not None
        row["restarts"] = status.num_restarts
        row["state"] = status.state.value if isinstance(status.state, EngineState) else status.state
    return row


def record_serve(address: str, device: str) -> dict[str, Any]:
    """``glm5ray serve --address`` on the GPU, and one completion."""
    command = [sys.executable, "-c", "from glm5ray.cli.app import main; main()", "serve", "--address", address]
    command += ["--engine", "served", "--port", "0", "--set", f"model.device={device}", "--set", "model.dtype=float32"]
    command += ["--set", "cache.num_pages=256"]
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, text=True)
        try:
            url = _wait_for_url(server, log)
            body = {"model": "nano", "prompt": PROMPT, "max_tokens": 32, "temperature": 0}
            body["model"] = json.load(urllib.request.urlopen(f"{url}/v1/models", timeout=30))["data"][0]["id"]
            call = urllib.request.Request(
                f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            text = json.load(urllib.request.urlopen(call, timeout=120))["choices"][0]["text"]
        finally:
            server.send_signal(signal.SIGTERM)
            status = server.wait(60)
    with LLM(config=load_config(None, [*SETTINGS, "model.device=cpu"])) as llm:
        result = llm.generate([PROMPT], SamplingParams(max_tokens=32, temperature=0.0))[0]
        if isinstance(result, RequestFailure):
            raise result.error
    return {"text_equals_cpu": text == result.choices[0].text, "exit_status_after_sigterm": status}


def _wait_for_url(server: subprocess.Popen[str], log: Any) -> str:
    until = time.monotonic() + 180
    while time.monotonic() < until and server.poll() is None:
        log.seek(0)
        if found := re.search(r"http://[\d.]+:\d+", log.read()):
            return found.group()
        time.sleep(0.2)
    log.seek(0)
    raise EngineUnavailable(f"serve gave no address: {log.read()[-2000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("gpu-ray.json"))
    parser.add_argument("--layouts", default="tp1,tp2,ep2,dp2ep2,tp2ep2")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: to try this script")
    parser.add_argument("--set", action="append", default=[])
    arguments = parser.parse_args()
    device = arguments.device
    num_gpus = torch.cuda.device_count() if device == "cuda" else 0
    if device == "cuda" and not num_gpus:
        raise SystemExit("no GPU is visible here")
    with LLM(config=load_config(None, [*SETTINGS, "model.device=cpu"])) as llm:
        expected = tokens_of(llm)
    ray.init(num_gpus=num_gpus, namespace=NAMESPACE, include_dashboard=False, log_to_driver=False)
    report: dict[str, Any] = {
        "what": "nano in float32, 8 greedy prompts of 64 tokens through Ray actors, against one CPU process",
        "device": device,
        "gpus": [torch.cuda.get_device_name(i) for i in range(num_gpus)],
        "torch": torch.__version__,
        "ray": ray.__version__,
        "environment": environment(),
        "layouts": [],
    }
    for name in arguments.layouts.split(","):
        try:
            row = record_layout(name, [*LAYOUTS[name], *arguments.set], device, num_gpus, expected)
        except Glm5RayError as error:
            row = {"layout": name, "failed": f"{type(error).__name__}: {error}"}
        report["layouts"].append(row)
        print(json.dumps(row), flush=True)
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    report["serve"] = record_serve(ray.get_runtime_context().gcs_address, device)
    arguments.json.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    print(json.dumps(report["serve"]))


if __name__ == "__main__":
    main()
