"""dramatiq with dramatiq-pg as its broker: plain functions on threads, psycopg2."""

from __future__ import annotations

import re
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, LiteralString

import dramatiq
import dramatiq_pg
import sqlalchemy as sa
from dramatiq.middleware import default_middleware
from psycopg_pool import ConnectionPool

from tests.peers.domain import INSERT_SQL, insert_with_plain_session
from tests.peers.peer import Cannot, Connection, Load, Settings, Work, connect, dsn

QUEUE: Final = "default"


class DramatiqPg:
    name = "dramatiq-pg"
    packages: Sequence[str] = ("dramatiq-pg", "dramatiq", "psycopg2-binary")
    promise = "another transaction than the completion; not fenced"
    most_jobs = 5000

    def settings(self, load: Load) -> Settings:
        # With 16 its pool runs out of connections, and messages stay unfinished for ever.
        return {"threads": 8, "results": False}

    def install(self, url: sa.URL) -> None:
        script = (Path(dramatiq_pg.__file__).parent / "schema.sql").read_text()
        names = {"schema": "dramatiq", "state": "state", "queue": "queue"}
        # It is meant for psql, with its commands and variables.
        statements = re.sub(r"^\\.*$", "", script, flags=re.MULTILINE)
        statements = re.sub(r':"(\w+)"', lambda found: names[found[1]], statements)
        with connect(url) as connection:
            connection.execute(statements.encode())

    def clear(self, connection: Connection) -> None:
        connection.execute("TRUNCATE dramatiq.queue")

    def unfinished(self, connection: Connection, jobs: int) -> str:
        return "EXISTS (SELECT FROM dramatiq.queue WHERE state IN ('queued', 'consumed') AND queue_name = 'default')"

    def seed(self, connection: Connection, jobs: int) -> bool:
        _add(connection, jobs, QUEUE, "queued", "'{}'::jsonb", first=0)
        return True

    def add_finished(self, connection: Connection, jobs: int) -> None:
        _add(connection, jobs, QUEUE, "done", "'{}'::jsonb")

    def add_future(self, connection: Connection, jobs: int) -> None:
        tomorrow = "jsonb_build_object('eta', (extract(epoch FROM now() + interval '1 day') * 1000)::bigint)"
        _add(connection, jobs, f"{QUEUE}.DQ", "queued", tomorrow)

    def work(self, work: Work) -> None:
        insert = None
        if work.load.name == "insert":
            insert = insert_with_plain_session(work.url, work.settings["threads"])
        elif work.load.name == "insert-grouped":
            insert = _insert_with_pool(work.url, work.settings["threads"])
        broker, _ = _broker(work.url, work.plain_handler(insert))
        work.start()
        dramatiq.Worker(broker, worker_threads=work.settings["threads"]).start()
        threading.Event().wait()

    @asynccontextmanager
    async def producer(self, url: sa.URL, settings: Settings) -> AsyncIterator[_Producer]:
        broker, actor = _broker(url, lambda number: None)
        yield _Producer(actor)
        broker.close()


class _Producer:
    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def one(self, number: int) -> None:
        self._actor.send(number)

    async def ten(self) -> None:
        raise Cannot("it always sends on a connection of its own")

    async def bulk(self, jobs: int) -> None:
        raise Cannot("it sends messages one by one")


def _insert_with_pool(url: sa.URL, size: int) -> Callable[[int], None]:
    pool = ConnectionPool(dsn(url), min_size=size, max_size=size, open=True)
    pool.wait()

    def insert(number: int) -> None:
        with pool.connection() as connection:
            connection.execute(INSERT_SQL, (number,))

    return insert


def _broker(url: sa.URL, handle: Callable[[int], None]) -> tuple[Any, Any]:
    middleware = [kind() for kind in default_middleware if kind.__name__ != "Prometheus"]
    broker = dramatiq_pg.PostgresBroker(
        url=dsn(url), results=False, schema="dramatiq", prefix="", middleware=middleware
    )
    dramatiq.set_broker(broker)

    def job(number: int) -> None:
        handle(number)

    return broker, dramatiq.actor(job, broker=broker, actor_name="job")


def _add(connection: Connection, jobs: int, queue: str, state: str, options: LiteralString, *, first: int = 1) -> None:
    connection.execute(
        "INSERT INTO dramatiq.queue (message_id, queue_name, state, message)"
        " SELECT id, %s, %s::dramatiq.state, jsonb_build_object('args', jsonb_build_array(number),"
        f" 'kwargs', '{{}}'::jsonb, 'options', {options}, 'actor_name', 'job', 'message_id', id::text,"
        " 'queue_name', %s::text, 'message_timestamp', (extract(epoch FROM now()) * 1000)::bigint)"
        " FROM (SELECT number, gen_random_uuid() AS id FROM generate_series(%s::int, %s::int) AS number) AS new",
        (queue, state, queue, first, first + jobs - 1),
    )


PEERS = (DramatiqPg(),)
