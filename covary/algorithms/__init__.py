"""One file per algorithm. The recipe's `algorithm.name` is a key of ALGORITHMS."""

from __future__ import annotations

from covary.algorithms.dr_grpo import DrGRPO
from covary.algorithms.grpo import GRPO
from covary.algorithms.gvpo import GVPO
from covary.algorithms.sft import SFT
from covary.batch import Algorithm

ALGORITHMS: dict[str, type[Algorithm]] = {"gvpo": GVPO, "grpo": GRPO, "dr_grpo": DrGRPO, "sft": SFT}
