"""What the shared-prefix plan weighs: measured once, kept on disk, for this processor only."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foreword.ops.cpu.native import costs as measured
from foreword.ops.cpu.native.plan import Costs

KNOWN = Costs(tile=3.0, row=0.25)


def never() -> Costs:
    raise AssertionError("measured although the costs are known")


def only_file(directory: Path) -> Path:
    (file,) = directory.iterdir()
    return file


def test_the_fit_finds_the_model_it_is_made_of() -> None:
    found = measured.fit(KNOWN.of)
    assert (found.tile, found.row) == pytest.approx((3.0, 0.25))


def test_a_fit_to_noise_stays_positive() -> None:
    """More rows that seem to cost less, and rows that seem to cost everything."""
    for seconds in (lambda rows, tiles: tiles / rows, lambda rows, tiles: tiles * rows**3):
        found = measured.fit(seconds)
        assert found.tile > 0
        assert found.row > 0


def test_costs_are_measured_once(tmp_path: Path) -> None:
    assert measured.remembered(tmp_path / "machine", "avx2", lambda: KNOWN) == KNOWN
    assert measured.remembered(tmp_path / "machine", "avx2", never) == KNOWN


def test_another_key_is_measured_for_itself(tmp_path: Path) -> None:
    measured.remembered(tmp_path, "avx2", lambda: KNOWN)
    assert measured.remembered(tmp_path, "portable", lambda: Costs(1.0, 1.0)) == Costs(1.0, 1.0)


@pytest.mark.parametrize("content", ["", "{", "[]", "3", "{}", '{"processor": 1}', '{"tile": 1.0, "row": 1.0}'])
def test_a_damaged_file_is_measured_again(tmp_path: Path, content: str) -> None:
    measured.remembered(tmp_path, "avx2", lambda: KNOWN)
    only_file(tmp_path).write_text(content)
    assert measured.remembered(tmp_path, "avx2", lambda: KNOWN) == KNOWN
    assert measured.remembered(tmp_path, "avx2", never) == KNOWN


@pytest.mark.parametrize("change", [{"processor": "another"}, {"row": -1.0}, {"tile": "3"}, {"more": 1.0}])
def test_what_does_not_fit_this_processor_is_measured_again(tmp_path: Path, change: dict[str, object]) -> None:
    measured.remembered(tmp_path, "avx2", lambda: KNOWN)
    file = only_file(tmp_path)
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    assert measured.remembered(tmp_path, "avx2", lambda: Costs(1.0, 1.0)) == Costs(1.0, 1.0)


def test_a_directory_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert measured.remembered(blocked, "avx2", lambda: KNOWN) == KNOWN


def test_this_processor_has_a_name() -> None:
    assert measured._processor()
