"""Which SQL an engine was asked to run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from sqlalchemy import Engine, event
from sqlalchemy.ext.asyncio import AsyncEngine


class StatementRecorder:
    """Records the statements of one engine, while used as a context manager.

    ``texts`` are the statements as the driver got them, in order; BEGIN, COMMIT and ROLLBACK are among ``events``
    only, which has everything.
    """

    def __init__(self, engine: Engine | AsyncEngine) -> None:
        self._engine = engine.sync_engine if isinstance(engine, AsyncEngine) else engine
        self.texts: list[str] = []
        self.events: list[str] = []
        self._listeners: dict[str, Callable[..., Any]] = {
            "before_cursor_execute": self._on_execute,
            "begin": lambda connection: self.events.append("BEGIN"),
            "commit": lambda connection: self.events.append("COMMIT"),
            "rollback": lambda connection: self.events.append("ROLLBACK"),
        }

    def __enter__(self) -> Self:
        for name, listener in self._listeners.items():
            event.listen(self._engine, name, listener)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for name, listener in self._listeners.items():
            event.remove(self._engine, name, listener)

    def clear(self) -> None:
        self.texts.clear()
        self.events.clear()

    def matching(self, part: str) -> list[str]:
        """The statements with ``part`` in them, in upper or lower case."""
        return [text for text in self.texts if part.lower() in text.lower()]

    def _on_execute(self, connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        self.texts.append(statement)
        self.events.append(statement)
