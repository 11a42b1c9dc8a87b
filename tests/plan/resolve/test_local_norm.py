from __future__ import annotations

from launcher.plan.plan import ask
from tests.plan.made import job, refusal, words


def test_norms_that_are_told_nowhere_are_refused() -> None:
    error = refusal("parallel.local_norm.device=true")
    assert str(error) == (
        "parallel.local_norm.device: true: has no effect, because norms are neither printed nor dumped: print them, "
        "or dump "
        "them to a folder (try: parallel.local_norm.print=true)"
    )
    ask(job("parallel.local_norm.device=true", *words(error)))
