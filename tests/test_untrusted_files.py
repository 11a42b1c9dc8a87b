"""No file from outside hangs a reader or fills the memory: pipes, devices, terabytes of zeros, bombs."""

from __future__ import annotations

import gzip
import os
import pickle
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import pytest

from launcher.__main__ import main
from launcher.checkpoint.foreign.torch_dcp import find
from launcher.checkpoint.layout.shards import untiled
from launcher.checkpoint.tensorfile.disk import LONGEST_FILE
from launcher.checkpoint.tensorfile.safetensors import arrange
from launcher.extras.images.idx import read as read_idx
from launcher.extras.images.idx_files import complete_shape
from launcher.extras.mindspore.protobuf import packet
from launcher.plan.values.layout import Box
from launcher.plan.values.tensor_spec import TensorSpec
from launcher.untrusted.files import LINK, LONGEST_TEXT
from tests.data.sample_files import write_idx
from tests.untrusted import DEVICE, KINDS, PIPE, READERS, bounded, planted, refusal

# Messages that are not the path and the reason.
SAID = {
    "state": "{home}/step-000001: incomplete checkpoint: state.json is missing",
    "layouts": "{home}/step-000001: incomplete checkpoint: strategy/stage0.json is missing",
    "key": "file:{path}: the key cannot be read: {why}",
    "status": "run_dir: {path}: {why}",
    "sweep": "sweep_dir: {path}: {why}",
    "cifar batch": "data.root: {path}: {why}",
    "tokenizer": "{path}: not a tokenizer: {why}",
    "idx.gz": "{home}/train-images-idx3-ubyte: {why}",
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_path_that_is_no_regular_file_is_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, reader: str
) -> None:
    monkeypatch.chdir(tmp_path)  # the address of a socket must be short
    path, read = planted(tmp_path, reader)
    make, why = KINDS[kind]
    make(path.relative_to(tmp_path) if kind == "socket" else path)
    if reader == "status" and path.is_symlink():  # no link in the folder of a run is followed
        why = LINK
    assert refusal(read) == SAID.get(reader, "{path}: {why}").format(home=tmp_path, path=path, why=why)


FOLDER = "Is a directory"
NOTHING = {  # messages for a folder where another kind of folder, or a file, is expected
    "safetensors": "{path}: not a Hugging Face folder (model.safetensors or model.safetensors.index.json), a torch "
    "DCP folder (.metadata) or rank_<k> folders",
    "safetensors in a folder": "{path}: it has neither model.safetensors nor model.safetensors.index.json",
    "index": "{home}: it has neither model.safetensors nor model.safetensors.index.json",
    "ckpt": "{path}: not a Hugging Face folder (model.safetensors or model.safetensors.index.json), a torch DCP "
    "folder (.metadata) or rank_<k> folders",
    "dcp metadata": "{home}: not a Hugging Face folder (model.safetensors or model.safetensors.index.json), a "
    "torch DCP folder (.metadata) or rank_<k> folders",
    "strategy": "{path}: no strategy files (*.json) in this folder",
    "strategy of any form": "{path}: no strategy files (*.json) in this folder",
    "tokenizer that is asked for": "{path}: no such file",
    "operators": "{path}: cannot be read: {why}",
    "switches": "{path}: cannot be read: {why}",
    "tokens": "{path}: no .tokens or .bin file is in this folder",
    "cifar": "{path}: no such file",
    "cifar, binary": "{path}: no such file",
    "idx": "{path}: no such file, plain or with .gz",
    "idx.gz": "{home}/train-images-idx3-ubyte: no such file, plain or with .gz",
    "status": "run_dir: {path}: {why}",
}


@pytest.mark.parametrize("reader", READERS)
def test_a_folder_in_place_of_a_file_is_refused(tmp_path: Path, reader: str) -> None:
    path, read = planted(tmp_path, reader)
    path.mkdir()
    text = (SAID | NOTHING).get(reader, "{path}: {why}")
    assert refusal(read) == text.format(home=tmp_path, path=path, why=FOLDER)


