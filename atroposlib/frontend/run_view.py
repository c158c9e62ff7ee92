"""The application behind `view-run`: rollouts of files, or of a running API, browsed in a browser.

Files are found through their index (`data.table`): opening reads no rollouts, showing a group reads one line.
Files without an index are indexed in a thread while the page is already up, and read on while a run adds to them.
The page is the plain ES modules of `viewer/`; it sets everything of a rollout as text, never as markup, and the policy
that it is served with lets nothing else run. A group's address is `file:line`, which does not change as files grow.
"""

import contextlib
import json
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from urllib.parse import urlencode

import numpy as np
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import ValidationError

from atroposlib.api.auth import names_this_machine
from atroposlib.data.dpo import PairRules, choose_pairs
from atroposlib.data.lazy_group import LazyGroup, SearchText
from atroposlib.data.rollout_files import KINDS, Line, run_name
from atroposlib.data.stats import read_failures
from atroposlib.data.table import FINISH_REASONS, Table, read_group, table_of
from atroposlib.errors import AtroposError, ConfigError
from atroposlib.frontend.group_detail import TokenTexts, group_detail, mean_gap, subset, tokens_of
from atroposlib.frontend.live_rollouts import RolloutSource
from atroposlib.frontend.query import (
    Query,
    Scan,
    by_task,
    compare,
    facets,
    histogram,
    lengths,
    side_rows,
    within,
)
from atroposlib.json_lines import one_line, parse_anyhow, to_json
from atroposlib.type_definitions import Array, JsonObject

logger = logging.getLogger(__name__)

PAGE_GROUPS = 50
_VIEWER = Path(__file__).with_name("viewer")
_MEDIA_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_FIRST_WAIT_S = 0.3  # for a scan, or for a first group, so that of a small run the first answer is the whole one
_MOST_SCANS = 6
_LOOKED_AT = 8  # groups, for one that tells if gaps are recorded

