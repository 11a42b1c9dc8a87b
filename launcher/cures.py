"""Every problem of a request at once, with the cures that hold: pasted, they pass and keep what was meant.

What is wrong hides what would be found behind it. So each problem is mended, by its cure or with something that the
schema takes, and the request is looked at again. Nothing is started, nothing is written.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from launcher.errors import Problem, RequestError
from launcher.job.compose import BadRequest
from launcher.job.kept import kept, pasted, swept, whole_override
from launcher.job.origins import Origins
from launcher.job.standins import other_option, standin

ROUNDS = 6
Words = tuple[str, ...]
Look = Callable[[Words], list["Finding"]]


@dataclass(frozen=True)
class Finding:
    """A problem, and where the keys of its request were set."""

    problem: Problem
    origins: Origins

    @property
    def said(self) -> tuple[str, str]:
        return self.problem.key, self.problem.text


def examine(words: Sequence[str], error: RequestError, look: Callable[[Words, bool], None]) -> BadRequest:
    """``error``, with all else that can be known to be wrong with ``words``, and with those cures alone that hold.

    ``look`` raises ``RequestError`` for what is wrong with a command line, and does nothing else; ``False``: without a
    plan.
    """
    listed = _findings(error, words)
    see = _seeing(words, look)
    found: Sequence[Finding] = listed
    for _ in range(ROUNDS):
        left = see(_mended(words, listed, True))
        if not left:
            return _told(listed)
        fresh = [f for f in left if not _near(f, listed)]
        if not fresh:
            break
        other = {f.said for f in see(_mended(words, listed, False))}
        if not (found := [f for f in fresh if f.said in other]):
            break
        listed = [*listed, *found]
    return _told(_holding(words, listed, see))


def _told(listed: Iterable[Finding]) -> BadRequest:
    return BadRequest(tuple(f.problem for f in listed), {f.problem: f.origins for f in listed})


def _findings(error: RequestError, words: Sequence[str]) -> list[Finding]:
    places = error.origins if isinstance(error, BadRequest) else Origins()
    late = isinstance(error, BadRequest) and error.late
    out = []
    for problem in error.problems:
        origins = places if isinstance(places, Origins) else places.get(problem, Origins())
        problem = swept(whole_override(problem, origins), origins, words)
        out.append(Finding(problem if not late or kept(problem, origins) else replace(problem, cure=""), origins))
    return out


def _seeing(typed: Sequence[str], look: Callable[[Words, bool], None]) -> Look:
    """What is wrong with other words, each worked out once. No package that ``typed`` does not trust is imported."""
    known: dict[Words, list[Finding]] = {}

    def see(words: Words) -> list[Finding]:
        if words not in known:
            trusting = any(w.startswith("security") and w not in typed for w in words)
            try:
                look(words, not trusting)
                known[words] = []
            except RequestError as error:
                known[words] = _findings(error, words)
        return known[words]

    return see


def _near(finding: Finding, listed: Iterable[Finding]) -> bool:
    """Whether it is about a key that is listed, or one above or below it: it may follow from what stands in there."""
    key = f"{finding.problem.key}."
    keys = [f"{f.problem.key}." for f in listed if f.problem.key]
    return any(key.startswith(k) or k.startswith(key) for k in keys) or finding.said in {f.said for f in listed}


def _mended(words: Sequence[str], listed: Iterable[Finding], by_cure: bool, only: Finding | None = None) -> Words:
    """``words`` without what is listed: cured where that can be, or each with a value that stands in."""
    out = tuple(words)
    for f in listed:
        cured = f.problem.cure and (by_cure if only is None else f is only)
        out = pasted(out, f.problem, f.origins) if cured else _stood_in(out, f, 0 if by_cure else 1)
    return out


def _stood_in(words: Words, finding: Finding, which: int) -> Words:
    problem, origins = finding.problem, finding.origins
    if not problem.key:
        return pasted(words, replace(problem, cure=""), origins)
    if "." not in problem.key and (option := other_option(problem.key, which)) is not None:
        return pasted(words, replace(problem, cure=option), origins)
    word = standin(problem.key, origins, which)
    if word is None and (origin := origins.of(problem.key)) is not None and not origin.typed:
        word = f"~{problem.key}"
    return pasted(words, replace(problem, cure=shlex.quote(word) if word else ""), origins)


def _holding(words: Sequence[str], listed: Sequence[Finding], see: Look) -> list[Finding]:
    """``listed`` without cures that bring something new, each alone or all together."""
    bare = {f.said for f in see(_mended(words, listed, False))}
    out = []
    for f in listed:
        holds = not f.problem.cure or _brings_nothing(_mended(words, listed, False, f), bare, see)
        out.append(f if holds else replace(f, problem=replace(f.problem, cure="")))
    if sum(bool(f.problem.cure) for f in out) > 1 and not _brings_nothing(_mended(words, out, True), bare, see):
        return [replace(f, problem=replace(f.problem, cure="")) for f in out]
    return out


def _brings_nothing(words: Words, known: set[tuple[str, str]], see: Look) -> bool:
    return all(f.said in known for f in see(words))