HUGE = 1 << 42
TOO_LONG = {  # the most bytes that are read, if the limit is not that of a list of tensors
    "dcp metadata": 128 << 20,
    "strategy": LONGEST_FILE,
    "latest": 1 << 20,
    "copied along": 1 << 30,
    "tokenizer": 64 << 20,
    "cifar": 64 << 20,
    "cifar, binary": 64 << 20,
    "cifar batch": 64 << 20,
}
ZEROS = {  # files of any length, which are refused for another reason
    "safetensors": "{path}: not a safetensors file: its header is not JSON",
    "safetensors in a folder": "{path}: not a safetensors file: its header is not JSON",
    "ckpt": "{path}: not a MindSpore checkpoint, or damaged, at byte 0: no entry of a tensor starts here",
    "state": f"{{home}}/step-000001: incomplete checkpoint: state.json has {HUGE} bytes, manifest.json says 15",
    "layouts": f"{{home}}/step-000001: incomplete checkpoint: strategy/stage0.json has {HUGE} bytes, manifest.json "
    "says 569",
    "key": "file:{path}: not an AES-256 key: it has 1024 bytes; give 32 random bytes, as 64 hexadecimal digits "
    "(openssl rand -hex 32), as base64 or, in a file, raw",
    "corpus": "{path}: byte 0 is NUL, so it is not plain text: write the text to a UTF-8 file first; "
    "data=tokens reads prepared tokens",
    "tokens": "{path}: not a .tokens file: its first bytes differ",
    "index of tokens": "{home}/c.bin: its .idx is not an index of Megatron: its first bytes differ",
    "idx": "{path}: not an idx file of unsigned bytes: it begins with 0x00000000",
    "idx.gz": "{home}/train-images-idx3-ubyte: cannot be read: Not a gzipped file (b'\\x00\\x00')",
}


@pytest.mark.parametrize("reader", [r for r in READERS if r != "tokenizer that is asked for"])
def test_a_file_of_terabytes_is_refused_by_its_size(tmp_path: Path, reader: str) -> None:
    path, read = planted(tmp_path, reader)
    with path.open("wb") as file:
        file.truncate(HUGE)
    why = f"{HUGE} bytes; at most {TOO_LONG.get(reader, LONGEST_TEXT)} are read"
    assert refusal(read) == (SAID | ZEROS).get(reader, "{path}: {why}").format(home=tmp_path, path=path, why=why)


BOMBS = {
    "deep": b"[" * 500_000 + b"]" * 500_000,
    "deep mappings": b'{"a":' * 65 + b"1" + b"}" * 65,
    "no end": b"[" * 1_000_000,
    "digits": b'{"a": ' + b"9" * 4_000_000 + b"}",
}
DEEP, DIGITS = "nested deeper than 64 levels", "a number with more digits than Python reads"
ABOUT = {"deep": DEEP, "deep mappings": DEEP, "no end": DEEP, "digits": DIGITS}
NO_JSON = {
    "index": "{path}: not JSON",
    "strategy": "{path}: not a strategy file: not JSON",
    "strategy of any form": "{path}: not a MindSpore strategy file ({form})",
    "MindSpore strategy": "{path}: not a MindSpore strategy file ({form})",
    "operators": "{path}:1: not JSON: {about}",
    "switches": "{path}:1: not JSON: {about}",
    "status": "run_dir: {path}: damaged: it does not say which steps are done; remove the file to run all of them "
    "again",
    "sweep": "sweep_dir: {path}: not JSON",
}
FORM = {b"{": "json): not JSON", b"[": "protobuf): byte 0 does not start a field"}


@pytest.mark.parametrize("reader", NO_JSON)
@pytest.mark.parametrize("bomb", BOMBS)
def test_deep_json_and_numbers_without_end_are_refused_at_once(tmp_path: Path, bomb: str, reader: str) -> None:
    path, read = planted(tmp_path, reader)
    path.write_bytes(BOMBS[bomb])
    text = NO_JSON[reader].replace("{form})", FORM[BOMBS[bomb][:1]])
    assert refusal(read) == text.format(path=path, about=ABOUT[bomb])


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_tokenizer_of_deep_or_endless_json_is_refused(tmp_path: Path, bomb: str) -> None:
    path, read = planted(tmp_path, "tokenizer")
    path.write_bytes(BOMBS[bomb])
    assert refusal(read).startswith(f"{path}: not a tokenizer: ")


