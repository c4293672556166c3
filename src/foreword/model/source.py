"""Where a model comes from: one resolver for every way to name it."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foreword.core.errors import ModelLoadError
from foreword.model import embedded
from foreword.model.status import status, with_bar

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_SAMPLE_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model that is ready to be read.

    Attributes:
        name: what to call it.
        directory: holds config.json, safetensors files and the tokenizer's files.
    """

    name: str
    directory: Path


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model that resolves by its short name.

    Attributes:
        location: where its weights lie, ready to be read; None before the first use.
        size_bytes: what is downloaded for it.
    """

    name: str
    description: str
    location: Path | None
    size_bytes: int


def home() -> Path:
    """Where models are kept: ``FOREWORD_HOME``, or else the user's cache directory of the platform."""
    if chosen := os.environ.get("FOREWORD_HOME"):
        return Path(chosen).expanduser()
    import platformdirs

    return Path(platformdirs.user_cache_dir("foreword"))


def known_models() -> list[KnownModel]:
    """The models that resolve by a short name."""
    from foreword.model.gguf import is_converted

    target = _converted_directory(embedded.NAME)
    location = target if is_converted(target, embedded.GGUF_SHA256) else None
    return [KnownModel(embedded.NAME, embedded.DESCRIPTION, location, embedded.GGUF_BYTES)]


def resolve(model: str, *, progress: bool = True) -> ModelSource:
    """Find ``model``, fetching and converting it on the first use.

    Args:
        model: a known name such as ``"smollm2-135m"``; a directory with a Hugging Face checkpoint (config.json,
            safetensors and tokenizer files); a ``.gguf`` file; or a hub repository such as ``"org/name"``.
        progress: show on stderr what is done, where it takes more than two seconds.

    Raises:
        ModelLoadError: nothing of that name, or it is damaged; names the file and the reason.
    """
    if model.strip().lower() == embedded.NAME:
        return _resolve_embedded(progress)
    path = Path(os.path.expanduser(model))
    if os.path.isdir(path):
        check_checkpoint(path)
        return ModelSource(path.resolve().name, path)
    if os.path.isfile(path):
        return _resolve_gguf(path, progress)
    if _HUB_ID.fullmatch(model):
        return _resolve_hub(model, progress)
    known = ", ".join(each.name for each in known_models())
    raise ModelLoadError(
        f"model={model!r} was not found. Tried: a known name ({known}); a directory or .gguf file {path} "
        '(there is none); a hub repository (it does not look like "org/name")'
    )


def context_length(model: str) -> int | None:
    """The longest context of ``model``, where its files lie ready to be read; nothing is fetched or converted."""
    from foreword.model.config import ModelConfig

    known = next((each for each in known_models() if each.name == model.strip().lower()), None)
    directory = known.location if known is not None else Path(os.path.expanduser(model))
    if directory is None or not (directory / "config.json").is_file():
        return None
    try:
        return ModelConfig.from_directory(directory).max_position_embeddings
    except ModelLoadError:  # which is for those who load it to see
        return None


def check_checkpoint(directory: Path) -> None:
    """See that ``directory`` is a whole checkpoint, by names and headers; weights are not read.

    Raises:
        ModelLoadError: a file is missing, truncated or unreadable.
    """
    config = directory / "config.json"
    if not config.is_file():
        ggufs = sorted(file.name for file in directory.glob("*.gguf"))
        hint = f"; to load a GGUF file, name it: {directory / ggufs[0]}" if ggufs else ""
        raise ModelLoadError(f"{directory} is no model: it holds no config.json{hint}")
    _load_object(config)
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        weight_map = _load_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ModelLoadError(f"{index}: weight_map is not a map of names to files")
        if not weight_map:
            raise ModelLoadError(f"{index} names no files: weight_map is missing or empty")
        files = [directory / name for name in sorted(set(weight_map.values()))]
    else:
        files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ModelLoadError(f"{directory} holds no *.safetensors; other weight formats are not read")
    for file in files:
        _check_safetensors(file)


