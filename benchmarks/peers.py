"""Other programs to measure against, each in a virtual environment of its own below ``benchmarks/.cache``."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

CACHE = Path(__file__).parent / ".cache"


@dataclass(frozen=True)
class Peer:
    """A program in its own environment: ``module`` must import there after ``packages`` are installed.

    ``variables``: environment variables for installing and importing it. ``beside``: its environment also
    sees the packages that are installed here, torch above all, so that it needs no copies of them.
    """

    name: str
    module: str
    packages: tuple[str, ...]
    variables: tuple[tuple[str, str], ...] = ()
    beside: bool = False


MINDSPORE = Peer("mindspore", "mindspore", ("mindspore==2.10.0", "numpy<2", "safetensors<0.8"))
"""With newer versions of numpy or safetensors, MindSpore writes wrong values or fails on bfloat16."""
DEEPSPEED = Peer(
    name="deepspeed",
    module="deepspeed.utils.zero_to_fp32",
    packages=("deepspeed==0.19.8",),
    variables=(("DS_BUILD_OPS", "0"),),
    beside=True,
)


def python(peer: Peer) -> tuple[Path | None, str]:
    """Return an interpreter that can import the program, or ``None`` and the reason why there is none."""
    home = CACHE / peer.name
    found, done = home / "bin" / "python", home / "installed"
    try:
        if not done.exists():
            _run(peer, sys.executable, "-m", "venv", "--clear", str(home))
            if peer.beside:
                lines = [path for path in sys.path if path.endswith("-packages")]
                (next(home.glob("lib/*/site-packages")) / "beside.pth").write_text("\n".join(lines) + "\n")
            install = ("-m", "pip", "install", "-q", "--disable-pip-version-check")
            _run(peer, str(found), *install, *peer.packages)
        _run(peer, str(found), "-c", f"import {peer.module}")
    except RuntimeError as error:
        return None, str(error)
    done.touch()
    return found, ""


def _run(peer: Peer, *command: str) -> None:
    environment = {**os.environ, **dict(peer.variables)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or [f"exit code {done.returncode}"]
        raise RuntimeError(lines[-1])
