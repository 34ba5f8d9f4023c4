"""``python -m enlist`` is the ``enlist`` command."""

from enlist.cli import main

main()