def headed(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_safetensors_header_of_deep_or_endless_json_is_refused(tmp_path: Path, bomb: str) -> None:
    path, read = planted(tmp_path, "safetensors")
    path.write_bytes(headed(BOMBS[bomb]))
    assert refusal(read) == f"{path}: not a safetensors file: its header is not JSON"


def row(shape: str) -> bytes:
    return headed(f'{{"w": {{"dtype": "F32", "shape": {shape}, "data_offsets": [0, 4]}}}}'.encode())


CUT = "1000000000000...00000000000000"
HEADERS = {
    "100 MB": (
        (100_000_000).to_bytes(8, "little"),
        "not a safetensors file: its header claims 100000000 bytes, at most 33554432 are read",
    ),
    "dims": (row(f"[{', '.join(['1'] * 500_000)}]"), "tensor w has shape [1, 1, 1, 1, 1, 1, ...] at [0, 4]"),
    "one name over and over": (headed(b"{" + b",".join([b'"a": 1'] * 200_000) + b"}"), "a is listed twice"),
    "numbers beyond files": (row(f"[{10**4000}, {10**4000}]"), f"tensor w has shape [{CUT}, {CUT}] at [0, 4]"),
    "lists in lists": (row("[[[[[[[[1]]]]]]]]"), "tensor w has shape [[[...]]] at [0, 4]"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_no_header_is_longer_than_tensors_need(tmp_path: Path, case: str) -> None:
    path, read = planted(tmp_path, "safetensors")
    data, text = HEADERS[case]
    path.write_bytes(data)
    if case == "100 MB":
        os.truncate(path, 1 << 30)
    assert refusal(read) == f"{path}: {text}"


def test_a_header_that_is_too_long_is_not_written(tmp_path: Path) -> None:
    specs = {f"{i:07d}" + "n" * 9_000: TensorSpec((), "int8") for i in range(4_000)}
    with pytest.raises(
        ValueError, match="the header of 4000 tensors in one file would have 36249784 bytes; at most 33554432 are read"
    ):
        arrange(specs, {})


def doubled(first: bytes, join: bytes, times: int) -> bytes:
    """Return a pickle whose value contains the previous one twice, and so on: 2 ** ``times`` values when expanded."""
    return first + b"".join(pickle.MEMOIZE + pickle.BINGET + bytes([i]) + join for i in range(times))


def listed(times: int) -> bytes:
    """Return the same as ``doubled``, of lists."""
    new = b"".join(pickle.BINPUT + bytes([i]) + b"0](h" + bytes([i]) + b"h" + bytes([i]) + b"e" for i in range(times))
    return b"](K\x00e" + new


def as_key(value: bytes) -> bytes:
    return b"\x80\x04}" + value + b"K\x01s."


def as_metadata(size: bytes) -> bytes:
    """Return a checkpoint without files that has one tensor of this size."""
    at = b"ctorch.distributed.checkpoint.metadata\n"
    tensor = b")\x81}(X\x04\x00\x00\x00size" + size + b"ub"
    listed = b"}X\x01\x00\x00\x00w" + at + b"TensorStorageMetadata\n" + tensor + b"s"
    return b"\x80\x04" + at + b"Metadata\n)\x81}(X\x13\x00\x00\x00state_dict_metadata" + listed + b"ub."


COLLIDING = b"".join(pickle.LONG1 + bytes([18]) + (k * (2**61 - 1) << 60).to_bytes(18, "little") + b"K\x01"
                     for k in range(1, 20_000))  # fmt: skip
LONG, KEY = "a tuple of more than 1000 values", "a key that is neither text nor a small number"
SIZE = b"ctorch\nSize\nh\x00\x85R"
PICKLES = {
    "tuples twice over": (as_key(doubled(b")", b"\x86", 99)), LONG),
    "frozen sets": (as_key(b"((\x91\x94h\x00\x91"), "not a pickle of plain data (KeyError)"),
    "tuples without end": (as_key(b")" + b"\x85" * 500_000), LONG),
    "a long tuple": (as_key(b"(" + b"K\x01" * 500_000 + b"t"), LONG),
    "a tuple as a key": (as_key(b"K\x01\x85"), f"{KEY} (tuple)"),
    "a float as a key": (as_key(b"G" + bytes(8)), f"{KEY} (float)"),
    "numbers that collide": (b"\x80\x04}(" + COLLIDING + b"u.", f"{KEY} (int)"),
    "a set of tuples": (b"\x80\x04\x8f(" + doubled(b")", b"\x86", 40) + b"\x90.", LONG),
    "lists twice over": (as_metadata(listed(60)), "[[[...], [...]], [[...], [...]]] is not a list of sizes"),
    "a copied mapping": (b"\x80\x04ccollections\nOrderedDict\n]\x85R.", "a mapping that is copied from another"),
    "lists alone": (b"\x80\x04(" + b"]" * 500_000 + b"l.", "it makes more objects than its length can need"),
    "marks alone": (b"\x80\x04]" + b"\x94" * 500_000 + b".", "it memoizes more objects than its length can need"),
    "sizes that are copied": (
        b"\x80\x04](" + b"K\x01" * 100_000 + b"e\x940(" + SIZE * 9_000 + b"l.",
        "not a pickle of plain data (ValueError)",
    ),
}
OF_TORCH = {  # names that image files never contain
    "lists twice over": "torch.distributed.checkpoint.metadata.Metadata is not allowed",
    "a copied mapping": "collections.OrderedDict is not allowed",
    "sizes that are copied": "torch.Size is not allowed",
    "frozen sets": "not a pickle of plain data",
}


@pytest.mark.parametrize("case", PICKLES)
def test_a_pickle_costs_what_its_length_says(tmp_path: Path, case: str) -> None:
    data, text = PICKLES[case]
    path, read = planted(tmp_path, "dcp metadata")
    path.write_bytes(data)
    assert refusal(read) == f"{path}: {text}"
    path, read = planted(tmp_path, "cifar batch")
    path.write_bytes(data)
    why = OF_TORCH.get(case, text)
    assert refusal(read) == f"data.root: {path}: not a CIFAR-10 batch: {why}; fetch the archive again"


def test_labels_of_images_are_a_list_of_numbers(tmp_path: Path) -> None:
    path, read = planted(tmp_path, "cifar batch")
    nested: Any = []
    for _ in range(60):
        nested = [nested, nested]
    path.write_bytes(pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), b"labels": nested}, 2))
    why = "data is not an array, or labels are not a list of numbers"
    assert refusal(read) == f"data.root: {path}: not a CIFAR-10 batch: {why}; fetch the archive again"


