"""LLM and run-batch on an engine of the cluster: the same answers as in one process, also when the scheduler dies."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import partial
from typing import TYPE_CHECKING

import pytest

from glm5ray.config import load_config
from glm5ray.engine.results import RequestFailure, RequestResult
from glm5ray.errors import EngineUnavailable
from glm5ray.jobs.batch_file import run_batch
from glm5ray.protocol import FinishReason, GenerateRequest, SamplingParams
from tests.actors import engines
from tests.actors.engines import make_spec, next_token
from tests.actors.test_scheduler_actor import running

if TYPE_CHECKING:
    from pathlib import Path

    from glm5ray.engine.llm import LLM

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.usefixtures("ray_cluster"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


def request(name: str, max_tokens: int, n: int = 1) -> GenerateRequest:
    params = SamplingParams(max_tokens=max_tokens, n=n)
    return GenerateRequest(request_id=name, prompt_token_ids=(1, 2, 3), sampling=params)


def check(result: RequestResult | RequestFailure, max_tokens: int) -> None:
    assert isinstance(result, RequestResult)
    for choice in result.choices:
        positions = range(3, 3 + max_tokens)
        assert list(choice.token_ids) == [next_token(result.request_id, choice.index, p) for p in positions]
        assert choice.finish_reason is FinishReason.LENGTH


def test_an_llm_over_a_running_engine():
    from glm5ray import LLM

    with running(make_spec("llm")):
        llm = LLM.connect(engine="llm")
        assert llm.config.scheduler.max_num_seqs == 8
        assert llm.capacity == engines.CAPACITY
        names = [f"r{i}" for i in range(40)]
        results = list(llm.run(request(name, 6, n=2) for name in names))
        assert sorted(result.request_id for result in results) == sorted(names)
        for result in results:
            check(result, 6)
        too_long, fits = llm.generate([[1] * 119, [1]], [SamplingParams(max_tokens=5), SamplingParams(max_tokens=1)])
        assert isinstance(too_long, RequestFailure)
        assert too_long.error.code == "context_length_exceeded"
        assert isinstance(fits, RequestResult)
        stream = llm.stream([1, 2, 3], SamplingParams(max_tokens=100))
        next(stream)
        stream.close()  # ends the request in the engine
        llm.generate([[1]], SamplingParams(max_tokens=1))
        while (stats := llm.stats()).num_running:
            pass
        assert stats.num_finished["abort"] == 1
        llm.close()
        with LLM.connect(engine="llm") as again:
            assert isinstance(again.generate([[1]], SamplingParams(max_tokens=1))[0], RequestResult)
    with pytest.raises(EngineUnavailable, match="no engine called 'llm'"):
        LLM.connect(engine="llm")


def test_a_scheduler_that_dies_loses_and_repeats_nothing(tmp_path: Path):
    from glm5ray import LLM

    flag = tmp_path / "died"
    with running(make_spec("reborn", partial(engines.suicidal, str(flag)))), LLM.connect(engine="reborn") as llm:
        deltas = [delta.token_ids for delta in llm.stream([1, 2, 3], SamplingParams(max_tokens=40))]
        assert flag.exists()
        tokens = [token for ids in deltas for token in ids]
        assert tokens == [next_token("stream-0", 0, position) for position in range(3, 43)]
        flag.unlink()
        names = [f"r{i}" for i in range(20)]
        results = list(llm.run(request(name, 30, n=1 + i % 2) for i, name in enumerate(names)))
        assert flag.exists()
        assert sorted(result.request_id for result in results) == sorted(names)
        for result in results:
            check(result, 30)


def test_an_engine_that_is_stopped_fails_what_runs():
    from glm5ray import LLM
    from glm5ray.actors.launch import start_from_spec, stop_engine

    start_from_spec(make_spec("ended"), timeout_s=60.0)
    llm = LLM.connect(engine="ended")
    stream = llm.stream([1, 2, 3], SamplingParams(max_tokens=100))
    next(stream)
    assert stop_engine("ended")
    with pytest.raises(Exception, match=r"the engine has failed"):
        list(stream)
    llm.close()


def batch(llm: LLM, folder: Path) -> list[dict]:
    """Answers of the batch without what differs between any two runs, in the order of the input."""
    lines = [
        {"custom_id": f"c{i}", "method": "POST", "url": "/v1/completions", "body": body}
        for i, body in enumerate(
            [
                {"model": "nano", "prompt": "The sky is", "max_tokens": 12, "temperature": 0},
                {"model": "nano", "prompt": "Once upon a time", "max_tokens": 20, "seed": 7, "n": 3, "logprobs": 2},
                {"model": "nano", "prompt": "One, two,", "max_tokens": 12, "seed": 1, "stop": [" "]},
                {"model": "nano", "prompt": "x", "max_tokens": 99999},
                *({"model": "nano", "prompt": f"Number {k} is", "max_tokens": 8, "temperature": 0} for k in range(8)),
            ]
        )
    ]
    source, output = folder / "in.jsonl", folder / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run_batch(source, output, llm, model_names=("nano",), overwrite=True)
    answers = [json.loads(line) for line in output.read_text().splitlines()]
    for answer in answers:
        answer["id"] = answer["response"]["request_id"] = None
        for name in ("id", "created"):
            answer["response"]["body"].pop(name, None)
        for choice in answer["response"]["body"].get("choices", ()):
            if choice["logprobs"]:
                # the tokens are the same; a matrix product rounds with the number of its rows, so these are not quite
                scores = choice["logprobs"].pop("token_logprobs")
                assert len(scores) == len(choice["logprobs"].pop("top_logprobs")) == len(choice["logprobs"]["tokens"])
    return sorted(answers, key=lambda answer: int(answer["custom_id"][1:]))


def test_a_batch_gives_the_answers_of_one_process(tmp_path: Path):
    from glm5ray import LLM
    from glm5ray.actors.launch import list_engines, open_llm

    config = load_config(None, ["cache.num_pages=64", "scheduler.max_num_seqs=4"])
    with LLM(config=config) as local:
        expected = batch(local, tmp_path)
    with open_llm(config, engine="batch") as remote:
        assert "batch" in list_engines()
        assert batch(remote, tmp_path) == expected
    assert "batch" not in list_engines(), "it was started for this batch alone"


def run_batch_command(source: Path, output: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from glm5ray.cli.app import main; main()", "run-batch", str(source)]
    command += ["-o", str(output), "--set", "cache.num_pages=64", "--set", "scheduler.max_num_seqs=4", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)


def comparable(output: Path) -> bytes:
    """The file without what differs between any two runs: the run's id, the time, and the order of the lines."""
    data = output.read_bytes()
    run_id = json.loads(data.splitlines()[0])["id"].removeprefix("batch_req_").rpartition("-")[0].encode()
    assert len(run_id) == 12
    data = re.sub(rb'"created": ?\d+', b'"created": 0', data.replace(run_id, b"run"))
    return b"\n".join(sorted(data.splitlines()))


