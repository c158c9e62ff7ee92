"""The edge of every command: an error becomes one sentence and an exit code."""

import errno
import logging
import sys
from collections.abc import Callable

import typer

from atroposlib.errors import AtroposError


def run(app: typer.Typer, name: str, *, log_level: int | None = logging.WARNING) -> None:
    """Run a typer app. Exit 0 done, 1 failed with a sentence, 2 wrong usage, 130 on Ctrl-C.

    Args:
        log_level: of log lines on stderr; None leaves logging to the command.
    """
    if log_level is not None:
        plain = "%(message)s" if log_level >= logging.WARNING else "%(asctime)s %(levelname)s %(name)s: %(message)s"
        logging.basicConfig(format=plain, level=log_level, stream=sys.stderr)
    try:
        app(prog_name=name)
    except AtroposError as error:
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(1)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        where = f" at {error.filename}" if error.filename else ""
        print(f"{name}: no room on the disk{where} ({error.strerror}); free some and try again", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print(f"{name}: stopped; nothing half-written is left", file=sys.stderr)
        sys.exit(130)


def command(function: Callable[..., None], help_text: str | None = None) -> typer.Typer:
    """An app with one command."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(help=help_text)(function)
    return app
