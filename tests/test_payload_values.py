"""Odd values and odd times: each comes back as it went in, or is refused at the call and nothing else is lost."""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import functools
import ipaddress
import math
import pathlib
import random
import re
import time
import types
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Annotated, Any, Literal, NamedTuple
from zoneinfo import ZoneInfo

import pytest
import sqlalchemy as sa
from psycopg import sql
from pydantic import AnyUrl, BaseModel, ByteSize, ConfigDict, Field, RootModel
from sqlalchemy import URL, Engine
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from enlist import (
    HandlerRegistry,
    InvalidOption,
    Job,
    JobPayload,
    JobRecord,
    JobRepository,
    JobState,
    PayloadError,
    Worker,
)
from enlist.payload import decode
from tests.jobs import Note, state_of, texts
from tests.shop import Order
from tests.support import Observer, StatementRecorder

repo = JobRepository(notify=None)


class Free(JobPayload, kind="free"):
    value: Any = None


class IntColour(enum.IntEnum):
    RED = 1


class StrColour(enum.StrEnum):
    RED = "red"


class Flag(enum.Flag):
    A = 1
    B = 2


class Pair(NamedTuple):
    number: int
    text: str


class OwnStr(str):
    __slots__ = ()


class OwnInt(int):
    pass


class OwnFloat(float):
    pass


class OwnDict(dict[str, Any]):
    pass


class OwnList(list[Any]):
    pass


@dataclasses.dataclass
class Point:
    x: int


class Inner(BaseModel):
    x: int = 1


class Numbers(RootModel[list[int]]):
    pass


def nested(levels: int) -> Any:
    value: Any = 1
    for level in range(levels):
        value = [value] if level % 2 else {"a": value}
    return value


# -- what JSON has ----------------------------------------------------------------------------------------------------

KEPT: dict[str, Any] = {
    "nothing": None,
    "no text": "",
    "what looks like an escape": "\\u0000",
    "what looks like an escaped escape": "\\\\u0000",
    "what looks like a surrogate": "\\ud800",
    "what looks like a byte": "\\x00 \x01\x02",
    "control characters": "".join(map(chr, range(1, 32))),
    "delete": "\x7f\x80\x9f",
    "what a line ends with": "a\r\n\u2028\u2029\x0b\x0c\x85b",
    "a byte order mark": "\ufeffa",
    "a non-character": "\ufffe\uffff",
    "the last character": "\U0010ffff",
    "emoji": "\N{PILE OF POO}" * 10,
    "composed and not": ["\u00e9", "e\u0301"],
    "what looks like a number": ["1", "1e5", "NaN", "Infinity", "-Infinity", "null", "true"],
    "what looks like JSON": '{"a": [1, "\\u0000"]}',
    "markup": "</script><!-- <img src=x onerror=alert(1)>",
    "formats": "%s %(x)s {0} {x!r} $1 :name ::jsonb",
    "quotes": "'\"`\\/",
    "brackets": "[[[{{{" * 100,
    "zero": [0, 0.0],
    "integers that no float holds": [2**53 + 1, 2**63, -(2**64), 10**308, 10**400, -(10**4299)],
    "floats that look like integers": [1.0, 1e15, 1e16, 1e17, 1e22, 1e300, -1e308],
    "the ends of floats": [5e-324, 2.2250738585072014e-308, 1.7976931348623157e308, 0.1 + 0.2, 1e-7, math.pi],
    "the truth and numbers": [True, 1, 1.0, False, 0],
    "nothing in it": [{}, [], [[]], [{}], [None], {"": {}}],
    "no name": {"": 1, " ": 2, "\t": 3},
    "names that look alike": {"a": 1, "A": 2, "a ": 3, "\u00e9": 4, "e\u0301": 5, "1": 6, "01": 7, "1.0": 8},
    "names with dots and brackets": {"a.b": 1, "a": {"b": 2}, "a[0]": 3, "$.a": 4},
    "names with a meaning elsewhere": {"__proto__": 1, "constructor": 2, "__class__": 3, "kind": 4, "queue": 5},
    "names that look like escapes": {"\\u0000": 1, "\\ud800": 2, "%s": 3},
    "a long name": {"n" * 10_000: 1},
    "many names": {str(number): number for number in range(2000)},
    "a long list": list(range(5000)),
    "depth": nested(195),
}

