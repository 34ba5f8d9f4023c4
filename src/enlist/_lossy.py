"""Fields that cannot be stored: what a model writes of them is not what it reads."""

from __future__ import annotations

import dataclasses
import typing
from collections import OrderedDict
from typing import Any, Final

from pydantic import AliasChoices, AliasPath, BaseModel, Secret, SecretBytes, SecretStr
from pydantic.fields import FieldInfo

from enlist.exceptions import PayloadError

__all__ = ["refuse_lossy_fields"]

_SECRETS: Final = (SecretStr, SecretBytes, Secret)


def refuse_lossy_fields(model: type[BaseModel]) -> None:
    """Check the fields of a payload class, nested models and dataclasses included.

    :raises PayloadError: one is masked, left out, or not read under the name that it is written with.
    """
    _check_model(model, model.__name__, set())


def _check_model(model: type[BaseModel], path: str, seen: set[type]) -> None:
    if model in seen:
        return
    seen.add(model)
    names_read = model.model_config.get("populate_by_name") or model.model_config.get("validate_by_name")
    for name, field in model.model_fields.items():
        where = f"{path}.{name}"
        _check_field(field, where)
        if not _is_read(name, field, by_name=bool(names_read)):
            raise PayloadError(
                f"{where} is written as {field.serialization_alias or name!r} and read as"
                f" {field.validation_alias!r}: give it one alias for both, Field(alias=...)"
            )
        _check_type(field.annotation, where, seen)


def _check_field(field: FieldInfo, where: str) -> None:
    if field.exclude or getattr(field, "exclude_if", None) is not None:
        raise PayloadError(f"{where} is excluded from serialization, so it would not be stored: leave it out")


def _is_read(name: str, field: FieldInfo, *, by_name: bool) -> bool:
    """Whether what is written under the field's serialization alias is read into the field."""
    written = field.serialization_alias or name
    reading = field.validation_alias
    if reading is None:
        return written == name
    choices = reading.choices if isinstance(reading, AliasChoices) else [reading]
    names = [choice.path[0] if isinstance(choice, AliasPath) else choice for choice in choices]
    return written in names or (by_name and written == name)


def _check_type(annotation: Any, where: str, seen: set[type]) -> None:
    if isinstance(annotation, typing.TypeVar):
        _check_type(annotation.__bound__, where, seen)
        return
    if (value := getattr(annotation, "__value__", None)) is not None:  # a `type` statement
        _check_type(value, where, seen)
        return
    arguments = typing.get_args(annotation)
    origin = typing.get_origin(annotation)
    if origin is typing.Literal:
        return
    for argument in arguments:
        if isinstance(argument, FieldInfo):
            _check_field(argument, where)
        else:
            _check_type(argument, where, seen)
    concrete = annotation if origin is None else origin
    if not isinstance(concrete, type):
        return
    if issubclass(concrete, _SECRETS):
        raise PayloadError(
            f"{where} is a {concrete.__name__}, which is stored as asterisks; store a reference to the secret, or a"
            " str if it may be readable in the database"
        )
    if issubclass(concrete, OrderedDict):
        raise PayloadError(
            f"{where} is an {concrete.__name__}, whose order is lost: PostgreSQL's jsonb keeps none; use a list of"
            " pairs, or a dict if the order means nothing"
        )
    if issubclass(concrete, BaseModel):
        _check_model(concrete, where, seen)
    elif (dataclasses.is_dataclass(concrete) or _is_typeddict(concrete)) and concrete not in seen:
        seen.add(concrete)
        for name, hint in _hints(concrete).items():
            _check_type(hint, f"{where}.{name}", seen)


def _is_typeddict(value: type) -> bool:
    # By its looks: pydantic wants the one of typing_extensions, which typing.is_typeddict() does not know.
    return issubclass(value, dict) and hasattr(value, "__required_keys__")


def _hints(value: type) -> dict[str, Any]:
    try:
        return typing.get_type_hints(value, include_extras=True)
    except NameError:  # pydantic resolved it in a namespace that is not known here; the round trip decides
        return {}
