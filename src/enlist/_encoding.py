"""Payloads to JSON and back: only what PostgreSQL can store, and what comes back equal."""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import math
import re
from collections import deque
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, Final, NoReturn, TypeVar, cast

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticSerializationError

from enlist._options import shown
from enlist.exceptions import PayloadError

__all__ = ["DEFAULT_MAX_BYTES", "decode_model", "describe_invalid", "encode_data", "encode_model", "parse_stored"]

DEFAULT_MAX_BYTES: Final = 1_048_576
"""Longest payload, in bytes of JSON: 1 MiB."""

MAX_DEPTH: Final = 200
"""Deepest nesting. Parsers recurse: Python's stop at 1,000 calls, those of its caller included."""

MAX_DIGITS: Final = 4300
"""Longest integer, in digits: Python's own limit for reading one."""

# A float that jsonb would give back as a long integer: JSON's 1e+300 is 1000...0 there, which is another number.
_EXPONENT: Final = re.compile(r"[:\[,]-?[0-9]+(?:\.[0-9]+)?e\+?[0-9]|^-?[0-9.]+e\+?[0-9]")
_MAYBE_EXPONENT: Final = re.compile(r"e\+?[0-9]")
_NOT_FINITE: Final = re.compile(r"Infinity|NaN")
_STRING: Final = re.compile(r'"(?:[^"\\]|\\.)*"')
_STRING_OR_EXPONENT: Final = re.compile(r'"(?:[^"\\]|\\.)*"|-?[0-9]+(?:\.[0-9]+)?e\+?[0-9]+')
_STRING_OR_BRACKET: Final = re.compile(r'"(?:[^"\\]|\\.)*"|[\[{\]}]')
_LONG_INTEGER: Final = re.compile(rf"[0-9]{{{MAX_DIGITS + 1}}}")

_MODELS_EQ: Final = BaseModel.__eq__

ModelT = TypeVar("ModelT", bound=BaseModel)


def encode_model(payload: BaseModel, max_bytes: int) -> str:
    """Return a model as JSON, by alias. See :func:`enlist.payload.encode`."""
    # Reading it back costs 0.6 us where writing costs 0.4, and is the only check that leaves no hole: values of a
    # subclass, Any, unions, validators that are not idempotent. (pydantic's own, warnings="error", takes 1 us.)
    # From the instance: Python looks an attribute up there in a third of the time that it takes from a model's class.
    try:
        encoded = payload.__pydantic_serializer__.to_json(payload, by_alias=True, round_trip=True, warnings=False)
    except (PydanticSerializationError, ValueError, RecursionError) as error:
        _refuse_values(payload)
        where = _unwritable(payload, str(error)) or "payload"
        raise PayloadError(f"{where} cannot be written as JSON: {_reason(error)}") from error
    text = _storable(payload, encoded.decode(), len(encoded), max_bytes)
    try:
        read = payload.__pydantic_validator__.validate_json(encoded)
        equal = _is_plainly_equal(payload, read) or read == payload or _same_instants(payload, read)
    except ValidationError as error:
        _refuse_values(payload)
        raise PayloadError(f"payload cannot be read back: {describe_invalid(error)}") from None
    except Exception as error:  # of the application's: a validator that needs a context, a comparison
        _refuse_values(payload)
        raise PayloadError(f"payload cannot be read back and compared: {type(error).__name__}: {error}") from error
    if not equal:
        _refuse_values(payload)
        raise PayloadError(
            f"{_difference(payload, read)} would not come back equal when it is read: give the field a type that"
            " pydantic can restore from JSON"
        )
    return text


def _is_plainly_equal(payload: BaseModel, read: BaseModel) -> bool:
    """What ``==`` finds out as well, in five times the time; False if it must be asked."""
    return (
        type(read) is type(payload)
        and type(payload).__eq__ is _MODELS_EQ
        and read.__dict__ == payload.__dict__
        and read.__pydantic_extra__ == payload.__pydantic_extra__
        and read.__pydantic_private__ == payload.__pydantic_private__
    )


