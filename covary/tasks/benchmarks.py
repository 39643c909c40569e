"""Benchmarks by name: where their rows come from, how an odd format becomes question and answer, what grades it.

A benchmark is one row of `BENCHMARKS`. Its normalise function takes a row as the file or the hub has it and gives a
`Problem`, or None for a row that is no part of the benchmark. To add one: a function where the format is odd, a row in
the table, a line in docs/evaluation.md.

No hub id of the table was loaded where covary is tested: the tests read the files of the same data sets that public
repositories hold. `sha256` is that of all normalised rows of such a file; None where there was no whole file.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from reasoning_gym.factory import DATASETS

from covary.jsonlines import dump_line, read_jsonl
from covary.rewards import Grader
from covary.rewards.extract import boxed
from covary.seeding import derive_seed
from covary.tasks.reasoning_gym import ReasoningGym
from covary.tasks.tables import Row, hub_table, parquet_table
from covary.tasks.task import ExtractorName, Task, chat_messages, check_examples, check_sizes
from covary.types import Example, UserError

LETTERS = "ABCDEFGHIJ"
BOX = r"Solve the problem step by step, then give the final answer inside \boxed{}."
CHOICE = r"Think step by step, then give the letter of the right option inside \boxed{}."
TAGS = "Think step by step, then give nothing but the final answer between <answer> and </answer>."
TYPED = (
    r"Answer the question step by step, then give the final answer inside \boxed{}: a number, a list of numbers such as "
    r"[1, 2], True or False, or the letter of an option."
)


@dataclass(frozen=True)
class Problem:
    """A normalised row.

    Attributes:
        question: as the model reads it, options included.
        answer: as the grader reads it.
        category: subject, where the data have one.
        tolerance: relative, that a number may differ from the answer by; None: what the grader says.
    """

    question: str
    answer: str
    category: str | None = None
    tolerance: float | None = None


@dataclass(frozen=True)
class Source:
    """One row of the table.

    Attributes:
        hub: hub id; None where the data set is on no hub that we know.
        subset: its configuration there.
        split: its split there.
        normalise: row -> Problem, or None for a row that is left out.
        grader: a key of `covary.rewards.GRADERS`.
        instruction: text before the question.
        sha256: of all normalised rows, as `digest` computes it.
        left_out: why rows are left out.
    """

    hub: str | None
    subset: str | None
    split: str
    normalise: Callable[[Row], Problem | None]
    grader: str
    instruction: str
    sha256: str | None = None
    left_out: str = ""


def _plain(question: str, answer: str, category: str | None = None) -> Callable[[Row], Problem]:
    """Rows that hold question and answer under these names, the answer as text or number."""

    def normalise(row: Row) -> Problem:
        value = row[answer]
        text = str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
        return Problem(row[question], text, row[category] if category else None)

    return normalise


def _aime(row: Row) -> Problem:
    """Answers are integers of three digits: 025 is 25."""
    return Problem(row["problem"], str(int(row["answer"])))


def _minerva(row: Row) -> Problem:
    """The file's answer is the last box of the solution; the hub's has a column of its own."""
    if "solution" not in row:
        return Problem(row["question"], row["answer"])
    answer = boxed(row["solution"])
    if answer is None:
        raise ValueError("the solution has no box")
    return Problem(row["problem"], answer, row.get("type"))


def _olympiad(row: Row) -> Problem:
    """Several answers are one list; dollar signs and the full stop of a sentence are no part of it.

    `error` is the absolute difference that an answer may have.
    """
    answer = ", ".join(row["final_answer"]).replace("$", "").rstrip(". ")
    question = f"{row['context']}\n{row['question']}" if row.get("context") else row["question"]
    tolerance = float(row["error"]) / abs(float(answer)) if row.get("error") else None
    return Problem(question, answer, row.get("subfield"), tolerance)


def _gsm8k(row: Row) -> Problem:
    return Problem(row["question"], row["answer"].rpartition("####")[2].strip().replace(",", ""))


def _theoremqa(row: Row) -> Problem | None:
    """Answers of several types; the hub has all of them as text. Rows with a picture are left out.

    Floats are rounded, some of them coarsely: they may differ by the 4 % of the benchmark's own evaluation.
    """
    if row.get("Picture") is not None:
        return None
    answer, kind = row["Answer"], row["Answer_type"]
    if kind.startswith("list"):
        values = ast.literal_eval(answer) if isinstance(answer, str) else answer
        answer = f"[{', '.join(map(str, values))}]"
    elif kind == "option":
        answer = answer.strip("() ").upper()  # (c) is C
    return Problem(row["Question"], str(answer), row.get("field"), 0.04 if "float" in kind else None)


def _mmlu_pro(row: Row) -> Problem:
    return _choice(row["question"], row["options"], row["answer"], row.get("category"))


def _mmlu_stem(row: Row) -> Problem:
    return _choice(row["question"], row["choices"], LETTERS[row["answer"]], row.get("type") or row.get("subject"))


def _gpqa(row: Row) -> Problem:
    """The right option comes first in the data: all four are shuffled, by the question alone."""
    right = row["Correct Answer"].strip()
    options = [right, *(row[f"Incorrect Answer {i}"].strip() for i in (1, 2, 3))]
    random.Random(derive_seed("gpqa", row["Question"])).shuffle(options)
    return _choice(row["Question"], options, LETTERS[options.index(right)], row.get("High-level domain"))


def _aqua(row: Row) -> Problem:
    options = [re.sub(r"^[A-E]\)\s*", "", option) for option in row["options"]]
    return _choice(row["question"], options, row["correct"])


def _sat_math(row: Row) -> Problem:
    """All options are one string, `A) ... B) ...` or `A. ... B. ...`; the hub's columns have other names."""
    question, options = (
        (row["question"], row["options"]) if "options" in row else (row["Question"], row["Possible Answers"])
    )
    parts = re.split(r"(?:^|\s)[A-D][).]\s+", options)[1:]
    if len(parts) != 4:
        raise ValueError(f"four options are expected, found {len(parts)}")
    return _choice(question, parts, row["Answer"].strip())


