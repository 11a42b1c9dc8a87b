"""Times tokenization: one core against `tokenizers` alone, then a corpus on all cores, with its memory.

    python benchmarks/prepare.py [--mb 64] [--tokenizer tokenizer.json]

The corpus is real text. Its documents are paragraphs of the text that ships with the launcher, then the .py,
.md, .txt and .rst files of installed packages and of Python's standard library. Without --tokenizer, a
tokenizer of 32,000 byte pairs is trained on the first part of the corpus.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer

from launcher.data import text_files, train_byte_pairs
from launcher.data.prepare.encode import Encoder, Recipe

END = "<|endoftext|>"
KINDS = {".py", ".md", ".txt", ".rst"}
TIMED = 16 << 20  # characters that one core is timed with
TRAINED = 8 << 20


def documents(most: int) -> Iterator[str]:
    """Yield documents until they have ``most`` bytes."""
    size = 0
    shipped = text_files.SHIPPED.read_text(encoding="utf-8").split("\n\n")
    packages = sorted(
        p for p in Path(json.__file__).parents[1].rglob("*") if p.suffix in KINDS and p.is_file()
    )
    others = sorted(
        p for d in sys.path if "site-packages" in d for p in Path(d).rglob("*") if p.suffix in KINDS
    )
    for text in (*shipped, *(p.read_text(encoding="utf-8", errors="ignore") for p in (*others, *packages))):
        size += len(text.encode())
        if size > most:
            return
        if text:
            yield text


def batches(texts: list[str], most: int) -> Iterator[list[str]]:
    """Yield the first ``most`` characters, in batches as large as those of ``prepare``."""
    batch: list[str] = []
    for text in texts:
        most -= len(text)
        batch.append(text)
        if sum(map(len, batch)) > 1 << 20:
            yield batch
            batch = []
        if most < 0:
            break
    if batch:
        yield batch


def time_one_core(tokenizer: Tokenizer, texts: list[str]) -> None:
    """Print the speed of one core in CPU seconds, because other programs may run on this machine."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a core is compared with a core
    ours = Encoder(Recipe(tokenizer.to_str(), tokenizer.token_to_id(END)))
    spent = {"tokenizers alone": 0.0, "prepare": 0.0}
    size = 0
    for batch in batches(texts, TIMED):
        began = time.process_time()
        alone = [row.ids for row in tokenizer.encode_batch_fast(batch, add_special_tokens=False)]
        between = time.process_time()
        found = ours(batch, end=False)
        spent["tokenizers alone"] += between - began
        spent["prepare"] += time.process_time() - between
        assert found.tolist() == [i for ids in alone for i in ids]
        size += sum(len(text.encode()) for text in batch)
    for name, seconds in spent.items():
        print(f"{name:20} {size / 1e6 / seconds:6.2f} MB a CPU second")
    ratio = spent["tokenizers alone"] / spent["prepare"]
    print(f"{'ratio':20} {ratio:6.2f}, over {size / 1e6:.0f} MB, the same tokens")


def time_command(folder: Path, tokenizer: Path) -> None:
    """Run the command itself, and print its time and its memory."""
    words = [
        f"src={folder}/corpus.jsonl",
        f"dst={folder}/out",
        f"tokenizer_file={tokenizer}",
        f"end_of_document='{END}'",
    ]
    began, most = time.perf_counter(), 0
    with subprocess.Popen(
        [sys.executable, "-m", "launcher.data.prepare", *words], stdout=subprocess.PIPE
    ) as run:
        while run.poll() is None:
            most = max(most, memory(run.pid))
            time.sleep(0.05)
        assert run.stdout is not None
        print(run.stdout.read().decode().replace(f"{folder}/", ""), end="")
        if run.returncode:
            raise SystemExit("it failed")
    size = (folder / "corpus.jsonl").stat().st_size
    cores, seconds = len(os.sched_getaffinity(0)), time.perf_counter() - began
    print(f"{size / 1e6:.0f} MB in {seconds:.1f} s on {cores} cores: {size / 1e6 / seconds:.1f} MB/s")
    print(f"all processes together: at most {most / 1e6:.0f} MB of memory")


def memory(pid: int) -> int:
    """Return the bytes of a process and its children; memory that they share counts once."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        rows = [Path(f"/proc/{p}/smaps_rollup").read_text() for p in (str(pid), *children)]
    except OSError:
        return 0
    return sum(
        int(line.split()[1]) << 10 for row in rows for line in row.splitlines() if line.startswith("Pss:")
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mb", type=int, default=64)
    parser.add_argument("--tokenizer", type=Path)
    args = parser.parse_args()
    texts = list(documents(args.mb * 1_000_000))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = args.tokenizer or folder / "tokenizer.json"
        if args.tokenizer is None:
            some = [text for batch in batches(texts, TRAINED) for text in batch]
            file.write_text(train_byte_pairs.train_on(some, 32_000, [END]).to_str())
        with (folder / "corpus.jsonl").open("w", encoding="utf-8") as out:
            out.writelines(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
        time_one_core(Tokenizer.from_file(str(file)), texts)
        del texts
        time_command(folder, file)


if __name__ == "__main__":
    main()
