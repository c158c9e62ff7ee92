"""The edge of every command: one look of its help, addresses checked, a bar for long reading, errors as sentences.

An error becomes one sentence and an exit code.
"""

import errno
import io
import logging
import re
import socket
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from inspect import cleandoc
from pathlib import Path
from typing import Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand
from typer.models import ArgumentInfo, OptionInfo

from atroposlib import calm_log
from atroposlib.api.auth import is_server_url
from atroposlib.errors import AtroposError, ConfigError, LaunchError
from atroposlib.paths import remedy
from atroposlib.system_limits import limit_reached

Click: TypeAlias = Any
"""An object of the click that typer brings: by its version a package of that name, or a copy of its own."""

_HELP_FLAGS = {"help_option_names": ["-h", "--help"], "terminal_width": 100}
_INTERRUPTED = 130  # by Ctrl-C; typer makes a SystemExit of it
_UPDATE_BYTES = 8_000_000
_METAVARS: dict[object, str] = {int: "N", float: "X", Path: "PATH"}


class HelpCommand(TyperCommand):
    """One command, whose arguments are called by their names alone."""

    def collect_usage_pieces(self, ctx: Click) -> list[str]:
        """Return the words of the usage line: arguments as they are named, without braces."""
        return [re.sub(r"^\{(.+)\}", r"\1", piece) for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Click, formatter: Click) -> None:
        """Write arguments and options; the name of an argument says what it is, not its Python type."""
        sections: dict[str, list[tuple[str, str]]] = {"argument": [], "option": []}
        for parameter in self.get_params(ctx):
            if record := parameter.get_help_record(ctx):
                name = re.sub(r" <.*>$", "", record[0]) if parameter.param_type_name == "argument" else record[0]
                sections[parameter.param_type_name].append((name, record[1]))
        for title, records in sections.items():
            if records:
                with formatter.section(f"{title.capitalize()}s"):
                    formatter.write_dl(records)


class App(typer.Typer):
    """A typer app of this look: one command, or several below one word."""

    def __init__(self, help_text: str | None = None) -> None:
        super().__init__(
            help=_with_lines_kept(help_text),
            no_args_is_help=bool(help_text),
            add_completion=False,
            pretty_exceptions_enable=False,
            rich_markup_mode=None,
            context_settings=_HELP_FLAGS,
        )

    def command(
        self, name: str | None = None, *, context_settings: dict[Any, Any] | None = None, **options: Any
    ) -> Any:
        """Register a function, as `typer.Typer.command` does; a list of commands has all its first paragraph."""
        settings = {**_HELP_FLAGS, **(context_settings or {})}

        def register(function: Callable[..., None]) -> Any:
            _name_values(function)
            text = _with_lines_kept(options.pop("help", None) or function.__doc__) or ""
            texts = {"help": text, "short_help": text.partition("\n\n")[0]}
            return super(App, self).command(name, cls=HelpCommand, context_settings=settings, **texts, **options)(
                function
            )

        return register


def command(function: Callable[..., None], help_text: str | None = None) -> App:
    """Return an app with one command. Its help is `help_text`, else the function's docstring."""
    app = App()
    app.command(help=help_text)(function)
    return app


def run(app: typer.Typer, name: str, *, log_level: int | None = logging.WARNING) -> None:
    """Run a typer app. Exit 0 done, 1 failed with a sentence, 2 wrong usage, 130 on Ctrl-C.

    Args:
        name: of the command; `atropos <word>` where it was called so.
        log_level: of log lines on stderr; None leaves logging to the command.
    """
    name = called_as(name)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal without UTF-8 shows \u00e9 in place of a trace
    if log_level is not None:
        calm_log.begin(log_level, "%(message)s" if log_level >= logging.WARNING else calm_log.LINE)
    try:
        app(prog_name=name)
    except AtroposError as error:
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:
        if sentence := limit_reached(error):
            print(f"{name}: {sentence}, and try again", file=sys.stderr)
        elif error.filename:
            what_to_do = f"; {remedy(error)}" if isinstance(error, PermissionError) else ""
            print(f"{name}: cannot use {error.filename}: {error.strerror}{what_to_do}", file=sys.stderr)
        else:
            raise
        sys.exit(1)
    except (KeyboardInterrupt, SystemExit) as ended:
        if isinstance(ended, SystemExit) and ended.code != _INTERRUPTED:
            raise
        print(f"{name}: stopped; nothing half-written is left", file=sys.stderr)
        sys.exit(_INTERRUPTED)


def called_as(name: str) -> str:
    """Return `atropos <word>` where the command was called so, else its own name."""
    return sys.argv[0] if sys.argv[0].startswith("atropos ") else name


def _with_lines_kept(text: str | None) -> str | None:
    """Return a help text that is written with its lines as they are where a paragraph has indented ones."""
    paragraphs = re.sub(r"\n\n(?=  )", "\n", cleandoc(text or "")).split("\n\n")
    return "\n\n".join(f"\b\n{each}" if "\n  " in each else each for each in paragraphs) or None


def _name_values(function: Callable[..., None]) -> None:
    """Give every option of a command a plain name for its value (N, X, PATH, TEXT, a|b) where it has none."""
    for name, hint in get_type_hints(function, include_extras=True).items():
        for info in getattr(hint, "__metadata__", ()):
            if not isinstance(info, OptionInfo | ArgumentInfo):
                continue
            kinds = [kind for kind in _kinds(hint.__origin__) if kind is not type(None)]
            if kinds == [bool]:
                info.show_default = False
            elif info.metavar is None and isinstance(info, ArgumentInfo):
                info.metavar = name.upper()
            elif info.metavar is None:
                info.metavar = "|".join(
                    str(kind) if isinstance(kind, str) else _METAVARS.get(kind, "TEXT") for kind in kinds
                )


def _kinds(annotation: object) -> list[object]:
    """Return the types or literal values that an annotation allows."""
    if get_origin(annotation) in (Union, types.UnionType, Literal):
        return [kind for part in get_args(annotation) for kind in _kinds(part)]
    return [annotation]


def http_url(text: str) -> str:
    """The callback of an option that takes an address: `text` as it is; wrong usage unless it is http(s)://HOST[:PORT].

    >>> http_url("http://:secret@node7:8000")
    'http://:secret@node7:8000'
    """
    if not is_server_url(text):
        raise typer.BadParameter(f"{text!r} is no address of a server; write http://HOST:PORT, or https://")
    return text


def listening(host: str, port: int) -> socket.socket:
    """Return a bound socket; ConfigError when the host is not of this machine, LaunchError when the port is taken."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot listen on {host} ({error}); choose another --host") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        kind, flag = (ConfigError, "--host") if error.errno == errno.EADDRNOTAVAIL else (LaunchError, "--port")
        raise kind(f"cannot listen on {host}:{port}: {error.strerror or error}; choose another {flag}") from error
    return listener


@contextmanager
def reading(paths: Iterable[str], *, passes: int = 1) -> Iterator[Callable[[int], None]]:
    """A function to be told the bytes read of `paths`; draws a bar on a terminal's stderr, nothing elsewhere."""
    from rich.console import Console  # most commands read nothing for long
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from atroposlib.data.rollout_files import find_rollout_files

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    total = passes * sum(path.stat().st_size for path in find_rollout_files(paths, warns=False))
    columns = (TextColumn("reading"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("reading", total=total)
        pending = 0

        def advance(count: int) -> None:
            nonlocal pending
            pending += count
            if pending >= _UPDATE_BYTES:
                progress.advance(task, pending)
                pending = 0

        yield advance
