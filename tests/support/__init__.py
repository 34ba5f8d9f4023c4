"""Tools of the tests: databases, an observer, a recorder of statements, and the search for what a test leaves."""

from __future__ import annotations

from tests.support.observer import Observer
from tests.support.statements import StatementRecorder
from tests.support.waiting import wait_until

__all__ = ["Observer", "StatementRecorder", "wait_until"]
