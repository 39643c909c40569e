"""An algorithm of your own: learn from every pair of completions of a prompt, the better against the worse.

    python examples/own_algorithm.py [RUN_FOLDER]

    L = - 1/B * sum over pairs (i, j) of a group with R_i > R_j of  log sigmoid(beta * (d_i - d_j)),
    d = log pi(y|x) - log pi_old(y|x)

The rows of a group meet in the loss, so it is `coupled`: covary never splits a group without saying so to the gradient.
"""

import sys
from dataclasses import dataclass

import torch
from torch.nn.functional import logsigmoid

import covary
from covary import Algorithm, Score, Stream
from covary.ops import masked_sum


@dataclass(frozen=True)
class Pairwise(Algorithm):
    """Logistic loss on the pairs within a group."""

    beta: float = 0.5

    min_group = 2
    coupled = True
    frozen = (Score("old", Stream("old")),)

    def loss(self, scores, batch):
        """Every pair counts once, for the row with the higher reward."""
        delta = self.beta * masked_sum(scores["policy"] - batch["old"], batch.mask)
        better = (batch.rewards[:, None] > batch.rewards) & (batch.group[:, None] == batch.group)
        return -torch.where(better, logsigmoid(delta[:, None] - delta), 0).sum() / batch.total("rows")

    def metrics(self, scores, batch):
        """How many pairs there were to learn from."""
        better = (batch.rewards[:, None] > batch.rewards) & (batch.group[:, None] == batch.group)
        return {"pairwise/pairs": float(better.sum())}


if __name__ == "__main__":
    trained = covary.train(
        "recipes/quickstart.yaml",
        algorithm=Pairwise(),
        steps=4,
        rollout={"prompts": 16, "completions": 8},
        optimizer={"prompts": 8},
        task={"test": 20},
        eval={"every": None, "samples": 1},
        out=sys.argv[1] if len(sys.argv) > 1 else "runs/own_algorithm",
    )
    print(f"{trained.metrics['pairwise/pairs']:.0f} pairs an update, reward {trained.metrics['reward/mean']:.2f}")
