"""A place to try something out: a database on a server of one's own, or a schema in a given database."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import sqlalchemy as sa

from enlist._cli_database import connecting, engine_for, one_line
from enlist._driver import shown_url
from enlist.demo.server import EmbeddedServer
from enlist.exceptions import ConfigurationError
from enlist.migrations import migrate

__all__ = ["Scratch", "scratch"]

logger = logging.getLogger("enlist.demo")


@dataclass(frozen=True)
class Scratch:
    """A database with enlist's tables and nothing else that is seen through its URL."""

    url: sa.URL
    clean_up: str
    """What removes it when it was kept, for a person to copy: a shell line, or an SQL statement."""
    own_server: bool


@contextmanager
def scratch(
    name: str, url: sa.URL | None = None, *, keep: bool = False, settings: Mapping[str, str] | None = None
) -> Iterator[Scratch]:
    """Make the place and remove it afterwards.

    :param name: of the schema to make in the database of ``url``. It must not exist: what is removed at the end is
        what was made here. Other schemas of that database are neither read nor written.
    :param url: a PostgreSQL to use; default a new embedded server, in a temporary directory.
    :param keep: don't remove it.
    :param settings: for the embedded server.
    :raises ConfigurationError: the schema exists already, or connections don't get to it.
    :raises EnlistError: the database cannot be reached, or no server be started.
    """
    if url is None:
        with EmbeddedServer(keep=keep, settings=settings) as server:
            _migrate(server.url())
            yield Scratch(server.url(), server.stop_command, own_server=True)
        return
    own = _with_search_path(url, name)
    _create_schema(url, name)
    try:
        _check_search_path(own, name)
        _migrate(own)
        yield Scratch(own, f"DROP SCHEMA {name} CASCADE", own_server=False)
    finally:
        if not keep:
            _drop_schema(url, name)


def _migrate(url: sa.URL) -> None:
    with connecting(engine_for(url)) as connection:
        migrate(connection)


def _check_search_path(url: sa.URL, schema: str) -> None:
    """Refuse connections that are in another schema: tables are emptied here that would be the application's.

    PgBouncer can be told to ignore the connection's options (``ignore_startup_parameters``).
    """
    with connecting(engine_for(url)) as connection:
        found = connection.scalar(sa.select(sa.func.current_schema()))
    if found != schema:
        raise ConfigurationError(
            f"{shown_url(url)}: the connection's options are ignored, so that it is in the schema {found!r} instead of"
            f" {schema!r}; behind PgBouncer, give the address of the server itself"
        )


def _with_search_path(url: sa.URL, schema: str) -> sa.URL:
    options = url.query.get("options", "")
    options = " ".join(options) if isinstance(options, tuple) else options
    return url.update_query_dict({"options": f"{options} -csearch_path={schema}".strip()})


def _create_schema(url: sa.URL, name: str) -> None:
    with connecting(engine_for(url)) as connection:
        if connection.scalar(sa.text("SELECT 1 FROM pg_namespace WHERE nspname = :name"), {"name": name}):
            raise ConfigurationError(
                f"{shown_url(url)} has a schema {name!r} already: another run is using it, or one was kept or killed;"
                f" to remove it: DROP SCHEMA {name} CASCADE"
            )
        connection.exec_driver_sql(f"CREATE SCHEMA {name}")


def _drop_schema(url: sa.URL, name: str) -> None:
    try:
        with connecting(engine_for(url)) as connection:
            connection.exec_driver_sql("SET LOCAL lock_timeout = '10s'")
            connection.exec_driver_sql(f"DROP SCHEMA IF EXISTS {name} CASCADE")
    except Exception as error:  # another error may be on its way, and is the cause
        logger.warning("the schema %s could not be removed: %s", name, one_line(error))
