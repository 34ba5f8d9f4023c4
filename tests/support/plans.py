"""How PostgreSQL runs a statement: its plan with the parameters in sight and without, and what that scans."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, cast

import psycopg
import sqlalchemy as sa

Mode = Literal["custom", "generic"]


class Scan(NamedTuple):
    """One place of a plan where rows of the table are looked for."""

    how: str
    """The node's type, such as "Index Scan"; of a bitmap heap scan those of its indexes."""
    index_name: str | None
    condition: str | None
    """What is looked up in the index; None: all of it is read."""
    repeated: bool
    """Whether it is done for each row of something else: inside of a loop, a recursion or a sub-select."""


def plan_of(engine: sa.Engine, statement: Any, parameters: dict[str, Any], mode: Mode, options: str = "") -> Any:
    """EXPLAIN a statement as a prepared one: "generic" is the plan that a server may keep for any parameters."""
    compiled = statement.compile(dialect=engine.dialect)
    values = {
        name: processor(value) if (processor := compiled._bind_processors.get(name)) else value
        for name, value in compiled.construct_params(parameters).items()
    }
    names = list(dict.fromkeys(re.findall(r"%\((\w+)\)s", str(compiled))))
    text = re.sub(r"%\((\w+)\)s", lambda match: f"${names.index(match[1]) + 1}", str(compiled)).replace("%%", "%")
    with engine.connect() as connection:  # rolled back: what is PREPAREd stays, so it is given up
        driver = cast("psycopg.Connection[Any]", connection.connection.driver_connection)
        cursor = psycopg.ClientCursor(driver)
        cursor.execute(f"SET LOCAL plan_cache_mode = force_{mode}_plan".encode())
        cursor.execute(f"PREPARE explained AS {text}".encode())
        given = ", ".join([f"%({name})s" for name in names])
        execute = f"EXECUTE explained ({given})" if names else "EXECUTE explained"
        ((found,),) = cursor.execute(
            f"EXPLAIN (FORMAT JSON{options}) {execute}".encode(), {name: values[name] for name in names}
        ).fetchall()
        cursor.execute("DEALLOCATE explained")
    return found[0]["Plan"]


def scans(plan: Any, table: str) -> set[Scan]:
    """Where a plan looks for rows of a table."""
    return set(_scans(plan, table, repeated=False))


def _scans(node: Any, table: str, *, repeated: bool) -> Iterator[Scan]:
    how, index = node["Node Type"], node.get("Index Name")
    of_table = node.get("Relation Name") == table and how not in {"ModifyTable", "Bitmap Heap Scan"}
    if of_table or how == "Bitmap Index Scan":
        yield Scan(how, index, node.get("Index Cond"), repeated)
    for part in node.get("Plans", ()):
        role = part["Parent Relationship"]
        loop = role == "SubPlan" or (role == "Inner" and how in {"Nested Loop", "Recursive Union"})
        # An InitPlan, also that of a CTE, is run once at most, wherever it stands.
        yield from _scans(part, table, repeated=loop or (repeated and role != "InitPlan"))


def nodes(plan: Any) -> Iterator[Any]:
    """All nodes of a plan."""
    yield plan
    for part in plan.get("Plans", ()):
        yield from nodes(part)
