"""A small MCP server to try things with: a store of articles. stdio, or streamable HTTP on loopback with `--port`.

    python inventory_server.py
    python inventory_server.py --port 8123          # http://127.0.0.1:8123/mcp

Each process holds a store of its own, which is empty at first.
"""

import argparse

from mcp.server.mcpserver import MCPServer  # pyright: ignore[reportMissingImports]

server = MCPServer("inventory", log_level="WARNING")
store: dict[str, int] = {}


@server.tool()
def clear() -> str:
    """Empty the store, for the next episode."""
    store.clear()
    return "empty"


@server.tool()
def articles() -> str:
    """List the names of all articles."""
    return ", ".join(sorted(store)) or "nothing"


@server.tool()
def count(article: str) -> str:
    """Return how many pieces of an article there are."""
    return str(store.get(article, 0))


@server.tool()
def receive(article: str, pieces: int) -> str:
    """Put pieces of an article into the store."""
    if pieces < 1:
        return "at least one piece can be received"
    store[article] = store.get(article, 0) + pieces
    return f"{pieces} {article} are in"


@server.tool()
def ship(article: str, pieces: int) -> str:
    """Take pieces of an article out of the store; none are taken where there are too few."""
    if not 1 <= pieces <= store.get(article, 0):
        return f"{pieces} {article} cannot be shipped, there are {store.get(article, 0)}"
    store[article] -= pieces
    return f"{pieces} {article} are out"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, help="serve streamable HTTP at this port of loopback instead of stdio")
    if (port := parser.parse_args().port) is None:
        server.run("stdio")
    else:
        server.run("streamable-http", host="127.0.0.1", port=port)
