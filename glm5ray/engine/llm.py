"""LLM: the offline front door. Text or token ids in, results out, one process."""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from os import PathLike
from typing import TYPE_CHECKING, Any, Protocol

from glm5ray.config import EngineConfig
from glm5ray.engine.core import EngineCore
from glm5ray.engine.executor import InProcessExecutor
from glm5ray.engine.interrupts import interrupts_held
from glm5ray.engine.outputs import RequestOutput
from glm5ray.engine.results import RequestFailure, RequestResult, TextDelta
from glm5ray.errors import ConfigError, Glm5RayError, RequestError, WorkerDied
from glm5ray.protocol import FinishReason, GenerateRequest, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

    from glm5ray.engine.executor import Executor
    from glm5ray.protocol import Capacity, TokenEvent
    from glm5ray.scheduler.stats import SchedulerStats
    from glm5ray.tokenizer import Tokenizer

Prompt = str | Sequence[int]


class CoreScheduler(Protocol):
    """What an LLM asks of a scheduler."""

    @property
    def num_unfinished(self) -> int: ...

    def stats(self) -> SchedulerStats: ...


class Core(Protocol):
    """What an LLM needs below it: an :class:`EngineCore`, or a stand-in for one that runs elsewhere."""

    @property
    def capacity(self) -> Capacity: ...

    @property
    def scheduler(self) -> CoreScheduler: ...

    @property
    def has_work(self) -> bool: ...

    def add(self, request: GenerateRequest) -> None: ...

    def abort(self, request_id: str, index: int | None = None, reason: FinishReason = FinishReason.ABORT) -> None: ...

    def step(self) -> list[TokenEvent]: ...

    def shutdown(self) -> None: ...


class _Sink:
    """Where the results (and, if wanted, the text deltas) of one caller gather."""

    def __init__(self, *, wants_deltas: bool = False) -> None:
        self.wants_deltas = wants_deltas
        self.results: deque[RequestResult | RequestFailure] = deque()
        self.deltas: deque[TextDelta] = deque()
        self.open: set[str] = set()
        """Requests of this caller that run."""


