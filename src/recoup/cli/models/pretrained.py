"""A model in a folder, as transformers saves it: `hf:FOLDER`. Weights are read from safetensors; no code is run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from recoup.cli.importing import import_library
from recoup.errors import ModelError


def open_pretrained(folder: str) -> nn.Module:
    """The model in a folder, of the class that its config names.

    Raises:
        ModelError: transformers is not installed, or the folder holds no model that it can read.
    """
    if not (Path(folder) / "config.json").is_file():
        raise ModelError(
            f"'{folder}' is no folder with a config.json. Nothing is downloaded: save the model there by "
            "save_pretrained first."
        )
    library: Any = import_library("transformers", "transformers", ModelError)
    try:
        config = library.AutoConfig.from_pretrained(folder, local_files_only=True)
        kind = getattr(library, (config.architectures or ["AutoModel"])[0])
        model = kind.from_pretrained(folder, local_files_only=True, use_safetensors=True)
    except Exception as error:  # of whatever kind the library has
        raise ModelError(
            f"the model in '{folder}' could not be opened: {type(error).__name__}: {str(error)[:300]}. Open it in a "
            "factory of your own and name that."
        ) from error
    assert isinstance(model, nn.Module)
    return model


def vocabulary_of(model: nn.Module) -> int:
    """How many different tokens a model reads; 0 where its config says nothing of them."""
    size = getattr(getattr(model, "config", None), "vocab_size", None)
    return size if type(size) is int else 0
