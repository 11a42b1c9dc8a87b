"""The command that installs the optional packages of a part of the launcher."""

from __future__ import annotations

import re

NAME = "autoparallel-launcher"


def install_command(extra: str) -> str:
    """A line for the shell that installs what ``extra`` of ``pyproject.toml`` lists, with its version bounds.

    It names the packages, not the launcher: the launcher is not on PyPI, so ``pip install 'launcher[extra]'``
    could not work. In a checkout that is not installed the line installs the checkout.

    >>> install_command("images").startswith("pip install ")
    True
    """
    from importlib.metadata import PackageNotFoundError, requires  # slow, and only a refusal needs it

    try:
        lines = requires(NAME) or []
    except PackageNotFoundError:
        return f"pip install -e '.[{extra}]'"
    pattern = re.compile(rf"(.*?)\s*;\s*extra == ['\"]{re.escape(extra)}['\"]")
    packages = [match[1] for line in lines if (match := pattern.fullmatch(line))]
    return " ".join(("pip install", *(f"'{package}'" for package in packages)))
