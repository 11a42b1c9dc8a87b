"""Ranks start whatever the parent process has done before, and whatever the user's modules do."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from launcher.errors import RunError
from launcher.runtime.cluster.world import World
from launcher.runtime.processes import fork_server
from launcher.runtime.processes.fork_server import ForkServer, start_here
from launcher.runtime.processes.start_and_restart import run_ranks

ROOT = Path(__file__).parents[3]
SPOILERS = {
    "a backward": "(torch.ones(3, requires_grad=True) * 2).sum().backward()",
    "threads": "threading.Thread(target=threading.Event().wait, daemon=True).start()",
    "OpenMP's threads": "torch.set_num_threads(2); torch.randn(1 << 20).exp().sum()",
}
"""State from which a process cannot be forked, or only by luck."""

REQUEST = (
    "model=lm_tiny", "model.dim=16", "data=random_tokens", "data.vocab_size=64", "data.seq_len=8", "train.steps=2",
    "train.batch_size=8", "steps=[train]", "logger=plain", "parallel.hsdp.threshold=0",
)  # fmt: skip
NET = """
import threading

import torch
from torch import nn

{spoiler}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        {inside}
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, x):
        return self.b(self.a(x).relu())


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, n):
        return torch.full((6,), n / 32), torch.tensor(n % 5)
"""


def own_request(folder: Path, spoiler: str = "", inside: str = "") -> None:
    """Write a recipe whose model runs ``spoiler`` when it is imported, and ``inside`` when it is constructed."""
    (folder / "own_net.py").write_text(NET.format(spoiler=spoiler, inside=inside))
    (folder / "r.yaml").write_text(
        "defaults:\n  - override /model: null\n  - override /data: null\n  - override /steps: [train]\n"
        "model: {_target_: own_net.Net}\ndata: {_target_: own_net.Rows}\nsecurity: {allow: [own_net]}\n"
        "launch: {nproc: 2}\nparallel: {pipeline: {stages: 1}}\ntrain: {steps: 2, batch_size: 8}\n"
    )


def python(code: str, folder: Path, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run ``code`` as a separate program in ``folder``."""
    script = folder / "program.py"
    script.write_text(textwrap.dedent(code))
    paths = [str(ROOT), str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "2"}
    words = (sys.executable, str(script), *words)
    return subprocess.run(
        words, cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False, **options
    )


def describe(line: Any) -> None:
    import threading

    names = [name for name in sys.modules if name.startswith("own_net")]
    line.send((os.getppid(), threading.active_count(), len(os.listdir("/proc/self/task")), names, os.getcwd()))


def test_a_child_of_the_server_has_one_thread_and_is_where_this_process_is(tmp_path, monkeypatch):
    server = ForkServer()
    monkeypatch.setattr(fork_server, "_forks_left", 0)
    monkeypatch.chdir(tmp_path)
    try:
        line = server.start(describe)
        parent, *rest = line.connection.recv()
        line.close()
    finally:
        server.stop()
    assert parent != os.getpid()
    assert rest == [1, 1, [], str(tmp_path)]


def test_a_server_that_was_killed_is_replaced(monkeypatch):
    server = ForkServer()
    monkeypatch.setattr(fork_server, "_forks_left", 0)
    line = server.start(describe)
    parent = line.connection.recv()[0]
    os.kill(parent, 9)
    os.waitid(os.P_PID, parent, os.WEXITED | os.WNOWAIT)
    again = server.start(describe)
    assert again.connection.recv()[0] not in (parent, os.getpid())
    line.close()
    again.close()
    server.stop()


def test_a_server_that_cannot_import_is_an_error(monkeypatch, capfd):
    server = ForkServer()
    monkeypatch.setattr(fork_server, "_forks_left", 0)
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(RunError, match=r"^the process that ranks are forked from has ended twice; "):
        server.start(describe)
    assert "No module named" in capfd.readouterr().err