_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class FileRollouts(RolloutSource):
    """Rollout files; tables are added while they are being indexed."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[Path, tuple[int, int]] = {}
        self._order: list[Path] = []
        self.pending = ""

    def add(self, table: Table) -> None:
        """One more file is known, or one has grown."""
        known = {**self._tables, table.files[0]: table}
        self._tables = {path: known[path] for path in dict.fromkeys([*self._order, *known]) if path in known}

    def follow(self, files: list[Path]) -> None:
        """Index what is new in `files` since the last call; a damaged one is named and left out, one gone forgotten."""
        self._order = files
        for gone in self._sizes.keys() - set(files):  # compressed under another name, say
            del self._sizes[gone]
            self._tables = {path: table for path, table in self._tables.items() if path != gone}
        for number, path in enumerate(files, 1):
            try:
                status = path.stat()
                size = (status.st_size, status.st_mtime_ns)
                if self._sizes.get(path) == size:
                    continue
                if path not in self._sizes:
                    self.pending = f"indexing {path.name} ({number} of {len(files)})"
                self._sizes[path] = size
                table = table_of(path, so_far=self.add)
                table.set_aside.warn()
                self.add(table)
            except (AtroposError, OSError) as error:
                logger.warning("%s", error)
        tables = list(self._tables.values())
        odd = [each.files[0].name for each in tables if each.set_aside]
        is_other = odd and not any(len(each.groups) for each in tables)
        self.pending = f"no line of {odd[0]} is a group of responses; give view-run rollout files" if is_other else ""

    def group(self, table: Table, row: int) -> bytes:
        return read_group(table, row)[0].data

    def read(self, table: Table, rows: Array) -> Iterator[tuple[int, Line, LazyGroup]]:
        keep = np.isin(table.responses["group"], rows)
        for chosen in table.read(keep):
            yield int(table.responses["group"][chosen.rows[0]]), chosen.line, chosen.group

    def state(self) -> str:
        """Return which file is being indexed, or that there is none of rollouts."""
        return self.pending


class View:
    """Answers the page's questions about one source of rollouts."""

    def __init__(self, rollouts: RolloutSource, texts: TokenTexts) -> None:
        self.rollouts, self.texts = rollouts, texts
        self._searches: dict[str, Scan] = {}
        self._gaps = Scan(rollouts.read, _gaps)
        self._has_gaps: bool | None = None
        self._names: tuple[list[Path], list[str], list[str]] = ([], [], [])

    def names(self, table: Table) -> tuple[list[str], list[str]]:
        """Each file's name in addresses, and that of its run; as short as they are different."""
        files, labels, runs = self._names
        if files != table.files:
            labels = _labels(table.files)
            folders = _labels([path.parent / run_name(path) for path in table.files])
            self._names = (table.files, labels, folders)
            runs = folders
        return labels, runs

    def place(self, table: Table, row: int) -> str:
        """The address of a group."""
        group = table.groups[row]
        return f"{self.names(table)[0][group['file']]}:{group['line']}"

    def row(self, table: Table, place: str) -> int:
        """The group at an address, also of a file that was compressed since; 404 when there is none."""
        label, _, line = place.rpartition(":")
        number = int(line) if line.isdecimal() and len(line) < 12 else -1
        for suffix in ("", *KINDS):
            files = [at for at, path in enumerate(table.files) if f"/{path}".endswith(f"/{label}{suffix}")]
            rows = np.flatnonzero(np.isin(table.groups["file"], files) & (table.groups["line"] == number))
            if len(rows):
                return int(rows[0])
        raise HTTPException(404, f"there is no group {place[:200]}; {len(table.groups)} are known")

    def matching(self, table: Table, query: Query) -> tuple[Array, int]:
        """[responses] of bool, and how many groups a search has still to read."""
        keep, left = query.plain(table, self.names(table)[1]), 0
        if query.text is not None:
            found, left = self._search(query.text).values(table, wait_s=_FIRST_WAIT_S)
            keep &= found > 0
        if query.min_gap is not None or query.max_gap is not None:
            gaps, unread = self._gaps.values(table, wait_s=_FIRST_WAIT_S)
            keep, left = keep & within(gaps, query.min_gap, query.max_gap), max(left, unread)
        return keep, left

    def _search(self, text: str) -> Scan:
        scan = self._searches.pop(text, None)
        if scan is None:
            needle = SearchText(text)
            scan = Scan(
                self.rollouts.read,
                lambda line, group: [float(needle.is_in(group, index)) for index in range(len(group.scores))],
            )
        self._searches[text] = scan
        if len(self._searches) > _MOST_SCANS:
            self._searches.pop(next(iter(self._searches)))
        return scan

    def gaps(self, table: Table) -> tuple[Array | None, int]:
        """[responses] the engine-trainer gap, None where the first groups have none; groups still to be read."""
        if self._has_gaps is None:
            for _, line, group in self.rollouts.read(table, np.arange(min(_LOOKED_AT, len(table.groups)))):
                self._has_gaps = self._has_gaps or any(not math.isnan(gap) for gap in _gaps(line, group))
        return self._gaps.values(table, wait_s=_FIRST_WAIT_S) if self._has_gaps else (None, 0)

    def record(self, table: Table, row: int) -> JsonObject:
        """The recorded group, as lenient as can be; 500 with a sentence when it cannot be read."""
        try:
            return parse_anyhow(self.rollouts.group(table, row))
        except (AtroposError, OSError, ValueError, RecursionError) as error:
            raise HTTPException(500, str(error)) from error

    def sides(self, table: Table, row: int) -> dict[int, str]:
        """Which responses of a group, by row, a DPO export with its default rules would choose or reject."""
        of_item = table.column("item") == table.groups["item"][row]
        pairs = choose_pairs(table, of_item & (table.responses["odd"] == 0), PairRules(), seed=0).get(row, [])
        return {response: side for pair in pairs for response, side in zip(pair, ("chosen", "rejected"), strict=True)}

    def groups(self, query: Query, rest: Mapping[str, str]) -> JsonObject:
        """The list: from the group number `offset`, or around the address of one that it should hold."""
        table = self.rollouts.table()
        keep, left = self.matching(table, query)
        gaps, unread = self.gaps(table) if query.sort == "gap" else (None, 0)
        rows = query.order(table, np.unique(table.responses["group"][keep]), gaps)
        offset = _offset(rest, rows, lambda place: self.row(table, place))
        return {
            "state": self.rollouts.state(),
            "unread": max(left, unread),
            "facets": facets(table, self.names(table)[1]),
            "groups_total": len(table.groups),
            "responses_total": len(table.responses),
            "matching": len(rows),
            "matching_responses": int(keep.sum()),
            "offset": offset,
            "page": PAGE_GROUPS,
            "groups": [self.summary(table, int(row), keep) for row in rows[offset : offset + PAGE_GROUPS]],
        }

    def group(self, place: str) -> JsonObject:
        """One group; 404 or 500 with a sentence when there is none, or none to be read."""
        table = self.rollouts.table()
        row = self.row(table, place)
        detail = group_detail(self.record(table, row))
        first, sides = int(table.groups[row]["first"]), self.sides(table, row)
        for index, response in enumerate(detail["responses"]):
            response["side"] = sides.get(first + index)
            response["completion"] = int(table.responses["completion"][first + index])
        return {"at": self.place(table, row), "task": table.tasks[table.groups[row]["task"]], **detail}

    def first_answers(self) -> JsonObject:
        """The answers to the first questions of a page without an address of its own, by question."""
        deadline = time.monotonic() + _FIRST_WAIT_S
        while not len(self.rollouts.table().groups) and self.rollouts.state() and time.monotonic() < deadline:
            time.sleep(0.01)
        listed = self.groups(Query(), {})
        answers = {"/api/groups?": listed}
        if listed["groups"]:
            place = listed["groups"][0]["at"]
            with contextlib.suppress(HTTPException):  # the page asks again, and is told
                answers[f"/api/group?{urlencode({'at': place})}"] = self.group(place)
        return answers

    def summary(self, table: Table, row: int, keep: Array) -> JsonObject:
        """One line of the list."""
        group = table.groups[row]
        span = slice(int(group["first"]), int(group["first"]) + int(group["responses"]))
        responses = table.responses[span]
        return {
            "at": self.place(table, row),
            "task": table.tasks[group["task"]],
            "weights": table.weights[group["weights"]] if table.weights else "",
            "scores": [None if math.isnan(score) else score for score in responses["score"].tolist()],
            "tokens": responses["completion"].tolist(),
            "finish": [FINISH_REASONS[code] for code in responses["finish"]],
            "failed": int(group["failed"]) > 0,
            "matches": keep[span].tolist(),
        }


