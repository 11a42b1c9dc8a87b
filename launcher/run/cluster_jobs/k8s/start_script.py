"""The bash script of a pod: starts the ranks of a node, has them save on SIGTERM, returns their code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from shlex import quote

from launcher.errors import REQUEUE

KILLED = 128 + 15
"""A shell's exit code for a process that SIGTERM has ended."""


@dataclass(frozen=True)
class NodeVariables:
    """Bash expressions for the index of a node and for the rendezvous, as the cluster provides them."""

    index: str
    address: str
    port: str


@dataclass(frozen=True)
class NodeCommand:
    """The command of each of ``each`` ranks per node; ``folder``: its directory, ``setup``: lines before."""

    words: Sequence[str]
    folder: str
    nodes: int
    each: int
    setup: Sequence[str] = ()


def script(command: NodeCommand, at: NodeVariables, stopped: int = REQUEUE, ends: Sequence[str] = ()) -> str:
    """The script; ``stopped``: its exit code when told to stop; ``ends``: lines that adapt ``$code``."""
    return "\n".join([*_head(command, at, stopped), *_ranks(command), *_wait(), *ends, 'exit "$code"']) + "\n"


def _head(command: NodeCommand, at: NodeVariables, stopped: int) -> Iterator[str]:
    yield "set -u"
    yield f"trap 'exit {stopped}' TERM  # before there are ranks nothing is lost"
    yield f"cd {quote(command.folder)} || exit 1"
    yield from command.setup
    variables: Mapping[str, object] = {
        "MASTER_ADDR": at.address,
        "MASTER_PORT": at.port,
        "WORLD_SIZE": command.nodes * command.each,
        "LOCAL_WORLD_SIZE": command.each,
    }
    yield f"node={at.index}"
    yield from (f"export {name}={value}" for name, value in variables.items() if value != f"${name}")


def _ranks(command: NodeCommand) -> Iterator[str]:
    words = " ".join(map(quote, command.words))
    yield ""
    yield "ranks=()"
    yield f"for ((i = 0; i < {command.each}; i++)); do"
    yield f"    RANK=$((node * {command.each} + i)) LOCAL_RANK=$i {words} &"
    yield '    ranks+=("$!")'
    yield "done"
    yield "told="
    yield """trap 'told=1; kill -TERM "${ranks[@]}" 2>/dev/null' TERM"""


def _wait() -> Iterator[str]:
    yield ""
    yield f"# A rank that was told to stop saves and exits with {REQUEUE};"
    yield f"# one that is still starting is ended by the signal itself ({KILLED})."
    yield "code=0"
    yield 'for rank in "${ranks[@]}"; do'
    yield '    wait "$rank"'
    yield "    ended=$?"
    yield '    while [ -n "$told" ]; do  # the signal has ended the waiting, not the rank'
    yield "        told="
    yield '        wait "$rank"'
    yield "        ended=$?"
    yield "    done"
    yield f'    [ "$ended" -ge 0 ] || ended={REQUEUE}  # lost by bash: another start finds out'
    yield '    case "$ended" in'
    yield "        0) ;;"
    yield f'        {REQUEUE} | {KILLED}) [ "$code" -ne 0 ] || code={REQUEUE} ;;'
    yield f'        *) [ "$code" -ne 0 ] && [ "$code" -ne {REQUEUE} ] || code=$ended ;;'
    yield "    esac"
    yield "done"
