"""Which device and which dtype a configuration means on this machine."""

from __future__ import annotations

import torch

from cluster.core.errors import ConfigError
from workers.checkpoint.folder import Checkpoint

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_DTYPE_OF_FILE = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def choose_device(name: str) -> torch.device:
    """ "auto" takes cuda where there is one. Raises ConfigError for what is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name not in ("cpu", "cuda"):
        raise ConfigError(f"device must be 'auto', 'cpu' or 'cuda', got {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device 'cuda': torch finds no usable GPU on this machine")
    return torch.device(name)


def choose_dtype(name: str, checkpoint: Checkpoint, device: torch.device) -> torch.dtype:
    """ "auto" takes the type that the weights are saved in; fp16 becomes bf16 on the CPU,
    which has no fast fp16 path. Raises ConfigError for an unknown name."""
    if name == "auto":
        dtype = _DTYPE_OF_FILE[checkpoint.main_dtype]
        if dtype is torch.float16 and device.type == "cpu":
            return torch.bfloat16
        return dtype
    if name not in DTYPES:
        raise ConfigError(f"dtype must be one of {['auto', *DTYPES]}, got {name!r}")
    return DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """ "bfloat16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")
