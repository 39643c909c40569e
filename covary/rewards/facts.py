"""What evaluation wants to know of a reward: whether it reads answers, whether it compares them, which code it is."""

from __future__ import annotations

import hashlib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from covary.rewards.functions import FunctionFile
from covary.rewards.reward import PooledReward
from covary.rewards.types import Grader, Reward

_LIBRARIES = {"math-verify", "sympy", "reasoning-gym"}


def reads_answers(reward: Reward) -> bool:
    """Whether its verdicts say which answer they read (`Graded.grade`): those of built-in graders do."""
    return isinstance(reward, PooledReward) and isinstance(reward.task, Grader)


def compares_answers(reward: Reward) -> bool:
    """Whether a completion's answer may stand for the reference, to tell if another completion says the same.

    Not with Reasoning Gym's scorers: some look at the question alone, and would take any two right answers for one.
    """
    return reads_answers(reward) and reward.name != "reasoning_gym"


def grader_version(reward: Reward) -> dict[str, str | None]:
    """Stored beside an evaluation, since another grader gives other numbers.

    Name, extractor and a hash of the source; of built-in graders the versions of the libraries that they use; of a judge
    a hash of its prompt.

    The source of a Python function that no file holds is not known: its hash is None.
    """
    task = reward.task if isinstance(reward, PooledReward) else None
    if isinstance(task, Grader):
        sources = sorted(Path(__file__).parent.glob("*.py"))
        return {
            "name": task.name,
            "extract": task.extract,
            "source_sha256": _digest(sources),
            **{library: _version(library) for library in sorted(_LIBRARIES)},
        }
    prompt = getattr(reward, "prompt_sha256", None)
    return {
        "name": reward.name,
        **({"prompt_sha256": prompt} if prompt is not None else {}),
        "source_sha256": _digest([Path(task.path)]) if isinstance(task, FunctionFile) else None,
    }


def _digest(files: list[Path]) -> str:
    sha = hashlib.sha256()
    for file in files:
        sha.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return sha.hexdigest()


def _version(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None
