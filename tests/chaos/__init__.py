"""Workers that are killed, frozen, cut off and deprived of their server, over jobs whose every effect is counted.

``python -m tests.chaos --seconds 60 --workers 6 --seed 1`` prints what was done to them and what was found wrong.
"""
