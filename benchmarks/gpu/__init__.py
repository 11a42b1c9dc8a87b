"""The lab: all measurements on a machine with an accelerator, by one command.

    python -m benchmarks.gpu [--only PART ...] [--seconds 480] [--write benchmarks/results/gpu]
    python -m benchmarks.gpu --list
    python -m benchmarks.gpu --dry

Each part is a process with its own time limit, and makes one line of JSON when it ends. A part that is cut
off at its limit reports what it knows by then. Parts that are not timed run first, side by side. Timed parts
import and plan in the meantime; then they run one after the other, with nothing beside them.
"""