def _choice(question: str, options: Sequence[str], letter: str, category: str | None = None) -> Problem:
    if letter not in LETTERS[: len(options)]:
        raise ValueError(f"the answer {letter!r} is none of {len(options)} options")
    lines = [f"{name}) {option.strip()}" for name, option in zip(LETTERS, options, strict=False)]
    return Problem("\n".join([question.strip(), *lines]), letter, category)


BENCHMARKS: dict[str, Source] = {
    "aime24": Source(
        "HuggingFaceH4/aime_2024",
        None,
        "train",
        _aime,
        "math",
        BOX,
        sha256="4fd54148fa3783827576298705e0e65e32f94ca9bee098259b6c8170f0c1ed0a",
    ),
    "amc23": Source(
        "math-ai/amc23",
        None,
        "test",
        _plain("question", "answer"),
        "math",
        BOX,
        sha256="665161d4d7c36d92da217fb598799f49e01264f67090991c3da56b0d140f4f5e",
    ),
    "math500": Source(
        "HuggingFaceH4/MATH-500",
        None,
        "test",
        _plain("problem", "answer", "subject"),
        "math",
        BOX,
        sha256="730861b285423d9330d1afdb795e51c11499d158dae0e6cfd6e7bbc17cc2cf16",
    ),
    "minerva_math": Source(
        "math-ai/minervamath",
        None,
        "test",
        _minerva,
        "math",
        BOX,
        sha256="a6cf2ab03f6109b32d39df844b032919d80248b43acc7c0e85783a14638ba176",
    ),
    "olympiadbench": Source(
        "Hothan/OlympiadBench",
        "OE_TO_maths_en_COMP",
        "train",
        _olympiad,
        "math",
        BOX,
        sha256="8d59df41850b911d51cce1d6e3542c9580cfc2318ce813967eda7806df40d455",
    ),
    "carp_en": Source(
        None,
        None,
        "test",
        _plain("content", "answer"),
        "math",
        BOX,
        sha256="18567ad99c7e9d919cabdb77f01af60282c24864e11d06bd6428e2596e404df0",
    ),
    "gsm8k": Source(
        "openai/gsm8k",
        "main",
        "test",
        _gsm8k,
        "math",
        BOX,
        sha256="4c5ba32d09592ac72af02de0370faf668ca055028f8a95f8b214c6c93e415a42",
    ),
    "theoremqa": Source(
        "TIGER-Lab/TheoremQA",
        None,
        "test",
        _theoremqa,
        "math",
        TYPED,
        left_out="they need a picture",
        sha256="b07afa2c4b4ac715980b5245eac9b7a7d4252d33e78ffaa747d56ce4f8b3fc36",
    ),
    "mmlu_pro": Source("TIGER-Lab/MMLU-Pro", None, "test", _mmlu_pro, "multiple_choice", CHOICE),
    "mmlu_stem": Source(
        "TIGER-Lab/MMLU-STEM",
        None,
        "test",
        _mmlu_stem,
        "multiple_choice",
        CHOICE,
        sha256="66e5c90fceda40fa4efa39ff717460b417e48f21575e8bffb36a60c16a146f3c",
    ),
    "gpqa": Source("Idavidrein/gpqa", "gpqa_diamond", "train", _gpqa, "multiple_choice", CHOICE),
    "aqua": Source(
        "deepmind/aqua_rat",
        "raw",
        "test",
        _aqua,
        "multiple_choice",
        CHOICE,
        sha256="0b482d372004b87c25e1742113a25cb7dd40fdd8bdc7601b67c822073f9236c9",
    ),
    "sat_math": Source(
        "mcaleste/sat_multiple_choice_math_may_23",
        None,
        "train",
        _sat_math,
        "multiple_choice",
        CHOICE,
        sha256="68825b126d5df086ddcd6925e63285d0b37a17c7574220272476ca026116cc02",
    ),
}


