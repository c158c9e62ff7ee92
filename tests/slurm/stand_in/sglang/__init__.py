"""Stands where SGLang would in tests of the SLURM scripts: same command line, same `/generate`, no GPU."""
