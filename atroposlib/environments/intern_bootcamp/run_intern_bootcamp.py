"""Upstream's entry point; the same as running intern_bootcamp_env.py."""

from atroposlib.environments.intern_bootcamp.intern_bootcamp_env import InternBootcampEnv

if __name__ == "__main__":
    InternBootcampEnv.cli()