@dataclass(frozen=True)
class Benchmark:
    """The test rows of a benchmark, from the hub or a local folder. It has no training rows.

    Attributes:
        benchmark: a name of `BENCHMARKS`.
        data_dir: folder that holds the rows as a file in `<data_dir>/<benchmark>/` (`.jsonl`, `.json` or `.parquet`);
            None: from the hub.
        test: at most so many questions (drawn by seed, kept in their order); all by default.
        seed: of that choice.
        instruction: text before the question; None: the benchmark's own; empty: none.
        examples: worked examples, `{question, answer}`, shown as earlier turns.
        system: system message.
        template: prompt template, shipped or a path (`covary.prompts`); None: the algorithm's own.
        extract: how the answer is read from a completion before it is graded.
    """

    benchmark: str
    data_dir: str | None = None
    test: int | None = None
    seed: int = 0
    instruction: str | None = None
    examples: list[dict[str, str]] | None = None
    system: str | None = None
    template: str | None = None
    extract: ExtractorName = "none"

    def __post_init__(self) -> None:
        check_examples(self.examples)
        check_sizes(test=self.test)
        if self.benchmark not in BENCHMARKS:
            near = difflib.get_close_matches(self.benchmark, BENCHMARKS, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise UserError(f"benchmark: there is no {self.benchmark!r}; {hint}there are {', '.join(BENCHMARKS)}")

    def load(self) -> Task:
        """Read and normalise every row.

        Raises:
            UserError: no such file or hub data set, or a row without what its benchmark needs (file and row are named).
        """
        source, name = BENCHMARKS[self.benchmark], self.benchmark
        problems, notes = [], []
        for index, (where, row) in enumerate(self._rows(source)):
            try:
                problem = source.normalise(row)
            except (KeyError, ValueError, TypeError, AttributeError, IndexError, SyntaxError) as error:
                what = f"has no column {error}" if isinstance(error, KeyError) else str(error)
                raise UserError(f"{where}: is no row of {name}: {what}; it has {', '.join(map(str, row))}") from error
            problems.append((index, problem))
        kept = [(index, problem) for index, problem in problems if problem is not None]
        if len(kept) < len(problems):
            notes.append(f"{name}: left out {len(problems) - len(kept)} rows, {source.left_out}")
        if not kept:
            raise UserError(f"{name}: holds no rows")
        sha256 = digest([problem for _, problem in kept])
        if source.sha256 is not None and sha256 != source.sha256:
            notes.append(f"{name}: its rows are not those that covary's tests read (sha256 {sha256[:12]}...)")
        if self.test is not None and self.test < len(kept):
            kept = sorted(
                random.Random(derive_seed(self.seed, "limit", name)).sample(kept, self.test), key=lambda p: p[0]
            )
        instruction = source.instruction if self.instruction is None else self.instruction or None
        return Task(
            name=name,
            train=[],
            test=[
                Example(
                    id=f"{name}/{index}",
                    prompt=chat_messages(
                        problem.question, instruction=instruction, examples=self.examples, system=self.system
                    ),
                    answer=problem.answer,
                    given_prompt=[{"role": "user", "content": problem.question}],
                    columns={
                        name: value
                        for name, value in (("category", problem.category), ("tolerance", problem.tolerance))
                        if value is not None
                    },
                )
                for index, problem in kept
            ],
            grader=Grader(source.grader, self.extract),
            notes=notes,
        )

    def _rows(self, source: Source) -> Iterator[tuple[str, Row]]:
        """(what messages call it, row) of every row."""
        if self.data_dir is not None:
            yield from _file_rows(_file(Path(self.data_dir).expanduser(), self.benchmark))
        elif source.hub is None:
            raise UserError(f"{self.benchmark}: is on no hub that covary knows; name a folder with its file (data_dir)")
        else:
            table = hub_table(source.hub, source.subset, source.split, None)
            for index, row in enumerate(table):
                yield table.where(index), row


def all_of_reasoning_gym(test: int | None = None, template: str | None = None) -> ReasoningGym:
    """Every task of Reasoning Gym with its default parameters, 10 questions each, or `test` in all.

    `composite` needs a specification of its own, and `path_star` is in no list of Reasoning Gym's tasks.
    """
    names = sorted(set(DATASETS) - {"composite", "path_star"})
    return ReasoningGym(
        tasks={name: {} for name in names},
        train=0,
        test=10 * len(names) if test is None else test,
        instruction=TAGS,
        template=template,
        extract="answer_tag",
    )


def digest(problems: Sequence[Problem]) -> str:
    """SHA-256 of normalised rows in their order."""
    sha = hashlib.sha256()
    for problem in problems:
        sha.update(dump_line(astuple(problem)).encode("ascii"))
    return sha.hexdigest()


def _file(folder: Path, name: str) -> Path:
    """The one data file of a benchmark's folder; of several the one whose name says `test`."""
    inside = folder / name
    if not inside.is_dir():
        raise UserError(f"data_dir: there is no folder {inside}")
    files = sorted(path for path in inside.iterdir() if path.suffix in (".jsonl", ".json", ".parquet"))
    tests = [path for path in files if "test" in path.stem]
    chosen = tests if tests else files
    if len(chosen) != 1:
        found = ", ".join(path.name for path in files) or "none"
        raise UserError(
            f"data_dir: {inside} needs one .jsonl, .json or .parquet file (named *test* if there are others); it has {found}"
        )
    return chosen[0]


def _file_rows(path: Path) -> Iterator[tuple[str, Row]]:
    if path.suffix == ".parquet":
        table = parquet_table(path)
        yield from ((table.where(index), row) for index, row in enumerate(table))
    elif path.suffix == ".jsonl":
        yield from ((f"{path}, line {number}", row) for number, row in read_jsonl(path))
    else:
        try:
            rows: Any = json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise UserError(f"{path}: cannot be read as JSON ({error})") from error
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise UserError(f"{path}: takes a JSON array of objects")
        yield from ((f"{path}, item {number}", row) for number, row in enumerate(rows, start=1))
