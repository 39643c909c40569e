"""Policy-gradient on-policy distillation, per token (Thinking Machines' on-policy distillation; the base of TRL's iw_opd).

    A_t = sg[ log pi_t(y_t) - log pi_old(y_t) ]
    L   = - mean over tokens of  A_t * log pi(y_t)

REINFORCE on minus the sampled KL of each token, without what follows it: the expected gradient is that of the token-wise
reverse KL on given prefixes. Tokens are compared one by one, so teacher and student need one tokenizer.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from covary.batch import Algorithm, Batch, Scores
from covary.ops import log_ratio, masked_mean, masked_sum
from covary.types import Score, Stream


@dataclass(frozen=True)
class PGOPDToken(Algorithm):
    """REINFORCE with the log-ratio to the teacher as the reward of a token."""

    needs_reward = False
    frozen = (Score("teacher", Stream("teacher")), Score("old", Stream("old")))

    def loss(self, scores: Scores, batch: Batch) -> Float[Tensor, ""]:
        """Mean over tokens of the advantage times the log-prob."""
        advantage = log_ratio(batch["teacher"], batch["old"], batch.mask)
        return -masked_sum(advantage * scores["policy"], batch.mask).sum() / batch.total("tokens")

    def metrics(self, scores: Scores, batch: Batch) -> dict[str, float]:
        """Log-ratio of the policy to the teacher, in nats per token of a completion."""
        return {
            "pg_opd_token/log_ratio": float(
                masked_mean(log_ratio(scores["policy"], batch["teacher"], batch.mask), batch.mask).mean()
            )
        }
