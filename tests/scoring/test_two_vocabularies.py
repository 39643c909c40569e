"""Scores of two streams whose vocabularies differ by padding, and those of a teacher's own."""

from __future__ import annotations

import pytest
import torch

from covary.engines.local import LocalEngine
from covary.types import Completion, Example, Group, Score, Stream
from tests.models import random_llama

PAIR = (Stream("teacher"), Stream("policy"))
GROUP = Group(
    Example("e", ""),
    {"prompt": [5, 6, 7], "teacher": [9, 5, 6, 7]},
    [Completion([1, 2, 3], "", "eos"), Completion([4], "", "eos")],
)


@pytest.mark.parametrize(("policy", "teacher"), [(259, 259), (259, 270), (270, 259)])
@pytest.mark.parametrize("quantity", ["kl", ("jsd", 0.5), ("jsd", 0.0), ("tempered_kl", 2.0)])
def test_distributions_are_compared_over_what_both_have(policy: int, teacher: int, quantity: object) -> None:
    """The logits of the shorter vocabulary, before the softmax: plain forward passes give the same."""
    models = {"policy": random_llama(policy, seed=1, scale=3.0), "teacher": random_llama(teacher, seed=2, scale=3.0)}
    score = Score("d", PAIR, quantity)  # type: ignore[arg-type]
    with torch.no_grad():
        found = LocalEngine(models["policy"], frozen={"teacher": models["teacher"]}).score([GROUP], [score])["d"]
        for row, values in zip(GROUP.completions, found, strict=True):
            logps = []
            for name, context in (("teacher", "teacher"), ("policy", "prompt")):
                ids = GROUP.contexts[context] + row.tokens
                logits = models[name](input_ids=torch.tensor([ids])).logits[0, len(GROUP.contexts[context]) - 1 : -1]
                logps.append(logits[:, : min(policy, teacher)].double())
            p, q = logps
            tau = 2.0 if quantity == ("tempered_kl", 2.0) else 1.0
            p, q = (p / tau).log_softmax(-1), (q / tau).log_softmax(-1)
            expected = (p.exp() * (p - q)).sum(-1)
            if quantity == ("jsd", 0.5):
                m = (0.5 * p.exp() + 0.5 * q.exp()).log()
                expected = 0.5 * (p.exp() * (p - m)).sum(-1) + 0.5 * (q.exp() * (q - m)).sum(-1)
            assert isinstance(values, torch.Tensor)
            torch.testing.assert_close(values.double(), expected, rtol=0, atol=1e-5)
            assert float(values.min()) > 1e-3
