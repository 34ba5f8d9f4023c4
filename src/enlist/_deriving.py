"""From an engine to others on the same database: what is known of how its connections are made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from enlist._connecting import CONNECTING
from enlist._driver import shown_url
from enlist.exceptions import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["DRIVER", "creator_of", "derivable", "handler_options", "has_creator"]

DRIVER: Final = "postgresql+psycopg"

ASYNCPGS_CACHES: Final = ("prepared_statement_cache_size", "statement_cache_size")

ASYNCPG_ONLY: Final = frozenset(
    {
        *ASYNCPGS_CACHES,
        "command_timeout",
        "max_cacheable_statement_size",
        "max_cached_statement_lifetime",
        "prepared_statement_name_func",
        "timeout",
    }
)
"""What asyncpg and its dialect are told of how they work: a psycopg connection to the same database needs none."""


def handler_options(engine: sa.Engine | AsyncEngine) -> dict[str, Any]:
    """What a derived engine for handlers takes over: their transactions are the same in both worlds."""
    sync = engine.sync_engine if isinstance(engine, AsyncEngine) else engine
    options: dict[str, Any] = {"execution_options": dict(sync.get_execution_options())}
    level = cast("Any", sync.dialect)._on_connect_isolation_level
    if level is not None:
        options["isolation_level"] = level
    return options


def derivable(engine: sa.Engine | AsyncEngine, keyword: str) -> tuple[sa.URL, dict[str, Any]]:
    """The engine's URL and arguments for psycopg; refused where more than these says how its connections are made."""
    sync = engine.sync_engine if isinstance(engine, AsyncEngine) else engine
    pool = cast("Any", sync.pool)
    psycopg = sync.dialect.driver in {"psycopg", "psycopg_async"}
    arguments: dict[str, Any] = {}
    url = sync.url
    lost = []
    if has_creator(pool):
        lost.append("its creator")
    else:
        # What create_engine() was given as connect_args is kept nowhere else.
        given = _closure(pool._creator).get("cparams", {})
        _, from_url = sync.dialect.create_connect_args(url)
        arguments = {name: value for name, value in given.items() if name not in from_url}
    derived = _unless_given(url)
    if sync.dialect.driver == "asyncpg":
        sizes = [{**url.query, **arguments}.get(name) for name in ASYNCPGS_CACHES]
        if "0" in map(str, sizes):  # as behind a pooler, where a prepared statement may be on another connection
            derived["prepare_threshold"] = None
        arguments = {name: value for name, value in arguments.items() if name not in ASYNCPG_ONLY}
        url = url.difference_update_query(ASYNCPG_ONLY)
    if not psycopg:
        lost += [f"connect_args[{name!r}]" for name in arguments]
        lost += [f"the URL's {name}" for name in url.query if name not in {"host", "port", "user", "database"}]
    listeners = [*cast("Any", sync.dialect).dispatch.do_connect, *pool.dispatch.connect]
    lost += [f"its listener {function!r}" for function in listeners if not _is_sqlalchemys(function)]
    if lost:
        raise ConfigurationError(
            f"the engine of {shown_url(sync.url)} is more than its URL ({', '.join(lost)}), so no psycopg engine can be"
            f" derived from it: give the worker one as {keyword}="
        )
    return url.set(drivername=DRIVER), derived | arguments


def has_creator(pool: Any) -> bool:
    """Whether the application makes the connections, ``create_engine(creator=...)``."""
    return getattr(pool._creator, "__module__", None) != "sqlalchemy.engine.create"


def _is_sqlalchemys(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).startswith("sqlalchemy.")


def _closure(function: Callable[..., Any]) -> dict[str, Any]:
    names = function.__code__.co_freevars
    cells = function.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}


def creator_of(source: sa.Engine) -> Callable[[Any], Any]:
    """Make connections as the engine does, its listeners too, but give up a server that does not answer."""
    given = _closure(cast("Any", source.pool)._creator)["cparams"]
    dialect = cast("Any", source.dialect)

    def make(record: Any) -> Any:
        positional, _ = dialect.create_connect_args(source.url)
        # A copy each time: a listener may put the password of the hour into it.
        arguments = {**_unless_given(source.url), **given}
        for listener in dialect.dispatch.do_connect:
            if (made := listener(dialect, record, positional, arguments)) is not None:
                return made
        return dialect.connect(*positional, **arguments)

    return make


def _unless_given(url: sa.URL) -> dict[str, Any]:
    """How long connecting and a silent server are put up with, where the URL does not say."""
    return {name: value for name, value in CONNECTING.items() if name not in url.query}
