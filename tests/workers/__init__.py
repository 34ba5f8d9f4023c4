"""Programs for worker processes; see ``tests.support.process``."""
