from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import xxhash

from launcher.checkpoint import Entry, Strategy, commit, partial
from launcher.checkpoint.layout.strategy_file import dump
from launcher.checkpoint.manifest import stamp, text_record
from launcher.checkpoint.tensorfile.safetensors import CHUNK, FileRecord, arrange
from launcher.checkpoint.write import RankRecord
from launcher.plan.values.grid import Grid
from launcher.plan.values.layout import Layout
from tests.tiers import exhaustive

COLUMNS = 1 << 13
GRID = Grid.of(dp_shard=32)  # narrow columns: each rank reads across 32 times its own bytes of the source

CHILD = """
import sys
from pathlib import Path
from launcher.checkpoint import export, transform
from launcher.checkpoint.layout.strategy_file import load

def held(key):
    return int(Path("/proc/self/status").read_text().split(key + ":")[1].split()[0]) * 1024

src, act = Path(sys.argv[1]), sys.argv[2]
before = held("VmRSS")
if act == "transform":
    transform(src, src.with_name("out"), load(src.with_name("target")), workers=2)
else:
    export(src, src.with_name("out.safetensors"))
print(held("VmHWM") - before)
"""


def sparse(final: Path, shape: tuple[int, int]) -> None:
    """A checkpoint of one rank with one tensor of zeros that takes no space on disk."""
    grid = Grid.of(dp_shard=1)
    strategy = Strategy(grid, {"w": Entry(Layout(grid, shape, ((), ())), "float32")})
    home = partial(final)
    (home / "rank_0").mkdir(parents=True)
    specs = {"w": strategy.entries["w"].spec}
    head, header = arrange(specs, stamp(0, 1, strategy.digest))
    with (home / "rank_0" / "model.safetensors").open("wb") as file:
        file.write(head)
        file.truncate(header.size)
    digest, zeros = xxhash.xxh3_128(), bytes(CHUNK)
    for _ in range(specs["w"].nbytes // CHUNK):
        digest.update(zeros)
    files = {"rank_0/model.safetensors": FileRecord(header.size, header.digest, {"w": digest.hexdigest()})}
    files |= {f"strategy/{p.name}": text_record(p) for p in dump(strategy, home / "strategy")}
    commit(home, final, [RankRecord(0, 1, strategy.digest, files)], {})
    assert (final / "rank_0" / "model.safetensors").stat().st_blocks * 512 < 1 << 20


@pytest.mark.parametrize(
    ("act", "mib", "split"),
    [
        pytest.param("transform", 2048, (("dp_shard",), ()), marks=exhaustive),
        ("transform", 256, ((), ("dp_shard",))),
        ("export", 256, ((), ())),
    ],
    ids=["2 GB by rows", "columns", "export"],
)
def test_copies_of_checkpoints_need_at_most_100_megabytes_of_memory(
    tmp_path: Path, act: str, mib: int, split: tuple[tuple[str, ...], ...]
) -> None:
    shape = ((mib << 18) // COLUMNS, COLUMNS)
    sparse(tmp_path / "src", shape)
    dump(Strategy(GRID, {"w": Entry(Layout(GRID, shape, split), "float32")}), tmp_path / "target")
    command = [sys.executable, "-c", CHILD, str(tmp_path / "src"), act]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert int(done.stdout) < 100 << 20
    for path in tmp_path.rglob("*.safetensors"):
        path.unlink()  # gigabytes that pytest would keep


def test_checkpoints_import_no_torch_and_no_hydra() -> None:
    code = (
        "import pkgutil, sys, importlib, launcher.checkpoint as c\n"
        "for m in pkgutil.iter_modules(c.__path__): importlib.import_module(f'launcher.checkpoint.{m.name}')\n"
        "print(sorted({'torch', 'hydra', 'omegaconf'} & {m.split('.')[0] for m in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stderr, done.stdout) == ("", "[]\n")
