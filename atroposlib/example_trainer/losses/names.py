"""The choices that a config offers; free of torch, so that a config can be checked without it."""

from typing import Literal

AdvantageKind = Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "batch_std"]
PolicyLoss = Literal["clipped", "gspo", "gspo_token", "cispo", "sapo", "reinforce", "distill", "maxent"]
Aggregation = Literal["seq_mean_token_mean", "token_mean", "seq_sum_const"]
KLKind = Literal["k1", "k2", "k3"]
MismatchKind = Literal["none", "tis", "icepop", "seq_truncate", "seq_mask"]
MaxEntNLL = Literal["token_mean", "sum"]
KLControl = Literal["ziegler", "step"]
