"""``launcher --completion SHELL``: how real shells complete a word when tab is pressed."""

from __future__ import annotations

import errno
import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.__main__ import BEGIN, OF_A_RUN, main
from launcher.job import completion
from launcher.job.args import FLAGS, SHELLS
from launcher.job.completion import script
from launcher.job.config_folders import ConfigFiles
from launcher.job.schema import keys as schema_keys
from tests.test_surface import keys

ROOT = Path(__file__).parents[2]
PRINTED = r'printf "<%s>" "$@"; echo'
INTERACTIVE = {
    "bash": (["bash", "--noprofile", "--rcfile", "rc", "-i"], "bind 'set bell-style none'\nsource {}\n"),
    "zsh": (["zsh", "-d", "-i"], "autoload -Uz compinit && compinit -u -D\nsource {}\n"),
}


def needs(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} on this machine")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The current folder of the shell, with the completion scripts, a recipe and a folder."""
    here = tmp_path_factory.mktemp("completion")
    for shell in SHELLS:
        (here / f"words.{shell}").write_text(script(shell, (BEGIN, *OF_A_RUN)))
    (here / "mine.yaml").touch()
    (here / "minutes.txt").touch()
    (here / "runs").mkdir()
    return here


TYPED = {
    "par\tpip\tsched\tdual\t": "parallel.pipeline.scheduler=dualpipe_v",
    "model=lm_t\t": "model=lm_tiny",
    "recipe=lm_si\t": "recipe=lm_single",
    "recipe=min\t": "recipe=mine.yaml",
    "run_dir=ru\t": "run_dir=runs",
    "optim=sgd,li\t": "optim=sgd,lion",
    "determ\tfa\t": "deterministic=false",
    "steps.cert\tprec\t": "steps.certify.precision=",
    "--multi\t": "--multirun",
    "--completion fi\t": "--completion fish",
    "ini\t": "init",
    "logs ru\t": "logs runs",
    "seed=1 ini\t": "seed=1 ini",
}


@pytest.mark.parametrize("shell", INTERACTIVE)
@pytest.mark.parametrize(("typed", "meant"), TYPED.items(), ids=[repr(typed) for typed in TYPED])
def test_a_tab_completes_what_is_typed(shell: str, typed: str, meant: str, folder: Path, tmp_path: Path) -> None:
    needs(shell)
    command, start = INTERACTIVE[shell]
    rc = tmp_path / {"bash": "rc", "zsh": ".zshrc"}[shell]
    rc.write_text(f"{start.format(folder / f'words.{shell}')}launcher() {{ {PRINTED}; }}\nPS1='ready> '\n")
    command = [str(rc) if word == "rc" else word for word in command]
    given = completed_words(command, f"launcher {typed}\r", folder, ZDOTDIR=str(tmp_path))
    assert [word.removesuffix("/") for word in given] == meant.split()  # zsh removes the slash again


def completed_words(command: list[str], typed: str, cwd: Path, **env: str) -> list[str]:
    """Type in an interactive shell, and return the arguments that it calls ``launcher`` with."""
    ours, theirs = pty.openpty()
    env = {**os.environ, **env, "TERM": "dumb"}
    with subprocess.Popen(
        command, cwd=cwd, env=env, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    ) as process:
        os.close(theirs)
        read_until(ours, r"ready> ")
        os.write(ours, typed.encode())
        found = read_until(ours, r"((?:<[^<>\r]*>)+)\r?\n")
        process.kill()
    os.close(ours)
    return found[1][1:-1].split("><")


def read_until(terminal: int, pattern: str) -> re.Match[str]:
    text = ""
    while (found := re.search(pattern, text)) is None:
        try:
            text += os.read(terminal, 1 << 16).decode()
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            pytest.fail(f"the shell has ended: {text}")
    return found


