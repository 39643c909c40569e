"""Attention of branches in parts is the softmax over all keys: values, gradients, and what one product cannot hold."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from covary import partial_attention
from covary.attention import Forest
from covary.partial_attention import Blocks, add_part, attend_part, mask_of, scale_to_base_2

H, K, E = 4, 2, 8


def dense(query, key, value, sees, scale, groups=H // K):
    """Softmax attention over every packed token, masked; (N, H, E)."""
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    scores = torch.einsum("nhe,mhe->hnm", query, key) * scale
    return torch.einsum("hnm,mhe->nhe", scores.masked_fill(~sees, -torch.inf).softmax(-1), value)


def what_is_seen(prompts, branches, tree, window):
    """(N, N) from the meaning of a forest, token by token."""
    owner = [("prompt", g, t) for g, n in enumerate(prompts) for t in range(n)]
    owner += [(r, tree[r], prompts[tree[r]] + t) for r, n in enumerate(branches) for t in range(n)]

    def sees(of, other):
        same_tree = of[1] == other[1]
        own = other[0] in ("prompt", of[0])
        near = window is None or of[2] - other[2] < window
        return same_tree and own and other[2] <= of[2] and near

    return torch.tensor([[sees(of, other) for other in owner] for of in owner])


@st.composite
def forests(draw):
    prompts = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    counts = [draw(st.integers(0, 4)) for _ in prompts]
    branches = [draw(st.integers(0, 7)) for count in counts for _ in range(count)]
    tree = [g for g, count in enumerate(counts) for _ in range(count)]
    return prompts, branches, tree


def attend_only(way: str, patch: pytest.MonkeyPatch) -> None:
    """Branches take one of the two ways, whatever their length."""
    one = getattr(Forest, way)
    patch.setattr(Forest, "_in_parts", one)
    patch.setattr(Forest, "_at_once", one)


@settings(deadline=None, max_examples=60)
@given(
    forests(),
    st.sampled_from([None, 1, 3, 20]),
    st.sampled_from([None, 0.5]),
    st.sampled_from([1, 60, 2**22]),
    st.sampled_from([1, 3, 128]),
    st.sampled_from(["_in_parts", "_at_once"]),
)
def test_values_and_gradients_are_those_of_dense_attention(forest, window, scale, scores, queries, way):
    prompts, branches, tree = forest
    count = sum(prompts) + sum(branches)
    draw = torch.Generator().manual_seed(count)
    tensors = [
        torch.randn(count, heads, E, generator=draw, dtype=torch.float64, requires_grad=True) for heads in (H, K, K)
    ]
    outer = torch.randn(count, H, E, generator=draw, dtype=torch.float64)
    sees = what_is_seen(prompts, branches, tree, window)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partial_attention, "_SCORES", scores)
        patch.setattr(partial_attention, "_CAUSAL_QUERIES", queries)
        attend_only(way, patch)
        found = Forest.of(prompts, branches, tree, torch.device("cpu")).attend(
            torch.nn.Identity(), *tensors, scale, window
        )
        gradients = torch.autograd.grad(found, tensors, outer)
    expected = dense(*tensors, sees, E**-0.5 if scale is None else scale)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, tensors, outer), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("way", ["_in_parts", "_at_once"])
def test_a_key_that_a_token_does_not_see_may_fit_it_as_well_as_it_likes(way, monkeypatch):
    """A branch of two tokens beside one of three is padded by its first, whose score with the second is 400 nats."""
    attend_only(way, monkeypatch)
    query, key = torch.zeros(6, 1, 1), torch.zeros(6, 1, 1)
    query[1] = key[2] = 20.0
    tensors = [x.requires_grad_() for x in (query, key, torch.arange(6.0).view(6, 1, 1))]
    found = Forest.of([1], [2, 3], [0, 0], torch.device("cpu")).attend(torch.nn.Identity(), *tensors, 1.0, None)
    expected = dense(*tensors, what_is_seen([1], [2, 3], [0, 0], None), 1.0, groups=1)
    torch.testing.assert_close(found, expected)
    gradients, wanted = (torch.autograd.grad((x**2).sum(), tensors) for x in (found, expected))
    torch.testing.assert_close(gradients, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("way", ["_in_parts", "_at_once"])
def test_a_value_that_is_not_finite_stays_in_its_branch(way, monkeypatch):
    attend_only(way, monkeypatch)
    prompts, branches, tree = [3, 2], [4, 2, 3], [0, 0, 1]
    draw = torch.Generator().manual_seed(0)
    tensors = [torch.randn(14, heads, E, generator=draw) for heads in (H, K, K)]
    broken = slice(5, 9)  # the first branch
    for tensor in tensors:
        tensor[broken] = torch.nan
    found = Forest.of(prompts, branches, tree, torch.device("cpu")).attend(torch.nn.Identity(), *tensors, None, None)
    finite = found.isfinite().flatten(1).all(1)
    assert finite.tolist() == [not broken.start <= i < broken.stop for i in range(14)]


def test_branches_are_padded_with_those_of_more_than_half_their_length_where_that_saves_much():
    lengths = [1, 31, 8, 0, 16, 5, 15, 7, 17]
    assert partial_attention._similar(lengths) == [[1, 4, 8], [2, 6], [0, 5, 7]]
    assert partial_attention._similar([3, 3]) == [[0, 1]]
    assert partial_attention._similar([2, 4, 0, 3]) == [[0, 1, 3]]
    assert partial_attention._similar([0]) == partial_attention._similar([]) == []


def test_a_part_that_nobody_sees_has_no_weight_beside_another():
    draw = torch.Generator().manual_seed(0)
    query = torch.randn(1, K, 1, H // K, E, generator=draw) * scale_to_base_2(E, None)
    key, value, other_key, other_value = (torch.randn(1, K, 3, E, generator=draw) for _ in range(4))
    seen = attend_part(query, key, value, None)
    unseen = attend_part(query, other_key, other_value, mask_of(torch.ones(1, 1, 1, 1, 3, dtype=torch.bool)))
    assert torch.equal(add_part(*seen, *unseen), seen[0])
    assert torch.equal(add_part(*unseen, *seen), seen[0])


def test_the_log_of_the_sum_of_exponentials_is_to_base_2():
    draw = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(1, K, 1, H // K, E, generator=draw), *torch.randn(2, 1, K, 5, E, generator=draw)
    _, log_sum = attend_part(query * scale_to_base_2(E, 0.3), key, value, None)
    expected = (torch.einsum("bkqje,bkse->bkqjs", query, key) * 0.3).logsumexp(-1) / math.log(2)
    torch.testing.assert_close(log_sum, expected)


def test_everything_seen_is_no_mask():
    assert mask_of(torch.zeros(2, 3, dtype=torch.bool)) is None


@pytest.mark.parametrize("lengths", [[3, 3], [2, 0, 4], [0], [], [1, 5, 0]])
def test_blocks_give_back_what_was_packed(lengths):
    packed = torch.arange(float(sum(lengths)))
    blocks = Blocks.of(lengths, torch.device("cpu"))
    assert blocks.valid.sum(1).tolist() == lengths
    assert torch.equal(blocks.pack(blocks.unpack(packed)), packed)