NOTHING_KEEPS: dict[str, tuple[Any, str]] = {
    "NUL": ("a\x00b", " has a NUL"),
    "NUL in a list": (["", "\x00"], r"\[1\] has a NUL"),
    "NUL behind an escape": (["\\u0000", {"a": "\\\x00"}], r"\[1\]\.a has a NUL"),
    "NUL in a name": ({"a": {"\x00": 1}}, r"a key of (payload|meta)\.value\.a has a NUL"),
    "the first half of a pair": ("\ud83d", " has a lone surrogate"),
    "the second half": (["\ude00"], r"\[0\] has a lone surrogate"),
    "both halves": ("\ud83d\ude00", " has a lone surrogate"),  # a str of two: not the character
    "half of a pair in a name": ({"\udfff": 1}, "a key of (payload|meta).value has a lone surrogate"),
    "no number": (math.nan, " is nan"),
    "infinity": ([{"a": math.inf}], r"\[0\]\.a is inf"),
    "less than anything": ({"a": [0, -math.inf]}, r"\.a\[1\] is -inf"),
    "an overflow": (1e308 * 10, " is inf"),
    "too many digits": (10**4300, " is an integer of more than 4300 digits"),
    "far too many digits": ({"a": -(10**9000)}, r"\.a is an integer of more than 4300 digits"),
    "too deep": (nested(250), "nested more than 200 levels"),
    "far too deep": (nested(5000), "nested more than 200 levels"),
}

NOT_JSON: dict[str, Any] = {
    "an integer for a name": {1: "a", "1": "b"},
    "None for a name": {"a": {None: 1}},
    "a truth for a name": {True: 1, "true": 2},
    "a float for a name": {1.5: 1},
    "a tuple for a name": {(1, 2): 3},
    "a tuple": (1, 2),
    "a tuple in a list": [[1], (1,)],
    "a named tuple": Pair(1, "a"),
    "a set": {1},
    "a frozen set": frozenset({"a"}),
    "bytes": b"abc",
    "a bytearray": bytearray(b"a"),
    "a Decimal": decimal.Decimal("1.10"),
    "a Decimal that is no number": decimal.Decimal("NaN"),
    "a fraction": fractions.Fraction(1, 3),
    "a complex number": 1 + 2j,
    "a datetime": dt.datetime(2030, 1, 1, tzinfo=dt.UTC),
    "a naive datetime": dt.datetime(2030, 1, 1),
    "a date": dt.date(2030, 1, 1),
    "a time": dt.time(1, 2),
    "a timedelta": dt.timedelta(seconds=1),
    "a UUID": uuid.UUID(int=1),
    "a flag": Flag.A | Flag.B,
    "a deque": collections.deque([1]),
    "a dataclass": Point(1),
    "a model": Inner(),
    "a root model": Numbers([1]),
    "a path": pathlib.PurePosixPath("/a"),
    "a pattern": re.compile("a"),
    "an address": ipaddress.ip_address("::1"),
}
# Pydantic writes none of these, and does not say where they are.
UNWRITABLE: dict[str, Any] = {
    "an object": object(),
    "a class": int,
    "a function": len,
    "a method": "".join,
    "a view": memoryview(b"a"),
    "an ellipsis": ...,
    "a zone": ZoneInfo("UTC"),
    "a mapping": types.MappingProxyType({"a": 1}),
    "a module": math,
}
# A model takes these for what they are equal to; a dict's or a list's subclass would be another after the way.
EQUAL: dict[str, Any] = {
    "an IntEnum": IntColour.RED,
    "a StrEnum": StrColour.RED,
    "a str of a class": OwnStr("a"),
    "an int of a class": OwnInt(1),
    "a float of a class": OwnFloat(1.5),
    "a dict of a class": OwnDict(a=1),
    "a list of a class": OwnList([1]),
    "a counter": collections.Counter("aab"),
    "a defaultdict": collections.defaultdict(int, a=1),
}


def test_what_json_has_comes_back_to_the_handler(engine: Engine, jobs_seen: dict[str, tuple[Any, Any]]) -> None:
    """As a field, in a dict for a kind, and in meta; early and late."""
    with Session(engine) as session:
        for name, value in KEPT.items():
            repo.enqueue(session, Free(value=value), meta={"name": name, "value": value})
            repo.enqueue(session, functools.partial(_free, value), meta={"name": f"late {name}", "value": value})
            repo.enqueue(session, "free", {"value": value}, meta={"name": f"dict {name}", "value": [value]})
        session.commit()
    work(engine, jobs_seen)
    assert len(jobs_seen) == 3 * len(KEPT)
    for name, value in KEPT.items():
        for form in ("", "late ", "dict "):
            payload, meta = jobs_seen[form + name]
            for back in (payload, meta[0] if form == "dict " else meta):
                assert back == value, name
                assert exactly(back) == exactly(value), name


