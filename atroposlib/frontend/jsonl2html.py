"""A rollout file as one HTML page: `python -m atroposlib.frontend.jsonl2html rollouts.jsonl [page.html]`.

Model text is untrusted. It is rendered as markdown with raw HTML, links and images switched off, so everything
it contains is shown, nothing is run or fetched; the page's content security policy also allows no script but the
template's own, named by its hash, which opens and closes all groups.
Messages above `MARKDOWN_CHARS` are shown as plain text, since markdown takes time that grows with the text.
"""

import html
import json
import logging
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path

import markdown
import msgspec

from atroposlib.data.chats import REASONING_KEYS, part_text, shared_prompt
from atroposlib.data.output import part_file, refuse_inputs
from atroposlib.data.rollout_files import NO_GROUP, Line, expand_input, html_twin, row_error, sound_lines
from atroposlib.data.set_aside import SetAside
from atroposlib.errors import AtroposError, RowError
from atroposlib.json_lines import parse_anyhow
from atroposlib.paths import expand_path
from atroposlib.type_definitions import Json, JsonObject

logger = logging.getLogger(__name__)

MARKDOWN_CHARS = 8_000
"""Messages longer than this are shown as preformatted text."""

SHOWN_CHARS = 200_000
"""Of a longer message only the beginning and the end are shown."""

MOST_DOTS = 128
"""Scores drawn in the line of a group; all of them count in its numbers."""

_LINE = r"[^\W\d_](?:[^\n\r\t\x02\x03*_`#\[\]<>&|\\~!]*[^\s\x02\x03*_`#\[\]<>&|\\~!])?"
_PLAIN = re.compile(rf" ?{_LINE}(?:\n\n{_LINE})* ?")
"""Paragraphs of one line, begun by a letter, without a character that means something in markdown or HTML: rendered
here, since markdown takes 60 us for the shortest text and a run has hundreds of thousands."""

_USUAL = {"role", "content"}
_UNSAFE_PATTERNS = (
    *("html", "entity", "autolink", "automail", "link", "image_link"),
    *("reference", "short_reference", "image_reference", "short_image_ref"),
)


def generate_html(input_path: str | os.PathLike[str], output_path: str | os.PathLike[str] | None = None) -> Path:
    """Write the page of one rollout file and return its path (default: the input's name with `.html`).

    Lines that are not groups are set aside with a warning. The page is written under another name and renamed.
    A missing input ends the process with exit code 1, as upstream's did.
    """
    source = expand_input(os.fspath(input_path))
    if not source.is_file():
        logger.error("%s does not exist", source)
        sys.exit(1)
    target = expand_path(output_path, what="output") if output_path else html_twin(source)
    refuse_inputs([target], [source], what="the page")
    with part_file(target) as part, part.open("w", encoding="utf-8") as stream:
        before, after = page_template().split("{groups_html}")
        stream.write(before.replace("{title}", html.escape(f"Rendered Messages - {source.name}")))
        shown = 0
        for index, group in enumerate(_groups(source)):
            shown += bool(stream.write(create_html_for_group(group, index)))
        stream.write(after if shown else "<p>no groups with messages and scores</p>" + after)
    return target


def create_html_for_group(group: Mapping[str, Json], index: int) -> str:
    """The `<details>` block of one group, a dot for each score in its line; "" when it has no messages or no scores.

    `messages` holds one entry per response, text or a list of chat messages; where messages and scores differ
    in number, the shorter decides. Messages that all responses begin with are shown once.
    """
    rows = list(zip(group.get("messages") or [], group.get("scores") or [], strict=False))
    if not rows:
        return ""
    shared = shared_prompt([messages for messages, _ in rows]) if len(rows) > 1 else 0
    prompt = f'<div class="prompt">{_conversation(rows[0][0][:shared])}</div>\n' if shared else ""
    items = [_item(index, j, said[shared:] if shared else said, score) for j, (said, score) in enumerate(rows)]
    task = f" <small><bdi>{html.escape(str(group['task']))}</bdi></small>" if group.get("task") else ""
    return (
        f'<details class="group" id="group-{index}"><summary>Group {index + 1}{task} '
        f"{_dots([score for _, score in rows])}</summary>\n"
        f'<div class="group-content">{prompt}{"".join(items)}</div></details>\n'
    )


def _dots(scores: Sequence[float | None]) -> str:
    known = [score for score in scores if score is not None and not math.isnan(score)]
    dots = "".join([_dot(score) for score in scores[:MOST_DOTS]]) + "…" * (len(scores) > MOST_DOTS)
    counts = f"{sum(score > 0 for score in known)} of {len(scores)} above 0"
    if len(known) > 1:
        counts += f", mean {round(sum(known) / len(known), 9) + 0.0:.3g}"  # no -0, no 2e-17
    return f'<span class="dots">{dots}</span> <small>{counts}</small>'


@lru_cache(maxsize=256, typed=True)
def _dot(score: float | None) -> str:
    css = "reward-none" if score is None or math.isnan(score) else get_score_class(score)
    return f'<i class="{css}" title="{_as_text(score)}"></i>'


