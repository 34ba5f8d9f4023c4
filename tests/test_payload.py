"""What goes in comes out equal, or is refused at the call with the path of what is in the way."""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import decimal
import enum
import json
import math
import sys
import uuid
import zoneinfo
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    Secret,
    SecretBytes,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from sqlalchemy import Engine
from sqlalchemy.orm import Session
from typing_extensions import TypedDict

from enlist import EnlistError, InvalidOption, JobPayload, JobRepository, PayloadError
from enlist.payload import decode, encode, encode_data, options_of
from tests.jobs import SendReceipt
from tests.support import Observer, StatementRecorder

repo = JobRepository()
T = TypeVar("T")


class Colour(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Size:
    width: int
    tags: list[str] = dataclasses.field(default_factory=list)


class Item(BaseModel):
    name: str
    weight: float | None = None


class Special(Item):
    extra: int = 1


class Everything(JobPayload, kind="everything"):
    number: decimal.Decimal = decimal.Decimal("1.10")
    at: dt.datetime = dt.datetime(2030, 1, 1, tzinfo=dt.UTC)
    day: dt.date = dt.date(2030, 1, 1)
    wait: dt.timedelta = dt.timedelta(milliseconds=1500)
    id: uuid.UUID = uuid.UUID(int=7)
    data: bytes = b"abc"
    marks: set[int] = {1, 2}
    pair: tuple[int, str] = (1, "x")
    colour: Colour = Colour.RED
    size: Size = Size(3)
    items: list[Item] = []
    table: dict[int, float] = {}
    anything: Any = None
    renamed: int = Field(default=1, alias="re-named")


class Free(JobPayload, kind="free"):
    value: Any = None
    items: list[Item] = []


def stored(engine: Engine, observer: Observer, payload: JobPayload) -> dict[str, Any]:
    with Session(engine) as session, session.begin():
        handle = repo.enqueue(session, payload)
    found: dict[str, Any] = observer.scalar("SELECT payload FROM enlist_job WHERE id = %s", handle.id)
    return found


def test_every_type_comes_back(engine: Engine, observer: Observer) -> None:
    payload = Everything(
        items=[Item(name="ü\\u0000\\", weight=1e300), Item(name="")],
        table={1: 1e22, 2: -0.1, 3: sys.float_info.max, 4: sys.float_info.min, 5: 5e-324},
        anything={"a": [1, "x", None]},
    )
    back = decode(Everything, stored(engine, observer, payload))
    assert back == payload
    assert back.table == payload.table
    assert isinstance(back.table[1], float)


_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"])), inner, max_size=4
        )
    ),
    max_leaves=12,
)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(value=st.lists(_JSON, max_size=3))
def test_any_json_comes_back_through_jsonb(value: Any) -> None:
    payload = Free(value=value)
    texts = [encode(payload), encode_data({"value": value}, 10_000)]
    with _OBSERVER[0].connection.cursor() as cursor:
        for text in texts:
            (found,) = cursor.execute("SELECT %s::jsonb", (text,)).fetchone()  # type: ignore[misc]
            assert found["value"] == value
            assert repr(found["value"]).replace("-0.0", "0.0") == repr(value).replace("-0.0", "0.0") or (
                json.dumps(found["value"], sort_keys=True).replace("-0.0", "0.0")
                == json.dumps(value, sort_keys=True).replace("-0.0", "0.0")
            )


_OBSERVER: list[Observer] = []


@pytest.fixture(autouse=True)
def _observed(observer: Observer) -> Any:
    _OBSERVER.append(observer)
    yield
    _OBSERVER.clear()


DEEP: Any = []
for _ in range(2000):
    DEEP = [DEEP]
