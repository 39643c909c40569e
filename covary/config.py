"""The run configuration: a recipe is read, overridden, checked strictly and written back resolved.

A mistake is told before any model is loaded, in one line that lists everything found wrong. Values
are JSON-like and never coerced: quoted `"7"` is text, `1e-5` is a number, `yes` is text.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import re
import reprlib
import types
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import yaml
from pydantic import ConfigDict, PositiveFloat, PositiveInt, TypeAdapter, ValidationError

from covary.objects import is_object_name, load_object, name_of
from covary.settings import (
    Checkpoint,
    Engine,
    Eval,
    JudgeReward,
    LikelihoodReward,
    Log,
    Model,
    Optimizer,
    RewardModel,
    Rollout,
    Teacher,
    TeacherServer,
    Text,
)
from covary.types import Example, Score, UserError

if TYPE_CHECKING:
    from covary.batch import Algorithm


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A checked recipe; field names are the recipe's top-level keys.

    Attributes:
        out: run folder. None: the caller names one.
        seed: of everything random in the run.
        steps: rollout iterations. Exactly one of `steps` and `epochs` is set.
        epochs: times that the training prompts are gone through.
        model: the policy to start from.
        task: an instance of one of `covary.tasks.TASKS`.
        reward: training reward: a grader by name, `path/to/file.py:name`, a reward model, a judge, or the
            likelihood of the reference answer. None: the task's own grader.
        algorithm: an instance of one of `covary.algorithms.ALGORITHMS`.
        rollout: how completions are made.
        optimizer: AdamW, and how a rollout is cut into updates.
        engine: how scores and gradients are computed.
        reference: the model behind `reference` streams, see `reference_model`. None: old.
        teacher: the model that a distillation method learns from.
        eval: evaluation on the test split.
        checkpoint: when to save.
        log: what to report.
        doctor: what to do when the run cannot learn: say so, stop, or do not look.
    """

    out: Text | None = None
    seed: int = 0
    steps: PositiveInt | None = None
    epochs: PositiveFloat | None = None
    model: Model = field(default_factory=Model)
    task: Any
    reward: Text | RewardModel | JudgeReward | LikelihoodReward | None = None
    algorithm: Algorithm
    rollout: Rollout = field(default_factory=Rollout)
    optimizer: Optimizer = field(default_factory=Optimizer)
    engine: Engine = field(default_factory=Engine)
    reference: Literal["old", "initial"] | None = None
    teacher: Teacher | TeacherServer | None = None
    eval: Eval = field(default_factory=Eval)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    log: Log = field(default_factory=Log)
    doctor: Literal["warn", "stop", "off"] = "warn"


RESUMABLE = frozenset({"steps", "eval", "checkpoint", "log"})
"""Top-level keys that a resumed run may change."""

# `Algorithm` is not imported at run time (its module loads torch), so the hints have Any in its place.
_HINTS: dict[str, Any] = get_type_hints(RunConfig, localns={"Algorithm": Any}, include_extras=True)
_SECTIONS: dict[str, type] = {
    key: hint for key, hint in _HINTS.items() if dataclasses.is_dataclass(hint) and isinstance(hint, type)
}
_NAMED = ("task", "algorithm")  # sections whose `name` says which fields they have
_STRICT = ConfigDict(strict=True, allow_inf_nan=False, extra="forbid")