OFFERED = {
    "model=lm": ["model=lm", "model=lm_tiny"],
    "parallel.hs": ["parallel.hsdp.", "parallel.hsdp="],
    "parallel.grid.": [f"parallel.grid.{name}=" for name in ("dp_replicate", "dp_shard", "pp", "tp")],
    "parallel.pipeline.scheduler=zero": [f"parallel.pipeline.scheduler=zero_bubble_{kind}" for kind in ("h1", "v")],
    "--c": ["--cfg", "--completion", "--config-dir"],
    "recipe=mi": ["recipe=mine.yaml"],
    "recipe=ru": ["recipe=runs/"],
    "optim=sgd,l": ["optim=sgd,lion"],
    "--completion ": ["bash", "fish", "zsh"],
    "lo": ["logger.", "logger=", "logs", "loss.", "loss="],
    "seed=1 lo": ["logger.", "logger=", "loss.", "loss="],
    "status ru": ["runs/"],
    "no_such_key=": [],
}


@pytest.mark.parametrize(("typed", "offered"), OFFERED.items(), ids=OFFERED)
def test_bash_offers_the_expected_words(typed: str, offered: list[str], folder: Path) -> None:
    needs("bash")
    line = f"launcher {typed}"
    ask = (
        f"source words.bash; COMP_WORDBREAKS=' '; COMP_LINE='{line}'; COMP_POINT={len(line)}; _launcher; "
        "printf '%s\\n' \"${COMPREPLY[@]}\""
    )
    assert lines(["bash", "--norc", "-c", ask], folder) == offered


@pytest.mark.parametrize(("typed", "offered"), OFFERED.items(), ids=OFFERED)
def test_fish_offers_the_expected_words(typed: str, offered: list[str], folder: Path) -> None:
    needs("fish")
    ask = f"source words.fish; complete -C 'launcher {typed}'"
    assert lines(["fish", "--no-config", "-c", ask], folder) == offered


def lines(command: list[str], cwd: Path) -> list[str]:
    """Return each offered word, without the description that a shell prints beside it."""
    env = {**os.environ, "HOME": str(cwd), "LC_ALL": "C"}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return sorted({line.partition("\t")[0].strip() for line in done.stdout.splitlines()} - {""})


def test_every_key_is_offered_and_none_that_is_not_there() -> None:
    there = {re.sub(r"\[\w+\]", "", key) for key, _ in keys()} | {"sweep_dir"}
    offered = completion.keys(completion.named_values())
    assert there - {word[:-1] for word in offered} == set()
    leaves = {word[:-1] for word in offered if word.endswith("=")} - set(ConfigFiles().groups())
    assert leaves - there == set()


def test_every_value_is_one_that_its_key_takes() -> None:
    groups = ConfigFiles().groups()
    for key, values in completion.named_values().items():
        options = ConfigFiles().options(key) if key in groups else ()
        notes = [note for name, note in completion.noted() if name == key]
        wrong = [
            v for v in values if v not in options and not any(schema_keys.accepts(note, as_typed(v)) for note in notes)
        ]
        assert (key, wrong) == (key, [])


def as_typed(word: str) -> object:
    from launcher.job.overrides import parse

    return parse(f"x={word}").value()


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_holds_all_it_needs(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--completion", shell]) == 0
    text = capsys.readouterr().out
    assert not re.search(r"python -|\bpython3?\b(?!=)", text)
    assert "@" not in re.sub(r"\$@|\[@\]|@:2", "", text)
    assert {*FLAGS} <= {*re.findall(r"--[\w-]+", text)}


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_reads_its_script_without_a_word(shell: str, folder: Path) -> None:
    needs(shell)
    done = subprocess.run([shell, "-n", f"words.{shell}"], cwd=folder, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_completion_script_is_printed_without_torch() -> None:
    code = "import sys; from launcher.__main__ import main; main(['--completion=bash']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize(
    ("typed", "told"), [(["--completion"], "--completion"), (["--completion", "tcsh"], "--completion tcsh")], ids=str
)
def test_any_other_shell_is_refused(typed: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(typed) == 2
    assert capsys.readouterr().err == (
        "error: 1 problem in this request; nothing was started\n\n"
        f"  {told}: needs the name of a shell: bash, zsh, fish\n"
    )