def _check_safetensors(file: Path) -> None:
    """Compare the file's length with what its header promises."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            header_size = int.from_bytes(stream.read(8), "little")
            if size < 8 or header_size > size - 8:
                raise ModelLoadError(f"{file} is truncated or no safetensors file: its header is cut off")
            header = json.loads(stream.read(header_size))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    except FileNotFoundError as error:
        raise ModelLoadError(f"{file} is missing: the index names it, but it is not there") from error
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{file} is no safetensors file that can be read: {error}") from error
    promised = 8 + header_size + max(ends, default=0)
    if size < promised:
        raise ModelLoadError(f"{file} is truncated: it has {size} bytes, its header promises {promised}")


def _load_object(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{file} holds a {type(content).__name__} where an object is needed")
    return content


def _converted_directory(name: str) -> Path:
    return home() / "models" / name


def _is_ready(target: Path, digest: str) -> bool:
    """Whether ``target`` holds a whole conversion; a damaged one is made anew rather than reported."""
    from foreword.model.gguf import is_converted

    if not is_converted(target, digest):
        return False
    try:
        check_checkpoint(target)
    except ModelLoadError:
        return False
    return True


def _resolve_embedded(progress: bool) -> ModelSource:
    target = _converted_directory(embedded.NAME)
    if not _is_ready(target, embedded.GGUF_SHA256):
        with _lock(target, progress):
            # Another process may have done it while this one waited.
            if not _is_ready(target, embedded.GGUF_SHA256):
                _convert(embedded.gguf_file(home(), progress), target, embedded.GGUF_SHA256, progress)
    return ModelSource(embedded.NAME, target)


def _resolve_gguf(path: Path, progress: bool) -> ModelSource:
    digest = _sample_digest(path)
    target = _converted_directory(f"{path.stem}-{digest[:12]}")
    if not _is_ready(target, digest):
        with _lock(target, progress):
            if not _is_ready(target, digest):
                _convert(path, target, digest, progress)
    return ModelSource(path.stem, target)


def _convert(path: Path, target: Path, digest: str, progress: bool) -> None:
    from foreword.model.gguf import convert

    try:
        with status(f"converting {path.name}", progress):
            convert(path, target, digest=digest, progress=with_bar("converting", "tensor", progress))
    except OSError as error:
        raise ModelLoadError(
            f"{target} cannot be written: {error}; set FOREWORD_HOME to a directory with room"
        ) from error


def _sample_digest(path: Path) -> str:
    """Identifies a GGUF file without reading all of it: size, time of change, first and last MiB."""
    try:
        details = path.stat()
        with path.open("rb") as stream:
            head = stream.read(_SAMPLE_BYTES)
            stream.seek(max(0, details.st_size - _SAMPLE_BYTES))
            tail = stream.read()
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    if not head.startswith(b"GGUF"):
        raise ModelLoadError(f"{path} is no model: not a GGUF file, and a checkpoint is a directory with config.json")
    stamp = f"{details.st_size} {details.st_mtime_ns} ".encode()
    return hashlib.sha256(stamp + head + tail).hexdigest()


@contextmanager
def _lock(target: Path, progress: bool) -> Iterator[None]:
    """Held by the one process that works on ``target``; the operating system frees it if that process dies."""
    from filelock import FileLock

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(target.with_name(f"{target.name}.lock"))
        with status(f"waiting for another process to prepare {target.name}", progress):
            lock.acquire()
    except OSError as error:
        raise ModelLoadError(
            f"{target.parent} cannot be written: {error}; set FOREWORD_HOME to a directory that can"
        ) from error
    try:
        yield
    finally:
        lock.release()


def _resolve_hub(model: str, progress: bool) -> ModelSource:
    try:
        import huggingface_hub

        with status(f"looking up {model} on the hub", progress):
            directory = huggingface_hub.snapshot_download(
                model,
                allow_patterns=["*.json", "*.safetensors", "chat_template.jinja"],
                ignore_patterns=["*/*", "consolidated*"],
            )
    except Exception as error:  # offline, not found, gated, refused: the hub's client raises many unrelated types
        known = ", ".join(each.name for each in known_models())
        raise ModelLoadError(
            f"model={model!r} could not be fetched from the hub, and no directory of that name exists "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no details'}). "
            f"Offline, name a directory with a checkpoint, a .gguf file, or a known name ({known})"
        ) from error
    check_checkpoint(Path(directory))
    return ModelSource(model, Path(directory))
