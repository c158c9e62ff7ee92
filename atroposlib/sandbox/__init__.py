"""Child processes for code that may hang, crash or do worse.

`workers.WorkerPool` is for code that is trusted but fragile: our verifiers, generators, a judge of mathematics.
`sandbox.Sandbox` is for programs that nobody trusts; `python -m atroposlib.sandbox` shows whether this machine can hold
one. Where a layer is missing, nothing is run.

workers      worker_main: the child
sandbox      programs: one program in bubblewrap, watched    seccomp: its filter    host: which layers hold here
"""
