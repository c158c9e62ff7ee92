"""`python -m environments.intern_bootcamp serve|process|evaluate`."""

from environments.intern_bootcamp.intern_bootcamp_env import InternBootcampEnv

InternBootcampEnv.cli()
