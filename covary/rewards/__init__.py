"""Rewards: what a completion is worth, from text and data.

A *grader* compares the text that an *extractor* finds in a completion with the row's answer; a
custom reward is a Python function in either convention of `functions.py`. `build_reward` turns a
recipe's word or a Python object into the one callable that training and evaluation use.

    reward = build_reward("math")
    verdicts = reward(examples, completions)    # [Graded(value=1.0, error=None), ...]
    reward.close()

A value of None means unscorable: such a row leaves its group, it is not a 0. Built-in graders and
functions named by file run in worker processes (`pool.py`); nothing here imports torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from covary.rewards.answer_tags import grade_answer_tags
from covary.rewards.choice import grade_multiple_choice
from covary.rewards.exact import grade_exact
from covary.rewards.extract import answer_tag, boxed, last_line, last_number, whole_text
from covary.rewards.functions import FunctionFile, is_batch_form
from covary.rewards.math import grade_math
from covary.rewards.numeric import grade_numeric
from covary.rewards.pool import Pool, PoolTask
from covary.rewards.reasoning_gym import grade_reasoning_gym
from covary.rewards.reward import BatchReward, ItemReward, PooledReward
from covary.rewards.types import Grade, Graded, Grader, Reward, Verdict
from covary.types import UserError

__all__ = [
    "EXTRACTORS",
    "GRADERS",
    "FunctionFile",
    "Grade",
    "Graded",
    "Grader",
    "Pool",
    "PoolTask",
    "Reward",
    "Verdict",
    "build_reward",
    "grade",
    "grade_extracted",
]

# (text, answer, columns of the row) -> grade, or None where no text can be graded against that answer
GRADERS: dict[str, Callable[[str, str | None, dict[str, Any]], Grade | None]] = {
    "exact": grade_exact,
    "numeric": grade_numeric,
    "math": grade_math,
    "multiple_choice": grade_multiple_choice,
    "answer_tags": grade_answer_tags,
    "reasoning_gym": grade_reasoning_gym,
}

# completion -> the text that the grader reads, or None where there is none
EXTRACTORS: dict[str, Callable[[str], str | None]] = {
    "none": whole_text,
    "last_number": last_number,
    "boxed": boxed,
    "answer_tag": answer_tag,
    "last_line": last_line,
}


def build_reward(
    spec: str | Grader | Callable[..., object],
    *,
    default_extract: str = "none",
    deadline: float = 10.0,
    workers: int = 2,
) -> Reward:
    """The reward that a recipe or a caller asks for.

    Args:
        spec: a name of GRADERS, a Grader, "path/to/file.py:function", or a callable.
        default_extract: the extractor of a grader given by name. Functions see the whole text.
        deadline: seconds per completion, where the reward runs in worker processes.
        workers: how many of those.

    Raises:
        UserError: for an unknown grader or extractor, and for a file or function that is not there.
    """
    if isinstance(spec, str) and ":" not in spec and not spec.endswith(".py"):
        spec = Grader(spec, default_extract)
    if isinstance(spec, Grader):
        _check("grader", spec.name, GRADERS)
        _check("extractor", spec.extract, EXTRACTORS)
        return PooledReward(spec.name, spec, Pool(workers, deadline))
    if isinstance(spec, str):
        file = FunctionFile.parse(spec)
        function = file.load()
        if is_batch_form(function):
            return BatchReward(file.name, function)
        return PooledReward(file.name, file, Pool(workers, deadline))
    if not callable(spec):
        raise UserError(f"reward {spec!r} is no function, grader or name of a grader")
    name = getattr(spec, "__name__", type(spec).__name__)
    return BatchReward(name, spec) if is_batch_form(spec) else ItemReward(name, spec)


def grade(name: str, completion: str, answer: str | None, columns: Mapping[str, Any] | None = None) -> Grade | None:
    """What a built-in grader says of a completion: a pure function, in this process and without a deadline.

    Runs and evaluations grade in worker processes (`build_reward`), since a completion is untrusted text.

    Args:
        name: a key of GRADERS.
        completion: the model's text only, never the prompt.
        answer: the reference answer.
        columns: of the row: `tolerance` for `math`, `numeric` and `answer_tags`, `metadata` for `reasoning_gym`.

    Returns:
        The verdict and the answer that was read; None where no completion can be graded against that answer.

    Raises:
        UserError: there is no such grader.
    """
    _check("grader", name, GRADERS)
    return GRADERS[name](completion, answer, dict(columns or {}))


def grade_extracted(grader: Grader) -> Callable[[str, str | None, dict[str, Any]], Grade | None]:
    """What a grader says about what its extractor finds. Where that is nothing, the completion is unparsable."""
    extract, judge = EXTRACTORS[grader.extract], GRADERS[grader.name]
    options = {} if grader.tolerance is None else {"tolerance": grader.tolerance}

    def grade_item(completion: str, answer: str | None, columns: dict[str, Any]) -> Grade | None:
        found, columns = extract(completion), options | columns
        if found is not None:
            return judge(found, answer, columns)
        # A row that no text can be scored on is unscorable for this one as well; a 0 here and
        # None for the others would favour them.
        return None if judge("", answer, columns) is None else Grade("unparsable")

    return grade_item


def _check(kind: str, name: str, known: dict[str, Any]) -> None:
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UserError(f"reward: there is no {kind} {name!r}; {hint}there are {', '.join(known)}")
