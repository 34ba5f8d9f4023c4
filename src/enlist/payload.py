"""Typed payloads: a pydantic model whose class says what kind of job it is, and how that job is inserted."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar, Unpack

from pydantic import BaseModel

from enlist._encoding import DEFAULT_MAX_BYTES, decode_model, encode_data, encode_model
from enlist._lossy import refuse_lossy_fields
from enlist._options import ABSENT, MAX_INTEGER, check_boolean, check_integer, check_name
from enlist.exceptions import PayloadError
from enlist.models import PRIORITY_RANGE

if TYPE_CHECKING:
    from pydantic import ConfigDict

__all__ = ["JobPayload", "PayloadOptions", "decode", "encode", "encode_data", "options_of"]

PayloadT = TypeVar("PayloadT", bound="JobPayload")

DEFAULT_QUEUE: Final = "default"
DEFAULT_PRIORITY: Final = 0
DEFAULT_MAX_ATTEMPTS: Final = 20


@dataclass(frozen=True, slots=True)
class PayloadOptions:
    """The insert options of a payload class. The call of ``enqueue`` can override them, but for kind and ordered."""

    kind: str = ""
    """What handlers are registered for; empty for a class that is only a base of others."""
    queue: str = DEFAULT_QUEUE
    priority: int = DEFAULT_PRIORITY
    max_attempts: int = DEFAULT_MAX_ATTEMPTS
    ordered: bool = False


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
    :raises InvalidOption: at the definition of the class, if an option is outside of what it may be.
    :raises PayloadError: at the definition of the class, if a field's value would be lost when it is stored
        (``SecretStr``, ``exclude=True``), also in a nested model.
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
        cls.__enlist_options__ = replace(cls.__enlist_options__, **given)
        cls.__enlist_checked__ = False

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        if cls.__pydantic_complete__:  # else a forward reference is open: checked with the first payload
            _check(cls)


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


def decode(payload_type: type[PayloadT], stored: dict[str, Any]) -> PayloadT:
    """Return a stored payload as an instance of its class.

    :raises PayloadError: it does not fit. The message names fields and reasons, never the payload's values.
    """
    return decode_model(payload_type, stored)
