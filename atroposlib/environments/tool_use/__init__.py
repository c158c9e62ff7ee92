"""What environments with tools share: rules for comparing calls, problems, and tools that run."""
