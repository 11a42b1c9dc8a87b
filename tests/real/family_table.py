"""The table of docs/hugging_face.md, a row per family: ``python -m tests.real.family_table`` writes its results."""

from __future__ import annotations

import json
import re
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

from launcher.__main__ import main
from tests.pages import ROOT

PAGE = ROOT / "docs/hugging_face.md"
TABLE = re.compile(r"(<!-- families -->\n).*?(<!-- end -->)", re.DOTALL)
SHARDED = "parallel.hsdp={{shard_size: 2, threshold: 0, optimizer_level: {}}}"
COLUMNS = {
    "pp2": ("parallel.pipeline={stages: 2, micro_batch_num: 2}",),
    **{f"hsdp {level}": (SHARDED.format(level),) for level in ("level1", "level2", "level3")},
    "tp2": ("operators=auto", "parallel.grid.tp=2"),
}
FAMILIES = {
    "Llama": "llama", "Qwen2": "qwen2", "Qwen3": "qwen3", "Mistral": "mistral", "Mixtral": "mixtral", "Phi-3": "phi3",
    "Gemma-2": "gemma2", "Gemma-3": "gemma3_text", "GPT-2": "gpt2", "GPT-NeoX": "gpt_neox", "OPT": "opt",
    "OLMo-2": "olmo2", "BERT": "bert", "T5": "t5", "ViT": "vit",
}  # fmt: skip
TOKENS = ("data=random_tokens", "data.vocab_size=64", "data.seq_len=16")
READS = {"ViT": ("data=mnist5k", "model.task=image_classification")}
IN_FP32 = {("Gemma-3", "tp2")}
"""The norms of its heads always compute in fp32, and tp sums their gradients over ranks."""


def seen(family: str, column: str, home: Path) -> str:
    """``exact``, or why it is refused. Raises ``AssertionError`` if it is neither."""
    from tests.real.families import described

    folder = described(FAMILIES[family], home / FAMILIES[family])
    run = home / f"{FAMILIES[family]}-{column.replace(' ', '-')}"
    precision = "fp32" if (family, column) in IN_FP32 else "fp64"
    words = [
        "recipe=lm_single", "model=hf", f"model.path={folder}", "model.weights=false", "train.batch_size=16",
        "launch.nproc=2", "steps=[certify]", f"steps.certify.precision={precision}", f"run_dir={run}", "logger=plain",
        *READS.get(family, TOKENS), *COLUMNS[column],
    ]  # fmt: skip
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(words)
    if code == 2:
        return first_problem(err.getvalue()).removeprefix(f"{folder}: ").replace(f"{folder}", "the folder")
    assert code == 0, f"{family}, {column}: {err.getvalue()}"
    assert json.loads((run / "certificate.json").read_text())["holds"]
    return "exact" if precision == "fp64" else "exact in fp32"


def first_problem(said: str) -> str:
    """The first of the problems, without its key."""
    line = next(row for row in said.splitlines() if row.startswith("  "))
    return line.strip().partition(": ")[2]


def table(found: dict[str, dict[str, str]]) -> str:
    """The table with a row per family, and below it the reasons of refusals."""
    notes: dict[str, int] = {}
    lines = [f"| family | {' | '.join(COLUMNS)} |", f"|---|{'---|' * len(COLUMNS)}"]
    for family, row in found.items():
        cells = [
            c if c.startswith("exact") else f"refused ({notes.setdefault(c, len(notes) + 1)})" for c in row.values()
        ]
        lines.append(f"| {family} | {' | '.join(cells)} |")
    reasons = (f"{n}. {reason}" for reason, n in notes.items())
    return "\n".join([*lines, "", *reasons, ""])


def written() -> dict[str, dict[str, str]]:
    """The page's entry for each family and column, in the words of ``seen``."""
    text = TABLE.search(PAGE.read_text(encoding="utf-8"))
    assert text is not None
    reasons = dict(re.findall(r"^(\d+)\. (.+)$", text[0], re.MULTILINE))
    rows = [row.strip("| ").split(" | ") for row in text[0].splitlines() if row.startswith("| ")][1:]
    return {
        family: {
            c: reasons[cell.removeprefix("refused (").removesuffix(")")] if cell.startswith("refused") else cell
            for c, cell in zip(COLUMNS, cells, strict=True)
        }
        for family, *cells in rows
    }


def write() -> None:
    with TemporaryDirectory() as home:
        found = {f: {c: seen(f, c, Path(home)) for c in COLUMNS} for f in FAMILIES}
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(TABLE.sub(lambda m: m[1] + table(found) + m[2], text), encoding="utf-8")


if __name__ == "__main__":
    write()
