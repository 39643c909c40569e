"""Plans of several sources: who answers what, in which order; and token-wise mixtures of policy and teacher."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from covary.rollout import decoding
from covary.rollout.dataset import DatasetRollout
from covary.rollout.mixture import MixtureRollout
from covary.rollout.server import ServerRollout
from covary.rollout.sources import SourcesRollout
from covary.rollout.transformers import TransformersRollout
from covary.types import Completion, Example, Group, Request, Sampling
from tests.models import byte_tokenizer, random_llama

TOKENIZER = byte_tokenizer()
POLICY = random_llama(seed=1, scale=4.0)
TEACHER = random_llama(vocabulary=270, seed=2, scale=4.0)  # the same tokens, and padding
SAMPLING = Sampling(max_tokens=6)


def group(number: int, completions: list[str] | None = None) -> Group:
    ids = TOKENIZER.encode(f"question {number}")
    example = Example(f"e{number}", "", completions=completions, rewards=[1.0] * len(completions or []) or None)
    return Group(example, {"prompt": ids, "teacher": [*TOKENIZER.encode("<|im_start|>"), *ids]})


def mixture(**changes: Any) -> MixtureRollout:
    return MixtureRollout(POLICY, TOKENIZER, TEACHER, teacher_context="teacher", **changes)


def sources() -> SourcesRollout:
    return SourcesRollout(
        {
            "policy": TransformersRollout(POLICY, TOKENIZER),
            "dataset": DatasetRollout(TOKENIZER),
            "mixed": mixture(),
        }
    )


class TestSources:
    def test_every_request_goes_to_its_source_and_stays_in_its_place(self) -> None:
        plan = [Request(1, source="dataset"), Request(2, learn=False), Request(1, source="mixed", teacher_share=0.5)]
        (done,) = sources().generate([plan], [group(0, ["given"])], SAMPLING, seed=3)
        assert [c.source for c in done.completions] == ["dataset", "policy", "policy", "mixed"]
        assert [c.learn for c in done.completions] == [True, False, False, True]
        assert done.completions[0].text == "given"
        assert done.rewards is None

    def test_samples_of_the_policy_do_not_depend_on_other_requests(self) -> None:
        alone = TransformersRollout(POLICY, TOKENIZER).generate([[Request(2)]], [group(0)], SAMPLING, seed=3)
        plan = [Request(1, source="dataset"), Request(2)]
        (done,) = sources().generate([plan], [group(0, ["given"])], SAMPLING, seed=3)
        assert [c.tokens for c in done.completions[1:]] == [c.tokens for c in alone[0].completions]

    def test_plans_may_differ_between_prompts(self) -> None:
        plans = [[Request(1, source="dataset")], [Request(2)], []]
        done = sources().generate(plans, [group(0, ["a"]), group(1), group(2)], SAMPLING, seed=3)
        assert [[c.source for c in g.completions] for g in done] == [["dataset"], ["policy"] * 2, []]
        assert [g.example.id for g in done] == ["e0", "e1", "e2"]

    def test_data_with_fewer_completions_than_asked_for_give_what_they_have(self) -> None:
        plan = [Request(3, source="dataset"), Request(1)]
        (done,) = sources().generate([plan], [group(0, ["a", "b"])], SAMPLING, seed=3)
        assert [c.source for c in done.completions] == ["dataset", "dataset", "policy"]

    def test_weights_and_states_reach_every_engine(self) -> None:
        both = sources()
        both.load_weights(None, 7)
        (done,) = both.generate([[Request(1), Request(1, source="mixed")]], [group(0)], SAMPLING, seed=3)
        assert [c.weights_version for c in done.completions] == [7, 7]
        state = both.state()
        assert set(state) == {"policy", "dataset", "mixed"}
        both.load_state(state)


class TestMixture:
    def logps(self, tokens: list[int], temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        """(T, V) of policy and teacher, each behind its own prompt, in plain forward passes."""
        both = []
        for model, context in ((POLICY, "prompt"), (TEACHER, "teacher")):
            prompt = group(0).contexts[context]
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
            both.append((logits[:, :259].double() / temperature).log_softmax(-1))  # the teacher's padding cut
        return both[0], both[1]

    @pytest.mark.parametrize("temperature", [1.0, 0.6])
    @pytest.mark.parametrize("copied", ["both", "the policy's", "neither"])
    def test_log_probs_are_those_of_the_mixture_of_the_two_distributions(
        self, temperature: float, copied: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        of_policy = 4 * len(group(0).contexts["prompt"])  # the teacher's prompt is longer
        limit = {"both": 2 * of_policy, "the policy's": of_policy, "neither": 0}[copied]
        monkeypatch.setattr(decoding, "_COPIED_TOKENS", limit)
        request = Request(4, source="mixed", teacher_share=0.3)
        sampling = Sampling(max_tokens=6, temperature=temperature)
        (done,) = mixture().generate([[request]], [group(0)], sampling, seed=3)
        for row in done.completions:
            assert row.source == "mixed"
            at = (torch.arange(len(row.tokens)), row.tokens)
            policy, teacher = (p[at].exp() for p in self.logps(row.tokens, temperature))
            expected = (0.3 * teacher + 0.7 * policy).log()
            torch.testing.assert_close(torch.tensor(row.logps).double(), expected, rtol=0, atol=1e-5)

    def test_frequencies(self) -> None:
        """The first token of 20000 rows against a * teacher + (1 - a) * policy."""
        share, rows = 0.4, 20_000
        request = Request(rows, source="mixed", teacher_share=share)
        (done,) = mixture().generate([[request]], [group(0)], Sampling(max_tokens=1), seed=5)
        policy, teacher = (p[0].exp() for p in self.logps([0]))
        expected = share * teacher + (1 - share) * policy
        seen = torch.bincount(torch.tensor([c.tokens[0] for c in done.completions]), minlength=259) / rows
        error = (expected * (1 - expected) / rows).sqrt()
        assert ((seen - expected).abs() < 5 * error + 2e-4).all()
        assert float((seen - policy).abs().sum()) > 0.2

    @pytest.mark.parametrize(
        ("share", "model", "context"), [(0.0, POLICY, "prompt"), (1.0, random_llama(seed=2, scale=4.0), "teacher")]
    )
    def test_without_a_share_it_is_the_policy_and_with_all_of_it_the_teacher(
        self, share: float, model: Any, context: str
    ) -> None:
        request = Request(3, source="mixed", teacher_share=share)
        both = MixtureRollout(POLICY, TOKENIZER, model, teacher_context="teacher")
        (mixed,) = both.generate([[request]], [group(0)], SAMPLING, seed=3)
        alone = replace(group(0), contexts={"prompt": group(0).contexts[context]})
        (plain,) = TransformersRollout(model, TOKENIZER).generate([[Request(3)]], [alone], SAMPLING, seed=3)
        assert [c.tokens for c in mixed.completions] == [c.tokens for c in plain.completions]

    @pytest.mark.parametrize(("policy", "teacher"), [(259, 270), (270, 259)])
    def test_padding_of_either_vocabulary(self, policy: int, teacher: int) -> None:
        """The teacher's is cut, and of the policy's the teacher has none."""
        ours, theirs = random_llama(vocabulary=policy, seed=1), random_llama(vocabulary=teacher, seed=2)
        if teacher < policy:
            theirs.resize_token_embeddings(policy)  # reads every id, and says its own only
            theirs.lm_head = torch.nn.Linear(32, teacher, bias=False)
        engine = MixtureRollout(ours, TOKENIZER, theirs, teacher_context="teacher")
        plan = [Request(40, source="mixed", teacher_share=0.5)]
        (done,) = engine.generate([plan], [group(0)], SAMPLING, seed=3)
        tokens = {token for row in done.completions for token in row.tokens}
        assert max(tokens) < policy
        assert (max(tokens) >= 259) == (policy == 270)

    def test_rows_do_not_depend_on_the_company_they_keep(self) -> None:
        request = Request(3, source="mixed", teacher_share=0.3)
        groups = [group(n) for n in range(4)]
        sampling = Sampling(max_tokens=12)
        together = mixture().generate([[request]] * 4, groups, sampling, seed=3)
        engine = mixture()
        engine.cache_bytes = 1
        alone = engine.generate([[request]] * 4, groups, sampling, seed=3)
        assert [[c.tokens for c in g.completions] for g in together] == [
            [c.tokens for c in g.completions] for g in alone
        ]

    @pytest.mark.parametrize("engine", ["transformers", "server"])
    def test_other_engines_refuse_mixtures(self, engine: str) -> None:
        other: Any = TransformersRollout(POLICY, TOKENIZER)
        if engine == "server":
            other = ServerRollout("http://localhost:1", "m", TOKENIZER)
        with pytest.raises(ValueError, match=r"the policy only|'mixed'"):
            other.generate([[Request(1, source="mixed", teacher_share=0.2)]], [group(0)], SAMPLING, seed=0)
        with pytest.raises(ValueError, match="samples the mixed only"):
            mixture().generate([[Request(1)]], [group(0)], SAMPLING, seed=0)


def test_a_mixtures_rows_are_no_samples_of_the_policy() -> None:
    """`kl/sampling` and the doctor read rows of the policy alone."""
    from covary.metrics import is_watched

    assert not is_watched(Completion([1], "a", "eos", logps=[-1.0], source="mixed"))
    assert is_watched(Completion([1], "a", "eos", logps=[-1.0]))