def _free(value: Any) -> Free:
    return Free(value=value)


@pytest.fixture
def jobs_seen() -> dict[str, tuple[Any, Any]]:
    return {}


def work(engine: Engine, seen: dict[str, tuple[Any, Any]]) -> None:
    """Have a worker run all jobs, and note each one's value and meta by its name."""
    registry = HandlerRegistry()

    @registry.handler(Free)
    def free(session: Session, job: Job[Free]) -> None:
        seen[job.meta["name"]] = (job.payload.value, job.meta["value"])

    Worker(engine, registry).drain(timeout=20)


def exactly(value: Any) -> Any:
    """A value with the types of its parts: True is not 1, and 1 not 1.0."""
    if isinstance(value, dict):
        return {key: exactly(part) for key, part in value.items()}
    if isinstance(value, list):
        return [exactly(part) for part in value]
    return type(value), value


def refusals() -> Iterator[tuple[str, Any, str]]:
    """What no payload, no dict and no meta may have, and what the message says after the path of the value."""
    for name, (value, says) in NOTHING_KEEPS.items():
        yield name, value, says
    for name, value in NOT_JSON.items():
        yield name, value, ""


def test_what_json_does_not_have_is_refused_by_its_path_and_nothing_else_is_lost(
    engine: Engine, observer: Observer, statements: StatementRecorder
) -> None:
    with Session(engine) as session:
        session.add(Order(ref="kept"))
        first = repo.enqueue(session, Note(text="first"))
        session.flush()
        statements.clear()
        for name, value, says in refusals():
            for where, call in calls(session, value):
                with pytest.raises(PayloadError) as caught:
                    call()
                message = str(caught.value)
                assert re.search(says, message), (name, message)
                assert f"{where}.value" in message or "nested more than" in message, (name, message)
                assert len(message) < 300, name
                assert message.isprintable(), name
            items = [Note(text="not this either"), Free(value=value)]
            with pytest.raises(PayloadError, match=r"^items\[1\]: (a key of )?payload"):
                repo.enqueue_many(session, items)
            with pytest.raises(PayloadError, match=r"^items\[0\]: (a key of )?meta"):
                repo.enqueue_many(session, [(Note(), {"meta": {"value": value}}), Note()])
        assert statements.events == []
        last = repo.enqueue(session, Note(text="last"))
        session.commit()
        assert {state_of(first), state_of(last)} == {JobState.COMMITTED}
    assert texts(observer) == ["first", "last"]
    assert observer.rows("SELECT ref FROM shop_order") == [("kept",)]


def test_objects_of_no_json_type_are_refused_by_their_path(engine: Engine, statements: StatementRecorder) -> None:
    with Session(engine) as session:
        for name, value in UNWRITABLE.items():
            with pytest.raises(PayloadError, match=r"payload\.value\[1\]\.a"):
                repo.enqueue(session, Free(value=[0, {"a": value}]))
            with pytest.raises(PayloadError, match=r"payload\.value\[1\]\.a is a"):
                repo.enqueue(session, "free", {"value": [0, {"a": value}]})
            with pytest.raises(PayloadError, match=r"meta\.value is a"):
                repo.enqueue(session, Note(), meta={"value": value})
            assert not session.new, name
        assert statements.events == []


def test_a_model_takes_a_value_for_what_it_is_equal_to_and_a_dict_does_not(engine: Engine, observer: Observer) -> None:
    with Session(engine) as session:
        for name, value in EQUAL.items():
            with pytest.raises(PayloadError, match=r"payload\.value is a"):
                repo.enqueue(session, "free", {"value": value})
            with pytest.raises(PayloadError, match=r"meta\.value is a"):
                repo.enqueue(session, Note(), meta={"value": value})
            handle = repo.enqueue(session, Free(value=value))
            session.commit()
            record = repo.get(session, handle.id)
            assert record is not None
            assert decode(Free, record.payload).value == value, name


