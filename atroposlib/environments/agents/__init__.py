"""Agent programs as environments: each file is one to copy, with what the agent needs and nothing else."""
