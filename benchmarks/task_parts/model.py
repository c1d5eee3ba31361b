"""The task model itself: its shape, its folder, and how it is loaded or made."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from task_parts.families import VOCABULARY

FOLDER = Path(__file__).resolve().parent / "weights"
"""Where the weights are kept, as a folder that ``kvwire.open_engine`` opens."""
SEED = 1


def configuration() -> LlamaConfig:
    """The model's shape: four layers of 128, two key-value heads.

    Returns:
        The configuration.
    """
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.08,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


def save(model: LlamaForCausalLM, folder: Path = FOLDER) -> None:
    """Keep a model, its weights as float16.

    Args:
        model: The model.
        folder: Where; made where it is missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.detach().half().contiguous() for name, tensor in model.state_dict().items()}
    del weights["lm_head.weight"]  # tied to the embedding
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    settings = {**model.config.to_diff_dict(), "architectures": ["LlamaForCausalLM"], "dtype": "float16"}
    text = json.dumps(settings, indent=1, sort_keys=True)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")


def load(folder: Path = FOLDER, *, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """Open the model that is kept.

    Args:
        folder: Where it lies.
        dtype: Of the weights in memory.

    Returns:
        The model, ready to be evaluated.

    Raises:
        FileNotFoundError: Nothing is kept there; ``task_model.py`` makes it.
    """
    if not is_kept(folder):
        raise FileNotFoundError(f"no weights in {folder.name}/; benchmarks/task_model.py makes them")
    model = LlamaForCausalLM(configuration())
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    return model.to(dtype).eval()


def is_kept(folder: Path = FOLDER) -> bool:
    """Whether weights are there.

    Args:
        folder: Where they would lie.

    Returns:
        The truth.
    """
    return (folder / "model.safetensors").is_file()
