"""Your own parquet files, or folders of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from covary.tasks.rows import Rows
from covary.tasks.tables import Table, parquet_table
from covary.tasks.task import file_title


@dataclass(frozen=True)
class Parquet(Rows):
    """Rows of parquet files. The settings are those of `Rows`; `path` and `test_path` are files or folders of them."""

    def tables(self) -> tuple[Table, Table | None]:
        """The files' rows.

        Raises:
            UserError: a file that cannot be read, or a folder without parquet files.
        """
        train = parquet_table(Path(self.path).expanduser())
        return train, None if self.test_path is None else parquet_table(Path(self.test_path).expanduser())

    def title(self, table: Table) -> str:
        """The file's stem, or the folder's name."""
        return file_title(Path(self.path))
