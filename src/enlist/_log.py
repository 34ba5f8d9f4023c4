"""The log of workers and notifiers: what cannot be logged stops nothing."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from contextlib import suppress
from typing import Any

__all__ = ["Log"]


class Log(logging.LoggerAdapter[logging.Logger]):
    """A logger whose filters and handlers may raise: a thread of the worker's must not end with it.

    The handlers of the standard library catch their errors themselves; those of applications, and filters, do not.
    """

    def __init__(self, name: str) -> None:
        super().__init__(logging.getLogger(name), {})

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        return msg, kwargs  # with the extra fields of the call

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        if not self.isEnabledFor(level):
            return
        with suppress(Exception, SystemExit):
            # One more: the line is the caller's, not this one's.
            super().log(level, msg, *args, **{**kwargs, "stacklevel": kwargs.get("stacklevel", 1) + 1})
