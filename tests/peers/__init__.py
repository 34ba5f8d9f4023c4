"""enlist beside other job queues for Python on PostgreSQL: the same work, on one server, in turn.

``python -m tests.peers --peers enlist,pgqueuer --measures drain-1,insert`` prints a table of what each one did.
"""
