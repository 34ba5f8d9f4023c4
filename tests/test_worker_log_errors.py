"""A log that cannot be written stops nothing."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session
from tenacity import wait_fixed

from enlist import HandlerRegistry, Job, Worker
from tests.support import Observer, wait_until
from tests.support.jobs import Jobs, running


class Breaks(logging.Filter):
    """What an application may have added."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error
        self.met = 0

    def filter(self, record: logging.LogRecord) -> bool:
        self.met += 1
        raise self.error


@pytest.mark.slow
@pytest.mark.parametrize("error", [OSError("no space left on device"), SystemExit(3)], ids=["OSError", "SystemExit"])
def test_a_filter_that_raises_ends_no_thread(
    error: BaseException, engine: Engine, observer: Observer, request: pytest.FixtureRequest
) -> None:
    jobs = Jobs(observer)
    handlers = HandlerRegistry()

    @handlers.handler("work", wait=wait_fixed(0.05))
    def work(_session: Session, job: Job[Any]) -> None:
        if job.attempt == 1:
            raise ValueError("boom")

    logger, breaks = logging.getLogger("enlist.worker"), Breaks(error)
    logger.addFilter(breaks)
    request.addfinalizer(lambda: logger.removeFilter(breaks))
    worker = Worker(engine, handlers, concurrency=2, poll_interval=0.05)
    with running(worker):
        wait_until(lambda: worker.health().listening)
        jobs.wait(jobs.add("work"))
        observer.execute(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        job_ids = jobs.add_many("work", 5)
        assert [jobs.wait(job_id, timeout=10)["attempt"] for job_id in job_ids] == [2] * 5
        wait_until(lambda: worker.health().listening, 10)
        wait_until(lambda: worker.health().free == 2)
    assert breaks.met > 5


def test_a_line_of_the_log_names_its_own_place(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    handlers = HandlerRegistry()
    handlers.handler("work")(lambda session, job: None)
    caplog.set_level(logging.INFO, "enlist")
    with running(Worker(engine, handlers)):
        pass
    places = {record.filename for record in caplog.records if record.name == "enlist.worker"}
    assert "_running.py" in places
    assert "_log.py" not in places
