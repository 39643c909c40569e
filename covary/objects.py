"""Python objects that a recipe names as `path/to/file.py:name`: rewards, algorithms, tasks of the user's own."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from covary.types import UserError


def is_object_name(name: str) -> bool:
    """Whether `name` has the form path/to/file.py:name."""
    path, colon, attribute = name.rpartition(":")
    return bool(colon) and path.endswith(".py") and attribute.isidentifier()


def load_object(name: str, what: str) -> Any:
    """Execute the file and return the object.

    Args:
        name: path/to/file.py:name; a relative path starts at the working directory.
        what: what it is for; the first word of messages.

    Raises:
        UserError: no such file, the file raises, or it does not define the name.
    """
    text, _, attribute = name.rpartition(":")
    path = Path(text).expanduser().resolve()
    if not path.is_file():
        raise UserError(f"{what}: there is no file {path}")
    module_name = "covary_file_" + hashlib.blake2b(str(path).encode(), digest_size=8).hexdigest()
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise UserError(f"{what}: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses look their module up there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        message = " ".join(str(error).split())
        raise UserError(f"{what}: importing {path} failed: {type(error).__name__}: {message}") from error
    if not hasattr(module, attribute):
        own = sorted(k for k, v in vars(module).items() if getattr(v, "__module__", None) == module_name)
        near = get_close_matches(attribute, own, n=1)
        valid = f"did you mean {near[0]!r}?" if near else f"defined there: {', '.join(own) or 'nothing'}"
        raise UserError(f"{what}: {attribute!r} is not defined in {path}; {valid}")
    return getattr(module, attribute)


def name_of(named: Any) -> str:
    """The name under which `load_object` finds a class or function again; its Python name where it has no file."""
    named = named if hasattr(named, "__qualname__") else type(named)
    try:
        return f"{inspect.getfile(named)}:{named.__qualname__}"
    except (OSError, TypeError):  # typed at a prompt
        return f"{named.__module__}:{named.__qualname__}"
