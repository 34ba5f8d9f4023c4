"""Typed payloads: a pydantic model whose class says what kind of job it is, and how that job is inserted."""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar, Unpack

from pydantic import BaseModel

from enlist._encoding import DEFAULT_MAX_BYTES, decode_model, encode_data, encode_model, parse_stored
from enlist._lossy import refuse_lossy_fields
from enlist._options import ABSENT, MAX_INTEGER, check_boolean, check_integer, check_name
from enlist.exceptions import PayloadError, PayloadMismatch
from enlist.models import MAX_SMALLINT, PRIORITY_RANGE

if TYPE_CHECKING:
    import uuid

    from pydantic import ConfigDict

__all__ = ["JobPayload", "PayloadOptions", "decode", "decode_text", "encode", "encode_data", "options_of"]

PayloadT = TypeVar("PayloadT", bound="JobPayload")

DEFAULT_QUEUE: Final = "default"
DEFAULT_PRIORITY: Final = 0
DEFAULT_MAX_ATTEMPTS: Final = 20


@dataclass(frozen=True, slots=True)
class PayloadOptions:
    """The insert options of a payload class; ``enqueue`` can override queue, priority and max_attempts."""

    kind: str = ""
    """What handlers are registered for; empty for a class that is only a base of others."""
    queue: str = DEFAULT_QUEUE
    priority: int = DEFAULT_PRIORITY
    max_attempts: int = DEFAULT_MAX_ATTEMPTS
    ordered: bool = False
    version: int = 1


class JobPayload(BaseModel):
    """Base of typed payloads: a pydantic model with the insert options of its jobs as class keywords.

    ::

        class SendReceipt(JobPayload, kind="send_receipt", queue="mail", max_attempts=8):
            order_id: int

    The options are no fields, so fields may have the same names. Subclasses and parametrized generics inherit what
    they don't set, the kind included: give a subclass a kind of its own if it has a handler of its own. pydantic's
    configuration may be given in the same place (``frozen=True``).

    A payload is stored as JSON, by alias, and read back by pydantic. Whatever does not come back equal is refused
    by ``enqueue``.

    :param kind: name of the kind, at most 200 bytes of UTF-8. A class without one can only be derived from.
    :param queue: name of the queue, at most 200 bytes of UTF-8; default ``"default"``.
    :param priority: -32768 to 32767, higher is run first; default 0.
    :param max_attempts: how often the job is tried before it is dead, at least 1; default 20.
    :param ordered: whether its jobs run one after the other within their concurrency key, which each must then have,
        in the order in which they were written, whatever their priorities; default False.
    :param version: the version of the fields, 1 to 32767, stored with each job; default 1. Raise it with a change
        that payloads stored before do not fit, and convert those in :meth:`upgrade`.
    :raises InvalidOption: at the definition of the class, if an option is outside of what it may be.
    :raises PayloadError: at the definition of the class, if a field's value would be lost when it is stored
        (``SecretStr``, ``exclude=True``), also in a nested model; or if ``upgrade`` is something else than described.
    """

    __enlist_options__: ClassVar[PayloadOptions] = PayloadOptions()
    __enlist_checked__: ClassVar[bool] = True  # whether the fields are known to be without loss

    def __init_subclass__(
        cls,
        *,
        kind: str | None = None,
        queue: str | None = None,
        priority: int = ABSENT,
        max_attempts: int | None = None,
        ordered: bool | None = None,
        version: int | None = None,
        **config: Unpack[ConfigDict],
    ) -> None:
        super().__init_subclass__(**config)
        given: dict[str, Any] = {}
        if kind is not None:
            given["kind"] = check_name("kind", kind)
        if queue is not None:
            given["queue"] = check_name("queue", queue)
        if priority is not ABSENT:
            given["priority"] = check_integer("priority", priority, *PRIORITY_RANGE)
        if max_attempts is not None:
            given["max_attempts"] = check_integer("max_attempts", max_attempts, 1, MAX_INTEGER)
        if ordered is not None:
            given["ordered"] = check_boolean("ordered", ordered)
        if version is not None:
            given["version"] = check_integer("version", version, 1, MAX_SMALLINT)
        _check_upgrade(cls)
        cls.__enlist_options__ = replace(cls.__enlist_options__, **given)
        cls.__enlist_checked__ = False

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        if "upgrade" in cls.model_fields:  # one without a default, which leaves no trace in the class before
            raise PayloadError(_NO_FIELD.format(cls.__name__))
        if cls.__pydantic_complete__:  # else a forward reference is open: checked with the first payload
            _check(cls)

    @classmethod
    def upgrade(cls, version: int, data: dict[str, Any]) -> dict[str, Any]:
        """Convert a payload that a lower version of the class has stored; override it in your class.

        The worker calls it before the handler, and validates what it returns. It must be quick and do no IO. ::

            class SendReceipt(JobPayload, kind="send_receipt", version=2):
                order_ids: list[int]

                @classmethod
                def upgrade(cls, version: int, data: dict[str, Any]) -> dict[str, Any]:
                    if version < 2:
                        data["order_ids"] = [data.pop("order_id")]
                    return data

        :param version: the version that the payload is stored with, lower than the class's.
        :param data: the JSON object as it is stored, by alias: yours to change.
        :return: the JSON object in the form of the class's version; by default ``data`` as it is. An exception, and
            what does not fit the class then, is a :class:`~enlist.PayloadMismatch`.
        """
        return data


