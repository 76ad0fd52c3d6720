"""Starting, finding and ending engines in a Ray cluster."""

from __future__ import annotations

import logging
import signal
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError
from ray.util import list_named_actors

from glm5ray.actors import authentication, local_head
from glm5ray.actors.client import RayEngineClient
from glm5ray.actors.handles import SchedulerHandle, find_scheduler
from glm5ray.actors.http_launch import list_http, start_http, stop_http, wait_until_open
from glm5ray.actors.names import NAMESPACE, engine_of, scheduler_name
from glm5ray.actors.ray_executor import ray_executor
from glm5ray.actors.remote_core import RemoteCore
from glm5ray.actors.scheduler_actor import SchedulerActor
from glm5ray.actors.spec import EngineSpec
from glm5ray.engine.client import EngineState
from glm5ray.engine.llm import LLM
from glm5ray.errors import ConfigError, EngineUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from glm5ray.actors.server_actor import HttpSpec, HttpStatus
    from glm5ray.config import EngineConfig
    from glm5ray.engine.client import EngineInfo, EngineStatus

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 3600.0
"""Weights of 400 GB from a slow disk take this long."""
_MAX_SCHEDULER_RESTARTS = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class StartedEngine:
    """An engine that is ready."""

    engine: str
    info: EngineInfo
    actor: Any
    """Ray's handle of the scheduler: an engine that is not detached lives as long as this object."""

    def stop(self) -> bool:
        """See :func:`stop_engine`."""
        return stop_engine(self.engine)


def join_ray(address: str | None = "auto") -> None:
    """Makes this process a driver of a Ray cluster, unless it is one already.

    ``auto``: the one that runs on this machine; ``None``: the same, or a new one that ends with this process; else an
    address. Raises :class:`EngineUnavailable` if there is none."""
    if ray.is_initialized():
        return
    if address is None:
        try:
            join_ray("auto")
        except EngineUnavailable:
            authentication.prepare()  # Ray would make the token as well, readable for all
            with _signals_kept():
                ray.init(namespace=NAMESPACE, include_dashboard=False, log_to_driver=False)
        return
    local_head.require_answer(address)
    authentication.use_token()
    # it warns that the cluster asks for a token, which is as it should be
    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
    try:
        with _signals_kept():
            ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.WARNING)
    except (ConnectionError, RayError, ValueError) as error:
        where = "on this machine" if address == "auto" else f"at {address}"
        raise EngineUnavailable(
            f"no Ray cluster answers {where}: {' '.join(str(error).split())}; start one with: glm5ray up"
        ) from error


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Ray puts a SIGTERM handler of its own, which exits with status 15, in the place of the program's."""
    if threading.current_thread() is not threading.main_thread():
        yield  # no thread but the main one may set handlers; Ray's attempt fails and it goes on without
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # one that was not set from Python cannot be set again from it
                signal.signal(number, handler)


def leave_ray() -> None:
    """Undoes :func:`join_ray`: this process is no driver any more."""
    ray.shutdown()


def start_engine(
    config: EngineConfig,
    *,
    engine: str = "default",
    address: str | None = None,
    detached: bool = True,
    progress: Callable[[str], None] | None = None,
    timeout_s: float = START_TIMEOUT_S,
) -> StartedEngine:
    """Starts an engine and waits until it answers.

    ``address`` as in :func:`join_ray`. ``detached``: it goes on when this process ends; otherwise it ends with it.
    ``progress`` is told each phase in a sentence. Raises :class:`ConfigError` if the name is taken, and
    :class:`EngineUnavailable` with the reason if it does not come up; then nothing is left of it.
    """
    overlap = config.scheduler.overlap
    spec = EngineSpec(
        engine=engine,
        config=config,
        make_executor=ray_executor,
        overlap=overlap is not False,
    )
    return start_from_spec(spec, address=address, detached=detached, progress=progress, timeout_s=timeout_s)


def start_from_spec(
    spec: EngineSpec,
    *,
    address: str | None = None,
    detached: bool = True,
    progress: Callable[[str], None] | None = None,
    timeout_s: float = START_TIMEOUT_S,
) -> StartedEngine:
    """:func:`start_engine` for an engine over any executor."""
    join_ray(address)
    if spec.engine in list_engines(address):
        raise ConfigError(
            f"an engine called {spec.engine!r} runs already; connect to it, stop it, or give this one another name"
        )
    options = ray.remote(SchedulerActor).options(
        name=scheduler_name(spec.engine),
        namespace=NAMESPACE,
        lifetime="detached" if detached else None,
        num_cpus=0,
        num_gpus=0,
        max_restarts=_MAX_SCHEDULER_RESTARTS,
        max_task_retries=0,
        enable_task_events=False,  # of many small calls a second: Ray's head would keep the last 100,000
    )
    actor = options.remote(spec)
    handle = SchedulerHandle(spec.engine, actor)
    try:
        _wait_until_ready(handle, progress or logger.info, timeout_s)
        info, _ = handle.call("info")
    except BaseException:
        stop_engine(spec.engine, address=address)
        raise
    return StartedEngine(engine=spec.engine, info=info, actor=actor)


