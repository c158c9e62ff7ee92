"""Child processes for code that may hang, crash or do worse.

`workers.WorkerPool` is for code that is trusted but fragile: our verifiers, generators, a judge of mathematics.
`sandbox.Sandbox` is for programs that nobody trusts; `python -m atroposlib.sandbox` shows whether this machine can hold
one. Where a layer is missing, nothing is run.

`keeper` is for programs that run as this user, such as agents: whatever they start ends with them.

workers      worker_main: the child
keeper       run by its path, as the parent of one program
sandbox      which layers hold here    programs: one program in bubblewrap, watched
             usage: of what it is limited in    seccomp: its filter
"""
