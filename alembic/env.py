"""How a host application's Alembic environment meets enlist: nothing special is needed.

The address is ``-x url=...`` or, from Python, ``config.attributes["connection"]``.
"""

from __future__ import annotations

from alembic import context
from sqlalchemy import Connection, create_engine, pool


def migrate(connection: Connection) -> None:
    context.configure(connection=connection)
    with context.begin_transaction():
        context.run_migrations()


if context.is_offline_mode():
    raise SystemExit("enlist's steps look at the database: they cannot be written as SQL beforehand (--sql)")

given = context.config.attributes.get("connection")
if given is not None:
    migrate(given)
else:
    engine = create_engine(context.get_x_argument(as_dictionary=True)["url"], poolclass=pool.NullPool)
    with engine.connect() as connection:
        migrate(connection)
