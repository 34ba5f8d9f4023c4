"""What the model of the unit of work, or thinking about it, has found: each as a test of its own."""

from __future__ import annotations

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from enlist import JobRepository, JobState
from tests.jobs import Note, state_of
from tests.support import Observer

repo = JobRepository()


@pytest.mark.parametrize("status", ["running", "done"])
def test_a_duplicate_names_the_job_that_has_taken_the_key_in_the_same_flush(
    engine: Engine, observer: Observer, status: str
) -> None:
    with Session(engine) as session:
        old = repo.enqueue(session, Note(text="old"), unique_key="k")
        session.commit()
        observer.execute(
            "UPDATE enlist_job SET status = %s, locked_until = CASE WHEN %s = 'running' THEN now() END", status, status
        )
        new = repo.enqueue(session, Note(text="new"), unique_key="k", on_conflict="replace")
        refused = repo.enqueue(session, Note(text="refused"), unique_key="k")
        session.commit()
    assert (state_of(new), state_of(refused)) == (JobState.COMMITTED, JobState.DUPLICATE)
    # The old one has lost the key to the new one: whoever wants to follow the job that will run needs that.
    assert refused.existing_id == new.id
    assert observer.rows("SELECT id, unique_held FROM enlist_job ORDER BY id") == [(old.id, False), (new.id, True)]
