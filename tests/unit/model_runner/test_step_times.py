"""Times of steps that are kept between starts: when they are used, and when they are measured again."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from pdserve.messages.worker import MachineUse, MeasuredStep
from pdserve.model_runner.options import WorkerOptions
from pdserve.model_runner.weights_cache.step_times import MAX_AGE_SECONDS, file_of, known_or_measured

STEPS = [MeasuredStep(1, 64, 0, 0.0, 4.5), MeasuredStep(0, 0, 16, 128.0, 7.25)]
OTHER = [MeasuredStep(1, 64, 0, 0.0, 9.0)]


class Measured:
    """Measurements, counted."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> list[MeasuredStep]:
        self.times += 1
        return OTHER


@pytest.fixture
def path(tmp_path: Path) -> Path:
    kept = tmp_path / "weights" / "abc.steps"
    assert known_or_measured(kept, lambda: STEPS) == STEPS
    return kept


def test_what_was_measured_once_is_known_to_the_next_start(path: Path) -> None:
    measure = Measured()
    assert known_or_measured(path, measure) == STEPS
    assert not measure.times
    assert [file.name for file in path.parent.iterdir()] == ["abc.steps"]


def test_without_a_file_every_start_measures() -> None:
    measure = Measured()
    assert known_or_measured(None, measure) == known_or_measured(None, measure) == OTHER
    assert measure.times == 2


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"{}",
        b'[{"decodes":1}]',
        b'[{"decodes":-1,"kv_tokens":1,"prompt_tokens":0,"prompt_pairs":0.0,"forward_ms":1.0}]',
        b'[{"decodes":1,"kv_tokens":1,"prompt_tokens":0,"prompt_pairs":0.0,"forward_ms":0.0}]',
        b'[{"decodes":1,"kv_tokens":1,"prompt_tokens":0,"prompt_pairs":0.0,"forward_ms":1e300}]',
        b'[{"decodes":1,"kv_tokens":1,"prompt_tokens":0,"prompt_pairs":0.0,"forward_ms":1e-300}]',
        b'[{"decodes":1' + b"0" * 400 + b',"kv_tokens":1,"prompt_tokens":0,"prompt_pairs":0.0,"forward_ms":1.0}]',
        b'[{"decodes":1,"kv_tokens":1,"prompt_tokens":0,"prompt_pairs":1e999,"forward_ms":1.0}]',
        b'[{"decodes":1,"kv_tokens":1,"prompt_tokens":0,"prompt_pairs":0.0,"forward_ms":1.0},'
        + b" " * (1 << 17)
        + b"]",
    ],
)
def test_a_damaged_file_is_measured_anew_and_replaced(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    measure = Measured()
    assert known_or_measured(path, measure) == OTHER
    assert known_or_measured(path, measure) == OTHER
    assert measure.times == 1


@pytest.mark.parametrize("sign", [-1, 1])
def test_a_file_of_another_day_is_replaced(path: Path, sign: int) -> None:
    then = time.time() + sign * (MAX_AGE_SECONDS + 60)
    os.utime(path, (then, then))
    measure = Measured()
    assert known_or_measured(path, measure) == OTHER
    assert known_or_measured(path, measure) == OTHER
    assert measure.times == 1


def test_old_files_of_other_models_are_removed(path: Path) -> None:
    then = time.time() - MAX_AGE_SECONDS - 60
    own = ("ab" * 16 + ".steps", "ab" * 16 + "x_1.new")
    others = ("thesis.new", "training.steps", "ab" * 16 + ".weights", "movie.part.new")
    for name in (*own, *others):
        path.with_name(name).touch()
        os.utime(path.with_name(name), (then, then))
    known_or_measured(path.with_name("ghi.steps"), Measured())
    assert {file.name for file in path.parent.iterdir()} == {"abc.steps", "ghi.steps", *others}


def test_what_others_may_write_to_is_not_read(path: Path) -> None:
    path.chmod(0o666)
    assert known_or_measured(path, Measured()) == OTHER
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_link_is_not_followed_but_replaced(path: Path) -> None:
    elsewhere = path.parent.parent / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    content = elsewhere.read_bytes()
    assert known_or_measured(path, Measured()) == OTHER
    assert not path.is_symlink()
    assert elsewhere.read_bytes() == content


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_file_of_another_user_is_replaced(path: Path) -> None:
    os.chown(path, 65534, 65534)
    assert known_or_measured(path, Measured()) == OTHER
    assert path.stat().st_uid == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_folder_behind_another_users_link_is_not_used(path: Path) -> None:
    link = path.parent.parent / "link"
    link.symlink_to(path.parent)
    measure = Measured()
    assert known_or_measured(link / path.name, measure) == STEPS
    os.chown(link, 65534, 65534, follow_symlinks=False)
    assert known_or_measured(link / path.name, measure) == OTHER
    assert known_or_measured(path, measure) == STEPS


def test_a_folder_of_others_is_left_alone(path: Path) -> None:
    path.parent.chmod(0o777)
    content, measure = path.read_bytes(), Measured()
    assert known_or_measured(path, measure) == known_or_measured(path, measure) == OTHER
    assert measure.times == 2
    assert path.read_bytes() == content


def test_a_folder_that_can_not_be_made_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    with caplog.at_level("INFO"):
        assert known_or_measured(tmp_path / "file" / "abc.steps", Measured()) == OTHER
    assert "measured at each start" in caplog.text


def test_each_model_and_way_to_compute_has_a_file_of_its_own(tmp_path: Path) -> None:
    options = WorkerOptions(weights_cache=str(tmp_path))
    machine = MachineUse(threads=2, kernel_level="avx2")
    files = [
        file_of(options, machine, "model", 2048),
        file_of(options, machine, "other", 2048),
        file_of(options, machine, "model", 1024),
        file_of(replace(options, page_size=32), machine, "model", 2048),
        file_of(options, MachineUse(threads=1, kernel_level="avx2"), "model", 2048),
        file_of(options, MachineUse(threads=2, kernel_level="avx512"), "model", 2048),
    ]
    assert len(set(files)) == len(files)
    assert {file.parent for file in files if file is not None} == {tmp_path}
    assert file_of(options, machine, "model", 2048) == files[0]


def test_no_file_without_a_cache_or_the_engines_kernels(tmp_path: Path) -> None:
    off = WorkerOptions(weights_cache="off")
    assert file_of(off, MachineUse(kernel_level="avx2"), "model", 2048) is None
    assert file_of(WorkerOptions(weights_cache=str(tmp_path)), MachineUse(), "model", 2048) is None
