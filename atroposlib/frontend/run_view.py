"""The application behind `view-run`: rollouts of files, or of a running API, browsed in a browser.

Files are found through their index (`data.table`): opening reads no rollouts, showing a group reads one line.
Files without an index are indexed in a thread while the page is already up. Everything the page shows of a rollout is
set as text, never as markup.
"""

import json
import logging
import math
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response

from atroposlib.api.auth import names_this_machine
from atroposlib.data.table import FINISH_REASONS, Table, concatenate, read_group
from atroposlib.errors import AtroposError
from atroposlib.json_lines import parse_anyhow
from atroposlib.type_definitions import IGNORE_INDEX

logger = logging.getLogger(__name__)

PAGE_GROUPS = 50
MAX_TOKENS = 4_000  # tokens shown one by one; of longer responses the rest is left out
Decode = Callable[[list[int]], list[str]]
"""The text of each token id."""

_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; script-src 'self'; style-src 'self'; img-src 'self' data:",
    "X-Content-Type-Options": "nosniff",
}


class Rollouts(Protocol):
    """Where a view's groups come from."""

    def table(self) -> Table:
        """Return the table as far as it is known."""
        ...

    def group(self, row: int) -> bytes:
        """The recorded line of one group row."""
        ...

    def state(self) -> str:
        """Return what is still being read, for the page's head; "" when nothing is."""
        ...


class FileRollouts:
    """Rollout files; tables are added while they are being indexed."""

    def __init__(self) -> None:
        self._tables: list[Table] = []
        self._joined: tuple[int, Table] = (0, concatenate([]))  # of this many files
        self.pending = ""

    def add(self, table: Table) -> None:
        """One more file is known. Called from the indexing thread."""
        self._tables.append(table)

    def table(self) -> Table:
        """Return the table as far as it is known."""
        known = list(self._tables)
        count, joined = self._joined
        if count != len(known):
            joined = concatenate(known)
            self._joined = (len(known), joined)
        return joined

    def group(self, row: int) -> bytes:
        """The recorded line of one group row."""
        return read_group(self.table(), row)[0].data

    def state(self) -> str:
        """Which file is being indexed."""
        return self.pending


def make_app(rollouts: Rollouts, decode: Decode | None = None) -> FastAPI:
    """The application. `decode` None: tokens are shown as ids."""
    app = FastAPI(title="atropos view-run", docs_url=None, redoc_url=None, openapi_url=None)

    @app.middleware("http")
    async def only_this_machine(request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
        host = request.headers.get("host", "")
        if names_this_machine(host):
            return await answer(request)
        return Response(f"Host is {host[:80]!r}; rollouts are shown to localhost only", status_code=403)

    @app.get("/")
    def page() -> Response:
        return HTMLResponse(_asset("view_run.html"), headers=_HEADERS)

    @app.get("/view_run.js")
    def script() -> Response:
        return Response(_asset("view_run.js"), media_type="text/javascript", headers=_HEADERS)

    @app.get("/view_run.css")
    def style() -> Response:
        return Response(_asset("view_run.css"), media_type="text/css", headers=_HEADERS)

    @app.get("/api/groups")
    def groups(
        task: str | None = None,
        min_score: float | None = None,
        max_score: float | None = None,
        min_tokens: int | None = None,
        max_tokens: int | None = None,
        offset: int = 0,
    ) -> Response:
        table = rollouts.table()
        rows = matching_groups(
            table, task=task, score=(min_score, max_score), completion_tokens=(min_tokens, max_tokens)
        )
        shown = rows[offset : offset + PAGE_GROUPS]
        return JSONResponse(
            {
                "state": rollouts.state(),
                "tasks": sorted(table.tasks),
                "groups_total": len(table.groups),
                "responses_total": len(table.responses),
                "matching": len(rows),
                "groups": [group_summary(table, int(row)) for row in shown],
            }
        )

    @app.get("/api/group/{row}")
    def group(row: int) -> Response:
        table = rollouts.table()
        if not 0 <= row < len(table.groups):
            raise HTTPException(404, f"there is no group {row}; {len(table.groups)} are known")
        try:
            record = parse_anyhow(rollouts.group(row))
        except AtroposError as error:
            raise HTTPException(500, str(error)) from error
        return Response(json.dumps(group_detail(record, decode)), media_type="application/json")

    return app


def matching_groups(
    table: Table,
    *,
    task: str | None = None,
    score: tuple[float | None, float | None] = (None, None),
    completion_tokens: tuple[int | None, int | None] = (None, None),
) -> Any:
    """Rows of groups with at least one response within all limits (both ends included), in order."""
    responses = table.responses
    keep = np.ones(len(responses), bool)
    for name, (low, high) in (("score", score), ("completion", completion_tokens)):
        if low is not None:
            keep &= responses[name] >= low
        if high is not None:
            keep &= responses[name] <= high
    if task is not None:
        keep &= table.column("task") == (table.tasks.index(task) if task in table.tasks else len(table.tasks))
    return np.unique(responses["group"][keep])


def group_summary(table: Table, row: int) -> dict[str, Any]:
    """One line of the list."""
    group = table.groups[row]
    responses = table.responses[int(group["first"]) : int(group["first"]) + int(group["responses"])]
    return {
        "row": row,
        "task": table.tasks[group["task"]],
        "where": f"{table.files[group['file']].name}:{group['line']}",
        "scores": [None if math.isnan(score) else score for score in responses["score"].tolist()],
        "tokens": responses["completion"].tolist(),
        "finish": [FINISH_REASONS[code] for code in responses["finish"]],
    }


def group_detail(record: dict[str, Any], decode: Decode | None) -> dict[str, Any]:
    """Return what the page shows of one group: messages and tokens of each response, and the rest as it is."""
    scores = record.get("scores") or []
    responses = [
        {
            "score": score,
            "finish": _at(record, "finish_reasons", index),
            "messages": _at(record, "messages", index),
            "tokens": _tokens(record, index, decode),
        }
        for index, score in enumerate(scores)
    ]
    big = {"tokens", "masks", "messages", "inference_logprobs", "advantages", "ref_logprobs", "images", "scores"}
    about = {key: value for key, value in record.items() if key not in big and value is not None}
    return {"responses": responses, "about": about, "images": _data_images(record.get("images"))}


def _tokens(record: dict[str, Any], index: int, decode: Decode | None) -> dict[str, Any] | None:
    ids, masks = _at(record, "tokens", index), _at(record, "masks", index)
    if not (ids and masks and isinstance(ids, list) and isinstance(masks, list)):
        return None
    shown = ids[:MAX_TOKENS]
    are_ids = all(isinstance(token, int) and token >= 0 for token in shown)
    logprobs = _at(record, "inference_logprobs", index)
    return {
        "texts": decode(shown) if decode and are_ids else [str(token) for token in shown],
        "ids": shown,
        "trained": [mask != IGNORE_INDEX for mask in masks[:MAX_TOKENS]],
        "logprobs": logprobs[:MAX_TOKENS] if logprobs else None,
        "left_out": len(ids) - len(shown),
    }


def _at(record: dict[str, Any], key: str, index: int) -> Any:
    rows = record.get(key)
    return rows[index] if isinstance(rows, list) and index < len(rows) else None


def _data_images(value: Any) -> list[str]:
    """Images that are held in the record itself; nothing is fetched from elsewhere."""
    if isinstance(value, str):
        return [value] if value.startswith("data:image/") else []
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [image for each in inner for image in _data_images(each)]


def _asset(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")
