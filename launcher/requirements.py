"""The packages that every request needs, and the messages about one that cannot be imported."""

from __future__ import annotations

import resource
import sys
from importlib.util import find_spec
from pathlib import Path
from shlex import quote

PACKAGES = {
    "torch": "torch", "hydra": "hydra-core", "omegaconf": "omegaconf", "pydantic": "pydantic",
    "numpy": "numpy", "safetensors": "safetensors", "rich": "rich", "tokenizers": "tokenizers",
    "xxhash": "xxhash", "jinja2": "jinja2", "yaml": "pyyaml",
}  # fmt: skip
"""The packages that ``pyproject.toml`` requires: from the import name to the name on the package index."""


def missing() -> str:
    """Returns the message about packages that this Python lacks; "" if it lacks none. Imports no package."""
    lacking = [package for name, package in PACKAGES.items() if not _exists(name)]
    return f"{sys.executable} has no {', '.join(lacking)}; {_install()}" if lacking else ""


def unloadable(error: BaseException) -> str:
    """Returns the message about a package that exists but cannot be loaded; "" for every other error."""
    name = getattr(error, "name", None) or ""
    library = isinstance(error, OSError) and error.errno is None and ".so" in str(error)  # from ctypes
    if not isinstance(error, ImportError) and not library:
        return ""
    if name.partition(".")[0] == "launcher":  # a bug in the launcher: the traceback says more
        return ""
    if isinstance(error, ModuleNotFoundError):
        return f"{sys.executable} has no {PACKAGES.get(name, name)}; {_install()}"
    lines = [line for line in str(error).splitlines() if line.strip()]
    why = lines[-1] if lines else type(error).__name__  # numpy prints a page of advice before the reason
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        return f"{why}; this process may use {limit >> 20} MB of memory (ulimit -v), and torch needs more"
    return f"{sys.executable} cannot load a package: {why}; {_install()}"


def _exists(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _install() -> str:
    """Returns the way out. ``make`` installs torch for the CPU; pip alone would download gigabytes."""
    root = Path(__file__).parents[1]
    if not (root / "Makefile").is_file():
        return "activate the environment in which the launcher is installed"
    return f"activate the launcher's environment, or create it: make -C {quote(str(root))} .venv/installed"