# ---- reading -------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """Safe YAML with JSON's scalars: PyYAML's YAML 1.1 reads `1e-5` as text, `010` as 8, `no` as false.

    A key given twice is an error. Lists and mappings are built at once, so that PyYAML refuses an
    anchor that contains itself.
    """

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (PyYAML's name)

    def mapping(self, node: yaml.MappingNode) -> dict[str, Any]:
        built: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = self.construct_object(key_node, deep=True)
            mark = key_node.start_mark
            if not isinstance(key, str):
                raise yaml.MarkedYAMLError(problem=f"a key must be text, got {_got(key)}", problem_mark=mark)
            if key in built:
                raise yaml.MarkedYAMLError(problem=f"the key {key!r} is given twice", problem_mark=mark)
            built[key] = self.construct_object(value_node, deep=True)
        return built

    def sequence(self, node: yaml.SequenceNode) -> list[Any]:
        return self.construct_sequence(node, deep=True)

    def integer(self, node: yaml.ScalarNode) -> int:
        return int(node.value)

    def number(self, node: yaml.ScalarNode) -> float:
        value = float(node.value)
        if math.isinf(value):
            raise yaml.MarkedYAMLError(problem=f"{node.value} is too large", problem_mark=node.start_mark)
        return value


class _Dumper(yaml.SafeDumper):
    """Quotes every text that either YAML 1.1 or our loader would read as something else."""

    def text(self, value: str) -> yaml.ScalarNode:
        # PyYAML's own choice of style folds U+0085 into a space; double quotes escape it.
        style = None if value.isprintable() else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_SCALARS = {
    "tag:yaml.org,2002:null": (r"(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    "tag:yaml.org,2002:bool": (r"(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    "tag:yaml.org,2002:int": (r"[-+]?(?:0|[1-9][0-9]*)$", list("-+0123456789")),
    "tag:yaml.org,2002:float": (
        r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?$",
        list("-+.0123456789"),
    ),
}
for _tag, (_pattern, _first) in _SCALARS.items():
    _Loader.add_implicit_resolver(_tag, re.compile(_pattern), _first)
    _Dumper.add_implicit_resolver(_tag, re.compile(_pattern), _first)
_Loader.add_constructor("tag:yaml.org,2002:map", _Loader.mapping)
_Loader.add_constructor("tag:yaml.org,2002:seq", _Loader.sequence)
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.integer)
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.number)
_Dumper.add_representer(str, _Dumper.text)


def load_recipe(path: str | Path) -> dict[str, Any]:
    """The recipe file's content, unchecked.

    Raises:
        UserError: no such file, or not one YAML mapping with distinct keys (file and line).
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text (byte {error.start})") from error
    except OSError as error:
        raise UserError(f"{path}: cannot read the recipe: {(error.strerror or str(error)).lower()}") from error
    try:
        data = yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise UserError(f"{where}: {_yaml_problem(error)}") from error
    if not isinstance(data, dict):
        raise UserError(f"{path}: a recipe is a mapping of {', '.join(_HINTS)}; got {_got(data)}")
    return data


def _yaml_problem(error: Exception) -> str:
    return " ".join(str(getattr(error, "problem", None) or error).split())


def apply_overrides(data: Mapping[str, Any], overrides: list[str]) -> dict[str, Any]:
    """A copy of `data` with `key.key=value` applied in order; values are YAML, missing sections are made.

    Keys are not judged here: `validate` does. So `algorithm.name=grpo` keeps the other keys of
    `algorithm`, and one that grpo lacks is reported rather than dropped.

    Raises:
        UserError: an override that is not `key=value`, a value that is not YAML, or a path through
            something that is not a section.
    """
    result = deepcopy(dict(data))
    for override in overrides:
        path, equals, text = override.partition("=")
        keys = path.strip().split(".")
        if not equals or not all(keys):
            raise UserError(f"{override!r}: an override is key=value, such as algorithm.beta=0.2 or steps=12")
        try:
            value = yaml.load(text, Loader=_Loader)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise UserError(f"{override!r}: the value is not YAML: {_yaml_problem(error)}") from error
        section = result
        for depth, key in enumerate(keys[:-1], 1):
            if section.get(key) is None:
                section[key] = {}
            section = section[key]
            if not isinstance(section, dict):
                raise UserError(f"{override!r}: {'.'.join(keys[:depth])} is not a section, it is {_got(section)}")
        section[keys[-1]] = value
    return result


# ---- checking ------------------------------------------------------------------------------------


def validate(data: Mapping[str, Any], *, where: str) -> RunConfig:
    """The checked configuration of a recipe's content.

    Args:
        data: top-level keys; a section is a mapping or null. `task` and `algorithm` may also be built
            objects, as in `covary.train(algorithm=covary.GVPO(beta=0.1))`.
        where: what a message names first: the recipe's file, or the function that was called.

    Raises:
        UserError: a line for every problem found. Rules between keys are checked where the keys
            themselves are right.
    """
    problems: list[str] = []
    classes: dict[str, type] = dict(_SECTIONS)
    for section in _NAMED:
        chosen = _named_class(section, data.get(section), problems)
        if chosen is not None:
            classes[section] = chosen
    keys = {"": tuple(_HINTS), **{section: _field_names(cls) for section, cls in classes.items()}}
    for section in _NAMED:
        keys[section] = ("name", *keys.get(section, ()))
    problems += [_unknown_key("", key, keys) for key in data if key not in _HINTS]

    built: dict[str, Any] = {}
    for section, cls in classes.items():
        _build_section(section, cls, data.get(section), keys, built, problems)
    for key, hint in _HINTS.items():
        if key in _SECTIONS or key in _NAMED:
            continue
        if data.get(key) is None:
            built[key] = getattr(RunConfig, key)
        else:
            _set_checked(built, key, hint, data[key], key, problems)
    problems += _conflicts(built)
    if problems:
        raise UserError("\n".join(f"{where}: {problem}" for problem in problems))
    return RunConfig(**built)


