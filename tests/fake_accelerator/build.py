"""Builds the fake accelerator: a folder that, on ``PYTHONPATH``, gives torch devices called ``fake``.

    python -m tests.fake_accelerator.build        # prints the folder

torch loads it by the entry point for accelerators outside of torch. ``FAKE_DEVICES`` is the number of devices
(default 0), ``FAKE_MEMORY_MB`` the memory of each (default 16 GB). The build needs a C++ compiler (``CXX``, else
``g++`` or ``c++``) and Python's headers, and takes half a minute, once for each version of torch.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths

HERE = Path(__file__).parent
HEADER, SOURCES, MODULE = "device.hpp", ("device.cpp", "collectives.cpp"), "fake_accelerator.py"
LIBRARY = f"_fake_accelerator{sysconfig.get_config_var('EXT_SUFFIX')}"
FLAGS = ("-std=c++20", "-O1", "-w", "-fPIC", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}")


def missing() -> str | None:
    """Returns why the accelerator cannot be built on this machine; ``None`` if it can."""
    if _compiler() is None:
        return "the fake accelerator is built with a C++ compiler, and this machine has none (CXX, g++, c++)"
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        return "the fake accelerator is built with Python's headers (Python.h), and this machine has none"
    return None


def site() -> Path:
    """Returns the folder for ``PYTHONPATH``, and builds it first if it does not exist.

    If several processes call this at the same time, one of them builds it.
    """
    digest = hashlib.sha256("\0".join(FLAGS).encode())
    for name in (HEADER, *SOURCES, MODULE, Path(__file__).name):
        digest.update((HERE / name).read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "launcher-tests"
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    folder = cache / f"fake-accelerator-torch{torch.__version__}-{python}-{digest.hexdigest()[:16]}"
    if folder.is_dir():
        return folder

    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            work = Path(tempfile.mkdtemp(dir=cache))
            try:
                _build(work)
                work.rename(folder)  # so that an existing folder is complete
            finally:
                shutil.rmtree(work, ignore_errors=True)
    return folder


def _compiler() -> list[str] | None:
    named = shlex.split(os.environ.get("CXX", ""))
    for words in (named, ["g++"], ["c++"]):
        if words and shutil.which(words[0]):
            return words
    return None


def _build(folder: Path) -> None:
    compiler = _compiler()
    assert compiler is not None, missing()
    includes = [f"-I{path}" for path in (*include_paths(), sysconfig.get_paths()["include"])]
    name = f"-DTORCH_EXTENSION_NAME={LIBRARY.partition('.')[0]}"

    # compile the sources at the same time
    objects = [folder / f"{source}.o" for source in SOURCES]
    commands = [
        [*compiler, *FLAGS, *includes, name, "-c", str(HERE / source), "-o", str(made)]
        for source, made in zip(SOURCES, objects, strict=True)
    ]
    compiling = [subprocess.Popen(c, stderr=subprocess.PIPE, text=True) for c in commands]
    said = [process.communicate()[1] for process in compiling]
    for process, text in zip(compiling, said, strict=True):
        if process.returncode:
            raise RuntimeError(f"{shlex.join(process.args)}\n{text}")

    # link one library, beside the module that torch loads
    torch_lib = Path(torch.__file__).parent / "lib"
    libraries = ["-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python", f"-Wl,-rpath,{torch_lib}"]
    linked = [*compiler, "-shared", *map(str, objects), f"-L{torch_lib}", *libraries, "-o", str(folder / LIBRARY)]
    subprocess.run(linked, check=True)
    for made in objects:
        made.unlink()
    shutil.copy(HERE / MODULE, folder)
    info = folder / "fake_accelerator-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-accelerator\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[torch.backends]\nfake = fake_accelerator:autoload\n")


if __name__ == "__main__":
    print(site())