def parse_stored(name: str, text: str) -> Any:
    """Return what is stored as JSON text.

    :raises PayloadError: Python cannot read it: a number of thousands of digits, deep nesting; jsonb stores them.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PayloadError(f"the stored {name} cannot be read: {error}") from None


def decode_model(payload_type: type[ModelT], text: str) -> ModelT:
    """Return a payload that is stored as JSON text as a model.

    :raises PayloadError: it does not fit; the message has the reasons alone, see :func:`enlist.payload.decode`.
    """
    try:
        # As JSON, not as Python values: a strict model takes a string for a UUID only there.
        read = payload_type.__pydantic_validator__.validate_json(text)
    except ValidationError as error:
        # from None: pydantic's own text has the payload's values.
        raise PayloadError(describe_invalid(error)) from None
    except Exception as error:  # of an application's own validator, such as one that needs a context
        raise PayloadError(f"reading it raised {type(error).__name__}") from error
    return cast("ModelT", read)


def describe_invalid(error: ValidationError) -> str:
    """Name the fields that do not fit, and why, without their values."""
    lines = []
    for detail in error.errors(include_url=False, include_input=False, include_context=False):
        # What an application's own validator says may hold anything.
        own = detail["type"] in {"value_error", "assertion_error"}
        reason = f"refused by its validator ({detail['type']})" if own else detail["msg"]
        lines.append(f"{_dotted(detail['loc'])}: {reason}")
    return "; ".join(lines[:5]) + ("; ..." if len(lines) > 5 else "")


def encode_data(data: Any, max_bytes: int, name: str = "payload") -> str:
    """Return a plain dict as JSON text: strings, numbers, booleans, None, lists and dicts of them.

    :raises PayloadError: it has anything else, or PostgreSQL could not store it.
    """
    if type(data) is not dict:
        what = f"a {type(data).__name__}: give dict(...) of it" if isinstance(data, dict) else shown(data)
        raise PayloadError(f"{name} must be a dict, not {what}")
    if not _is_json(data, MAX_DEPTH):
        _refuse_data(data, name)
    try:
        text = json.dumps(data, ensure_ascii=False, check_circular=False, separators=(",", ":"))
        size = len(text) if text.isascii() else len(text.encode())
    except ValueError as error:  # a lone surrogate or an integer with too many digits
        _refuse_values(data, name)
        raise PayloadError(f"{name} cannot be written as JSON: {_reason(error)}") from error
    return _storable(data, text, size, max_bytes, name)


def _is_json(value: Any, levels: int) -> bool:
    """Whether a value is made of JSON's own types, exactly: a subclass would not come back."""
    kind = type(value)
    if kind is str or kind is int or kind is bool or value is None:
        return True
    if kind is float:
        return math.isfinite(value)
    if levels == 0:
        return False
    if kind is list:
        return all(_is_json(item, levels - 1) for item in value)
    if kind is dict:
        return all(type(key) is str and _is_json(item, levels - 1) for key, item in value.items())
    return False


def _refuse_data(data: Any, name: str) -> NoReturn:
    """Say which part of plain data is not JSON."""
    for path, value in _walk(data, name):
        if path.count("\0") > MAX_DEPTH:
            break
        where = path.replace("\0", "")
        if type(value) is dict:
            for key in value:
                if type(key) is not str:
                    raise PayloadError(f"{where} has the key {shown(key)}: keys must be strings")
        elif type(value) is float and not math.isfinite(value):
            raise PayloadError(f"{where} is {value}, which JSON cannot hold")
        elif not (value is None or type(value) in {str, int, bool, float, list}):
            raise PayloadError(
                f"{where} is a {type(value).__name__}, which would not come back as one: convert it, or use a"
                " JobPayload class with a field of that type"
            )
    raise PayloadError(f"{name} is nested more than {MAX_DEPTH} levels deep")


def _refuse_values(payload: Any, name: str = "payload") -> None:
    """Raise for the first value of a payload that no JSON in PostgreSQL can hold; return if there is none."""
    for path, value in _walk(payload, name):
        where = path.replace("\0", "")
        if path.count("\0") > MAX_DEPTH:
            raise PayloadError(f"{name} is nested more than {MAX_DEPTH} levels deep")
        texts = [value] if isinstance(value, str) else []
        if isinstance(value, dict):
            texts = [key for key in value if isinstance(key, str)]
            if any(isinstance(key, float) and not math.isfinite(key) for key in value):
                raise PayloadError(f"a key of {where} is not finite, which JSON cannot hold")
        for text in texts:
            what = where if text is value else f"a key of {where}"
            if "\x00" in text:
                raise PayloadError(f"{what} has a NUL character, which PostgreSQL cannot store")
            if any("\ud800" <= character <= "\udfff" for character in text):
                raise PayloadError(f"{what} has a lone surrogate, which is not text")
        if isinstance(value, float) and not math.isfinite(value):
            raise PayloadError(f"{where} is {value}, which JSON cannot hold")
        if isinstance(value, int) and abs(value) >= 10**MAX_DIGITS:
            raise PayloadError(f"{where} is an integer of more than {MAX_DIGITS} digits")