def validate_task(data: Mapping[str, Any], *, where: str) -> Any:
    """The task object of a recipe's `task` section alone.

    Raises:
        UserError: as `validate`.
    """
    problems: list[str] = []
    built: dict[str, Any] = {}
    cls = _named_class("task", data, problems)
    if cls is not None:
        _build_section("task", cls, data, {"task": ("name", *_field_names(cls))}, built, problems)
    if problems:
        raise UserError("\n".join(f"{where}: {problem}" for problem in problems))
    return built["task"]


def validate_reward(data: Mapping[str, Any], *, where: str) -> RewardModel | JudgeReward:
    """A reward model or a judge from a mapping, as a recipe's `reward` has it.

    Raises:
        UserError: as `validate`.
    """
    problems: list[str] = []
    built: dict[str, Any] = {}
    _set_checked(built, "reward", _HINTS["reward"], data, "reward", problems)
    if problems:
        raise UserError("\n".join(f"{where}: {problem}" for problem in problems))
    return built["reward"]


def _table(section: str) -> dict[str, Any]:
    """The classes that a named section chooses from. Imported here: `covary.algorithms` loads torch."""
    if section == "algorithm":
        from covary.algorithms import ALGORITHMS

        return dict(ALGORITHMS)
    from covary.tasks import TASKS

    return dict(TASKS)


