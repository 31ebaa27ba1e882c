"""Turns a GGUF file into a bf16 safetensors folder that transformers loads in a second. Not public.

Runs as its own process (``python -m aaflow_langgraph._gguf FILE FOLDER``): dequantising needs five times the memory of
the result, and transformers' progress bars and warnings stay out of the caller.
"""

from __future__ import annotations

import sys
from pathlib import Path


def convert(source: Path, target: Path) -> None:
    """Write model, tokenizer and chat template of the GGUF file ``source`` into the existing folder ``target``."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    quantised = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    config = quantised.config
    # Left in place it would make transformers look for quantised weights in the saved folder.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(quantised.state_dict())
    model.tie_weights()
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
