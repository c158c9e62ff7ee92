"""Child processes for code that may hang, crash or do worse.

`workers.WorkerPool` is for code that is trusted but fragile: our verifiers, generators, a judge of mathematics.
"""