def test_run_batch_on_two_ranks_gives_the_bytes_of_one_process_and_leaves_nothing_behind(tmp_path: Path):
    """The command, as a user's shell runs it: the engine is started for the batch and ends with it."""
    import ray

    from glm5ray.actors.launch import list_engines

    bodies = [
        *({"prompt": f"Number {i} is", "max_tokens": 8 + i, "temperature": 0} for i in range(8)),
        {"prompt": "Once upon a time", "max_tokens": 20, "seed": 7, "n": 3, "temperature": 0.8, "top_p": 0.9},
        {"prompt": "One, two,", "max_tokens": 12, "seed": 1, "stop": [" "]},
        {"prompt": "x", "max_tokens": 99999},
    ]
    lines = [
        {"custom_id": f"c{i}", "method": "POST", "url": "/v1/completions", "body": {"model": "nano", **body}}
        for i, body in enumerate(bodies)
    ]
    source, here, there = tmp_path / "in.jsonl", tmp_path / "here.jsonl", tmp_path / "there.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    local = run_batch_command(source, here)
    address = ray.get_runtime_context().gcs_address
    remote = run_batch_command(source, there, "--address", address, "--engine", "cli", "--tp", "2")
    for run in (local, remote):
        assert "10 answered, 1 failed" in run.stdout, run.stderr
    assert local.returncode == remote.returncode
    assert "ready after" in remote.stderr
    assert comparable(there) == comparable(here)
    assert "cli" not in list_engines()
