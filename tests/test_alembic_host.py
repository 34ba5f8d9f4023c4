"""The reference host environment, ``alembic/``: enlist's schema by a host's own Alembic revision."""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from sqlalchemy import URL

from enlist.migrations import LATEST_STEP, current_step, verify_schema

INI = Path(__file__).parents[1] / "alembic" / "alembic.ini"


def test_upgrading_an_empty_database_makes_a_schema_that_a_worker_accepts(empty_database_url: URL) -> None:
    engine = sa.create_engine(empty_database_url, poolclass=sa.NullPool)
    config = Config(INI)
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
    with engine.connect() as connection:
        verify_schema(connection)
        assert current_step(connection) == LATEST_STEP
        assert connection.scalar(sa.text("SELECT version_num FROM alembic_version")) == "0004"
