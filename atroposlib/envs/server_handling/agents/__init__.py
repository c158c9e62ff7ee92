"""Any agent program on a rollout's own API key: dialects, budgets, the record of every call, and rows to train on."""
