"""Policy losses of the GRPO family as pure functions on tensors.

Shapes everywhere: B rows (sequences), T completion positions (padded), n groups. `mask` [B,T] is 1 where a token
is trained and 0 elsewhere: prompt, tool output, padding. Log-probabilities are natural logs, of the distribution
after temperature. Every loss is minimised. No function keeps state and none needs a trainer.

One step reads: `advantages` or `maxent` turn rewards into row weights, `policy` gives a loss per token and makes one
number of it, `controllers` move beta and tau.
"""
