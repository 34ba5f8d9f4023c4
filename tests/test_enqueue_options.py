"""Options outside of what they may be are refused at the call; what is taken is stored as it was meant."""

from __future__ import annotations

import datetime as dt
import math
import os
import time
import uuid
from collections.abc import Iterator
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo

import pytest
import sqlalchemy as sa
from sqlalchemy import URL, Engine
from sqlalchemy.orm import Session

from enlist import ConfigurationError, InvalidOption, JobRecord, JobRepository, PayloadError
from tests.jobs import Note
from tests.shop import Order
from tests.support import Observer, StatementRecorder

repo = JobRepository()
SOON = dt.datetime(2030, 6, 1, 12, tzinfo=dt.UTC)
EAST = dt.timezone(dt.timedelta(hours=14))
WEST = dt.timezone(dt.timedelta(hours=-12))


@pytest.mark.parametrize(
    "options",
    [
        {"queue": ""},
        {"queue": "a\x00b"},
        {"queue": "\ud800"},
        {"queue": "q" * 201},
        {"queue": "😀" * 51},
        {"queue": b"mail"},
        {"priority": 32768},
        {"priority": -32769},
        {"priority": True},
        {"priority": None},
        {"priority": 1.0},
        {"priority": "1"},
        {"priority": 10**5000},
        {"max_attempts": 0},
        {"max_attempts": 2**31},
        {"max_attempts": False},
        {"run_at": SOON.replace(tzinfo=None)},
        {"run_at": SOON.date()},
        {"run_at": SOON.isoformat()},
        {"run_at": SOON.timestamp()},
        {"run_at": dt.datetime.max.replace(tzinfo=dt.UTC)},
        {"run_at": dt.datetime.max.replace(tzinfo=WEST)},
        {"run_at": dt.datetime.min.replace(tzinfo=EAST)},
        {"delay": -1},
        {"delay": -0.001},
        {"delay": dt.timedelta(seconds=-1)},
        {"delay": dt.timedelta.max},
        {"delay": math.nan},
        {"delay": math.inf},
        {"delay": 10**400},
        {"delay": 1e30},
        {"delay": True},
        {"delay": "5"},
        {"delay": Decimal(5)},
        {"unique_key": ""},
        {"unique_key": "\x00"},
        {"unique_key": "\udcff"},
        {"unique_key": "k" * 2001},
        {"unique_key": "😀" * 501},
        {"unique_key": 7},
        {"unique_key": uuid.UUID(int=1)},
        {"concurrency_key": ""},
        {"concurrency_key": "k" * 9000},
        {"concurrency_limit": 0, "concurrency_key": "k"},
        {"concurrency_limit": 32768, "concurrency_key": "k"},
        {"concurrency_limit": 1.5, "concurrency_key": "k"},
        {"concurrency_limit": 2},
    ],
    ids=lambda options: next(iter(options)),
)
def test_bad_options_are_refused_before_any_sql(
    engine: Engine, statements: StatementRecorder, observer: Observer, options: dict[str, Any]
) -> None:
    with Session(engine) as session:
        session.add(Order(ref="a"))
        with pytest.raises(InvalidOption, match=next(iter(options))) as caught:
            repo.enqueue(session, Note(), **options)
        assert isinstance(caught.value, ValueError)
        assert len(str(caught.value)) < 400
        with pytest.raises(InvalidOption, match=rf"^items\[0\]: .*{next(iter(options))}"):
            repo.enqueue_many(session, [(Note(), options)])  # type: ignore[list-item]
        assert statements.events == []
        session.commit()
    assert observer.scalar("SELECT count(*) FROM shop_order") == 1
    assert observer.scalar("SELECT count(*) FROM enlist_job") == 0


def test_run_at_and_delay_exclude_each_other(engine: Engine) -> None:
    with Session(engine) as session, pytest.raises(InvalidOption, match=r"run_at .* and delay"):
        repo.enqueue(session, Note(), run_at=SOON, delay=5)


@pytest.mark.parametrize("meta", [[], "x", {1: 2}, {"a": object()}, {"a": (1,)}, {"a": "\x00"}])
def test_meta_is_a_dict_of_json(engine: Engine, meta: Any) -> None:
    with Session(engine) as session, pytest.raises(PayloadError, match="meta"):
        repo.enqueue(session, Note(), meta=meta)


def test_of_belongs_to_a_late_payload(engine: Engine) -> None:
    enqueue: Any = repo.enqueue
    with Session(engine) as session:
        with pytest.raises(InvalidOption, match="of="):
            enqueue(session, Note(), of=Order())
        with pytest.raises(TypeError, match="ordered"):
            enqueue(session, Note(), ordered=True)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ((Note(), {"prio": 1}), r"items\[1\]: unknown option 'prio'.*queue, priority"),
        ((Note(), [1]), r"items\[1\]: .*dict"),
        ((Note(),), r"items\[1\]: .*pair"),
        ("kind", r"items\[1\]: .*kind"),
    ],
)
def test_items_of_the_wrong_form(engine: Engine, item: Any, message: str) -> None:
    with Session(engine) as session:
        with pytest.raises((InvalidOption, PayloadError), match=message):
            repo.enqueue_many(session, [Note(), item])
        assert not session.new
        assert repo.enqueue_many(session, []) == []
        assert not session.new