def _is_built(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _named_class(section: str, value: Any, problems: list[str]) -> type | None:
    table = _table(section)
    if _is_built(value):
        return type(value)
    valid = ", ".join(table)
    if value is None:
        problems.append(f"{section}: is required; {section}.name takes one of {valid}")
    elif not isinstance(value, Mapping):
        hint = f"; write {value.__name__}()" if isinstance(value, type) else ""
        problems.append(
            f"{section}: takes a mapping with a name (one of {valid}) and its settings, or an instance of a frozen "
            f"dataclass, got {_got(value)}{hint}"
        )
    elif value.get("name") is None:
        problems.append(f"{section}.name: is required; one of {valid}")
    elif not isinstance(value["name"], str):
        problems.append(f"{section}.name: takes one of {valid}, got {_got(value['name'])}")
    elif value["name"] in table:
        return table[value["name"]]
    elif is_object_name(value["name"]):
        return _users_class(section, value["name"], problems)
    else:
        near = _nearest(value["name"], table)
        hint = f"did you mean {near}? " if near else ""
        problems.append(
            f"{section}.name: unknown {section} {value['name']!r}; {hint}valid names: {valid}, "
            "or your own as path/to/file.py:Class"
        )
    return None


def _users_class(section: str, name: str, problems: list[str]) -> type | None:
    """A task or algorithm of the user's own."""
    try:
        cls = load_object(name, f"{section}.name")
    except UserError as error:
        problems.append(str(error))
        return None
    needed = "load" if section == "task" else "loss"
    if isinstance(cls, type) and "__dataclass_fields__" not in vars(cls):
        problems.append(f"{section}.name: {name} lacks its own @dataclass(frozen=True), so its fields would not count")
        return None
    if isinstance(cls, type) and dataclasses.is_dataclass(cls) and callable(getattr(cls, needed, None)):
        return cls
    problems.append(f"{section}.name: {name} is no dataclass with a method `{needed}`")
    return None


def _field_names(cls: Any) -> tuple[str, ...]:
    return tuple(f.name for f in dataclasses.fields(cls) if f.init)


def _build_section(
    section: str,
    cls: Any,
    value: Any,
    keys: Mapping[str, tuple[str, ...]],
    built: dict[str, Any],
    problems: list[str],
) -> None:
    """Puts an instance into `built[section]`, or says in `problems` why not."""
    if _is_built(value):
        built[section] = value
        return
    if value is None:
        value = {}
    if not isinstance(value, Mapping):
        problems.append(f"{section}: takes a mapping of {', '.join(keys[section])}, got {_got(value)}")
        return
    problems += [_unknown_key(section, key, keys) for key in value if key not in keys[section]]
    hints = get_type_hints(cls, include_extras=True)
    fields = [f for f in dataclasses.fields(cls) if f.init]
    values: dict[str, Any] = {}
    found = len(problems)
    for f in fields:
        path = f"{section}.{f.name}"
        if f.name in value:
            _set_checked(values, f.name, hints[f.name], value[f.name], path, problems)
        elif f.default is f.default_factory is dataclasses.MISSING:
            problems.append(f"{path}: is required; takes {_takes(hints[f.name])}")
    if len(problems) > found:
        return
    try:
        built[section] = cls(**values)
    except ValueError as error:  # the dataclass's own ranges
        problems.append(_within(section, str(error), keys[section]))


def _within(section: str, message: str, names: tuple[str, ...]) -> str:
    """A message of a section's own check, with the path in front; some start with the field's name."""
    start = re.match(r"\w+(?=[.:,])", message)
    if start and start[0] in names:
        return f"{section}.{message}"
    return message if start and start[0] == section else f"{section}: {message}"


def _set_checked(target: dict[str, Any], key: str, hint: Any, value: Any, path: str, problems: list[str]) -> None:
    """Puts the value into `target[key]` if it has the declared type and range, without coercion."""
    within = [arg for arg in (hint, *get_args(hint)) if dataclasses.is_dataclass(arg)]
    if within and isinstance(value, Mapping):  # a section in a section: what is wrong in it is named
        built: dict[str, Any] = {}
        cls = max(within, key=lambda cls: len(value.keys() & {*_field_names(cls)}))  # of several, what its keys mean
        own, known = _field_names(cls), {name for each in within for name in _field_names(each)}
        others = [name for name in value if name in known and name not in own]
        if others:
            first = next(name for name in value if name in own)
            problems.append(
                f"{path}.{others[0]}: does not go together with {path}.{first}; {path} takes {_takes(hint)}"
            )
            return
        _build_section(path, cls, value, {path: _field_names(cls)}, built, problems)
        if path in built:
            target[key] = built[path]
        return
    if _is_function(hint) and isinstance(value, str) and is_object_name(value):
        try:
            target[key] = load_object(value, path)
        except UserError as error:
            problems.append(str(error))
            return
        if not callable(target[key]):
            problems.append(f"{path}: {value} is no function")
        return
    try:
        # JSON's strict mode is the one in which a list may become a tuple and nothing else changes.
        target[key] = TypeAdapter(hint, config=_STRICT).validate_json(json.dumps(value))
    except (ValidationError, TypeError, ValueError):
        problems.append(f"{path}: takes {_takes(hint)}, got {_got(value)}")
        return
    if any(_is_extreme(number, path) for number in _numbers(target[key])):
        problems.append(f"{path}: {_got(value)} is outside of any sensible range")


def _is_function(hint: Any) -> bool:
    """Whether a field takes a Python function, which a recipe names by its file."""
    return any(get_origin(arg) is Callable for arg in (hint, *get_args(hint)))


def _numbers(value: Any) -> list[int | float]:
    values = value if isinstance(value, tuple) else (value,)
    return [number for number in values if isinstance(number, int | float) and not isinstance(number, bool)]


def _is_extreme(number: int | float, path: str) -> bool:
    """Numbers that overflow or underflow further on, or ask for more rows than any memory holds."""
    if path == "seed":
        return not 0 <= number < 2**63
    if isinstance(number, int):
        return abs(number) > 10**9
    return abs(number) > 1e12 or 0 < abs(number) < 1e-12


def _conflicts(built: Mapping[str, Any]) -> Iterator[str]:
    """Rules between keys; a key that was itself wrong is absent from `built`."""
    model: Model | None = built.get("model")
    rollout: Rollout | None = built.get("rollout")
    optimizer: Optimizer | None = built.get("optimizer")
    log: Log | None = built.get("log")
    algorithm: Algorithm | None = built.get("algorithm")

    if "steps" in built and "epochs" in built and (built["steps"] is None) == (built["epochs"] is None):
        missing = built["steps"] is None
        yield "steps: set steps or epochs" if missing else "steps: set steps or epochs, not both"
    if model and model.dtype == "bfloat16":
        yield (
            "model.dtype: trained weights are float32 master weights; "
            "to compute in bfloat16 set engine.autocast: bfloat16"
        )
    if optimizer and optimizer.warmup > 1 and not optimizer.warmup.is_integer():
        yield (
            f"optimizer.warmup: takes a share of the steps (below 1) or a whole number of steps, got {optimizer.warmup}"
        )
    if optimizer and rollout and optimizer.prompts and rollout.prompts % optimizer.prompts:
        small = [n for n in range(1, math.isqrt(rollout.prompts) + 1) if rollout.prompts % n == 0]
        divisors = sorted({*small, *(rollout.prompts // n for n in small)})
        nearest = sorted(sorted(divisors, key=lambda n: abs(n - (optimizer.prompts or 0)))[:2])
        yield (
            f"optimizer.prompts: must divide rollout.prompts ({rollout.prompts}), got {optimizer.prompts}; "
            f"nearest: {', '.join(map(str, nearest))}"
        )
    if log and log.project is not None and log.tracker not in ("wandb", "trackio"):
        yield f"log.project: would be ignored, log.tracker: {log.tracker} has no projects"
    if rollout and rollout.engine == "dataset" and rollout.temperature != Rollout.temperature:
        yield "rollout.temperature: would be ignored, rollout.engine: dataset samples nothing"
    if rollout and rollout.engine != "vllm":
        for key in ("server", "memory_share"):
            if getattr(rollout, key) != getattr(Rollout, key):
                yield f"rollout.{key}: would be ignored, only rollout.engine: vllm has one"
    elif rollout and rollout.server is not None and rollout.memory_share != Rollout.memory_share:
        yield "rollout.memory_share: would be ignored, rollout.server has a memory of its own (--gpu-memory-utilization)"
    if algorithm is None:
        return
    name = _name_of("algorithm", algorithm)
    if rollout and not _enough(algorithm, rollout.completions):
        least = next((k for k in range(1, 65) if _enough(algorithm, k)), 65)
        yield (
            f"rollout.completions: {name} needs at least {least} completions per prompt, "
            f"got rollout.completions: {rollout.completions}"
        )
    if rollout and algorithm.offline and rollout.engine != "dataset":
        yield f"rollout.engine: {name} learns from given completions: set rollout.engine: dataset"
    own = "samples of its own policy" if "policy" in algorithm.sources else f"samples ({', '.join(algorithm.sources)})"
    if rollout and rollout.engine == "dataset" and not (algorithm.offline or _any_completions(algorithm)):
        yield f"rollout.engine: {name} needs {own}: set rollout.engine: transformers"
    if rollout and rollout.engine == "vllm" and "policy" not in algorithm.sources and not algorithm.offline:
        yield f"rollout.engine: vllm samples the policy, and {name} learns from no samples of it alone"
    if rollout and (rollout.replay or rollout.file):
        mixed = "replay" if rollout.replay else "file"
        if not _any_completions(algorithm):
            yield f"rollout.{mixed}: {name} needs {own}; methods that may learn from any sampler can"
        if rollout.engine == "dataset":
            yield f"rollout.{mixed}: would be ignored, rollout.engine: dataset samples nothing"
    if rollout and rollout.replay and rollout.replay.history >= rollout.completions:
        yield (
            f"rollout.replay.history: takes less than rollout.completions ({rollout.completions}), "
            f"got {rollout.replay.history}: something must be fresh"
        )
    if rollout and rollout.replay and rollout.replay.size < rollout.replay.history:
        yield f"rollout.replay.size: takes at least replay.history ({rollout.replay.history}), got {rollout.replay.size}"
    if rollout and rollout.replay and rollout.file:
        yield "rollout.file: cannot be combined with rollout.replay"
    if rollout and rollout.file and rollout.file.count >= rollout.completions:
        yield (
            f"rollout.file.count: takes less than rollout.completions ({rollout.completions}), "
            f"got {rollout.file.count}: something must be fresh"
        )
    if built.get("reward") is not None and not algorithm.needs_reward:
        yield f"reward: would be ignored, {name} trains without a reward; to grade evaluation set eval.reward"
    if built.get("reference") is not None and not _reads_reference(algorithm):
        yield f"reference: would be ignored, {name} reads no reference model"
    if "teacher" in built:
        teacher, reads = built["teacher"], reads_teacher(algorithm)
        if teacher is None and reads:
            yield f"teacher: is required, {name} learns from one; takes {_takes(_HINTS['teacher'])}"
        if teacher is not None and not reads:
            yield f"teacher: would be ignored, {name} reads no teacher"
        if teacher is not None and teacher.cache is not None and "teacher" not in algorithm.sources:
            yield f"teacher.cache: would be ignored, {name} asks the teacher for no completions"
    engine: Engine | None = built.get("engine")
    if engine and engine.logprob_temperature != 1 and _scores_of_teacher(algorithm):
        yield "engine.logprob_temperature: takes 1 with a teacher, which would else be met at another temperature"


def _any_completions(algorithm: Algorithm) -> bool:
    """Whether others' completions may stand where the plan asks for the policy's."""
    return algorithm.any_sampler and algorithm.sources == ("policy",)


def _enough(algorithm: Algorithm, k: int) -> bool:
    """Whether a plan for k completions leaves enough rows to learn from."""
    from numpy.random import default_rng

    (plan,) = algorithm.plan([Example("plan", "")], k, default_rng(0))
    return sum(request.count for request in plan if request.learn) >= max(1, algorithm.min_group)


def _reads_reference(algorithm: Algorithm) -> bool:
    return any("reference" in score.models for score in algorithm.frozen)


def reads_teacher(algorithm: Algorithm) -> bool:
    """Whether a method scores with a teacher or samples from one."""
    return bool(_scores_of_teacher(algorithm)) or not {"teacher", "mixed"}.isdisjoint(algorithm.sources)


def _scores_of_teacher(algorithm: Algorithm) -> list[Score]:
    return [score for score in (*algorithm.frozen, *algorithm.trained) if "teacher" in score.models]


def _unknown_key(section: str, key: Any, keys: Mapping[str, tuple[str, ...]]) -> str:
    """What is wrong with a key, and where it belongs or what it was meant to be.

    Args:
        section: where it stands, "" for the top level.
        key: the key.
        keys: the valid keys of every section.
    """
    path, key = _dotted(section, key), str(key)
    homes = [home for home, names in keys.items() if key in names and home != section]
    if homes:
        places = [f"under {home}" if home else "at the top level" for home in homes]
        return f"{path}: unknown key; belongs {' or '.join(places)}"
    near = _nearest(key, keys[section])
    meant = [_dotted(section, near)] if near else []
    if not near and not section:
        meant = [_dotted(home, near) for home, names in keys.items() if (near := _nearest(key, names))]
    hint = f"did you mean {' or '.join(meant)}? " if meant else ""
    return f"{path}: unknown key; {hint}valid keys: {', '.join(keys[section])}"


def _dotted(section: str, key: Any) -> str:
    return f"{section}.{key}" if section else str(key)


def _nearest(word: str, valid: Mapping[str, Any] | tuple[str, ...]) -> str | None:
    """The valid name closest in spelling, or the one that abbreviates `word` (learning_rate: lr)."""
    word = word.lower().replace("-", "_")
    close = difflib.get_close_matches(word, valid, n=1)
    initials = "".join(part[0] for part in word.split("_") if part)
    return close[0] if close else next((name for name in valid if name == initials), None)


def _takes(hint: Any) -> str:
    """A type annotation in a user's words."""
    origin, args = get_origin(hint), list(get_args(hint))
    if origin is Annotated:
        return _in_range(_takes(args[0]), args[1:])
    if origin is Literal:
        return f"one of {', '.join(map(str, args))}" if len(args) > 1 else f"only {args[0]}"
    if origin in (Union, types.UnionType):
        return " or ".join(_takes(arg).removeprefix("only ") for arg in args)
    if dataclasses.is_dataclass(hint):
        return f"a mapping of {', '.join(_field_names(hint))}"
    if origin is list or (origin is tuple and args[-1] is Ellipsis):
        return f"a list (each: {_takes(args[0])})"
    if origin is tuple:
        return f"a list of {len(args)} (each: {_takes(args[0])})"
    if origin is Callable:
        return "a function as path/to/file.py:name"
    if origin is dict:
        return "a mapping" if args[1] is Any else f"a mapping (each: {_takes(args[1])})"
    words = {
        int: "an integer",
        float: "a number",
        str: "text",
        bool: "true or false",
        type(None): "null",
    }
    return {**words, list: "a list", dict: "a mapping", Any: "any value"}.get(hint, str(hint))


def _in_range(noun: str, constraints: list[Any]) -> str:
    """`noun` with the limits of pydantic's constraints (a Field holds several)."""
    limits = [limit for item in constraints for limit in getattr(item, "metadata", [item])]
    if any(getattr(limit, "min_length", 0) for limit in limits):
        noun = f"non-empty {noun}"
    words = {"gt": "above", "ge": "from", "lt": "below", "le": "up to"}
    bounds = [f"{words[name]} {getattr(limit, name)}" for limit in limits for name in words if hasattr(limit, name)]
    return " ".join([noun, " and ".join(bounds)]).strip()


def _got(value: Any) -> str:
    """A given value in a user's words."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    kinds = {str: "the text ", dict: "the mapping ", list: "the list "}
    return f"{kinds.get(type(value), '')}{reprlib.repr(value)}"


# ---- writing and reading off ---------------------------------------------------------------------


def to_dict(config: RunConfig) -> dict[str, Any]:
    """The configuration as plain data, every setting spelled out. `validate` gives it back."""
    result: dict[str, Any] = {}
    for key in _HINTS:
        value = getattr(config, key)
        if key in _NAMED:
            value = {"name": _name_of(key, value), **_fields(value)}
        elif _is_built(value):
            value = _fields(value)
        result[key] = value
    return result


def to_yaml(config: RunConfig) -> str:
    """The resolved recipe: rerunning it reruns the run."""
    return yaml.dump(to_dict(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def _fields(section: Any) -> dict[str, Any]:
    values = {name: deepcopy(getattr(section, name)) for name in _field_names(section)}
    return {k: _fields(v) if _is_built(v) else name_of(v) if callable(v) else v for k, v in values.items()}


def _name_of(section: str, value: Any) -> str:
    """The recipe's name of a task or algorithm; one of the user's own is named by its file."""
    names = {cls: name for name, cls in _table(section).items()}
    return names.get(type(value)) or name_of(type(value))


def changed_keys(a: RunConfig, b: RunConfig) -> list[str]:
    """Dotted keys whose values differ, in the order of the recipe's keys."""
    before, after = dict(_leaves(to_dict(a))), dict(_leaves(to_dict(b)))
    absent = object()
    return [key for key in {**before, **after} if before.get(key, absent) != after.get(key, absent)]


def _leaves(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        path = _dotted(prefix, key)
        if isinstance(value, Mapping) and value:
            yield from _leaves(cast("Mapping[str, Any]", value), path)
        else:
            yield path, value


def updates_per_rollout(config: RunConfig) -> int:
    """Optimizer updates a step."""
    optimizer, rollout = config.optimizer, config.rollout
    return rollout.prompts // (optimizer.prompts or rollout.prompts) * optimizer.passes


def reference_model(config: RunConfig) -> Literal["old", "initial"]:
    """The model that `reference` streams read."""
    return config.reference or "old"


def warnings_for(config: RunConfig) -> list[str]:
    """What is allowed and probably not meant, one line each."""
    warnings: list[str] = []
    if updates_per_rollout(config) == 1 and reference_model(config) == "old" and _reads_reference(config.algorithm):
        warnings.append(
            "reference: the first update after a rollout has log-ratio 0, so with one update per rollout "
            "and reference: old nothing holds the policy back; set optimizer.prompts below rollout.prompts, "
            "optimizer.passes above 1, or reference: initial"
        )
    samples_itself = not {"policy", "mixed"}.isdisjoint(config.algorithm.sources) and not config.algorithm.any_sampler
    if samples_itself and config.rollout.temperature != config.engine.logprob_temperature:
        warnings.append(
            f"rollout.temperature: samples are drawn at {config.rollout.temperature:g} and log-probs taken at "
            f"engine.logprob_temperature {config.engine.logprob_temperature:g}: the policy whose ratios and gradients "
            f"{_name_of('algorithm', config.algorithm)} computes is not the one that sampled; set the two equal"
        )
    if config.steps is not None and 1 <= config.optimizer.warmup >= config.steps:
        warnings.append(
            f"optimizer.warmup: {config.optimizer.warmup:g} steps of warm-up in a run of {config.steps} "
            "never reach the learning rate"
        )
    return warnings