def test_the_error_says_how_much_memory_the_system_allows(monkeypatch):
    _, hard = limits = resource.getrlimit(resource.RLIMIT_AS)
    server = ForkServer()
    monkeypatch.setattr(fork_server, "_forks_left", 0)
    monkeypatch.setattr(sys, "path", [])
    resource.setrlimit(resource.RLIMIT_AS, (1 << 45, hard))  # any limit, here one that is never reached
    try:
        with pytest.raises(RunError) as error:
            server.start(describe)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert str(error.value) == (
        "the process that ranks are forked from has ended twice; its last messages are above; "
        "this process may use 33554432 MB of memory (ulimit -v), which may be too little"
    )


def shared() -> Any:
    return place_and_parent


def place_and_parent(world: World) -> tuple[int, str]:
    return world.rank, "shared"


def alone(world: World) -> tuple[int, str]:
    return world.rank, "alone"


def broken() -> Any:
    raise ValueError("a constructor that fails")


def threaded() -> Any:
    import threading

    threading.Thread(target=threading.Event().wait, daemon=True).start()
    return place_and_parent


def killed() -> Any:
    os.kill(os.getpid(), 9)


@pytest.mark.parametrize(
    ("share", "how"), [(shared, "shared"), (broken, "alone"), (threaded, "alone"), (killed, "alone")]
)
def test_ranks_share_what_was_made_before_the_fork_unless_that_has_spoilt_it(share, how):
    assert run_ranks(alone, 2, share=share, start=start_here) == [(0, how), (1, how)]


@pytest.mark.parametrize("where", ["spoiler", "inside"])
@pytest.mark.parametrize("spoiler", SPOILERS)
def test_a_users_module_may_do_what_no_fork_survives(spoiler, where, tmp_path):
    own_request(tmp_path, **{where: SPOILERS[spoiler]})
    done = python("from launcher.__main__ import script; script()", tmp_path, "recipe=r.yaml", "run_dir=run")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "done in" in done.stdout


NOTES_IMPORTS = """
    import sys
    from torch.distributed import distributed_c10d, get_rank
    from launcher.__main__ import script

    def note(event, args):
        if event == "import" and distributed_c10d._world.pg_map:  # a plan refuses models that ask for the group
            with open(f"imports{get_rank()}", "a") as file:
                print(args[0], file=file)

    sys.addaudithook(note)
    script()
"""


def test_ranks_import_nothing_that_their_parent_could_import_once(tmp_path):
    done = python(NOTES_IMPORTS, tmp_path, *REQUEST, "run_dir=run")
    assert done.returncode == 0, done.stdout + done.stderr
    path = tmp_path / "imports1"
    names = path.read_text().split() if path.exists() else []
    assert [name for name in names if not name.startswith("torch.")] == []  # torch's own differ by version


SCRIPT = """
    import threading, torch
    from launcher import run_job
    from launcher.job.compose import compose
    {before}
    job = compose([*{request}, "run_dir={folder}/run"]).job
    def run():
        print("figures", sorted(run_job(job)))
    {call}
"""
PROGRAMS = {
    "its own main": ("", "run()"),
    "after a backward": (SPOILERS["a backward"], "run()"),
    "after OpenMP's threads": (SPOILERS["OpenMP's threads"], "run()"),
    "from a thread": ("", "t = threading.Thread(target=run); t.start(); t.join()"),
}


@pytest.mark.parametrize("how", PROGRAMS)
def test_a_program_runs_a_job(how, tmp_path):
    """Its main module is not imported again, although it has no ``if __name__`` guard."""
    before, call = PROGRAMS[how]
    code = SCRIPT.format(before=before, call=call, request=list(REQUEST), folder=tmp_path)
    done = python(code, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("figures ['loss']") == 1


def test_a_program_without_a_file_runs_a_job(tmp_path):
    """A notebook's kernel has no file either: its main module cannot be imported in another process."""
    code = textwrap.dedent(SCRIPT.format(before="", call="run()", request=list(REQUEST), folder=tmp_path))
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-"],
        input=code,
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "figures ['loss']" in done.stdout