class LLM:
    """A model, ready to answer.

    >>> llm = LLM("nano")
    >>> llm.generate(["The sky is"], SamplingParams(max_tokens=8, temperature=0.0))[0].text  # doctest: +SKIP

    Calls may come from several threads and may be interleaved; they share the batch. Use it as a context manager, or
    call :meth:`close`.
    """

    def __init__(
        self,
        model: str | PathLike[str] | None = None,
        *,
        config: EngineConfig | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Loads ``model`` (a checkpoint folder, or ``nano``, the one in the package), which wins over
        ``config.model.path``.

        ``progress(done_bytes, total_bytes)`` is called while weights are read. Raises :class:`CheckpointError` and
        :class:`ConfigError`.
        """
        from glm5ray.model.byte_tokenizer import tokenizer_of
        from glm5ray.model.checkpoint_folder import resolve_checkpoint
        from glm5ray.worker.worker import Worker, pick_device

        config = config or EngineConfig()
        if not isinstance(config, EngineConfig):
            raise ConfigError(f"config is a {type(config).__name__}; make an EngineConfig, as load_config does")
        if config.parallel.world_size > 1:
            sizes = config.parallel
            raise ConfigError(
                f"parallel.tp_size is {sizes.tp_size}, parallel.ep_size {sizes.ep_size} and parallel.dp_size "
                f"{sizes.dp_size}; LLM runs one rank, in this process; set all of them to 1"
            )
        if model is not None:
            if not isinstance(model, str | PathLike):
                raise ConfigError(f"model is {model!r}; it must be a folder's path or the name of a model")
            config = replace(config, model=replace(config.model, path=str(model)))
        tokenizer = tokenizer_of(resolve_checkpoint(config.model.path), config.model.load_format)
        on_gpu = pick_device(config.model.device) == "cuda"
        overlap = on_gpu if config.scheduler.overlap == "auto" else config.scheduler.overlap
        executor = InProcessExecutor(lambda: Worker.load(config, progress=progress), threaded=overlap and not on_gpu)
        self._open(EngineCore(executor, config.scheduler, config.cache, overlap=overlap), tokenizer, config)

    @classmethod
    def from_executor(cls, executor: Executor, tokenizer: Tokenizer, config: EngineConfig | None = None) -> LLM:
        """The same over any executor: a fake one, or a worker that is already loaded. ``overlap: auto`` means the
        overlapped loop."""
        config = config or EngineConfig()
        overlap = config.scheduler.overlap is not False
        return cls.from_core(EngineCore(executor, config.scheduler, config.cache, overlap=overlap), tokenizer, config)

    @classmethod
    def from_core(cls, core: Core, tokenizer: Tokenizer, config: EngineConfig) -> LLM:
        """The same over an engine that runs already. ``config`` is its config."""
        llm = cls.__new__(cls)
        llm._open(core, tokenizer, config)
        return llm

    @classmethod
    def connect(cls, address: str | None = "auto", *, engine: str = "default") -> LLM:
        """The same over an engine that runs in a Ray cluster: started by ``glm5ray serve``, or by another process. It
        goes on when this LLM is closed.

        ``address`` is the cluster's: ``auto`` for the one on this machine. Raises :class:`EngineUnavailable`.
        """
        from glm5ray.actors.launch import connect_llm

        return connect_llm(engine, address=address)

    def _open(self, core: Core, tokenizer: Tokenizer, config: EngineConfig) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self._core = core
        self._lock = threading.RLock()
        self._outputs: dict[str, tuple[RequestOutput, _Sink]] = {}
        self._numbers = count()
        self._dead: str | None = None

    @property
    def capacity(self) -> Capacity:
        """The limits of this engine: longest sequence, pages, vocabulary."""
        return self._core.capacity

    def stats(self) -> SchedulerStats:
        """Counts of the scheduler: running, waiting, pages, preemptions, prefix hits."""
        return self._core.scheduler.stats()

    # --- generation ---------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_result: Callable[[RequestResult | RequestFailure], None] | None = None,
    ) -> list[RequestResult | RequestFailure]:
        """Answers to ``prompts`` (texts, or lists of token ids), in their order.

        A prompt that cannot be served has a :class:`RequestFailure` in its place; the others finish.
        ``sampling_params`` is one for all or one for each. ``on_result`` is called with each result as it comes.
        """
        many = _as_prompts(prompts)
        params = _as_params(sampling_params, len(many))
        return self._answers([lambda p=prompt: self._encode(p) for prompt in many], params, on_result)

    def chat(
        self,
        conversations: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_result: Callable[[RequestResult | RequestFailure], None] | None = None,
        **template_options: Any,
    ) -> list[RequestResult | RequestFailure]:
        """:meth:`generate` for chat messages: one conversation (a list of messages) or several.

        Messages go to the chat template as they are (``role``, ``content``, ``tool_calls`` with arguments as mappings),
        and so do ``template_options`` (``tools``, ``enable_thinking`` ...).
        """
        if not isinstance(conversations, Sequence) or isinstance(conversations, str | bytes):
            raise Glm5RayError(
                f"conversations is {type(conversations).__name__}; it must be a list of messages, or a list of such "
                "lists"
            )
        one = bool(conversations) and hasattr(conversations[0], "keys")
        many: Any = [conversations] if one else conversations
        params = _as_params(sampling_params, len(many))
        return self._answers([lambda m=m: self._render(m, template_options) for m in many], params, on_result)

    def _answers(
        self,
        prompts: list[Callable[[], tuple[int, ...]]],
        params: list[SamplingParams],
        on_result: Callable[[RequestResult | RequestFailure], None] | None,
    ) -> list[RequestResult | RequestFailure]:
        """Runs prompts that are still to be encoded; those that cannot be are failures in their place."""
        names = [f"generate-{next(self._numbers)}" for _ in prompts]
        items = (self._prepare(*item) for item in zip(names, prompts, params, strict=True))
        found: dict[str, RequestResult | RequestFailure] = {}
        for result in self.run(items):
            found[result.request_id] = result
            if on_result is not None:
                on_result(result)
        return [found[name] for name in names]

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[TextDelta]:
        """The answer to one prompt, piece by piece. Raises :class:`RequestError`. Closing the iterator ends the
        request."""
        (params,) = _as_params(sampling_params, 1)
        prepared = self._prepare(f"stream-{next(self._numbers)}", lambda: self._encode(prompt), params)
        if isinstance(prepared, RequestFailure):
            raise prepared.error
        sink = _Sink(wants_deltas=True)
        try:
            self._submit(prepared, sink)
            while True:
                while sink.deltas:
                    yield sink.deltas.popleft()
                if sink.results:
                    break
                self._pump()
            last = sink.results.popleft()
            if isinstance(last, RequestFailure):
                raise last.error
        finally:
            self._abandon(sink)

    def run(
        self,
        requests: Iterable[GenerateRequest | RequestFailure],
        *,
        on_step: Callable[[int], None] | None = None,
    ) -> Iterator[RequestResult | RequestFailure]:
        """Results as they finish, in any order. ``requests`` is read only as far as the engine has room, so it may be
        endless.

        A failure among ``requests`` is passed on; a request that cannot be served becomes one. Closing the iterator
        ends what still runs. ``on_step`` is called after each step with the number of tokens that it brought.
        """
        sink = _Sink()
        source = iter(requests)
        exhausted = False
        try:
            while True:
                while not exhausted and self._has_room(sink):
                    item = next(source, None)
                    if item is None:
                        exhausted = True
                    elif isinstance(item, RequestFailure):
                        sink.results.append(item)
                    else:
                        self._try_submit(item, sink)
                while sink.results:
                    yield sink.results.popleft()
                if exhausted and not sink.open:
                    return
                num_tokens = self._pump()  # also when the room is taken by other callers: their results make room
                if on_step is not None:
                    on_step(num_tokens)
        finally:
            self._abandon(sink)

    # --- the engine below ---------------------------------------------------------------------------------------------

    def _has_room(self, sink: _Sink) -> bool:
        """Enough waits that the scheduler can always fill a step, and no more; results are handed on before more is
        read."""
        if self._dead is not None:
            return len(sink.results) < 256  # nothing runs any more; each request fails at once
        running = self.config.scheduler.max_num_seqs * self.config.parallel.dp_size
        return self._core.scheduler.num_unfinished < running + min(running, 256) and len(sink.results) < 256

    def _prepare(
        self, request_id: str, prompt: Callable[[], tuple[int, ...]], params: SamplingParams
    ) -> GenerateRequest | RequestFailure:
        try:
            token_ids = prompt()
        except RequestError as error:
            return RequestFailure(request_id=request_id, error=error)
        return GenerateRequest(request_id=request_id, prompt_token_ids=token_ids, sampling=params)

    def _encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Raises :class:`RequestError`."""
        if isinstance(prompt, str):
            return tuple(self.tokenizer.encode(prompt))
        if isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray):
            return tuple(prompt)
        raise RequestError(f"a prompt is {prompt!r}; it must be a text or a list of token ids.", param="prompt")

    def _render(self, messages: Any, options: Mapping[str, Any]) -> tuple[int, ...]:
        """Raises :class:`RequestError`."""
        if not isinstance(messages, Sequence) or not all(hasattr(message, "keys") for message in messages):
            raise RequestError(
                f"a conversation is {messages!r}; it must be a list of messages, each with role and content.",
                param="messages",
            )
        if not messages:
            raise RequestError("a conversation has no messages; give at least one.", param="messages")
        return tuple(self.tokenizer.encode(self.tokenizer.apply_chat_template(list(messages), **options)))

    def _submit(self, request: GenerateRequest, sink: _Sink) -> None:
        """Raises :class:`RequestError`."""
        with self._lock, interrupts_held():
            if self._dead is not None:
                raise RequestError(self._dead, code="engine_failed", status=500)
            if request.sampling.seed is None:
                request = replace(request, sampling=replace(request.sampling, seed=secrets.randbits(63)))
            self._core.add(request)
            self._outputs[request.request_id] = (RequestOutput(request, self.tokenizer), sink)
            sink.open.add(request.request_id)

    def _try_submit(self, request: GenerateRequest, sink: _Sink) -> None:
        try:
            self._submit(request, sink)
        except RequestError as error:
            sink.results.append(RequestFailure(request_id=request.request_id, error=error))

    def _pump(self) -> int:
        """One step of the engine; hands each event to the caller that it belongs to, and returns the number of new
        tokens. Ctrl-C waits for its end."""
        num_tokens = 0
        with self._lock, interrupts_held():
            if self._dead is not None:
                return 0
            try:
                events = self._core.step()
                for event in events:
                    num_tokens += len(event.token_ids)
                    self._deliver(event)
            except WorkerDied as error:
                self._fail_all(f"the engine has failed and takes no more requests ({error}); make a new LLM")
            except BaseException:
                # a second Ctrl-C, or a bug of ours: what scheduler and worker know may no longer agree
                self._fail_all("the engine was broken off in the middle of a step; make a new LLM")
                raise
        return num_tokens

    def _deliver(self, event: TokenEvent) -> None:
        if event.request_id not in self._outputs:
            return  # abandoned, or ended by a stop string
        output, sink = self._outputs[event.request_id]
        progress = output.process(event)
        if progress.delta is not None and sink.wants_deltas:
            sink.deltas.append(progress.delta)
        if progress.stop:
            self._core.abort(event.request_id, event.index, FinishReason.STOP)
        if progress.result is not None:
            if isinstance(progress.result, RequestFailure):
                self._core.abort(event.request_id)
            self._close(event.request_id, progress.result)

    def _close(self, request_id: str, result: RequestResult | RequestFailure) -> None:
        _, sink = self._outputs.pop(request_id)
        sink.open.discard(request_id)
        sink.results.append(result)

    def _fail_all(self, why: str) -> None:
        """Ends every request with an error, now and from now on."""
        self._dead = why
        for request_id in list(self._outputs):
            error = RequestError(why, code="engine_failed", status=500)
            self._close(request_id, RequestFailure(request_id=request_id, error=error))

    def _abandon(self, sink: _Sink) -> None:
        """Ends what a caller left running."""
        with self._lock, interrupts_held():
            for request_id in list(sink.open):
                self._outputs.pop(request_id, None)
                self._core.abort(request_id)
            sink.open.clear()

    def close(self) -> None:
        """Ends the worker and gives its memory back; what still runs fails."""
        with self._lock, interrupts_held():
            if self._dead is None:
                for request_id in self._outputs:
                    self._core.abort(request_id)
                self._fail_all("this LLM was closed and takes no more requests; make a new one")
            self._core.shutdown()

    def __enter__(self) -> LLM:
        if self._dead is not None:
            raise Glm5RayError(self._dead)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt, or several, as a list."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise Glm5RayError(
            f"prompts is {type(prompts).__name__}; it must be a text, a list of texts, or lists of token ids"
        )
    if prompts and all(isinstance(entry, int) for entry in prompts):
        return [prompts]  # pyright: ignore[reportReturnType] - a list of ids is one prompt
    return list(prompts)  # pyright: ignore[reportReturnType] - mixed entries are checked one by one


def _as_params(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None:
        return [SamplingParams()] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence) or not all(isinstance(entry, SamplingParams) for entry in params):
        raise Glm5RayError(
            f"sampling_params is {params!r}; it must be a SamplingParams, or a list of one for each prompt"
        )
    if len(params) != count:
        raise Glm5RayError(f"{len(params)} sampling_params for {count} prompts; give one for all or one for each")
    return list(params)
