"""The layers of the design: who may import whom, read from the source, function-level imports included."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import foreword

ROOT = Path(foreword.__file__).parent

LAYERS: dict[str, set[str]] = {
    "core": set(),
    "kv": {"core"},
    "text": {"core"},
    "ops": {"core"},
    "pool": {"core", "kv", "ops"},
    "model": {"core", "text", "ops", "pool"},
    "scheduling": {"core", "kv"},
    "runtime": {"core", "kv", "text", "ops", "pool", "model", "scheduling"},
    "engine": {"core", "kv", "text", "ops", "pool", "model", "scheduling", "runtime"},
    "top": {"core", "kv", "text", "ops", "pool", "model", "scheduling", "runtime", "engine"},
}
"""Each layer and those it may import. ``kv`` is its index half, ``pool`` its storage half; ``top``: cli and the like.

Scheduling lists less than the rows above it: it is pure bookkeeping over ``core`` and ``kv``.
"""

STORAGE = {"pool", "host", "disk", "store"}
TOP = {"cli", "server", "distributed"}
WITHOUT_TENSORS = ("core", "kv", "text", "scheduling")
HEAVY = {"torch", "transformers", "numpy", "triton", "numba", "safetensors"}
FILES = sorted(ROOT.rglob("*.py"))


def layer_of(parts: tuple[str, ...]) -> str:
    """The layer of a module, given its path below the package: ``("kv", "pool")`` is storage."""
    if parts[0] == "kv" and len(parts) > 1 and parts[1] in STORAGE:
        return "pool"
    return "top" if parts[0] in TOP else parts[0]


def imports(source: str) -> set[tuple[str, bool]]:
    """Every absolute name that is imported anywhere in ``source``, and whether only for type checking."""
    tree = ast.parse(source)
    typing_only = {
        child
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for statement in node.body
        for child in ast.walk(statement)
    }
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {(alias.name, node in typing_only) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide their layer"
            found |= {(f"{node.module}.{alias.name}", node in typing_only) for alias in node.names}
    return found


def violations(path: Path, source: str) -> list[str]:
    relative = path.relative_to(ROOT).with_suffix("").parts
    layer = layer_of(relative)
    wrong = []
    for name, typing_only in imports(source):
        package, *rest = name.split(".")
        if package == "foreword" and rest:
            target = layer_of(tuple(rest))
            if target in LAYERS and target != layer and target not in LAYERS[layer]:
                wrong.append(f"{layer} imports {target}: {name}")
        elif package in HEAVY and layer in WITHOUT_TENSORS and not typing_only:
            wrong.append(f"{layer} imports {package}")
    return wrong


@pytest.mark.parametrize("path", [f for f in FILES if f.parent != ROOT], ids=lambda f: str(f.relative_to(ROOT)))
def test_every_arrow_points_up(path: Path) -> None:
    """No module imports from a layer below its own, nor tensors where there must be none."""
    assert violations(path, path.read_text()) == []


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("core/x.py", "from foreword.kv.blocks import BlockAllocator"),
        ("core/x.py", "def f():\n    import torch"),
        ("kv/cache.py", "import torch.nn"),
        ("kv/cache.py", "from foreword.kv.pool import KVPool"),
        ("kv/pool.py", "from foreword.scheduling.policy import Candidate"),
        ("text/x.py", "from foreword.kv import tree"),
        ("ops/x.py", "from foreword.scheduling.sequence import Sequence"),
        ("model/x.py", "def f():\n    from foreword.scheduling.sequence import Sequence"),
        ("scheduling/x.py", "import torch"),
        ("scheduling/x.py", "from foreword.model.inputs import ForwardBatch"),
        ("scheduling/x.py", "if TYPE_CHECKING:\n    from foreword.runtime.batch import build_batch"),
        ("runtime/x.py", "from foreword.engine.core import EngineCore"),
        ("engine/x.py", "from foreword.cli.main import main"),
    ],
)
def test_a_wrong_arrow_is_found(file: str, source: str) -> None:
    """The check itself: imports that break the rules are reported."""
    assert len(violations(ROOT / file, source)) == 1


def test_every_folder_has_a_layer() -> None:
    """A new folder or module at the top must be given its place."""
    names = {path.relative_to(ROOT).parts[0].removesuffix(".py") for path in FILES}
    assert names - TOP - {"__init__", "__main__"} <= set(LAYERS) - {"pool", "top"}
    assert len(FILES) > 30


@pytest.mark.parametrize(
    "statement",
    [
        "import foreword",
        "import foreword; foreword.SamplingParams(); foreword.EngineConfig; foreword.RequestOutput",
        "import foreword.kv.cache, foreword.scheduling.scheduler",
        "import foreword; dir(foreword)",
    ],
)
def test_imports_stay_light(statement: str) -> None:
    """The package, its plain data and the scheduler load no heavy library."""
    check = f"import sys; {statement}; print(sorted({sorted(HEAVY)!r} & sys.modules.keys()))"
    check = check.replace(repr(sorted(HEAVY)), f"set({sorted(HEAVY)!r})")
    result = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_everything_public_exists() -> None:
    """Each name of ``__all__`` can be imported, and a wrong one is an AttributeError."""
    for name in foreword.__all__:
        assert getattr(foreword, name) is not None
    with pytest.raises(AttributeError, match="Motor"):
        _ = foreword.Motor
