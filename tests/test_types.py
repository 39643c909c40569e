"""The nouns without torch."""

from __future__ import annotations

import pytest

from covary.types import Completion, Role


@pytest.mark.parametrize(
    ("text", "roles", "valid"),
    [
        ("so 4", ["sampled", "context", "answer"], True),
        (" \n", ["sampled", "context", "answer"], False),  # closed at once
        ("so 4", ["sampled", "sampled", "sampled"], False),  # never closed
        ("so 4", None, False),
    ],
)
def test_a_valid_trace_is_closed_and_not_empty(text: str, roles: list[Role] | None, valid: bool) -> None:
    assert Completion([1, 2, 3], text, "stop_string", roles=roles).valid_trace is valid
