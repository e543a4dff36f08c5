"""Loading a checkpoint as a transformers model, quietly and with errors that a user can act on."""

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from kvcompile.errors import CheckpointError


def load_model(path: Path, attention: str, device: str | torch.device = "cpu", dtype: Any = "auto") -> PreTrainedModel:
    """The causal language model at `path` in eval mode on `device`; raises CheckpointError when it cannot be built."""
    bar_enabled = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation=attention, local_files_only=True, trust_remote_code=False
        )
        return model.to(device).eval()
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(f"transformers cannot load the model in {path}: {reason}") from error
    finally:
        if bar_enabled:
            transformers.utils.logging.enable_progress_bar()


def load_tokenizer(path: Path) -> Any:
    """The tokenizer at `path`; raises CheckpointError when there is none."""
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} has no tokenizer that transformers can load; copy the tokenizer files there") from error
