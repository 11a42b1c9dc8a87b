"""Plans training runs of other people, and compares the predictions with their measurements.

    python -m benchmarks.predict IN.csv OUT.csv

Each row of the table is a measurement (``rows``). It becomes a request (``requests``), and the launcher's
planner plans it on a cluster with the constants of the measured framework (``frameworks``).
"""