def staircase(n: int) -> list[Box]:
    """Return boxes that tile a square, no two of which end at the same place."""
    return [b for i in range(n) for b in (Box((0, i), (i, i + 1)), Box((i, i), (n, i + 1)))]


def test_pieces_that_no_grid_would_make_are_not_compared_for_hours() -> None:
    assert untiled((20, 20), staircase(20)) is None
    with bounded():
        assert untiled((3000, 3000), staircase(3000)) == (
            "its 5999 pieces are cut too unevenly: no grid cuts a tensor like this"
        )
        rows = [Box((i, j), (i + 1, j + 1)) for i in range(100) for j in range(100)]
        assert untiled((100, 100), rows) is None


def test_an_archive_of_a_tensor_has_a_short_directory(tmp_path: Path) -> None:
    with ZipFile(tmp_path / "a.zip", "w") as archive:
        for i in range(5_000):
            archive.writestr(f"a/{i}", b"")
    data = (tmp_path / "a.zip").read_bytes()
    text = r"^not what torch.save writes: its directory has 2.* bytes, too many"
    with bounded(), pytest.raises(ValueError, match=text):
        find(memoryview(data), 0, len(data))


def entry(dims: bytes) -> bytes:
    """Return an entry of a ``.ckpt``."""
    return packet(1, packet(1, b"w") + packet(2, dims + packet(2, b"Float32") + packet(3, bytes(4))))