LOOP: list[Any] = []
LOOP += [LOOP, LOOP]


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ("a\x00b", r"payload\.value has a NUL"),
        ({"a": [{"b": "\x00"}]}, r"payload\.value\.a\[0\]\.b has a NUL"),
        ({"a\x00": 1}, r"a key of payload\.value has a NUL"),
        ("\ud800", r"payload\.value has a lone surrogate"),
        ({"\udfff": 1}, r"a key of payload\.value has a lone surrogate"),
        (["\\u0000", "\x00"], r"payload\.value\[1\] has a NUL"),
        (math.nan, r"payload\.value is nan"),
        ([1.0, -math.inf], r"payload\.value\[1\] is -inf"),
        ({"x": {"y": math.inf}}, r"payload\.value\.x\.y is inf"),
        (10**4400, r"payload\.value is an integer"),
        ({"a": -(10**4400)}, r"payload\.value\.a is an integer"),
        (DEEP, "nested more than 200"),
        (LOOP, "nested more than 200|payload"),
        ({1: "a"}, "payload"),
        ((1, 2), "payload"),
        ({1, 2}, "payload"),
        (b"abc", "payload"),
        (decimal.Decimal("1.1"), "payload"),
        (dt.datetime(2030, 1, 1), "payload"),
        (dt.date(2030, 1, 1), "payload"),
        (uuid.UUID(int=1), "payload"),
        (Colour.RED, "payload"),
        (Size(1), "payload"),
        (Item(name="x"), "payload"),
        (object(), "payload"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isprintable() else "",
)
@pytest.mark.parametrize("plain", [False, True])
def test_what_json_or_postgresql_refuses_is_refused_at_the_call(
    engine: Engine, statements: StatementRecorder, value: Any, path: str, plain: bool
) -> None:
    with Session(engine) as session:
        arguments: Any = ("plain", {"value": value}) if plain else (Free(value=value),)
        with pytest.raises(PayloadError, match=path) as caught:
            repo.enqueue(session, *arguments)
        assert isinstance(caught.value, ValueError)
        assert len(str(caught.value)) < 500
        assert statements.events == []
        assert not session.new


@pytest.mark.parametrize("weight", [math.nan, math.inf])
def test_a_float_that_is_not_finite_is_found_behind_a_type(weight: float) -> None:
    items = [Item(name="a"), Item(name="b", weight=weight)]
    with pytest.raises(PayloadError, match=r"payload\.items\[1\]\.weight is (nan|inf)"):
        encode(Free(items=items))


def test_the_path_names_the_place() -> None:
    items = [Item(name="a"), Item(name="b"), Item(name="c"), Item(name="d\x00")]
    with pytest.raises(PayloadError, match=r"payload\.items\[3\]\.name has a NUL"):
        encode(Free(items=items))


def test_values_that_a_field_would_cut_are_refused() -> None:
    with pytest.raises(PayloadError, match=r"payload\.items\[0\]"):
        encode(Free(items=[Special(name="a")]))
    with pytest.raises(PayloadError, match="order_id"):
        encode(SendReceipt.model_construct(order_id="not a number"))

    class Doubling(JobPayload, kind="doubling"):
        number: int

        @field_validator("number")
        @classmethod
        def double(cls, value: int) -> int:
            return 2 * value

    with pytest.raises(PayloadError, match=r"payload\.number would not come back equal"):
        encode(Doubling(number=1))


def test_depth_and_digits_at_the_limit_come_back() -> None:
    deep: Any = 1
    for _ in range(198):
        deep = [deep]
    for value in (deep, 10**4299, "[" * 300 + '"' + "{" * 300, "1" * 5000, "\\u0000"):
        assert decode(Free, json.loads(encode(Free(value=value)))).value == value
        assert json.loads(encode_data({"value": value}, 100_000)) == {"value": value}


@pytest.mark.slow
def test_size_is_limited_by_bytes_and_the_limit_can_be_raised(engine: Engine, observer: Observer) -> None:
    big = Free(value="é" * 600_000)
    with Session(engine) as session:
        with pytest.raises(PayloadError, match=r"1,200,\d\d\d bytes.*at most 1,048,576"):
            repo.enqueue(session, big)
        with pytest.raises(PayloadError, match=r"meta has .* at most 1,048,576"):
            repo.enqueue(session, Free(), meta={"a": "x" * 2_000_000})
        JobRepository(max_payload_bytes=20_000_000).enqueue(session, Free(value="x" * 10_000_000))
        session.commit()
    assert observer.scalar("SELECT length(payload->>'value') FROM enlist_job") == 10_000_000


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (SendReceipt, "class SendReceipt: give an instance"),
        ({"a": 1}, "dict without a kind"),
        ("kind", "without its data"),
        (Item(name="a"), "derive its class from JobPayload"),
        (None, "NoneType"),
        (7, "int"),
    ],
)
def test_what_is_no_payload_is_refused_with_the_remedy(engine: Engine, payload: Any, message: str) -> None:
    with Session(engine) as session, pytest.raises(PayloadError, match=message):
        repo.enqueue(session, payload)


@pytest.mark.parametrize("data", [None, [], "text", 1, SendReceipt(order_id=1), Item(name="a"), Size(1)])
def test_the_data_of_a_kind_is_a_dict(engine: Engine, data: Any) -> None:
    with Session(engine) as session, pytest.raises(PayloadError, match=r"dict|leave the kind out"):
        repo.enqueue(session, "kind", data)