def _unwritable(payload: BaseModel, reason: str) -> str | None:
    """The path of the first value that pydantic, as it says, cannot write."""
    for path, value in _walk(payload, "payload"):
        if path.count("\0") > MAX_DEPTH:
            break
        if f"unknown type: {type(value)!r}" in reason or ("utf-8" in reason and _is_binary(value)):
            return path.replace("\0", "")
    return None


def _is_binary(value: Any) -> bool:
    """Whether it is bytes that are no text."""
    if not isinstance(value, (bytes, bytearray)):
        return False
    try:
        value.decode()
    except UnicodeDecodeError:
        return True
    return False


def _storable(source: object, text: str, size: int, max_bytes: int, name: str = "payload") -> str:
    """Check the JSON text of a payload, and adapt it to what jsonb does with it."""
    if size > max_bytes:
        raise PayloadError(
            f"{name} has {size:,} bytes of JSON, at most {max_bytes:,} are allowed: store the data elsewhere and a"
            " reference to it here, or raise JobRepository(max_payload_bytes=...)"
        )
    if "\\u0000" in text or (size > MAX_DIGITS and _LONG_INTEGER.search(text)):
        _refuse_values(source, name)
        _refuse_values(_parsed(text, name), name)  # what a serializer of the application has made
    if ("Infinity" in text or "NaN" in text) and _NOT_FINITE.search(_STRING.sub("", text)):
        _refuse_values(source, name)
        raise PayloadError(f"{name} has a number that is not finite, which JSON cannot hold")
    if size > MAX_DEPTH and text.count("[") + text.count("{") > MAX_DEPTH and _depth(text) > MAX_DEPTH:
        raise PayloadError(f"{name} is nested more than {MAX_DEPTH} levels deep")
    if _MAYBE_EXPONENT.search(text) and _EXPONENT.search(text):
        text = _STRING_OR_EXPONENT.sub(_written_out, text)
    return text


def _parsed(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise PayloadError(f"{name} has an integer of more than {MAX_DIGITS} digits") from None


def _written_out(match: re.Match[str]) -> str:
    token = match[0]
    return token if token.startswith('"') else f"{Decimal(float(token)):f}.0"


def _depth(text: str) -> int:
    depth = deepest = 0
    for match in _STRING_OR_BRACKET.finditer(text):
        if match[0] in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif match[0] in "]}":
            depth -= 1
    return deepest


def _walk(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Each value inside of a payload with its path, in order; a NUL marks each level of the path.

    Without recursion, and depth first: what is nested too deeply, or contains itself, shows at once.
    """
    todo = [(name, value)]
    while todo:
        path, item = todo.pop()
        yield path, item
        todo += [(f"{path}\0{step}", part) for step, part in _parts(item)][::-1]


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, BaseModel):
        extra = value.__pydantic_extra__ or {}
        yield from ((f".{name}", part) for name, part in {**value.__dict__, **extra}.items())
    elif isinstance(value, dict):
        yield from ((f".{_key(key)}", part) for key, part in value.items())
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        yield from ((f"[{index}]", part) for index, part in enumerate(value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield f".{field.name}", getattr(value, field.name, None)


def _same_instants(before: Any, after: Any) -> bool:
    """Whether values that are not equal differ only in datetimes, which mean the same.

    Python finds no datetime of an hour that the clocks go through twice equal to one of another time zone.
    """
    if isinstance(before, dt.datetime) and isinstance(after, dt.datetime):
        aware = before.utcoffset() is not None and after.utcoffset() is not None
        return aware and before.astimezone(dt.UTC) == after.astimezone(dt.UTC)
    first, second = dict(_parts(before)), dict(_parts(after))
    if type(before) is not type(after) or isinstance(before, (set, frozenset)) or first.keys() != second.keys():
        return False
    if getattr(before, "__pydantic_private__", None) != getattr(after, "__pydantic_private__", None):
        return False
    unequal = [step for step, part in first.items() if part != second[step]]
    return bool(unequal) and all(_same_instants(first[step], second[step]) for step in unequal)


def _difference(before: Any, after: Any, path: str = "payload") -> str:
    """The path of the first part that differs."""
    first, second = dict(_parts(before)), dict(_parts(after))
    if type(before) is type(after) and first.keys() == second.keys():
        for step, part in first.items():
            if part != second[step]:
                return _difference(part, second[step], path + step)
    return path


def _dotted(location: tuple[int | str, ...]) -> str:
    steps = "".join(f"[{step}]" if isinstance(step, int) else f".{_key(step)}" for step in location)
    return f"payload{steps}"


def _key(key: object) -> str:
    """A key as a part of a path, fit for any log."""
    text = key if isinstance(key, str) else shown(key)
    return ascii(text)[1:-1] if len(text) <= 80 else f"{ascii(text[:80])[1:-1]}..."


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
