"""Lists all problems of a request with cures that hold: a cure passes all checks and keeps the intention.

A problem can hide others. So each problem is fixed, by its cure or with a placeholder that the schema
accepts, and the request is checked again. Nothing is started, nothing is written.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from launcher.errors import Problem, RequestError
from launcher.job.compose import BadRequest, Depth, depth
from launcher.job.config_folders import ConfigFiles
from launcher.job.cures.keeps_meaning import kept, settings
from launcher.job.cures.paste import pasted, swept, typed_origin, with_override, with_placeholder
from launcher.job.cures.validation_errors import MORE, counted, placeholder
from launcher.job.cures.validation_errors import SHOWN as SHOWN_KEYS
from launcher.job.origins import Origins
from launcher.job.overrides import nameable, shell

ROUNDS = 6
MOST_PROBLEMS = 40
"""The most problems whose cures are tried."""
_DEEP = re.compile(r"\Alaunch\.(device|backend)=|\bmode:index\b|\Aloss=(bce|mse)\b")
"""Matches an override that needs torch, or the model, to be checked."""
TRUSTED = "security.allow="
"""An override whose cures are merged."""
SHOWN = ("show=plan", "show=config", "show=timeline")
FITTED = ("model", "data", "loss")
"""Groups that must fit each other: a cure for one may not fit the others."""
_LAYOUT = re.compile(
    r"""\b(parallel|launch)\.[\w.]+=(-?\d|\{\w)     # a number or a group of the layout
    |\btrain\.(batch_size=|early_stop\b|compile=\{\w)
    |\bcheckpoint\.best=|(?<!\.)\bsteps=            # what needs validations, or other steps
    |~|\bauto\b                                    # the planner decides, or a setting is removed
    """,
    re.VERBOSE,
)
"""Matches a cure that the schema accepts and the planner may refuse."""
_PATH = re.compile(r"\b(checkpoint\.resume|run_dir|runs|[\w.]+\.(path|root|file|load|save|src|dst|to))=")
"""Matches a cure that sets a path: the path may not exist, or may be of the wrong kind."""
Words = tuple[str, ...]
ProblemTexts = set[tuple[str, str]]
VisibilityCheck = Callable[[Words], list["ListedProblem"]]


@dataclass(frozen=True)
class ListedProblem:
    """A problem, and the origins of its request's keys."""

    problem: Problem
    origins: Origins

    @property
    def key_and_text(self) -> tuple[str, str]:
        return self.problem.key, self.problem.text


def examine(words: Sequence[str], error: RequestError, look: Callable[[Words, Depth], None]) -> BadRequest:
    """Returns ``error`` with all other problems of ``words`` that can be found, and only cures that hold.

    ``look`` raises ``RequestError`` for a wrong command line, and does nothing else. It checks only as far as
    needed, so that an answer comes at once: a misspelled word in a shipped request imports no planner, and a
    request that needs no plan imports no torch.
    """
    # so many are not typed by a person; checking them for each cure would take minutes
    if len(error.problems) > MOST_PROBLEMS:
        return _bad_request(_first(error))
    listed = _findings(error, words)
    far = depth(error)
    if far == Depth.COMPOSED and _may_have_other_problems(words, listed):
        far = Depth.SETTLED
    see = _seeing(words, look, far)
    for _ in range(ROUNDS):
        remaining = see(_with_problems_fixed(words, listed, listed, 0))
        if not remaining:
            return _bad_request(listed)

        # new problems caused neither by cures nor by placeholders
        fresh = [f for f in remaining if not _near(f, listed) and not _said_by_recipe(f, listed)]
        if not fresh:
            break
        other = {f.key_and_text for f in see(_with_problems_fixed(words, listed, (), 1))}
        added = [f for f in fresh if f.key_and_text in other]
        if not added:
            break
        listed = [*listed, *added]
    return _bad_request(_with_cures_that_hold(words, listed, see))


def _may_have_other_problems(words: Sequence[str], listed: Iterable[ListedProblem]) -> bool:
    """Returns true if a request refused by the schema may have other problems, which only the planner finds.

    Shipped options are compatible. Other settings, paths, user files and numbers of a layout may not be.
    """
    groups = ConfigFiles().groups()
    blamed = {f.problem.key for f in listed}
    for word in words:
        key, _, value = word.lstrip("+").partition("=")
        chosen = key in groups and value in ConfigFiles().options(key)
        if not chosen and key not in blamed and word not in SHOWN:
            return True
    if any(f.problem.key.partition(".")[0] in FITTED for f in listed):
        return True
    return any(_LAYOUT.search(f.problem.cure) or _PATH.search(f.problem.cure) for f in listed)


def _bad_request(found_problems: Iterable[ListedProblem]) -> BadRequest:
    listed = _added_up(list(found_problems))
    return BadRequest(tuple(f.problem for f in listed), {f.problem: f.origins for f in listed})


def _findings(error: RequestError, words: Sequence[str]) -> list[ListedProblem]:
    late = isinstance(error, BadRequest) and error.late
    out = []
    for problem in error.problems:
        origins = _origins(error, problem)
        problem = swept(with_override(problem, origins), origins, words)
        if not kept(problem, origins, late):
            problem = replace(problem, cure="")
        out.append(ListedProblem(problem, origins))
    return _added_up(out)


def _first(error: RequestError) -> list[ListedProblem]:
    """Returns the first problems of ``error``, without cures; one problem represents all other keys."""
    shown, more = list(error.problems[:SHOWN_KEYS]), error.problems[SHOWN_KEYS:]
    hidden = [p for p in more if p.key and not p.text.endswith(MORE)]
    shown += [p for p in more if not p.key or p.text.endswith(MORE)]
    if len(hidden) > 1:
        shown.append(counted([p.key for p in hidden]))
    else:
        shown += hidden
    return [ListedProblem(replace(p, cure=""), _origins(error, p)) for p in shown]


def _origins(error: RequestError, problem: Problem) -> Origins:
    """Returns the origins of the request that ``problem`` is about."""
    places = error.origins if isinstance(error, BadRequest) else Origins()
    return places if isinstance(places, Origins) else places.get(problem, Origins())


def _added_up(listed: list[ListedProblem]) -> list[ListedProblem]:
    """Merges the names that the cures of ``listed`` trust: of several lists only the last would count."""
    words = [word for f in listed for word in shlex.split(f.problem.cure) if word.startswith(TRUSTED)]
    trusted = dict.fromkeys(name for _, names in settings(words) for name in names)
    every = f"{TRUSTED}[{','.join(trusted)}]"
    out = []
    for f in listed:
        cure = [every if word.startswith(TRUSTED) else word for word in shlex.split(f.problem.cure)]
        if every in cure and len(set(words)) > 1:
            f = replace(f, problem=replace(f.problem, cure=" ".join(map(shell, cure))))
        out.append(f)
    return out


def _seeing(typed: Sequence[str], look: Callable[[Words, Depth], None], deep: Depth) -> VisibilityCheck:
    """Returns a cached function from words to their problems.

    It imports no package that ``typed`` does not trust. Only torch knows whether there is a device for each
    rank.
    """
    known: dict[Words, list[ListedProblem]] = {}

    def see(words: Words) -> list[ListedProblem]:
        if words not in known:
            new = [w for w in words if w not in typed]
            trusting = any(w.startswith("security") for w in new)
            far = Depth.PLANNED if any(map(_DEEP.search, new)) else deep
            try:
                look(words, min(far, Depth.SETTLED) if trusting else far)
                known[words] = []
            except RequestError as error:
                known[words] = _findings(error, words)
        return known[words]

    return see


def _near(finding: ListedProblem, listed: Iterable[ListedProblem]) -> bool:
    """Returns true if the problem may come from a placeholder: its key, or one above or below, is listed."""
    key = f"{finding.problem.key}."
    keys = [f"{f.problem.key}." for f in listed if f.problem.key]
    texts = {f.key_and_text for f in listed}
    return finding.key_and_text in texts or any(key.startswith(k) or k.startswith(key) for k in keys)


def _said_by_recipe(finding: ListedProblem, listed: Iterable[ListedProblem]) -> bool:
    """Returns true if the problem may depend on the model, data or loss of a recipe that cannot be read."""
    unread = any(f.problem.key == "recipe" for f in listed)
    return unread and finding.problem.key.partition(".")[0] in FITTED


def _with_problems_fixed(
    words: Sequence[str], listed: Iterable[ListedProblem], cured: Collection[ListedProblem], which: int
) -> Words:
    """Returns ``words`` with the listed problems fixed: by the cures of ``cured``, else by placeholders.

    ``which``: 0 for the first of the two placeholders, 1 for the second.
    """
    out = tuple(words)
    for f in listed:
        by_cure = bool(f.problem.cure) and any(f is c for c in cured)
        out = pasted(out, f.problem, f.origins) if by_cure else _stood_in(out, f, which)
    return out


def _stood_in(words: Words, finding: ListedProblem, which: int) -> Words:
    problem, origins = finding.problem, finding.origins
    if not problem.key:
        return pasted(words, replace(problem, cure=""), origins)
    if "." not in problem.key and (options := ConfigFiles().options(problem.key)):
        other = f"{problem.key}={options[-1]}" if which and problem.key not in ("recipe", "steps") else ""
        return pasted(words, replace(problem, cure=other), origins)

    if not nameable(problem.key):  # no override can fix it
        return words
    word = placeholder(problem.key, origins, which)
    origin = origins.of(problem.key)
    if word is None and origin is not None and not origin.typed:
        word = f"~{problem.key}"
    cure = shlex.quote(word) if word else ""
    return with_placeholder(words, replace(problem, cure=cure), origins)


def _with_cures_that_hold(
    words: Sequence[str], listed: Sequence[ListedProblem], see: VisibilityCheck
) -> list[ListedProblem]:
    """Returns ``listed`` without cures that cause new problems, alone or together."""
    bare = {f.key_and_text for f in see(_with_problems_fixed(words, listed, (), 1))}
    out = [_alone(f, words, listed, bare=bare, see=see) for f in listed]
    for _ in range(ROUNDS):
        new = _new(_with_problems_fixed(words, out, out, 1), bare | {f.key_and_text for f in out}, see)
        more = [f for f in new if not _near(f, out)]
        out += more  # problems of the request as it was intended
        if not more:
            break
    return out


def _alone(
    f: ListedProblem,
    words: Sequence[str],
    listed: Sequence[ListedProblem],
    *,
    bare: ProblemTexts,
    see: VisibilityCheck,
) -> ListedProblem:
    """Returns ``f`` with a cure, its own or a corrected one, that causes no new problem.

    If there is none, the text says why.
    """
    if not f.problem.cure:
        return f
    same = [g for g in listed if g is not f and _same_word(f, g)]
    bare = bare | {g.key_and_text for g in same}
    # their placeholders would replace it
    listed = [g for g in listed if all(g is not other for other in same)]
    new = _new(_with_problems_fixed(words, listed, (f,), 1), bare, see)
    if not new:
        return f

    # add the problems that its cure causes to its text
    other = [g.problem for g in new if g.problem.key and g.key_and_text[1] != f.key_and_text[1]]
    consequences = "; ".join(dict.fromkeys(f"{p.key}: {p.text}" for p in other))
    joined = " And" if f.problem.text.endswith("?") else "; and"
    text = f"{f.problem.text}{joined} then {consequences}" if consequences else f.problem.text

    # its cure, corrected by the cures of those problems
    further = tuple(shlex.split(f.problem.cure))
    for g in new:
        further = pasted(further, g.problem, g.origins) if g.problem.cure else ()
    last = {w.partition("=")[0]: w for w in further}
    better = replace(f, problem=replace(f.problem, cure=" ".join(map(shell, last.values()))))
    others = [better if g is f else g for g in listed]
    if further and not _new(_with_problems_fixed(words, others, (better,), 1), bare, see):
        return replace(better, problem=replace(better.problem, text=text))
    return replace(f, problem=replace(f.problem, text=text, cure=""))


def _same_word(f: ListedProblem, g: ListedProblem) -> bool:
    """Returns true if one override caused both problems: a cure that keeps it keeps the other problem."""
    origin = typed_origin(f.problem, f.origins)
    return origin is not None and origin == typed_origin(g.problem, g.origins)


def _new(words: Words, known: ProblemTexts, see: VisibilityCheck) -> list[ListedProblem]:
    return [f for f in see(words) if f.key_and_text not in known]
