"""Games and worlds: each file one environment of `MultiTurnEnv`, under the name that upstream gives it."""
