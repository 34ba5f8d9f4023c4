"""What an application wants to have open while a worker works: entered at its start, left at its end."""

from __future__ import annotations

import asyncio
import inspect
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from enlist._log import Log
from enlist.exceptions import ConfigurationError

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

__all__ = ["AnyLifespan", "Lifespan"]

logger = Log("enlist.worker")

AnyLifespan: TypeAlias = AbstractContextManager[Any] | AbstractAsyncContextManager[Any]

LOOK_SECONDS: Final = 0.05
"""How often to look, while an async one is entered, whether the worker is to stop."""


class Lifespan:
    """One stay in the context manager that ``lifespan=`` has made.

    An async one is entered and left on the event loop of the handlers, to which what it opens then belongs; both in
    one task, as task groups and cancel scopes demand.
    """

    def __init__(self, made: AnyLifespan, loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
        """:param loop: has the handlers' event loop run, and returns it.

        :raises ConfigurationError: it is no context manager.
        """
        self._made = made
        # Some that are async have the plain methods only to say so (aiohttp.ClientSession).
        self._is_async = isinstance(made, AbstractAsyncContextManager)
        if not isinstance(made, (AbstractAsyncContextManager, AbstractContextManager)):
            raise ConfigurationError(
                f"lifespan must return a context manager, not {made!r}: decorate the function with"
                f" @contextlib.{_decorator(made)}"
            )
        self._get_loop = loop
        self._entered: Future[Any] = Future()
        self._life: Future[None] | None = None
        self._leave: asyncio.Event
        self._leaving = False

    def enter(self, stop_asked: threading.Event) -> Any:
        """Enter it and return what it yields; give up when the worker is to stop meanwhile, if it is async."""
        if not self._is_async:
            assert isinstance(self._made, AbstractContextManager)
            value = self._made.__enter__()
            self._entered.set_result(None)
            return value
        self._loop = self._get_loop()
        self._life = asyncio.run_coroutine_threadsafe(self._live(), self._loop)
        while not wait([self._entered, self._life], LOOK_SECONDS, FIRST_COMPLETED).done:
            if stop_asked.is_set():
                self._life.cancel()
                return None
        if not self._entered.done():
            self._life.result()  # raises what entering it has raised
        self._life.add_done_callback(self._tell)
        return self._entered.result()

    def leave(self, seconds: float) -> None:
        """Leave it, if it was entered, an async one in so many seconds at most. Never raises: the worker ends."""
        if not self._entered.done():
            return
        self._leaving = True
        if self._life is None:
            assert isinstance(self._made, AbstractContextManager)
            try:
                self._made.__exit__(None, None, None)
            except BaseException:
                logger.exception("the worker's lifespan could not be left")
            return
        self._loop.call_soon_threadsafe(self._leave.set)
        if not wait([self._life], seconds).done:
            logger.warning("the worker's lifespan is given up: it was not left in %g seconds", seconds)
            self._life.cancel()

    async def _live(self) -> None:
        assert isinstance(self._made, AbstractAsyncContextManager)
        self._leave = asyncio.Event()
        async with self._made as value:
            self._entered.set_result(value)
            await self._leave.wait()

    def _tell(self, life: Future[None]) -> None:
        """Say how an async one has ended, if in another way than it should."""
        error = None if life.cancelled() else life.exception()
        if error is not None or not self._leaving:
            how = "could not be left" if self._leaving else "has ended while the worker works: what it opened is gone"
            logger.error("the worker's lifespan %s", how, exc_info=error)


def _decorator(made: object) -> str:
    if inspect.iscoroutine(made):
        made.close()
        return "asynccontextmanager, and have it yield"
    return "asynccontextmanager" if inspect.isasyncgen(made) else "contextmanager"
