"""Hooks of mkdocs: pages made from READMEs and from settings, and links that hold in the site as in the repository."""

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig  # pyright: ignore[reportMissingImports]
from mkdocs.structure.files import File, Files  # pyright: ignore[reportMissingImports]
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

ROOT = Path(__file__).resolve().parents[1]
FROM_READMES = {
    "README.md": "index.md",
    "slurm/README.md": "slurm.md",
    "atroposlib/environments/README.md": "environments.md",
    "atroposlib/api/README.md": "trajectory-api.md",
    "atroposlib/sandbox/README.md": "sandbox.md",
}
LINKS = {"environments": "atroposlib/environments", "example_trainer": "atroposlib/example_trainer"}
"""Links in the repository to the packages that pages of the site are made from."""
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#\s:]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made here."""
    for source, page in FROM_READMES.items():
        files.append(File.generated(config, page, content=_relinked((ROOT / source).read_text(), source)))
    files.append(File.generated(config, "settings.md", content=settings_page()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Mend links that lead out of the folder of the site."""
    is_ours = page.file.src_uri in [*FROM_READMES.values(), "settings.md"]
    return markdown if is_ours else _relinked(markdown, f"docs/{page.file.src_uri}")


def _relinked(markdown: str, source: str) -> str:
    """Return the text with links that hold from the site: to a page of it, or the path in the repository as text."""

    def link(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        path = normpath(PurePosixPath(source).parent / target)
        first, _, rest = path.partition("/")
        path = f"{LINKS[first]}/{rest}".rstrip("/") if first in LINKS else path
        if path.startswith("docs/"):
            return f"[{text}]({path.removeprefix('docs/')}{anchor})"
        for readme in (path, f"{path}/README.md"):
            if readme in FROM_READMES:
                return f"[{text}]({FROM_READMES[readme]}{anchor})"
        return text if text.strip("`") == path else f"{text} (`{path}`)"

    return _LINK.sub(link, markdown)


def settings_page() -> str:
    """Return a table of every setting of environments, datagen runs and the trainer, from the models themselves."""
    from atroposlib.envs.config import BaseEnvConfig
    from atroposlib.envs.server_handling.server_config import APIServerConfig
    from atroposlib.example_trainer.config import RunConfig
    from atroposlib.launch.config import DatagenConfig

    parts = ["# Settings", "Generated from the models; `--help` of each command shows the same."]
    for title, model in {
        "Environments: `env`": BaseEnvConfig,
        "Engines of an environment: `openai`": APIServerConfig,
        "`atropos datagen`": DatagenConfig,
        "`atropos train`": RunConfig,
    }.items():
        parts += [f"## {title}", "| setting | type | default | |\n|---|---|---|---|\n" + "\n".join(_rows(model))]
    return "\n\n".join(parts) + "\n"


def _rows(model: type[BaseModel], prefix: str = "") -> list[str]:
    rows = []
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            rows += _rows(kind, f"{prefix}{name}.")
            continue
        shown = str(kind).replace("typing.", "") if getattr(kind, "__args__", None) else getattr(kind, "__name__", kind)
        default = (
            "required" if field.default is PydanticUndefined and not field.default_factory else field.get_default()
        )
        cells = [f"`{prefix}{name}`", f"`{shown}`", f"`{default}`", field.description or ""]
        rows.append("| " + " | ".join(re.sub(r"\s+", " ", cell).replace("|", "\\|") for cell in cells) + " |")
    return rows