CKPTS = {
    "dims in one field": (entry(packet(1, b"\x01" * 500_000)), "it has more than 64 dims"),
    "a field for each dim": (entry(b"\x08\x01" * 500_000), "more than 256 fields in one entry"),
}


@pytest.mark.parametrize("case", CKPTS)
def test_an_entry_of_a_ckpt_is_a_tensor(tmp_path: Path, case: str) -> None:
    path, read = planted(tmp_path, "ckpt")
    data, text = CKPTS[case]
    path.write_bytes(data)
    assert refusal(read) == f"{path}: tensor w: {text}"


def test_a_strategy_has_few_numbers_for_each_parameter(tmp_path: Path) -> None:
    path, read = planted(tmp_path, "MindSpore strategy")
    layouts = packet(1, packet(1, b"\x01" * 500_000)) + packet(2, packet(1, b"\x01"))
    path.write_bytes(b"\x08\x02" + packet(3, packet(1, b"w") + packet(2, layouts)))
    told = "parameter w: field 1 has more than 64 values"
    assert refusal(read) == f"{path}: not a MindSpore strategy file (protobuf): {told}"


def test_a_gzipped_file_is_unpacked_as_far_as_its_header_says(tmp_path: Path) -> None:
    write_idx(tmp_path, ".gz")
    path = tmp_path / "train-labels-idx1-ubyte.gz"
    path.write_bytes(path.read_bytes() + gzip.compress(bytes(256 << 20)))
    with bounded():
        assert read_idx(path).shape == (6,)
    head = bytes((0, 0, 8, 1)) + (1 << 31).to_bytes(4)
    path.write_bytes(gzip.compress(head + bytes(9)))
    with (
        bounded(),
        pytest.raises(ValueError, match=r"^its header promises 2147483656 bytes; at most 1073741824 are unp"),
    ):
        complete_shape(str(tmp_path), "train-labels-idx1-ubyte", 1)


def as_source(folder: Path) -> None:
    (folder / ".metadata").write_bytes(as_key(doubled(b")", b"\x86", 75)))


def as_header(folder: Path) -> None:
    (folder / "f.safetensors").write_bytes((100_000_000).to_bytes(8, "little"))
    os.truncate(folder / "f.safetensors", 1 << 30)


ASKED = {
    "a pickle of 308 bytes": (as_source, "steps.import.src=.", "steps.import.src: .metadata: {why}", LONG),
    "a header of 100 MB": (as_header, "steps.import.src=f.safetensors", "steps.import.src = f.safetensors: {why}",
                           HEADERS["100 MB"][1]),
    "a pipe of tensors": (lambda f: os.mkfifo(f / "f.ckpt"), "steps.import.src=f.ckpt",
                          "steps.import.src = f.ckpt: {why}", PIPE),
    "a pipe of switches": (lambda f: os.mkfifo(f / "s.json"), "parallel.transformer_opt=s.json",
                           "parallel.transformer_opt = s.json: {why}", PIPE),
    "a device of text": (lambda f: None, "data.path=/dev/zero", "data.path = /dev/zero: {why}", DEVICE),
    "layouts of terabytes": (lambda f: os.truncate(os.open(f / "l.json", os.O_CREAT | os.O_WRONLY), HUGE),
                             "parallel.param_strategy.load=l.json", "parallel.param_strategy.load = l.json: {why}",
                             f"{HUGE} bytes; at most {LONGEST_TEXT} are read"),
}  # fmt: skip


@pytest.mark.parametrize("case", ASKED)
def test_a_request_that_names_one_is_refused_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    make, word, text, why = ASKED[case]
    make(tmp_path)
    monkeypatch.chdir(tmp_path)
    more = ["steps=[import]"] if "import" in word else []
    with bounded(memory=512 << 20):
        assert main(["recipe=lm_single", "model=lm_tiny", *more, word, "show=plan"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "error: 1 problem in this request; nothing was started",
        "",
        f"  {text.format(why=why)}",
        f"    set by: {word} (command line)",
    ]
