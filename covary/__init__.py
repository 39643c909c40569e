"""covary: post-training of language models, each method one short file.

Public names are loaded on first use, so that `import covary.rewards` costs no torch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "train": "covary.api",
    "evaluate": "covary.measure",
    "Example": "covary.types",
    "Completion": "covary.types",
    "Group": "covary.types",
    "Request": "covary.types",
    "Score": "covary.types",
    "Stream": "covary.types",
    "UserError": "covary.types",
    "Algorithm": "covary.batch",
    "Batch": "covary.batch",
    "ALGORITHMS": "covary.algorithms",
    "GVPO": "covary.algorithms",
    "GRPO": "covary.algorithms",
    "DrGRPO": "covary.algorithms",
    "SFT": "covary.algorithms",
    "GVPOOPD": "covary.algorithms",
}

__all__ = [*_PUBLIC, "__version__"]  # pyright: ignore[reportUnsupportedDunderAll]


class _Package(ModuleType):
    """Keeps `covary.train` the function: importing covary/train.py would bind the module over it."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _PUBLIC and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'covary' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])


sys.modules[__name__].__class__ = _Package
