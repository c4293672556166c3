"""Engines and checkpoints that the whole session shares: each is made once, on first use."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

TESTS = Path(__file__).parent
os.environ.setdefault("FOREWORD_HOME", str(TESTS.parent / ".cache" / "foreword"))
sys.path.insert(0, str(TESTS))  # for `from support import ...`

settings.register_profile("quick", deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
settings.register_profile("soak", settings.get_profile("quick"), derandomize=False, max_examples=5000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

if TYPE_CHECKING:
    from foreword import Engine

REAL_KV = "192MiB"
ON_A_GPU = [
    Path("equivalence"),
    Path("unit/ops/triton"),
    Path("unit/engine/test_own_memory.py"),
    Path("unit/engine/test_steering.py"),
    Path("faults/test_injected_errors.py"),
    Path("faults/test_consumers.py"),
]
"""What ``--device`` collects, but for tests that are marked as the CPU's."""


def pytest_addoption(parser: pytest.Parser) -> None:
    from support import DEVICES

    parser.addoption(
        "--device",
        choices=DEVICES,
        default="cpu",
        help="what engines compute on: the CPU; a GPU, with the tests that mean something there; or, with the same "
        "tests, Triton's interpreter, which is slow",
    )


def pytest_configure(config: pytest.Config) -> None:
    from support import use_device

    try:
        use_device(config.getoption("--device"))
    except RuntimeError as error:
        raise pytest.UsageError(str(error)) from error


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Modules that are of no use on the device are not imported either: they may need packages that are not there."""
    from support import DEVICE

    if DEVICE == "cpu" or not collection_path.is_relative_to(TESTS):
        return None
    path = collection_path.relative_to(TESTS)
    return None if any(path.is_relative_to(each) or each.is_relative_to(path) for each in ON_A_GPU) else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    from support import DEVICE

    left_out = [item for item in items if DEVICE != "cpu" and item.get_closest_marker("cpu")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def need_model(model: str) -> None:
    """Skip where the default model cannot run, or is missing on a GPU machine, which may have no network."""
    from foreword.model.source import known_models
    from support import DEVICE

    [default] = known_models()
    if model != default.name or DEVICE == "cpu":
        return
    if DEVICE == "interpreter":
        pytest.skip(f"{model} is too large for Triton's interpreter")
    if default.location is None:
        pytest.skip(f"{model} is not on this machine: fetch it with `foreword generate Hello`, or set FOREWORD_HOME")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show what tests, also those that pass, have recorded as the property ``table``."""
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    for report in reports:
        if getattr(report, "when", None) == "call":
            for table in (value for name, value in report.user_properties if name == "table"):
                terminalreporter.section(report.nodeid)
                terminalreporter.write_line(str(table).rstrip())


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The default model as a checkpoint directory."""
    from foreword.model.source import resolve

    need_model("smollm2-135m")
    return resolve("smollm2-135m").directory


def _engines() -> Iterator[Callable[..., Engine]]:
    """One engine per model and options."""
    from foreword import Engine
    from support import on_device

    made: dict[tuple[Any, ...], Engine] = {}

    def get(model: str, **options: Any) -> Engine:
        need_model(model)
        options = on_device(options)
        key = (model, *sorted(options.items()))
        if key not in made or made[key].closed:
            made[key] = Engine(model, **options)
        return made[key]

    yield get
    for engine in made.values():
        engine.close()


shared_engines = pytest.fixture(_engines, scope="session", name="shared_engines")
module_engines = pytest.fixture(_engines, scope="module", name="module_engines")
"""For the large ones: closed behind the module, so that a process does not hold all of the session's at once."""


@pytest.fixture(scope="session")
def bf16_engine(shared_engines: Callable[..., Engine]) -> Engine:
    """The default model in bfloat16."""
    return shared_engines("smollm2-135m", dtype="bfloat16", kv_cache_memory=REAL_KV)


@pytest.fixture(scope="session")
def fp32_engine(shared_engines: Callable[..., Engine]) -> Engine:
    """The default model in float32."""
    return shared_engines("smollm2-135m", dtype="float32", kv_cache_memory=REAL_KV)


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A randomly initialised llama with a byte tokenizer: 2 layers, hidden 64, 4 heads, 2 KV heads, 260 tokens."""
    from support import save_tiny_llama

    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny(tiny_dir: Path, shared_engines: Callable[..., Engine]) -> Callable[..., Engine]:
    """A shared tiny engine with the given options, float32 and 256 blocks unless said otherwise."""
    from support import tiny_options

    return lambda **options: shared_engines(str(tiny_dir), **tiny_options(**options))


@pytest.fixture(autouse=True)
def tiers_are_always_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model computes faster than a loaded machine copies: what comes from where must not depend on that."""
    monkeypatch.setattr("foreword.kv.tier.Tier.is_worth", lambda *_: True)


@pytest.fixture
def new_tiny(tiny_dir: Path) -> Iterator[Callable[..., Engine]]:
    """A tiny engine of the test's own, closed after it: for tests that break or close it."""
    from foreword import Engine
    from support import on_device, tiny_options

    made: list[Engine] = []

    def make(**options: Any) -> Engine:
        made.append(Engine(str(tiny_dir), **on_device(tiny_options(**options))))
        return made[-1]

    yield make
    for engine in made:
        engine.close()
