"""One file per algorithm. The recipe's `algorithm.name` is a key of ALGORITHMS."""

from __future__ import annotations

from covary.algorithms.cispo import CISPO
from covary.algorithms.covrl import CoVRL
from covary.algorithms.covrl_jsd import CoVRLJSD
from covary.algorithms.dapo import DAPO
from covary.algorithms.dpo import DPO
from covary.algorithms.dr_grpo import DrGRPO
from covary.algorithms.gkd import GKD
from covary.algorithms.gmpo import GMPO
from covary.algorithms.gpg import GPG
from covary.algorithms.grpo import GRPO
from covary.algorithms.gspo import GSPO
from covary.algorithms.gvpo import GVPO
from covary.algorithms.gvpo_opd import GVPOOPD
from covary.algorithms.jlb import JLB
from covary.algorithms.jlb_grpo import JLBGRPO
from covary.algorithms.latro import LaTRO
from covary.algorithms.latro_grpo import LaTROGRPO
from covary.algorithms.minillm import MiniLLM
from covary.algorithms.pg_opd_sequence import PGOPDSequence
from covary.algorithms.pg_opd_token import PGOPDToken
from covary.algorithms.raft import RAFT
from covary.algorithms.ravr import RAVR
from covary.algorithms.ravr_grpo import RAVRGRPO
from covary.algorithms.reinforce_pp import ReinforcePP
from covary.algorithms.reinforce_pp_baseline import ReinforcePPBaseline
from covary.algorithms.remax import ReMax
from covary.algorithms.rloo import RLOO
from covary.algorithms.rlpr import RLPR
from covary.algorithms.seqkd import SeqKD
from covary.algorithms.sft import SFT
from covary.algorithms.supervised_kd import SupervisedKD
from covary.algorithms.verifree import VeriFree
from covary.algorithms.verifree_grpo import VeriFreeGRPO
from covary.batch import Algorithm

ALGORITHMS: dict[str, type[Algorithm]] = {
    "gvpo": GVPO,
    "grpo": GRPO,
    "dr_grpo": DrGRPO,
    "dapo": DAPO,
    "rloo": RLOO,
    "remax": ReMax,
    "reinforce_pp": ReinforcePP,
    "reinforce_pp_baseline": ReinforcePPBaseline,
    "gspo": GSPO,
    "gmpo": GMPO,
    "gpg": GPG,
    "cispo": CISPO,
    "raft": RAFT,
    "dpo": DPO,
    "sft": SFT,
    "gvpo_opd": GVPOOPD,
    "seqkd": SeqKD,
    "supervised_kd": SupervisedKD,
    "gkd": GKD,
    "minillm": MiniLLM,
    "pg_opd_sequence": PGOPDSequence,
    "pg_opd_token": PGOPDToken,
    "covrl": CoVRL,
    "covrl_jsd": CoVRLJSD,
    "latro": LaTRO,
    "latro_grpo": LaTROGRPO,
    "jlb": JLB,
    "jlb_grpo": JLBGRPO,
    "verifree": VeriFree,
    "verifree_grpo": VeriFreeGRPO,
    "rlpr": RLPR,
    "ravr": RAVR,
    "ravr_grpo": RAVRGRPO,
}