# -- the class --------------------------------------------------------------------------------------------------------


def test_options_are_inherited_and_are_no_fields() -> None:
    class Base(JobPayload, queue="q", priority=3):
        kind: str = "a field"
        queue: int = 1

    class Concrete(Base, kind="concrete", max_attempts=2):
        pass

    class Narrower(Concrete, priority=4):
        pass

    class Other(Concrete, kind="other", title="Another"):
        pass

    assert Concrete().model_dump() == {"kind": "a field", "queue": 1}
    assert (options_of(Concrete).kind, options_of(Concrete).queue, options_of(Concrete).priority) == (
        "concrete",
        "q",
        3,
    )
    assert (options_of(Narrower).kind, options_of(Narrower).priority) == ("concrete", 4)
    assert options_of(Narrower).max_attempts == 2
    assert options_of(Other).kind == "other"
    assert Other.model_config["title"] == "Another"
    with pytest.raises(PayloadError, match="Base has no kind"):
        options_of(Base)
    with pytest.raises(PayloadError, match="Base has no kind"):
        repo.enqueue(Session(), Base())


def test_generics_inherit() -> None:
    class Changed(JobPayload, Generic[T], kind="changed", queue="q"):
        before: T
        after: T

    payload = Changed[int](before=1, after=2)
    assert options_of(type(payload)).kind == "changed"
    assert decode(Changed[int], json.loads(encode(payload))) == payload


@pytest.mark.parametrize(
    "options",
    [
        {"kind": ""},
        {"kind": "a\x00"},
        {"kind": "k" * 201},
        {"kind": 3},
        {"queue": ""},
        {"queue": "\ud800"},
        {"priority": 40_000},
        {"priority": True},
        {"priority": None},
        {"priority": 1.0},
        {"max_attempts": 0},
        {"max_attempts": 2**31},
    ],
)
def test_bad_options_are_refused_at_the_definition(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption, match=next(iter(options))):
        type("Bad", (JobPayload,), {}, **options)


def test_unknown_class_keywords_are_refused() -> None:
    with pytest.raises(TypeError):
        type("Bad", (JobPayload,), {}, kind="bad", orderd=True)


class Masked(BaseModel):
    password: SecretStr


@dataclasses.dataclass
class MaskedData:
    password: SecretBytes


class MaskedDict(TypedDict):
    token: Secret[int]


class Hidden(BaseModel):
    shown: int
    hidden: int = Field(exclude=True)


@pytest.mark.parametrize(
    ("annotation", "where"),
    [
        (SecretStr, "Bad.field is a SecretStr"),
        (SecretBytes | None, "Bad.field is a SecretBytes"),
        (dict[str, list[SecretStr]], "Bad.field is a SecretStr"),
        (Secret[int], "Bad.field is a Secret"),
        (Annotated[int, Field(exclude=True)], "Bad.field is excluded"),
        (list[Hidden], "Bad.field.hidden is excluded"),
        (tuple[Masked, ...], "Bad.field.password is a SecretStr"),
        (MaskedData, "Bad.field.password is a SecretBytes"),
        (dict[str, MaskedDict], "Bad.field.token is a Secret"),
        (Annotated[int, Field(serialization_alias="f")], "written as 'f'"),
        (Annotated[int, Field(validation_alias="f")], "written as 'field'"),
    ],
)
def test_fields_that_lose_data_are_refused_at_the_definition(annotation: Any, where: str) -> None:
    with pytest.raises(PayloadError, match=where.replace(".", r"\.")):
        type("Bad", (JobPayload,), {"__annotations__": {"field": annotation}, "__module__": __name__}, kind="bad")


class Tree(JobPayload, kind="tree"):
    children: list[Tree] = []
    level: Literal["a", "b"] = "a"
    known: ClassVar[int] = 1


def test_recursive_payloads() -> None:
    payload = Tree(children=[Tree(), Tree(children=[Tree()])])
    assert decode(Tree, json.loads(encode(payload))) == payload


def test_a_forward_reference_is_checked_with_the_first_payload() -> None:
    class Late(JobPayload, kind="late"):
        inner: Inner

    class Inner(BaseModel):
        password: SecretStr

    Late.model_rebuild(_types_namespace={"Inner": Inner})
    with pytest.raises(PayloadError, match=r"Late\.inner\.password"):
        encode(Late(inner=Inner(password=SecretStr("x"))))


