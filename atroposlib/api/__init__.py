"""The trajectory API: environments post scored groups, trainers pull batches.

`atroposlib.api:app` is the server; it is built when first asked for, so that clients import quickly.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastapi import FastAPI

    from atroposlib.api.server import app

__all__ = ["app"]


def __getattr__(name: str) -> "FastAPI":
    if name == "app":
        from atroposlib.api.server import app

        return app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
