"""Rows of data files by number, without holding them all: JSON Lines by byte offset, parquet and hub datasets in Arrow.

A million rows stay on disk or in Arrow's compact columns; a Python object is made of the row that is asked for.
"""

from __future__ import annotations

import bisect
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

from covary.jsonlines import line_offsets, parse_row
from covary.types import RunError, UserError

Row = dict[str, Any]

_BATCH = 1024  # rows that become Python objects at once, where all are read in order


class Table(Protocol):
    """Rows of one split, in an order that never changes."""

    name: str
    """Short: what the data are called."""
    source: str
    """What messages call the whole: a file, a folder, a hub id and split."""

    def __len__(self) -> int:
        """Number of rows."""
        ...

    def __iter__(self) -> Iterator[Row]:
        """All rows in order: faster than one by one."""
        ...

    def row(self, index: int) -> Row:
        """One row."""
        ...

    def where(self, index: int) -> str:
        """What a message calls a row."""
        ...

    def id(self, index: int) -> str:
        """A name that no other row of the table has, for rows without one of their own."""
        ...


class JsonLines:
    """A JSON Lines file: the offset and the physical line of every row, 16 bytes a row."""

    def __init__(self, path: Path) -> None:
        self.name, self.source = path.stem, str(path)
        self._lines, self._offsets = line_offsets(path)
        # Held open: a file that is replaced under its name is still the one that was counted.
        self._file = open(path, "rb")  # noqa: SIM115 (read from for as long as the table lives)
        self._stamp = self._state()

    def __len__(self) -> int:
        return len(self._lines)

    def __iter__(self) -> Iterator[Row]:
        return map(self.row, range(len(self)))

    def row(self, index: int) -> Row:
        """One row, read from the file.

        Raises:
            UserError: the line is no JSON object, with file and line.
            RunError: the file was written to since it was opened.
        """
        if self._state() != self._stamp:
            raise RunError(f"{self.source}: was changed while it was being read")
        start, end = int(self._offsets[index]), int(self._offsets[index + 1])
        line, _, _ = os.pread(self._file.fileno(), end - start, start).partition(b"\n")  # blank lines may follow
        return parse_row(line, self.where(index))

    def where(self, index: int) -> str:
        """File and physical line."""
        return f"{self.source}, line {self._lines[index]}"

    def id(self, index: int) -> str:
        """File stem and physical line."""
        return f"{self.name}/{self._lines[index]}"

    def _state(self) -> tuple[int, int]:
        state = os.fstat(self._file.fileno())
        return state.st_size, state.st_mtime_ns


class Arrow:
    """Record batches, mapped from disk.

    Args:
        name: what the data are called.
        source: what messages call the whole.
        files: (what messages call a part, its record batches), in order; rows are counted from 1 in each.
    """

    def __init__(self, name: str, source: str, files: Sequence[tuple[str, Sequence[Any]]]) -> None:
        self.name, self.source = name, source
        self._batches = [batch for _, batches in files for batch in batches]
        self._starts = [0, *accumulate(batch.num_rows for batch in self._batches)]
        self._files = [file for file, _ in files]
        self._file_starts = [0, *accumulate(sum(batch.num_rows for batch in batches) for _, batches in files)]

    def __len__(self) -> int:
        return self._starts[-1]

    def __iter__(self) -> Iterator[Row]:
        for start, batch in zip(self._starts, self._batches, strict=False):
            for offset in range(0, batch.num_rows, _BATCH):
                try:
                    rows = batch.slice(offset, _BATCH).to_pylist()
                except (ValueError, OverflowError):  # one of them cannot be a Python object: it is found and named
                    last = min(offset + _BATCH, batch.num_rows)
                    rows = [self.row(start + index) for index in range(offset, last)]
                yield from rows

    def row(self, index: int) -> Row:
        """One row.

        Raises:
            UserError: a value that cannot be a Python object (text that is not UTF-8), with file and row.
        """
        number = bisect.bisect_right(self._starts, index) - 1
        try:
            return self._batches[number].slice(index - self._starts[number], 1).to_pylist()[0]
        except UnicodeDecodeError as error:
            raise UserError(f"{self.where(index)}: holds text that is not valid UTF-8") from error
        except (ValueError, OverflowError) as error:
            raise UserError(f"{self.where(index)}: cannot be read ({_first_line(error)})") from error

    def where(self, index: int) -> str:
        """File and row, counted from 1."""
        file = bisect.bisect_right(self._file_starts, index) - 1
        return f"{self._files[file]}, row {index - self._file_starts[file] + 1}"

    def id(self, index: int) -> str:
        """Name and row, counted from 1 over all files."""
        return f"{self.name}/{index + 1}"


def parquet_table(path: Path) -> Arrow:
    """A parquet file, or all parquet files under a folder in the order of their names.

    Raises:
        UserError: no such file, none in the folder, or one that is no parquet.
    """
    parquet = _arrow("pyarrow.parquet", f"{path}: parquet files")
    files = sorted(path.rglob("*.parquet")) if path.is_dir() else [path]
    if not files:
        raise UserError(f"{path}: holds no file named *.parquet")
    read = []
    for file in files:
        try:
            read.append((str(file), _unpacked(parquet.ParquetFile(file, memory_map=True))))
        except (OSError, ValueError) as error:  # pyarrow's own errors derive from these
            raise UserError(f"{file}: cannot be read as parquet ({_first_line(error)})") from error
    return Arrow(path.stem, str(path), read)


def _unpacked(file: Any) -> list[Any]:
    """A parquet file's record batches, mapped from a temporary copy: rows of a compressed file have no places.

    The copy is unlinked at once and ends with the mapping. What of it is in memory, the system may take back.
    """
    import pyarrow

    with tempfile.NamedTemporaryFile(prefix="covary-", suffix=".arrow") as copy:
        with pyarrow.ipc.new_stream(copy, file.schema_arrow) as writer:
            for batch in file.iter_batches():
                writer.write_batch(batch)
        copy.flush()
        pyarrow.default_memory_pool().release_unused()
        return list(pyarrow.ipc.open_stream(pyarrow.memory_map(copy.name)))


def hub_table(path: str, subset: str | None, split: str, revision: str | None) -> Arrow:
    """A split of a hub dataset, of a folder laid out like one, or of what `save_to_disk` wrote.

    Raises:
        UserError: the library is missing, or it cannot load what was asked for.
    """
    datasets = _arrow("datasets", f"task.path: {path}: hub datasets")
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    folder = Path(path).expanduser()
    source = f"{path}, split {split}"
    try:
        if (folder / "state.json").is_file():
            data = datasets.load_from_disk(str(folder))
        elif (folder / "dataset_dict.json").is_file():
            data = datasets.load_from_disk(str(folder))[split]
        else:
            data = datasets.load_dataset(
                str(folder) if folder.is_dir() else path, subset, split=split, revision=revision
            )
    except KeyError as error:
        raise UserError(f"{path}: has no split {error}") from error
    except Exception as error:  # of the network, the hub, the builder, the files: each with its own type
        raise UserError(f"{source}: cannot be loaded ({type(error).__name__}: {_first_line(error)})") from error
    if len(data.data) != len(data):  # rows chosen by an index beside the table
        data = data.flatten_indices()
    name = Path(path).name or str(path)
    return Arrow(name, source, [(source, data.data.table.to_batches())])


def _arrow(module: str, what: str) -> Any:
    """An optional library, imported when first needed."""
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"{what} need {module.split('.')[0]}: pip install 'covary[data]'") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0]