def calls(session: Session, value: Any) -> list[tuple[str, Callable[[], object]]]:
    """The three ways that a value can go, and the path of each."""
    return [
        ("payload", lambda: repo.enqueue(session, Free(value=value))),
        ("payload", lambda: repo.enqueue(session, "free", {"value": value})),
        ("meta", lambda: repo.enqueue(session, Note(), meta={"value": value})),
    ]


class Loop:
    """Values that contain themselves."""

    a_list: list[Any]
    a_dict: dict[str, Any]

    def __init__(self) -> None:
        self.a_list = [1]
        self.a_list.append(self.a_list)
        self.a_dict = {"b": 1}
        self.a_dict["a"] = [self.a_dict]


def test_values_that_contain_themselves_end_in_an_error(engine: Engine) -> None:
    with Session(engine) as session:
        for value in (Loop().a_list, Loop().a_dict):
            for _, call in calls(session, value):
                with pytest.raises(PayloadError) as caught:
                    call()
                assert len(str(caught.value)) < 300
        repo.enqueue(session, Note())
        session.commit()


async def test_what_is_no_dict_is_refused_early_and_late(any_async_engine: AsyncEngine, observer: Observer) -> None:
    enqueue: Any = repo.enqueue
    no_dicts: list[Any] = [[], (), "text", b"", 1, None, True, OwnDict(a=1), Inner(), [("a", 1)], {1, 2}]
    async with AsyncSession(any_async_engine) as session:
        for data in no_dicts:
            with pytest.raises(PayloadError, match="payload must be a dict"):
                enqueue(session, "free", data)
            handle = enqueue(session, "free", functools.partial(copy.copy, data))
            with pytest.raises(PayloadError, match=rf"{re.escape(__file__)}:\d+: payload must be a dict"):
                await session.flush()
            assert state_of(handle) is JobState.DISCARDED
            await session.rollback()
        repo.enqueue(session, Note(text="next"))
        await session.commit()
    assert texts(observer) == ["next"]


# -- what fields have -------------------------------------------------------------------------------------------------

BERLIN = ZoneInfo("Europe/Berlin")
TYPED: list[tuple[Any, list[Any]]] = [
    (decimal.Decimal, [decimal.Decimal(text) for text in ("1.10", "-0", "0.1000", "1E+400", "1E-400", "9" * 100)]),
    (float, [5e-324, 1e22, 1.7976931348623157e308, 0.1 + 0.2]),
    (int, [2**64, -(10**4299)]),
    (bool, [True, False]),
    (
        dt.datetime,
        [
            dt.datetime(2030, 1, 1, 12, 30, 15, 123456, tzinfo=dt.UTC),
            dt.datetime(2030, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=5, minutes=30))),
            dt.datetime(2030, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=-12))),
            dt.datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=BERLIN),
            dt.datetime(2030, 1, 1, 1, 1, 1, 1),
            dt.datetime(1, 1, 1),
            dt.datetime(9999, 12, 31, 23, 59, 59, 999999),
        ],
    ),
    (dt.date, [dt.date.min, dt.date.max, dt.date(2028, 2, 29)]),
    (dt.time, [dt.time(0), dt.time.max, dt.time(1, 2, 3, tzinfo=dt.UTC)]),
    (dt.timedelta, [dt.timedelta(0), dt.timedelta(days=-1, microseconds=1), dt.timedelta(days=400, seconds=1.5)]),
    (uuid.UUID, [uuid.UUID(int=0), uuid.UUID(int=2**128 - 1)]),
    (bytes, [b"", b"abc", "\u00e9".encode()]),
    (set[int], [set(), {1, 2, 3}]),
    (frozenset[str], [frozenset({"a", ""})]),
    (deque[int], [collections.deque([1, 2])]),
    (tuple[int, str], [(1, "a")]),
    (tuple[int, ...], [(), (1, 2)]),
    (Pair, [Pair(1, "a")]),
    (IntColour, [IntColour.RED]),
    (StrColour, [StrColour.RED]),
    (Point, [Point(1)]),
    (Inner, [Inner(x=2)]),
    (Numbers, [Numbers([1])]),
    (list[Inner | Point], [[Inner(x=3)]]),
    (dict[int, str], [{1: "a", -1: "b"}]),
    (dict[float, int], [{1.5: 1, 1e22: 2}]),
    (dict[dt.date, int], [{dt.date(2030, 1, 1): 1}]),
    (dict[uuid.UUID, int], [{uuid.UUID(int=1): 1}]),
    (dict[StrColour, int], [{StrColour.RED: 1}]),
    (int | str, [1, "1", ""]),
    (float | str | None, [1.5, "1.5", None]),
    (Literal["a", 1], ["a", 1]),
    (ipaddress.IPv6Address, [ipaddress.IPv6Address("::1")]),
    (pathlib.PurePosixPath, [pathlib.PurePosixPath("/a/../b")]),
    (re.Pattern[str], [re.compile("a+")]),
    (complex, [1 + 2j]),
    (ByteSize, [ByteSize(1024)]),
    (AnyUrl, [AnyUrl("https://example.org/\u00e9?q=1#f")]),
    (Annotated[int, Field(alias="renamed")], [7]),
]


