"""Settings of every test: no hub, no wandb, no colour."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "disabled")
os.environ.setdefault("NO_COLOR", "1")