def test_the_largest_and_smallest_values_are_stored(engine: Engine, observer: Observer) -> None:
    with Session(engine) as session:
        several: list[dict[str, Any]] = [
            {"queue": "😀" * 50, "priority": 32767, "max_attempts": 2**31 - 1, "delay": dt.timedelta(days=365_000)},
            {"queue": "q", "priority": -32768, "max_attempts": 1, "delay": 0},
            {"unique_key": "😀" * 500, "concurrency_key": os.urandom(1000).hex(), "concurrency_limit": 32767},
            {"run_at": dt.datetime(9999, 12, 28, tzinfo=WEST)},
            {"run_at": dt.datetime(1, 1, 4, tzinfo=EAST)},
        ]
        for options in several:
            handle = repo.enqueue(session, Note(), **options)
            session.commit()
            record = repo.get(session, handle.id)
            assert record is not None
            for name, value in options.items():
                if name != "delay":
                    assert getattr(record, name) == value
    assert observer.scalar("SELECT count(*) FROM enlist_job") == 5


@pytest.fixture(params=["UTC", "Asia/Kolkata"])
def process_zone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", request.param)
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("process_zone")
@pytest.mark.parametrize("server_zone", ["UTC", "America/New_York"])
@pytest.mark.parametrize(
    "run_at",
    [
        dt.datetime(2030, 1, 2, 3, 4, 5, 6, tzinfo=dt.UTC),
        dt.datetime(2030, 1, 2, 3, 4, tzinfo=dt.timezone(dt.timedelta(hours=5))),
        dt.datetime(2026, 10, 25, 2, 30, fold=0, tzinfo=ZoneInfo("Europe/Berlin")),
        dt.datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=ZoneInfo("Europe/Berlin")),
    ],
)
def test_an_instant_is_the_same_in_every_zone(
    database_url: URL, observer: Observer, server_zone: str, run_at: dt.datetime
) -> None:
    engine = sa.create_engine(database_url, connect_args={"options": f"-c timezone={server_zone}"})
    with Session(engine) as session:
        handle = repo.enqueue(session, Note(), run_at=run_at)
        session.commit()
        record = repo.get(session, handle.id)
        assert record is not None
        assert record.run_at.utcoffset() is not None
        assert record.run_at == run_at.astimezone(dt.UTC)
    engine.dispose()
    assert observer.scalar("SELECT extract(epoch FROM run_at)::float8 FROM enlist_job") == run_at.timestamp()


def test_a_repository_is_checked_when_it_is_made() -> None:
    make: Any = JobRepository
    for record in (Order, object, None, JobRecord.__table__):
        with pytest.raises(ConfigurationError, match="JobRecordMixin"):
            make(record)
    with pytest.raises(InvalidOption, match="after_commit"):
        make(notify="never")
    with pytest.raises(InvalidOption, match="max_payload_bytes"):
        make(max_payload_bytes=0)


class Timestamp(dt.datetime):
    """As that of a dataframe: it has more digits than a datetime, and writes them."""

    def isoformat(self, *arguments: Any, **options: Any) -> str:
        text = super().isoformat(*arguments, **options)
        return f"{text[:26]}789{text[26:]}"

    def __str__(self) -> str:
        return self.isoformat(" ")


class Timedelta(dt.timedelta):
    def total_seconds(self) -> float:
        return super().total_seconds() + 1


def test_a_subclass_of_datetime_is_taken_for_the_datetime_that_it_is(engine: Engine, observer: Observer) -> None:
    with Session(engine) as session:
        repo.enqueue(session, Note(), run_at=Timestamp(2030, 1, 2, 3, 4, 5, 6, tzinfo=dt.UTC))
        repo.enqueue(session, Note(), delay=Timedelta(seconds=60))
        session.commit()
    (at, delay) = observer.rows(
        "SELECT (run_at AT TIME ZONE 'UTC')::text, run_at - created_at FROM enlist_job ORDER BY id"
    )
    assert at[0] == "2030-01-02 03:04:05.000006"
    assert delay[1] == dt.timedelta(seconds=60)


def test_times_are_read_back_in_utc(database_url: URL) -> None:
    """Also in the hour that comes twice: Python finds none of its times equal to one of another zone."""
    engine = sa.create_engine(database_url, connect_args={"options": "-c timezone=America/New_York"})
    at = dt.datetime(2026, 11, 1, 5, 30, tzinfo=dt.UTC)
    with Session(engine) as session:
        handle = repo.enqueue(session, Note(), run_at=at)
        session.commit()
        record = repo.get(session, handle.id)
        assert record is not None
        assert record.run_at == at
        assert record.created_at.tzinfo is dt.UTC
    engine.dispose()
