"""Datasets of the Hugging Face hub, and folders that the `datasets` library knows."""

from __future__ import annotations

from dataclasses import dataclass

from covary.tasks.rows import Rows
from covary.tasks.tables import Table, hub_table
from covary.types import UserError


@dataclass(frozen=True)
class Hub(Rows):
    """Rows of hub datasets, of folders laid out like one, or of what `save_to_disk` wrote.

    Attributes:
        subset: configuration of the dataset at `path`, where it has several.
        split: split with the training rows.
        test_split: split with the test rows, of `test_path` where that is given, else of `path`. None: `test` of
            `test_path`; without `test_path` no rows of their own.
        revision: branch, tag or commit of the dataset at `path`.
    """

    subset: str | None = None
    split: str = "train"
    test_split: str | None = None
    revision: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.test_path is None and self.test_split == self.split:
            raise UserError(f"test_split: {self.test_split} is the split of the training rows; hold some out with test")

    def tables(self) -> tuple[Table, Table | None]:
        """The rows of the two splits.

        Raises:
            UserError: something that the `datasets` library cannot load, or no such library.
        """
        train = hub_table(self.path, self.subset, self.split, self.revision)
        if self.test_path is not None:
            return train, hub_table(self.test_path, None, self.test_split or "test", None)
        if self.test_split is not None:
            return train, hub_table(self.path, self.subset, self.test_split, self.revision)
        return train, None
