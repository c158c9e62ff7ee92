"""Policy losses of the GRPO family as pure functions on tensors.

Shapes everywhere: B rows (sequences), T completion positions (padded), n groups. `mask` [B,T] is 1 where a token
is trained and 0 elsewhere: prompt, tool output, padding. Log-probabilities are natural logs, of the distribution
after temperature. Every loss is minimised. No function keeps state and none needs a trainer.

One step reads: `advantages` or `maxent` turn rewards into row weights, `policy` gives a loss per token and makes one
number of it.

Here are the choices that a config offers; they need no torch.
"""

from typing import Literal

AdvantageKind = Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "batch_std"]
PolicyLoss = Literal["clipped", "gspo", "gspo_token", "cispo", "sapo", "reinforce", "distill", "maxent"]
Aggregation = Literal["seq_mean_token_mean", "token_mean", "seq_sum_const"]
KLKind = Literal["k1", "k2", "k3"]
MismatchKind = Literal["none", "tis", "icepop", "seq_truncate", "seq_mask"]
MaxEntNLL = Literal["token_mean", "sum"]
KLControl = Literal["ziegler", "step"]