def test_strict_models_computed_and_aliased_fields_come_back() -> None:
    class Strict(JobPayload, kind="strict", strict=True, extra="forbid"):
        id: uuid.UUID
        at: dt.datetime
        alias: int = Field(alias="als")
        kilo: Annotated[int, PlainSerializer(lambda value: value)] = 1

    payload = Strict(id=uuid.UUID(int=3), at=dt.datetime(2030, 1, 1, tzinfo=dt.UTC), als=3)
    assert decode(Strict, json.loads(encode(payload))) == payload


def test_a_stored_payload_that_does_not_fit_is_named_without_its_values() -> None:
    class Own(JobPayload, kind="own"):
        name: str
        items: list[Item] = []

        @field_validator("name")
        @classmethod
        def check(cls, value: str) -> str:
            if value == "secret":
                raise ValueError(f"not {value}")
            return value

    with pytest.raises(PayloadError) as caught:
        decode(Own, {"name": "secret", "items": [{"name": {"secret": 1}}, {}]})
    message = str(caught.value)
    assert message.startswith("the payload does not fit Own version 1: stored as version 1; ")
    assert "payload.items[0].name" in message
    assert "payload.items[1].name: Field required" in message
    assert "secret" not in message
    assert not isinstance(caught.value.__cause__, ValidationError)
    assert caught.value.__suppress_context__
    assert issubclass(PayloadError, EnlistError)


def test_extra_values_are_kept_if_the_class_allows_them() -> None:
    class Open(JobPayload, kind="open"):
        model_config = ConfigDict(extra="allow")

    payload = Open(a=[1.5], b="x")  # type: ignore[call-arg]
    assert decode(Open, json.loads(encode(payload))) == payload
    with pytest.raises(PayloadError, match=r"payload\.a\[0\] is nan"):
        encode(Open(a=[math.nan]))  # type: ignore[call-arg]


def test_an_ordered_dict_is_refused_at_the_definition() -> None:
    with pytest.raises(PayloadError, match=r"Ordered\.steps is an OrderedDict, whose order is lost"):

        class Ordered(JobPayload, kind="ordered"):
            steps: collections.OrderedDict[str, int]


@pytest.mark.parametrize("value", [math.inf, [math.nan], {"a": -math.inf}])
def test_a_float_that_is_not_finite_is_refused_though_the_class_would_write_it(value: Any) -> None:
    class Loose(JobPayload, kind="loose", ser_json_inf_nan="constants"):
        value: Any
        text: str = "NaN Infinity"

    with pytest.raises(PayloadError, match=r"payload\.value\S* is (nan|-?inf), which JSON cannot hold"):
        encode(Loose(value=value))
    assert json.loads(encode(Loose(value=1.0)))["text"] == "NaN Infinity"


@pytest.mark.parametrize("fold", [0, 1])
def test_a_datetime_of_the_hour_that_comes_twice_is_taken(fold: int) -> None:
    class Timed(JobPayload, kind="timed"):
        times: list[dt.datetime]

    at = dt.datetime(2026, 10, 25, 2, 30, fold=fold, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin"))
    back = decode(Timed, json.loads(encode(Timed(times=[at]))))
    assert back.times[0].astimezone(dt.UTC) == at.astimezone(dt.UTC)


def test_a_validator_that_fails_in_its_own_way_is_a_payload_error() -> None:
    class Bound(JobPayload, kind="bound"):
        value: int

        @field_validator("value")
        @classmethod
        def check(cls, value: int, info: ValidationInfo) -> int:
            assert isinstance(info.context, dict), "no context" if value else ""
            return value

        @field_validator("value", mode="before")
        @classmethod
        def look_up(cls, value: Any, info: ValidationInfo) -> Any:
            return info.context["values"][value]  # type: ignore[index]

    payload = Bound.model_validate({"value": 1}, context={"values": {1: 1}})
    with pytest.raises(PayloadError, match="cannot be read back and compared: TypeError"):
        encode(payload)
    with pytest.raises(PayloadError, match=r"does not fit Bound version 1: .*; reading it raised TypeError"):
        decode(Bound, {"value": 1})


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": [object()]}, r"payload\.value\.a\[0\]"),
        (memoryview(b"x"), r"payload\.value"),
        ([1, {"k": {2: len}}], r"payload\.value\[1\]\.k\.2"),
        (zoneinfo.ZoneInfo("UTC"), r"payload\.value"),
        (["text", b"text", [b"\xff"]], r"payload\.value\[2\]\[0\]"),
    ],
)
def test_a_value_that_nothing_can_write_is_named_by_its_path(value: Any, path: str) -> None:
    class Free(JobPayload, kind="free"):
        value: Any

    with pytest.raises(PayloadError, match=rf"^{path} cannot be written as JSON"):
        encode(Free(value=value))