def test_what_a_field_holds_comes_back_as_it_was(engine: Engine) -> None:
    with Session(engine) as session:
        for annotation, values in TYPED:
            payload_type = make_payload_type(annotation)
            name = "renamed" if "alias" in repr(annotation) else "value"
            for value in values:
                handle = repo.enqueue(session, payload_type.model_validate({name: value}))
                session.commit()
                record = repo.get(session, handle.id)
                assert record is not None
                back: Any = decode(payload_type, record.payload)
                if isinstance(value, dt.datetime) and value.tzinfo is not None:
                    assert back.value.astimezone(dt.UTC) == value.astimezone(dt.UTC)
                else:
                    assert (type(back.value), back.value) == (type(value), value), annotation


def make_payload_type(annotation: Any) -> type[JobPayload]:
    namespace = {"__annotations__": {"value": annotation}, "__module__": __name__}
    made: type[JobPayload] = type("Typed", (JobPayload,), namespace, kind="typed")
    return made


LOSSY: list[tuple[Any, Any]] = [
    (bytes, b"\xff\x00"),
    (bytes, b"a\x00"),
    (str, "\x00"),
    (str, "\udc80"),
    (dict[int | str, str], {1: "a", "1": "b"}),
    (dict[Any, int], {None: 1, "None": 2}),
    (dict[bool | str, int], {True: 1, "true": 2}),
    (dict[str, Any], {"a": {1: 2}}),
    (Any, {"a": dt.datetime(2030, 1, 1, tzinfo=dt.UTC)}),
    (list[Any], [decimal.Decimal(1)]),
    (int | float, math.inf),
    (list[float], [1.0, math.nan]),
    (Inner | None, types.SimpleNamespace(x=1)),
    (int, "text"),
    (list[int], "12"),
    (dt.timedelta, "soon"),
]


def test_what_a_field_would_lose_is_refused_at_the_call(engine: Engine, statements: StatementRecorder) -> None:
    """Also where validation was passed by, with model_construct()."""
    with Session(engine) as session:
        for annotation, value in LOSSY:
            payload: Any = make_payload_type(annotation).model_construct(value=value)
            with pytest.raises(PayloadError, match="payload") as caught:
                repo.enqueue(session, payload)
            assert len(str(caught.value)) < 400, annotation
        assert statements.events == []
        assert not session.new


def test_a_field_and_an_extra_value_of_one_name_are_refused_or_kept(engine: Engine) -> None:
    class Open(JobPayload, kind="open"):
        model_config = ConfigDict(extra="allow")
        value: int = Field(alias="renamed")

    with Session(engine) as session:
        payload = Open.model_validate({"renamed": 1, "other": [1.5, {"a": None}]})
        handle = repo.enqueue(session, payload)
        session.commit()
        record = repo.get(session, handle.id)
        assert record is not None
        assert decode(Open, record.payload) == payload
        clash = Open.model_construct(value=1)
        assert clash.__pydantic_extra__ is not None
        clash.__pydantic_extra__["renamed"] = 2
        with pytest.raises(PayloadError, match="payload"):
            repo.enqueue(session, clash)


