"""Your own JSON Lines files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from covary.tasks.rows import Rows
from covary.tasks.tables import JsonLines, Table
from covary.tasks.task import file_title


@dataclass(frozen=True)
class Jsonl(Rows):
    """Rows of JSON Lines files. The settings are those of `Rows`; `path` and `test_path` are files."""

    def tables(self) -> tuple[Table, Table | None]:
        """The files' rows.

        Raises:
            UserError: a file that cannot be read.
        """
        train = JsonLines(Path(self.path).expanduser())
        return train, None if self.test_path is None else JsonLines(Path(self.test_path).expanduser())

    def title(self, table: Table) -> str:
        """The file's stem, or the folder's name."""
        return file_title(Path(self.path))