def make_app(rollouts: RolloutSource, texts: TokenTexts | None = None) -> FastAPI:
    """The application; `texts` None: the tokenizer is that of the run."""
    app = FastAPI(title="atropos view-run", docs_url=None, redoc_url=None, openapi_url=None)
    view = View(rollouts, texts or TokenTexts())
    assets = {path.name: path.read_text(encoding="utf-8") for path in _VIEWER.iterdir() if path.suffix in _MEDIA_TYPES}
    modules = "".join(
        f'<link rel="modulepreload" href="/viewer/{name}">' for name in sorted(assets) if name.endswith(".js")
    )
    head, answers, tail = assets.pop("index.html").replace("<!-- modules -->", modules).partition("{}")

    @app.middleware("http")
    async def only_this_machine(request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
        host = request.headers.get("host", "")
        if not names_this_machine(host):
            return Response(f"Host is {host[:80]!r}; rollouts are shown to localhost only", status_code=403)
        response = await answer(request)
        response.headers.update(_HEADERS)
        return response

    @app.exception_handler(ConfigError)
    def refused(request: Request, error: Exception) -> Response:
        return JSONResponse({"detail": str(error)}, status_code=400)

    @app.get("/")
    def page() -> Response:
        """The page: what it is made of at once, then the first answers, which its scripts wait for."""

        def parts() -> Iterator[str]:
            yield head
            try:
                yield json.dumps(view.first_answers()).replace("<", "\\u003c")  # nothing in it ends its element
            except (AtroposError, OSError, ValueError) as error:
                logger.warning("%s", error)
                yield answers
            yield tail

        return StreamingResponse(parts(), media_type="text/html")

    @app.get("/viewer/{name}")
    async def asset(name: str) -> Response:
        if name not in assets:
            raise HTTPException(404, f"there is no {name[:80]!r}")
        return Response(assets[name], media_type=_MEDIA_TYPES[Path(name).suffix])

    @app.get("/api/state")
    def state() -> Response:
        table = rollouts.table()
        return _json({"state": rollouts.state(), "groups": len(table.groups), "responses": len(table.responses)})

    @app.get("/api/groups")
    def groups(request: Request) -> Response:
        return _json(view.groups(*_query(request, "offset", "around")))

    @app.get("/api/numbers")
    def numbers(request: Request) -> Response:
        query, _ = _query(request)
        table = rollouts.table()
        keep, left = view.matching(table, query)
        gaps, unread = view.gaps(table)
        return _json(
            {
                "unread": max(left, unread),
                "score": histogram(table.responses["score"][keep]),
                "tokens": histogram(lengths(table)[keep]),
                "gap": histogram(gaps[keep]) if gaps is not None else None,
                "tasks": by_task(table, keep),
            }
        )

    @app.get("/api/group")
    def group(at: str) -> Response:
        return _json(view.group(at))

    @app.get("/api/tokens")
    def tokens(at: str, response: int = 0, start: int = 0) -> Response:
        table = rollouts.table()
        row = view.row(table, at)
        record = view.record(table, row)
        found = tokens_of(record, max(0, response), max(0, start))
        if found is None:
            raise HTTPException(404, f"no token ids were recorded for response {response} of {at[:200]}")
        spec = texts_of_ids = None
        reason = "these are no ids"
        if all(isinstance(token, int) and 0 <= token < 1 << 32 for token in found["ids"]):
            spec = view.texts.spec_of(table.files[table.groups[row]["file"]], record)
            texts_of_ids, reason = view.texts.texts(spec, found["ids"])
        return _json({**found, "texts": texts_of_ids, "tokenizer": spec, "reason": reason})

    @app.get("/api/compare")
    def comparison(request: Request) -> Response:
        query, rest = _query(request, "left", "right", "offset")
        table = rollouts.table()
        keep, left = view.matching(table, query)
        runs = view.names(table)[1]
        sides = [side_rows(table, runs, rest.get(name, "")) for name in ("left", "right")]
        found = compare(table, keep & sides[0], keep & sides[1])
        offset = _offset(rest, np.zeros(0), lambda place: 0)
        total = len(found["items"])
        found["items"] = [
            {**item, "groups": [view.place(table, row) for row in item["groups"]]}
            for item in found["items"][offset : offset + PAGE_GROUPS]
        ]
        return _json({**found, "offset": offset, "page": PAGE_GROUPS, "matching": total, "unread": left})

    @app.get("/api/failures")
    def failures(kind: str | None = None) -> Response:
        counts, newest = read_failures(rollouts.table().files, kind=kind or None)
        return _json({"counts": counts, "failures": newest})

    @app.get("/api/policy.yaml")
    def policy(request: Request) -> Response:
        return Response(_query(request)[0].policy(), media_type="application/yaml", headers=_attached("policy.yaml"))

    @app.get("/api/rollouts.jsonl")
    def lines(request: Request) -> Response:
        query, _ = _query(request)
        table = rollouts.table()
        keep, left = view.matching(table, query)
        if left:
            raise ConfigError(f"the search has {left} groups still to read; export when it has ended")
        return StreamingResponse(
            _chosen_lines(rollouts, table, keep), media_type="application/jsonl", headers=_attached("rollouts.jsonl")
        )

    return app


def _chosen_lines(rollouts: RolloutSource, table: Table, keep: Array) -> Iterator[bytes]:
    """The lines of groups with a response in `keep`, each with those responses only."""
    for row, line, _ in rollouts.read(table, np.unique(table.responses["group"][keep])):
        group = table.groups[row]
        first = int(group["first"])
        indices = np.flatnonzero(keep[first : first + int(group["responses"])]).tolist()
        if len(indices) == group["responses"]:
            yield line.data.rstrip(b"\n") + b"\n"
        else:
            yield one_line(to_json(subset(parse_anyhow(line.data), indices))) + b"\n"


def _gaps(line: Line, group: LazyGroup) -> list[float]:
    try:
        record = parse_anyhow(line.data)
    except (ValueError, RecursionError):  # a damaged group has none
        record = {}
    return [mean_gap(record, index) for index in range(len(group.scores))]


def _query(request: Request, *others: str) -> tuple[Query, dict[str, str]]:
    """The query in an address (empty values do not limit) and its other parameters by name; 422 for anything else."""
    parameters = dict(request.query_params)
    rest = {name: parameters.pop(name) for name in others if name in parameters}
    try:
        return Query.model_validate({name: value for name, value in parameters.items() if value != ""}), rest
    except ValidationError as error:
        first = error.errors()[0]
        raise HTTPException(422, f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def _offset(rest: Mapping[str, str], rows: Array, row_of: Callable[[str], int]) -> int:
    """Where a page of the list begins: at `offset`, or with the page of the group `around` if it is in the list."""
    if rest.get("around"):
        try:
            at = np.flatnonzero(rows == row_of(rest["around"]))
        except HTTPException:
            at = []
        return int(at[0]) // PAGE_GROUPS * PAGE_GROUPS if len(at) else 0
    offset = rest.get("offset", "0")
    return int(offset) if offset.isdecimal() and len(offset) < 12 else 0


def _labels(paths: list[Path]) -> list[str]:
    """The last part of each path; where two would be the same, as many more in front of all as tell them apart."""
    different = len(set(paths))
    for parts in range(1, max((len(path.parts) for path in paths), default=1) + 1):
        labels = ["/".join(path.parts[-parts:]) for path in paths]
        if len(set(labels)) == different:
            return labels
    return [str(path) for path in paths]


def _json(value: object) -> Response:
    return Response(json.dumps(value), media_type="application/json")


def _attached(name: str) -> dict[str, str]:
    return {"Content-Disposition": f'attachment; filename="{name}"'}