def test_text_of_any_characters_comes_back_or_is_refused(engine: Engine, observer: Observer) -> None:
    """Texts from all of Unicode: refused are those with a NUL or half of a pair, and no others."""
    chance = random.Random(7)
    alphabets = [range(128), range(0xD700, 0xE100), range(0x110000), [0x5C, 0x75, 0x30, 0x22, 0x64, 0x38]]
    kept = {}
    with Session(engine) as session:
        for _ in range(500):
            alphabet = chance.choice(alphabets)
            text = "".join(chr(chance.choice(alphabet)) for _ in range(chance.randrange(12)))
            bad = any(character == "\x00" or "\ud800" <= character <= "\udfff" for character in text)
            with pytest.raises(PayloadError) if bad else contextlib.nullcontext():
                handle = repo.enqueue(session, Note(text=text), meta={text: text})
                kept[handle.id] = text
            with pytest.raises(PayloadError) if bad else contextlib.nullcontext():
                handle = repo.enqueue(session, "note", {"text": text, text: 1} if text != "text" else {"text": text})
                kept[handle.id] = text
        session.commit()
    found = dict(observer.rows("SELECT id, payload->>'text' FROM enlist_job"))
    assert found == kept


# -- size -------------------------------------------------------------------------------------------------------------


def test_a_payload_of_ten_megabytes_is_refused_with_size_and_limit(
    engine: Engine, observer: Observer, statements: StatementRecorder
) -> None:
    big = "x" * 10_000_000
    with Session(engine) as session:
        session.add(Order(ref="kept"))
        several: list[tuple[str, Callable[[], object]]] = [
            ("payload has 10,000,011 bytes", lambda: repo.enqueue(session, Note(text=big))),
            ("payload has 10,000,011 bytes", lambda: repo.enqueue(session, "note", {"text": big})),
            ("meta has 10,000,011 bytes", lambda: repo.enqueue(session, Note(), meta={"text": big})),
            (r"items\[0\]: payload has 10,000,011 bytes", lambda: repo.enqueue_many(session, [Note(text=big)])),
            ("payload has 20,000,012 bytes", lambda: repo.enqueue(session, Note(text="é" * 10_000_000 + "x"))),
        ]
        for says, call in several:
            with pytest.raises(ValueError, match=rf"{says}.*at most 1,048,576.*max_payload_bytes") as caught:
                call()
            assert len(str(caught.value)) < 300
        assert statements.events == []
        late = repo.enqueue(session, lambda: Note(text=big))
        with pytest.raises(PayloadError, match=rf"{re.escape(__file__)}:\d+: payload has 10,000,011 bytes"):
            session.commit()
        session.rollback()
        assert state_of(late) is JobState.DISCARDED
    assert observer.scalar("SELECT count(*) FROM shop_order") == 0


@pytest.mark.slow
async def test_a_raised_limit_lets_ten_megabytes_through_to_the_handler(
    engine: Engine, any_async_engine: AsyncEngine, jobs_seen: dict[str, tuple[Any, Any]]
) -> None:
    """What cannot be compressed, and what is written longer than it is."""
    values: dict[str, Any] = {
        "random": random.Random(7).randbytes(5_000_000).hex(),
        "escapes": '\\"\n\N{PILE OF POO}' * 1_000_000,
    }
    large = JobRepository(notify=None, max_payload_bytes=12_000_000)
    async with AsyncSession(any_async_engine) as session:
        for name, value in values.items():
            large.enqueue(session, Free(value=value), meta={"name": name, "value": None})
        await session.commit()
    work(engine, jobs_seen)
    assert jobs_seen.keys() == values.keys()
    for name, value in values.items():
        assert jobs_seen[name][0] == value, name


def test_the_limit_is_of_bytes_as_they_are_stored(engine: Engine, observer: Observer) -> None:
    narrow = JobRepository(notify=None, max_payload_bytes=100)
    with Session(engine) as session:
        # {"text":"..."} is 11 bytes; a quote and a control character are written longer than they are.
        for text, fits in [
            ("x" * 89, True),
            ("x" * 90, False),
            ("é" * 44, True),
            ("é" * 45, False),
            ('"' * 44, True),
            ('"' * 45, False),
            ("\x01" * 14, True),
            ("\x01" * 15, False),
        ]:
            forms: list[Callable[[str], object]] = [
                lambda text: narrow.enqueue(session, Note(text=text)),
                lambda text: narrow.enqueue(session, "note", {"text": text}),
                lambda text: narrow.enqueue(session, Note(), meta={"text": text}),
            ]
            for form in forms:
                if fits:
                    form(text)
                else:
                    with pytest.raises(PayloadError, match="at most 100 are allowed"):
                        form(text)
        session.commit()
    assert observer.scalar("SELECT count(*) FROM enlist_job") == 12


# -- time -------------------------------------------------------------------------------------------------------------