def serve_detached(
    config: EngineConfig,
    http: HttpSpec,
    *,
    address: str | None = "auto",
    progress: Callable[[str], None] | None = None,
    timeout_s: float = START_TIMEOUT_S,
) -> HttpStatus:
    """Starts an HTTP actor, and the engine behind it unless one of this name runs; both go on when this process ends.
    Returns when requests are answered; ``/health`` tells before how far it is.

    Raises what :func:`start_engine` and :func:`glm5ray.actors.http_launch.start_http` do, the latter before anything
    is loaded; then what was started here is ended."""
    join_ray(address)
    progress = progress or logger.info
    start_http(http)
    is_ours = False
    try:
        if http.engine in list_engines(address):
            progress(f"engine {http.engine} runs already, and is served as it is")
        else:
            is_ours = True
            start_engine(config, engine=http.engine, address=address, progress=progress, timeout_s=timeout_s)
        return wait_until_open(http.engine)
    except BaseException:
        stop_http(http.engine, drain_s=0.0)
        if is_ours:
            stop_engine(http.engine, address=address)
        raise


def _wait_until_ready(handle: SchedulerHandle, progress: Callable[[str], None], timeout_s: float) -> None:
    started_s = time.monotonic()
    told = ""
    progress("the scheduler starts")
    while True:
        # the process of the actor may take longer than a call may: it imports torch
        status: EngineStatus = handle.call("status", timeout_s=60.0)
        if status.state is EngineState.READY:
            progress(f"ready after {time.monotonic() - started_s:.1f} s")
            return
        if status.state in (EngineState.FAILED, EngineState.STOPPED):
            raise EngineUnavailable(f"engine {handle.engine!r} did not start: {status.detail}")
        if status.detail != told:
            progress(told := status.detail)
        if time.monotonic() - started_s > timeout_s:
            raise EngineUnavailable(f"engine {handle.engine!r} was not ready within {timeout_s:.0f} s: {status.detail}")
        time.sleep(0.1)


def connect(engine: str = "default", *, address: str | None = "auto") -> RayEngineClient:
    """A client of a running engine, for one event loop. Raises :class:`EngineUnavailable`."""
    join_ray(address)
    find_scheduler(engine)
    return RayEngineClient(engine)


def connect_llm(engine: str = "default", *, address: str | None = "auto") -> LLM:
    """An LLM over a running engine; closing it leaves the engine as it is. Raises :class:`EngineUnavailable`."""
    join_ray(address)
    return _llm_over(RemoteCore(engine))


def open_llm(
    config: EngineConfig,
    *,
    engine: str = "default",
    address: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> LLM:
    """:func:`connect_llm` if an engine of this name runs; otherwise one is started with ``config``, for this LLM
    alone, and ends with it. Raises what :func:`start_engine` does."""
    join_ray(address)
    if engine in list_engines(address):
        return _llm_over(RemoteCore(engine))
    started = start_engine(config, engine=engine, address=address, detached=False, progress=progress)
    try:
        return _llm_over(RemoteCore(engine, on_shutdown=started.stop))
    except BaseException:
        started.stop()
        raise


def _llm_over(core: RemoteCore) -> LLM:
    from glm5ray.model.byte_tokenizer import tokenizer_of
    from glm5ray.model.checkpoint_folder import resolve_checkpoint

    tokenizer = tokenizer_of(resolve_checkpoint(core.info.model_path), core.config.model.load_format)
    return LLM.from_core(core, tokenizer, core.config)


def list_engines(address: str | None = "auto") -> list[str]:
    """The names of the engines in the cluster, ready or not. Raises :class:`EngineUnavailable`."""
    join_ray(address)
    named: Any = list_named_actors(all_namespaces=True)  # of dicts, whatever its annotation says
    names = [engine_of(entry["name"]) for entry in named if entry["namespace"] == NAMESPACE]
    return sorted(name for name in names if name is not None)


def list_all(address: str | None = "auto") -> list[str]:
    """The engines that run or are served over HTTP: what :func:`stop_engine` would end. Raises
    :class:`EngineUnavailable`."""
    return sorted({*list_engines(address), *list_http()})


def stop_engine(engine: str = "default", *, address: str | None = "auto", timeout_s: float = 20.0) -> bool:
    """Ends an engine's HTTP actor, then the engine, its workers and its placement group. False if nothing of this name
    runs. ``timeout_s``: what requests over HTTP have to end, and then again the engine."""
    join_ray(address)
    was_served = stop_http(engine, drain_s=timeout_s)
    try:
        actor = find_scheduler(engine)
    except EngineUnavailable:
        return was_served
    try:
        SchedulerHandle(engine, actor).call("stop", timeout_s / 2, timeout_s=timeout_s)
    except EngineUnavailable as error:
        logger.warning("engine=%s is ended by force: %s", engine, error)
    ray.kill(actor, no_restart=True)  # workers are its children and go with it
    until_s = time.monotonic() + timeout_s
    while engine in list_engines(address):
        if time.monotonic() > until_s:
            raise EngineUnavailable(f"engine {engine!r} was told to end and is still there after {timeout_s:.0f} s")
        time.sleep(0.05)
    return True
