"""Numbers and lists as text."""

from __future__ import annotations

from collections.abc import Sequence

GB = 1 << 30


def many(n: int, noun: str) -> str:
    """Returns ``n`` and ``noun``, in the plural unless ``n`` is 1.

    >>> many(1, "micro batch"), many(4, "micro batch"), many(0, "step"), many(2, "epoch")
    ('1 micro batch', '4 micro batches', '0 steps', '2 epochs')
    """
    if n == 1:
        return f"{n} {noun}"
    ending = "es" if noun.endswith(("nch", "tch")) else "s"
    return f"{n} {noun}{ending}"


def scaled(n: float) -> tuple[str, str]:
    """Returns ``n`` as a number below 1000, and the prefix for its unit.

    >>> scaled(950), scaled(1_234_567)
    (('950', ''), ('1.2', 'M'))
    """
    for prefix in ("", "k", "M", "G", "T"):
        if n < 1000:
            return (f"{n:.1f}" if prefix else f"{n:.0f}"), prefix
        n /= 1000
    return f"{n:.1f}", "P"


def bytes_text(n: float) -> str:
    """Formats a number of bytes.

    >>> bytes_text(1536), bytes_text(3 * 1024**3)
    ('1.5 KB', '3.0 GB')
    """
    for unit in ("B", "KB", "MB", "GB"):
        if n < 1024:
            return f"{n:.0f} B" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} TB"


def seconds_text(n: float) -> str:
    """Formats a number of seconds.

    >>> seconds_text(12.34), seconds_text(0.0021), seconds_text(0.00006)
    ('12.3 s', '2.1 ms', '60.0 us')
    """
    if n >= 1:
        return f"{n:.1f} s"
    return f"{n * 1e3:.1f} ms" if n >= 1e-3 else f"{n * 1e6:.1f} us"


def spans(numbers: Sequence[int]) -> str:
    """Lists ascending numbers, with consecutive ones as a range.

    >>> spans((0, 1, 2, 5)), spans((4,))
    ('0-2,5', '4')
    """
    runs: list[list[int]] = []
    for n in numbers:
        if runs and runs[-1][-1] == n - 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ",".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs)


def some(names: Sequence[str]) -> str:
    """Lists the first three names, and how many more there are.

    >>> some(["a", "b"]), some(["a", "b", "c", "d"])
    ('a, b', 'a, b, c and 1 more')
    """
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}"