def get_score_class(score: float) -> str:
    """The CSS class of a score: `reward-positive`, `reward-zero` or `reward-negative`."""
    if score > 0:
        return "reward-positive"
    return "reward-negative" if score < 0 else "reward-zero"


def render_text(text: str) -> str:
    """Safe HTML of one model text: markdown when it is short, preformatted otherwise."""
    if len(text) <= MARKDOWN_CHARS and _PLAIN.fullmatch(text):
        return "<p>" + text.lstrip().replace("\n\n", "</p>\n<p>") + "</p>"
    if len(text) <= MARKDOWN_CHARS:
        try:
            return _markdown().reset().convert(text)
        except RecursionError:  # a model that says "- - - - ..." for ever makes a list in a list in a list
            _markdown.cache_clear()
    return _preformatted(text)


def _preformatted(text: str) -> str:
    if len(text) > SHOWN_CHARS:
        half = SHOWN_CHARS // 2
        text = f"{text[:half]}\n\n[... {len(text) - 2 * half} characters are not shown ...]\n\n{text[-half:]}"
    return f"<pre>{html.escape(text)}</pre>"


@cache
def page_template() -> str:
    """The page around the groups, with the placeholders `{title}` and `{groups_html}`."""
    return Path(__file__).with_name("rendered_template.html").read_text(encoding="utf-8")


class _Shown(msgspec.Struct):
    """The part of a group that the page needs."""

    scores: list[float | bool | None] | None = None
    messages: list[object] | None = None
    task: object = None


def _groups(source: Path) -> Iterator[JsonObject]:
    odd = SetAside()
    for line in sound_lines(source, odd):
        try:
            yield _shown(line)
        except RowError as error:
            odd.add(error)
    odd.warn()


def _shown(line: Line) -> JsonObject:
    """RowError when nothing of the line can be shown."""
    try:
        return msgspec.structs.asdict(msgspec.convert(parse_anyhow(line.data), _Shown))
    except msgspec.ValidationError as error:
        raise RowError(line.where, NO_GROUP, f"not a group: {error}") from error
    except (ValueError, RecursionError) as error:
        raise row_error(line, error) from error


def _item(group_index: int, index: int, message: object, score: float | None) -> str:
    return (
        f'<div class="item {get_score_class(score or 0.0)}" id="group-{group_index}-item-{index}">'
        f'<div class="content">{_conversation(message)}</div><div class="score">Reward: {_as_text(score)}</div></div>\n'
    )


def _as_text(score: float | None) -> str:
    return html.escape(f"{score:g}" if isinstance(score, float) else str(score))


def _conversation(messages: object) -> str:
    if isinstance(messages, str):
        return render_text(messages)
    if not isinstance(messages, Sequence):
        return ""
    return "".join([_turn(each) for each in messages if isinstance(each, Mapping)])


def _turn(message: Mapping[str, Json]) -> str:
    """One message with all that it holds: thoughts before its content, every other key, as JSON, behind it."""
    content, role = message.get("content"), str(message.get("role", ""))
    thoughts = [key for key in REASONING_KEYS if isinstance(message.get(key), str)]
    rest = [key for key in message if key not in _USUAL and key not in thoughts and message[key] is not None]
    parts = content if isinstance(content, list) else [content] if content is not None else []
    return "".join(
        [
            _speaker(role),
            *(f"<p><em>{html.escape(key)}</em></p>{render_text(message[key])}" for key in thoughts),
            *(render_text(part_text(part) or _as_json(part)) for part in parts if part != ""),
            *(f"<p><em>{html.escape(key)}</em></p>{_preformatted(_as_json(message[key]))}" for key in rest),
        ]
    )


def _speaker(role: str) -> str:
    return f"<p><strong>{html.escape(role.capitalize())}</strong></p>"


def _as_json(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=1)


@cache
def _markdown() -> markdown.Markdown:
    renderer = markdown.Markdown(extensions=["fenced_code", "tables", "nl2br"])
    renderer.preprocessors.deregister("html_block")
    for name in _UNSAFE_PATTERNS:
        renderer.inlinePatterns.deregister(name)
    renderer.parser.blockprocessors.deregister("reference")
    return renderer


def main() -> None:
    """Command line: input path, and optionally the page's path."""
    if not 2 <= len(sys.argv) <= 3 or sys.argv[1] in {"-h", "--help"}:
        print("Usage: python -m atroposlib.frontend.jsonl2html ROLLOUTS.jsonl[.zst] [PAGE.html]", file=sys.stderr)
        sys.exit(0 if sys.argv[1:] in (["-h"], ["--help"]) else 2)
    logging.basicConfig(format="%(message)s")
    try:
        print(generate_html(*sys.argv[1:]))
    except (AtroposError, OSError) as error:
        print(f"jsonl2html: {error}", file=sys.stderr)
        sys.exit(error.exit_code if isinstance(error, AtroposError) else 1)


if __name__ == "__main__":
    main()
