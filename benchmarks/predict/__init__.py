"""Plans other people's training runs, and holds what is predicted of them against what they measured.

    python -m benchmarks.predict IN.csv OUT.csv

The table has a measurement a row (``rows``); each becomes a request (``requests``), and a plan of the planner
that users have, on a cluster whose constants are those of the framework that was measured (``frameworks``).
"""
