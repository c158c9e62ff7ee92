"""Addresses given on the command line, checked before anything waits for them."""

from urllib.parse import urlsplit

import typer


def http_url(text: str) -> str:
    """The callback of an option that takes an address: `text` as it is; wrong usage unless it is http(s)://HOST[:PORT].

    >>> http_url("http://:secret@node7:8000")
    'http://:secret@node7:8000'
    """
    try:
        parts = urlsplit(text)
        is_http = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets that do not close, a port that is no number or above 65535
        is_http = False
    if not is_http:
        raise typer.BadParameter(f"{text!r} is no address of a server; write http://HOST:PORT, or https://")
    return text
