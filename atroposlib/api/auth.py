"""Who may talk to the API: the token, and no web pages of other sites.

The token comes as `Authorization: Bearer TOKEN`, or as a Basic password, which is what clients send for
`http://:TOKEN@host:8000` without knowing about tokens.
"""

import base64
import binascii
import hmac
import ipaddress
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from urllib.parse import urlsplit

from atroposlib.errors import ConfigError

TOKEN_VARIABLE = "ATROPOS_API_TOKEN"


def read_token(token_file: Path | None, environment: Mapping[str, str]) -> str | None:
    """The token from the file, else from the environment; None when there is neither.

    ConfigError: the file cannot be read or is empty.
    """
    if token_file is None:
        return environment.get(TOKEN_VARIABLE, "").strip() or None
    try:
        token = token_file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--token-file {token_file} cannot be read: {error}") from error
    if not token:
        raise ConfigError(f"--token-file {token_file} is empty; write the token into it")
    return token


def is_authorized(authorization: str | None, token: str) -> bool:
    """Tell whether an Authorization header carries the token. Takes as long for a near miss as for a far one."""
    scheme, _, credentials = (authorization or "").partition(" ")
    given = [credentials.strip().encode(text, "replace") for text in ("utf-8", "latin-1")]  # as servers decode headers
    if scheme.lower() == "basic":
        try:
            given = [base64.b64decode(given[0], validate=True).partition(b":")[2]]
        except binascii.Error:
            return False
    elif scheme.lower() != "bearer":
        return False
    return any(hmac.compare_digest(each, token.encode()) for each in given)


def is_cross_site(headers: Mapping[str, str]) -> bool:
    """Tell whether a browser says that a page of another site makes this request. Programs send neither header."""
    if headers.get("sec-fetch-site") in ("cross-site", "same-site"):
        return True
    origin = headers.get("origin")
    return origin is not None and origin.partition("://")[2] != headers.get("host")


def is_server_url(text: str) -> bool:
    """Tell whether a server may have this address: http(s)://HOST[:PORT]."""
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool((parts.hostname or "").encode("idna")) and parts.port != 0
    except ValueError:  # brackets that do not close, no host name, a port that is no number or above 65535
        return False


def is_loopback(host: str) -> bool:
    """Tell whether an address is reachable from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


@lru_cache(maxsize=64)
def names_this_machine(host_header: str) -> bool:
    """Tell whether a Host header is `localhost` or an address.

    Any other name on a server without a token may be a web page that had its name resolve to this machine.
    """
    host = host_header.rpartition(":")[0] if host_header.rpartition(":")[2].isdigit() else host_header
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return host == "localhost"
    return True