class Timestamp(dt.datetime):
    """A subclass, as dataframes have it: its arithmetic stays in the class, and its text is more precise."""

    nanosecond = 789

    def isoformat(self, *arguments: Any, **options: Any) -> str:
        text = super().isoformat(*arguments, **options)
        return f"{text[:26]}{self.nanosecond}{text[26:]}"

    __str__ = isoformat


class NoOffset(dt.tzinfo):
    """A zone that does not know."""

    def utcoffset(self, at: dt.datetime | None) -> None:
        return None

    def dst(self, at: dt.datetime | None) -> None:
        return None

    def tzname(self, at: dt.datetime | None) -> None:
        return None


NEW_YORK = ZoneInfo("America/New_York")
OWN_ZONE = dt.timezone(dt.timedelta(hours=5, minutes=30, seconds=15, microseconds=7))
INSTANTS: dict[str, tuple[dt.datetime, str]] = {
    "UTC": (dt.datetime(2030, 1, 2, 3, 4, 5, 6, tzinfo=dt.UTC), "2030-01-02 03:04:05.000006"),
    "+05:30": (
        dt.datetime(2030, 1, 2, 3, 4, tzinfo=dt.timezone(dt.timedelta(hours=5, minutes=30))),
        "2030-01-01 21:34:00",
    ),
    "-12:00": (dt.datetime(2030, 1, 2, 13, tzinfo=dt.timezone(dt.timedelta(hours=-12))), "2030-01-03 01:00:00"),
    "odd seconds": (dt.datetime(2030, 1, 2, 5, 30, 15, 7, tzinfo=OWN_ZONE), "2030-01-02 00:00:00"),
    "before zones": (dt.datetime(1880, 1, 1, tzinfo=BERLIN), "1879-12-31 23:06:32"),
    "the first 2:30": (dt.datetime(2026, 10, 25, 2, 30, tzinfo=BERLIN), "2026-10-25 00:30:00"),
    "the second 2:30": (dt.datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=BERLIN), "2026-10-25 01:30:00"),
    "the first 1:30": (dt.datetime(2026, 11, 1, 1, 30, tzinfo=NEW_YORK), "2026-11-01 05:30:00"),
    "the second 1:30": (dt.datetime(2026, 11, 1, 1, 30, fold=1, tzinfo=NEW_YORK), "2026-11-01 06:30:00"),
    "a 2:30 that there is not": (dt.datetime(2026, 3, 8, 2, 30, tzinfo=NEW_YORK), "2026-03-08 07:30:00"),
    "half an hour's change": (
        dt.datetime(2026, 4, 5, 1, 45, fold=1, tzinfo=ZoneInfo("Australia/Lord_Howe")),
        "2026-04-04 15:15:00",
    ),
    "a subclass": (
        Timestamp(2030, 1, 2, 3, 4, 5, 6, tzinfo=dt.timezone(dt.timedelta(hours=1))),
        "2030-01-02 02:04:05.000006",
    ),
    "the year 1": (dt.datetime(1, 1, 4, tzinfo=dt.UTC), "0001-01-04 00:00:00"),
    "the year 9999": (dt.datetime(9999, 12, 28, 23, 59, 59, 999999, tzinfo=dt.UTC), "9999-12-28 23:59:59.999999"),
    "after 32 bits": (dt.datetime(2038, 1, 19, 3, 14, 8, tzinfo=dt.UTC), "2038-01-19 03:14:08"),
    "a leap day": (dt.datetime(2028, 2, 29, 23, 59, 59, tzinfo=dt.UTC), "2028-02-29 23:59:59"),
}

NO_INSTANTS: dict[str, Any] = {
    "naive": dt.datetime(2030, 1, 1),
    "naive, the second": dt.datetime(2026, 10, 25, 2, 30, fold=1),
    "a naive subclass": Timestamp(2030, 1, 1),
    "a zone that does not know": dt.datetime(2030, 1, 1, tzinfo=NoOffset()),
    "a date": dt.date(2030, 1, 1),
    "a time": dt.time(1, tzinfo=dt.UTC),
    "a timedelta": dt.timedelta(hours=1),
    "a string": "2030-01-01T00:00:00+00:00",
    "a leap second": "2016-12-31T23:59:60Z",
    "a word": "tomorrow",
    "seconds": 1_900_000_000,
    "seconds and more": 1.9e9,
    "a tuple": (2030, 1, 1),
    "a struct": time.gmtime(0),
    "the first": dt.datetime.min.replace(tzinfo=dt.UTC),
    "the last": dt.datetime.max.replace(tzinfo=dt.UTC),
    "before the first": dt.datetime.min.replace(tzinfo=dt.timezone(dt.timedelta(hours=14))),
    "after the last": dt.datetime.max.replace(tzinfo=dt.timezone(dt.timedelta(hours=-12))),
}
LENGTHS: list[float | dt.timedelta] = [
    0,
    0.25,
    90,
    dt.timedelta(days=1),
    dt.timedelta(days=120),
    dt.timedelta(days=240),
    86_400 * 365.25,
]


