"""From ``module:object`` to an application's worker, with an error for each way in which it cannot be had."""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from enlist._cli_database import one_line
from enlist.exceptions import ConfigurationError, EnlistError
from enlist.handlers import HandlerRegistry
from enlist.worker import Worker

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["load_application", "load_worker"]


def load_worker(target: str) -> Worker:
    """Import an application's worker.

    :param target: ``module:object``. The module is looked for in the current directory as well; the object, a dotted
        path of attributes, is a :class:`~enlist.Worker` or can be called without arguments to get one.
    :raises ConfigurationError: there is no such module or object, importing or calling it failed, or it is
        something else.
    """
    found = _load(target)
    if not isinstance(found, Worker):
        raise ConfigurationError(f"{target} is {_described(found)}, not a Worker, nor a function that returns one")
    return found


def load_application(target: str) -> Worker | HandlerRegistry:
    """Import an application's worker, or its registry of handlers; otherwise as :func:`load_worker`."""
    found = _load(target)
    if not isinstance(found, (Worker, HandlerRegistry)):
        raise ConfigurationError(
            f"{target} is {_described(found)}, not a Worker or HandlerRegistry, nor a function that returns one"
        )
    return found


def _load(target: str) -> object:
    module_name, _, path = target.partition(":")
    if not module_name or not path or not all(name.isidentifier() for name in path.split(".")):
        raise ConfigurationError(f"{target!r} should be module:object, such as shop.jobs:worker")
    module = _import(module_name)
    found: object = module
    for name in path.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            raise ConfigurationError(_missing(module, path)) from None
        except Exception as error:
            raise ConfigurationError(_failed(f"getting {target}", error)) from error
    if isinstance(found, (Worker, HandlerRegistry)) or not callable(found):
        return found
    return _call(target, found)


def _import(name: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise ConfigurationError(
                f"there is no module {name!r}: neither in the current directory, {here}, nor installed"
            ) from error
        raise ConfigurationError(_failed(f"importing {name!r}", error)) from error
    except (EnlistError, KeyboardInterrupt):
        raise
    except BaseException as error:  # SystemExit too: a script that is no module
        raise ConfigurationError(_failed(f"importing {name!r}", error)) from error


def _call(target: str, factory: object) -> object:
    assert callable(factory)
    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        raise ConfigurationError(
            f"{target} is {_described(factory)} that cannot be called without arguments: {error}"
        ) from None
    except ValueError:  # some callables written in C have no signature
        pass
    if inspect.iscoroutinefunction(factory):
        raise ConfigurationError(f"{target} is an async function; a plain one is needed to make a worker")
    try:
        return factory()
    except (EnlistError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise ConfigurationError(_failed(f"calling {target}", error)) from error


def _missing(module: ModuleType, path: str) -> str:
    workers = [name for name, value in vars(module).items() if isinstance(value, Worker)]
    hint = f"; its workers are: {', '.join(workers)}" if workers else ""
    return f"module {module.__name__!r} has no attribute {path!r}{hint}"


def _failed(what: str, error: BaseException) -> str:
    """Say where, in the application's own code, and with which error: a traceback's last line."""
    place = ""
    if isinstance(error, SyntaxError):  # its traceback ends in the importer; its text has the file's name
        place = f" ({error.filename}, line {error.lineno})"
    elif (traceback := error.__traceback__) is not None:
        while traceback.tb_next is not None:
            traceback = traceback.tb_next
        place = f" ({traceback.tb_frame.f_code.co_filename}, line {traceback.tb_lineno})"
    return f"{what} failed: {type(error).__qualname__}: {one_line(error)}{place}; --traceback shows more"


def _described(found: object) -> str:
    if inspect.isclass(found):
        return f"the class {found.__qualname__}"
    name = type(found).__qualname__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
