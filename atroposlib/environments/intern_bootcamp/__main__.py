"""`python -m atroposlib.environments.intern_bootcamp serve|process|evaluate`."""

from atroposlib.environments.intern_bootcamp.intern_bootcamp_env import InternBootcampEnv

InternBootcampEnv.cli()
