"""How long a drive lasts, and one warning when that is short."""

from __future__ import annotations

import math
import os
import warnings
from pathlib import Path

import pytest

from offcompile.ir import OffloadError
from offcompile.runtime.disk.drive_life import DriveWarning, DriveWatch, capacity_of, drive_life

TB = 10**12
YEAR_S = 365.25 * 24 * 3600


def test_years_follow_from_bytes_per_step_and_the_rating() -> None:
    # 600 TB for a drive of 1 TB, 12 GB every 10 s: 50,000 steps
    life = drive_life(12 * 10**9, 10.0, TB)
    assert life.steps == pytest.approx(50_000)
    assert life.years == pytest.approx(500_000 / YEAR_S)
    assert "12 GB written per step of 10 s" in life.words()
    assert "rated for 600 TB written lasts 5.79 days" in life.words()
    assert drive_life(12 * 10**9, 10.0, TB, endurance_bytes=1e18).years == pytest.approx(
        life.years * 1e6 / 600
    )
    assert "years" in drive_life(10**6, 10.0, TB).words()
    assert "hours" in drive_life(10**12, 10.0, TB).words()


def test_what_writes_nothing_lasts() -> None:
    life = drive_life(0, 1.0, TB)
    assert math.isinf(life.years) and math.isinf(life.steps)
    assert life.words() == "optimizer states: nothing is written to disk"


def test_a_short_life_is_told_once_when_it_was_measured_for_long_enough() -> None:
    watch = DriveWatch(TB, horizon_years=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(6):  # the first one writes what was never there
            watch.step_over(50 * 10**9 + step * 12 * 10**9, 100.0 + step * 10.0)
        assert watch.life is None
    with pytest.warns(DriveWarning, match=r"lasts 5.79 days .*host_memory=.*lossy"):
        watch.step_over(50 * 10**9 + 6 * 12 * 10**9, 160.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        watch.step_over(50 * 10**9 + 7 * 12 * 10**9, 170.0)
    assert watch.life == drive_life(12 * 10**9, 10.0, TB)


def test_a_long_life_is_not_worth_a_word() -> None:
    watch = DriveWatch(TB)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(8):
            watch.step_over(step * 10**6, step * 10.0)
    assert watch.life is not None and watch.life.years > 1


def test_directories_of_one_file_system_are_one_drive(tmp_path: Path) -> None:
    told = os.statvfs(tmp_path)
    (tmp_path / "a").mkdir()
    assert capacity_of((tmp_path, tmp_path / "a")) == told.f_blocks * told.f_frsize


@pytest.mark.parametrize("given", [(-1, 1.0, TB), (1, 0.0, TB), (1, 1.0, 0)])
def test_numbers_that_mean_nothing_are_refused(given: tuple[int, float, int]) -> None:
    with pytest.raises(OffloadError, match="no life of a drive follows"):
        drive_life(*given)


def test_counting_from_nothing_begins_anew() -> None:
    watch = DriveWatch(10**6 * TB)
    watch.step_over(10**9, 0.0)
    for step in range(1, 100):
        watch.step_over(10**6 * step, 10.0 * step)
    assert watch.life is not None and watch.life.written_bytes_per_step == 10**6