@pytest.fixture(params=["UTC", "Asia/Kolkata", "America/St_Johns"])
def process_zone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", request.param)
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@contextlib.asynccontextmanager
async def session_in(url: URL, driver: str) -> AsyncIterator[AsyncSession]:
    """A session on a connection of its own."""
    engine = create_async_engine(url.set(drivername=f"postgresql+{driver}"))
    try:
        async with AsyncSession(engine) as session:
            yield session
    finally:
        await engine.dispose()


@pytest.mark.usefixtures("process_zone")
@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
async def test_a_time_is_the_same_instant_in_every_zone_and_comes_back_aware(
    database_url: URL, observer: Observer, driver: str
) -> None:
    """The zones are those of the process, of the database, and of the session if it sets one of its own."""
    for zone in ("UTC", "America/New_York", "Pacific/Apia"):
        if zone != "Pacific/Apia":
            statement = sql.SQL("ALTER DATABASE {} SET timezone = {}")
            observer.connection.execute(statement.format(sql.Identifier(database_url.database or ""), zone))
        async with session_in(database_url, driver) as session:
            if zone == "Pacific/Apia":
                await session.execute(sa.text("SET LOCAL timezone = 'Pacific/Apia'"))
            assert await session.scalar(sa.text("SHOW timezone")) == zone
            handles = {name: repo.enqueue(session, Note(), run_at=at) for name, (at, _) in INSTANTS.items()}
            await session.flush()
            for name, (_, utc) in INSTANTS.items():
                record = await session.get(JobRecord, handles[name].id)
                assert record is not None
                assert record.run_at == dt.datetime.fromisoformat(f"{utc}Z"), name
                assert record.run_at.tzinfo is dt.UTC, name
            await session.commit()
        stored = dict(observer.rows("SELECT id, (run_at AT TIME ZONE 'UTC')::text FROM enlist_job"))
        assert {name: stored[handle.id] for name, handle in handles.items()} == {
            name: utc for name, (_, utc) in INSTANTS.items()
        }


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
async def test_a_delay_is_as_long_as_it_says_across_a_change_of_the_clocks(
    database_url: URL, observer: Observer, driver: str
) -> None:
    """A day is 24 hours, also in a session whose time zone has days of 23."""
    async with session_in(database_url, driver) as session:
        await session.execute(sa.text("SET LOCAL timezone = 'America/New_York'"))
        for number, length in enumerate(LENGTHS):
            repo.enqueue(session, Note(), delay=length, unique_key=str(number), unique_for=length)
        await session.commit()
    waits = observer.rows(
        "SELECT extract(epoch FROM run_at - created_at)::float8,"
        " extract(epoch FROM unique_hold_until - created_at)::float8"
        " FROM enlist_job ORDER BY id"
    )
    seconds = [length.total_seconds() if isinstance(length, dt.timedelta) else length for length in LENGTHS]
    assert waits == [(length, length) for length in seconds]


@pytest.mark.usefixtures("process_zone")
def test_what_is_no_instant_is_refused_in_every_zone(
    engine: Engine, observer: Observer, statements: StatementRecorder
) -> None:
    with Session(engine) as session:
        session.add(Order(ref="kept"))
        for name, value in NO_INSTANTS.items():
            with pytest.raises(InvalidOption, match=r"^run_at must ") as caught:
                repo.enqueue(session, Note(), run_at=value)
            assert len(str(caught.value)) < 300, name
            with pytest.raises(InvalidOption, match=r"^items\[1\]: run_at must "):
                repo.enqueue_many(session, [Note(), (Note(), {"run_at": value})])
        assert statements.events == []
        repo.enqueue(session, Note(text="kept"))
        session.commit()
    assert texts(observer) == ["kept"]
