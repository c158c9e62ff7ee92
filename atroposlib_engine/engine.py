"""The engine's thread: it steps the scheduler while there is work and takes commands from anywhere in between."""

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from atroposlib_engine.generation import Generation
from atroposlib_engine.llama import Llama
from atroposlib_engine.models import LocalModel
from atroposlib_engine.scheduler import Scheduler

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")


class Engine:
    """A model that serves. Every method may be called from any thread and returns at once."""

    def __init__(
        self,
        model: LocalModel,
        *,
        slots: int,
        context: int,
        threads: int | None = None,
        weight_version: str = "default",
    ) -> None:
        self.llama = Llama(model.gguf, slots=slots, context=context, threads=threads)
        self.scheduler = Scheduler(self.llama, weight_version=weight_version)
        self.model_path = str(model.gguf)
        self.tokenizer_path = str(model.tokenizer_dir)
        self.model_name = model.name
        self.fault: BaseException | None = None
        self.on_fault: Callable[[], None] = lambda: None
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End what runs as aborted, then the thread; returns when it has ended."""
        self.call(lambda: self.scheduler.abort(None))
        self._stopping = True
        self._commands.put(lambda: None)
        self._thread.join()
        self.llama.close()

    def submit(self, generations: list[Generation]) -> None:
        """Queue sequences; their `on_progress` is called on the engine's thread."""

        def add() -> None:
            for generation in generations:
                self.scheduler.add(generation)

        self._commands.put(add)

    def call(self, function: Callable[[], _Result]) -> Future[_Result]:
        """Run `function` on the engine's thread between two batches."""
        done: Future[_Result] = Future()

        def command() -> None:
            try:
                done.set_result(function())
            except Exception as error:
                done.set_exception(error)

        self._commands.put(command)
        return done

    def swap_weights(self, gguf: Path, version: str | None) -> Future[None]:
        """Load other weights of the same model once running sequences have ended; ModelError in the future."""
        done: Future[None] = Future()
        self._commands.put(lambda: self.scheduler.swap_weights(gguf, version, done))
        return done

    def _run(self) -> None:
        busy = False
        while not self._stopping:
            try:
                self._take_commands(wait=not busy)
                busy = self.scheduler.step()
            except Exception as error:
                logger.exception("the engine failed and stops")
                self.fault = error
                self.scheduler.abort(None)
                self.on_fault()
                return

    def _take_commands(self, *, wait: bool) -> None:
        try:
            self._commands.get(block=wait)()
            while True:
                self._commands.get_nowait()()
        except queue.Empty:
            return