_NO_FIELD: Final = (
    "{0}.upgrade is the method that converts older payloads, and cannot be a field: give the field another name, and"
    " Field(alias='upgrade') if it is to be stored under this one"
)


def _check_upgrade(cls: type[JobPayload]) -> None:
    """Refuse an ``upgrade`` that could not be called: it would fail old jobs, in production."""
    name = cls.__name__
    found = inspect.getattr_static(cls, "upgrade")
    if not inspect.isroutine(found):
        raise PayloadError(_NO_FIELD.format(name))
    if not isinstance(found, classmethod):
        raise PayloadError(f"{name}.upgrade must be a class method: @classmethod def upgrade(cls, version, data)")
    if inspect.iscoroutinefunction(cls.upgrade):
        raise PayloadError(f"{name}.upgrade is async, and it is not awaited: make it a plain class method")
    try:
        inspect.signature(cls.upgrade).bind(1, {})
    except TypeError as error:
        raise PayloadError(f"{name}.upgrade must take (cls, version, data): {error}") from None


def _check(cls: type[JobPayload]) -> None:
    refuse_lossy_fields(cls)
    cls.__enlist_checked__ = True


def options_of(payload: JobPayload | type[JobPayload]) -> PayloadOptions:
    """Return the insert options of a payload class, given it or an instance.

    :raises PayloadError: the class has no kind.
    """
    options = payload.__enlist_options__
    if not options.kind:
        name = (payload if isinstance(payload, type) else type(payload)).__name__
        raise PayloadError(f"{name} has no kind: class {name}(JobPayload, kind='...')")
    return options


def encode(payload: JobPayload, max_bytes: int = DEFAULT_MAX_BYTES) -> str:
    """Return a payload as JSON text that PostgreSQL can store and :func:`decode` gives back equal.

    :param max_bytes: the longest text, in bytes of UTF-8; default 1 MiB.
    :raises PayloadError: there is no such text; the message has the path of the value that is in the way.
    """
    if not payload.__enlist_checked__:
        _check(type(payload))
    return encode_model(payload, max_bytes)


def decode(
    payload_type: type[PayloadT], stored: dict[str, Any], version: int | None = None, job_id: uuid.UUID | None = None
) -> PayloadT:
    """The same as :func:`decode_text`, for a payload that was read from its column already."""
    return decode_text(payload_type, json.dumps(stored), version, job_id)


def decode_text(
    payload_type: type[PayloadT], text: str, version: int | None = None, job_id: uuid.UUID | None = None
) -> PayloadT:
    """Return a payload, stored as JSON text, as an instance of its class; upgraded if a lower version has stored it.

    :param version: the version that it was stored with; default the class's.
    :param job_id: the job, for the message.
    :raises PayloadMismatch: it does not fit. The message names fields and reasons, never the payload's values.
    """
    known = payload_type.__enlist_options__.version
    if version is None:
        version = known
    try:
        if version < known:
            text = _upgraded(payload_type, version, text)
        return decode_model(payload_type, text)
    except PayloadError as error:
        whose = "the payload" if job_id is None else f"the payload of job {job_id}"
        message = f"{whose} does not fit {payload_type.__name__} version {known}: stored as version {version}; {error}"
        raise PayloadMismatch(message, known, version) from error.__cause__


def _upgraded(payload_type: type[JobPayload], version: int, text: str) -> str:
    stored = parse_stored("payload", text)
    if not isinstance(stored, dict):
        return text  # written by hand; it is refused when it is read
    try:
        data: object = payload_type.upgrade(version, stored)
    except Exception as error:
        raise PayloadError(f"upgrade() raised {type(error).__name__}") from error
    if not isinstance(data, dict):
        raise PayloadError(f"upgrade() returned {type(data).__name__}, not a dict")
    try:
        return json.dumps(data)
    except Exception as error:
        raise PayloadError(f"upgrade() returned what is not JSON: {type(error).__name__}") from error
