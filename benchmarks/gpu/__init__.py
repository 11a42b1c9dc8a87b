"""The lab: everything that a machine with a device is asked, by one command.

    python -m benchmarks.gpu [--only PART ...] [--seconds 480] [--write benchmarks/results/gpu]
    python -m benchmarks.gpu --list
    python -m benchmarks.gpu --dry

Each part is a process of its own with a limit of its own, and one line of JSON as soon as it ends. One that
is cut off tells what it knew by then. Parts that time nothing run first, side by side. Those that are timed
have imported and planned by then; they run one after the other, with nothing beside them.
"""
