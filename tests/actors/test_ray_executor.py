"""Ranks as actors: the tokens of one process, and what happens when a rank exits, raises or hangs (case B37)."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from glm5ray.actors.spec import EngineSpec
from glm5ray.config import load_config
from glm5ray.engine.client import EngineState
from glm5ray.engine.results import RequestResult
from glm5ray.errors import EngineUnavailable
from glm5ray.protocol import GenerateRequest, SamplingParams
from tests.actors import engines
from tests.actors.test_scheduler_actor import running, tokens_of, with_client

if TYPE_CHECKING:
    from glm5ray.actors.client import RayEngineClient

pytestmark = [
    pytest.mark.ray,
    pytest.mark.usefixtures("ray_cluster"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
SETTINGS = ["cache.num_pages=32", "scheduler.max_num_seqs=8", "model.device=cpu"]


def request(number: int) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.0 if number % 2 else 1.0, seed=number)
    return GenerateRequest(
        request_id=f"r{number}", prompt_token_ids=tuple(range(20 + number, 40 + 2 * number)), sampling=sampling
    )


def one_process() -> dict[str, list[int]]:
    from glm5ray import LLM

    with LLM(config=load_config(None, SETTINGS)) as llm:
        results = list(llm.run(request(i) for i in range(4)))
    return {result.request_id: list(result.choices[0].token_ids) for result in results}


@pytest.mark.parametrize(
    ("layout", "sizes", "num_faults"),
    [
        ("tp 2", {"tp": 2}, 1),
        pytest.param("tp 2", {"tp": 2}, 3, marks=pytest.mark.slow),
        pytest.param("dp 2, ep 2", {"dp": 2, "ep": 2}, 3, marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_exits_raises_or_hangs_is_a_pause(
    tmp_path: Path, layout: str, sizes: dict[str, int], num_faults: int
):
    """One fault or three in a row, in one run of two ranks. Within five seconds of each the status, which is what
    /health tells, is not ready."""
    seen: list[tuple[float, EngineState]] = []

    async def body(client: RayEngineClient) -> None:
        async def look() -> None:
            while True:
                status = await client.status()
                seen.append((time.time(), status.state))
                await asyncio.sleep(0.1)

        looking = asyncio.ensure_future(look())
        answers = await asyncio.gather(*(tokens_of(client, request(i)) for i in range(4)))
        looking.cancel()
        expected = one_process()
        assert answers == [{0: (expected[f"r{i}"], "length")} for i in range(4)]
        assert len(os.listdir(tmp_path)) == num_faults
        status = await client.status()
        assert (status.state, status.num_restarts, status.layout) == (EngineState.READY, num_faults, layout)
        for fault in tmp_path.iterdir():
            at = fault.stat().st_mtime
            noticed = min(when for when, state in seen if when > at and state is EngineState.RECOVERING)
            assert noticed - at < 5.0, f"fault {fault.name} was noticed after {noticed - at:.1f} s"

    spec = EngineSpec(
        engine="faulty",
        config=load_config(
            None,
            [
                *SETTINGS,
                *(f"parallel.{name}_size={size}" for name, size in sizes.items()),
                "recovery.step_timeout_s=8",
            ],
        ),
        make_executor=partial(engines.faulty, str(tmp_path), num_faults),
    )
    with running(spec):
        with_client("faulty", body, timeout_s=180)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_rank_that_dies_while_nothing_runs_is_noticed_and_replaced(tmp_path: Path, rank: int):
    """SIGKILL, as the kernel does it when memory runs out. No request is needed for it to be noticed. Before, the ranks
    are profiled at their work."""
    from glm5ray.actors.ranks import profile_ranks, rank_stats
    from glm5ray.actors.ray_executor import ray_executor

    async def body(client: RayEngineClient) -> None:
        expected = one_process()
        profiling = asyncio.ensure_future(asyncio.to_thread(profile_ranks, "idle", 3, folder=str(tmp_path)))
        while not profiling.done():
            assert await tokens_of(client, request(0)) == {0: (expected["r0"], "length")}
        num_sums = []
        for path in await profiling:
            names = [event["name"] for event in json.loads(gzip.decompress(Path(path).read_bytes()))["traceEvents"]]
            num_sums.append(names.count("gloo:all_reduce"))
        assert num_sums[0] == num_sums[1] > 0
        assert num_sums[0] % 3 == 0, "as many in each step"
        before = (await client.status()).epoch
        stats = rank_stats("idle")
        assert [(one.rank, one.epoch, one.device) for one in stats] == [(0, before, "cpu"), (1, before, "cpu")]
        assert stats[0].num_steps == stats[1].num_steps == (await client.status()).scheduler.num_steps
        os.kill(stats[rank].pid, signal.SIGKILL)
        while (status := await client.status()).state is EngineState.READY and status.num_restarts == 0:
            await asyncio.sleep(0.1)
        assert f"rank {rank} died" in status.detail
        while (status := await client.status()).state is not EngineState.READY:
            await asyncio.sleep(0.1)
        assert (status.num_restarts, status.epoch) == (1, before + 1)
        assert await tokens_of(client, request(1)) == {0: (expected["r1"], "length")}
        assert (await client.status()).num_restarts == 1

    config = load_config(None, [*SETTINGS, "parallel.tp_size=2", "recovery.step_timeout_s=20"])
    with running(EngineSpec(engine="idle", config=config, make_executor=ray_executor)):
        with_client("idle", body, timeout_s=90)


@pytest.mark.slow
def test_data_parallel_ranks_give_the_tokens_of_one_process():
    """Four requests on two ranks with pages of their own; then one alone, so that the other rank has no tokens."""
    from glm5ray.actors.ray_executor import ray_executor

    async def body(client: RayEngineClient) -> None:
        expected = one_process()
        answers = await asyncio.gather(*(tokens_of(client, request(i)) for i in range(4)))
        assert answers == [{0: (expected[f"r{i}"], "length")} for i in range(4)]
        assert await tokens_of(client, request(3)) == answers[3]
        assert (await client.status()).layout == "dp 2, ep 2"

    config = load_config(None, [*SETTINGS, "parallel.dp_size=2", "parallel.ep_size=2"])
    with running(EngineSpec(engine="groups", config=config, make_executor=ray_executor)):
        with_client("groups", body, timeout_s=120)


@pytest.mark.slow
def test_an_engine_that_finds_no_room_says_what_is_missing():
    from glm5ray.actors.launch import start_engine

    config = load_config(None, ["parallel.tp_size=64", *SETTINGS])
    with pytest.raises(EngineUnavailable, match=r"needs 64 times 1 CPU, .* of 16 CPUs free; .* lower parallel.tp_size"):
        start_engine(config, engine="large")


@pytest.mark.slow
def test_a_detached_engine_outlives_its_driver_and_a_stop_leaves_nothing():
    import ray

    from glm5ray import LLM
    from glm5ray.actors.launch import list_engines, stop_engine

    address = ray.get_runtime_context().gcs_address
    start = (
        "from glm5ray.actors.launch import start_engine; from glm5ray.config import load_config; "
        f"start_engine(load_config(None, {SETTINGS}), engine='left', address={address!r})"
    )
    subprocess.run([sys.executable, "-c", start], check=True, timeout=120)
    time.sleep(1.0)  # Ray ends what belonged to the driver
    assert "left" in list_engines()
    ranks = [sys.executable, "-c", "from glm5ray.cli.app import main; main()", "ranks", "--engine", "left"]
    shown = subprocess.run([*ranks, "--address", address, "--json"], check=True, timeout=120, capture_output=True)
    report = json.loads(shown.stdout.splitlines()[-1])
    assert [(rank["rank"], rank["device"], rank["num_steps"]) for rank in report["ranks"]] == [(0, "cpu", 0)]
    os.kill(report["ranks"][0]["pid"], 0)  # it is there
    with LLM.connect(engine="left") as llm:
        result = llm.generate("The sky is", SamplingParams(max_tokens=4, temperature=0.0))[0]
        assert isinstance(result, RequestResult)
    assert stop_engine("left")
    assert not stop_engine("left")
    named: Any = ray.util.list_named_actors(all_namespaces=True)
    assert not [entry for entry in named if entry["name"].startswith("glm5ray:left")]
    groups: Any = ray.util.placement_group_table()
    assert not [group for group in groups.values() if "left" in group["name"] and group["state"] != "REMOVED"]


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1, 2), (2, 2)], ids=["ep2", "tp2-ep2"])
def test_layouts_give_the_tokens_of_one_process(sizes: tuple[int, int]):
    from glm5ray.actors.launch import open_llm

    layout = [f"parallel.tp_size={sizes[0]}", f"parallel.ep_size={sizes[1]}"]
    with open_llm(load_config(None, [*SETTINGS, *layout]), engine="layout") as llm:
        results = list(llm.run(request(i) for i in range(4)))
    assert {result.request_id: list(result.choices[0].token_ids) for result in results} == one_process()
