"""A stand-in for SGLang's router in the SLURM tests."""
