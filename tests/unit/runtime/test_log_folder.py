"""``pdserve up --log-dir`` writes only where no other user can have chosen the place.

What belongs to this user is made to look like another's by changing the user id that the check compares with.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.machine import limit

from pdserve.runtime.exit_codes import EXIT_USAGE
from pdserve.server.log_folder import LogFolder, LogFolderError

NAME = "router.log"
UP = """
import sys
from pdserve.server.cluster import Cluster, run_cluster
from pdserve.server.cluster_options import ClusterOptions
Cluster.run = lambda cluster: 0
sys.exit(run_cluster(ClusterOptions(port=0, log_dir=sys.argv[1])))
"""
CLUSTER = """
import sys
from pdserve.runtime.logs import configure_logging
from pdserve.server.cluster import Cluster
from pdserve.server.cluster_options import ClusterOptions
from pdserve.server.cluster_plan import ClusterPlan, ProcessPlan
configure_logging("up", "info")
unified, router = (ProcessPlan(name, ("-c", ""), "http://127.0.0.1:9") for name in ("unified-0", "router"))
sys.exit(Cluster(ClusterOptions(log_dir=sys.argv[1]), ClusterPlan((unified,), router)).run())
"""


def _of_another_user(state: os.stat_result) -> os.stat_result:
    fields = list(state)
    fields[4] = 1234
    return os.stat_result(fields)


def test_a_missing_folder_is_made_for_this_user_alone_and_logs_are_appended_to(tmp_path: Path) -> None:
    for _ in range(2):
        with LogFolder(tmp_path / "a" / "b").open(NAME) as log:
            log.write(b"a line\n")
            assert os.get_blocking(log.fileno())
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "a" / "b" / NAME).stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "a" / "b" / NAME).read_bytes() == b"a line\na line\n"


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(LogFolderError, match="chmod go-w"):
        LogFolder(tmp_path)


def test_a_sticky_folder_is_accepted(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    LogFolder(tmp_path).open(NAME).close()


@pytest.mark.parametrize("mode", [0o755, 0o1777])
def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int) -> None:
    tmp_path.chmod(mode)
    real_fstat = os.fstat
    monkeypatch.setattr(os, "fstat", lambda fd: _of_another_user(real_fstat(fd)))
    with pytest.raises(LogFolderError, match=f"{tmp_path} is not used: it belongs to user 1234"):
        LogFolder(tmp_path)


def test_a_folder_that_is_changed_while_the_cluster_runs_is_refused(tmp_path: Path) -> None:
    logs = LogFolder(tmp_path)
    tmp_path.chmod(0o777)
    with pytest.raises(LogFolderError, match="chmod go-w"):
        logs.open(NAME)


@pytest.mark.parametrize("exists", [True, False])
def test_a_log_that_is_a_link_is_refused(tmp_path: Path, exists: bool) -> None:
    target = tmp_path / "target"
    if exists:
        target.write_text("precious")
    (tmp_path / NAME).symlink_to(target)
    with pytest.raises(LogFolderError, match=f"{NAME} is not used: it is a link"):
        LogFolder(tmp_path).open(NAME)
    assert target.exists() == exists
    assert not exists or target.read_text() == "precious"


def test_a_log_that_is_another_files_second_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("precious")
    (tmp_path / NAME).hardlink_to(tmp_path / "target")
    with pytest.raises(LogFolderError, match="second name"):
        LogFolder(tmp_path).open(NAME)


@pytest.mark.parametrize("has_reader", [True, False])
def test_a_log_that_is_a_pipe_is_refused_without_waiting_for_its_reader(tmp_path: Path, has_reader: bool) -> None:
    os.mkfifo(tmp_path / NAME)
    reader = os.open(tmp_path / NAME, os.O_RDONLY | os.O_NONBLOCK) if has_reader else None
    with pytest.raises(LogFolderError, match=NAME):
        LogFolder(tmp_path).open(NAME)
    if reader is not None:
        os.close(reader)


def test_a_log_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / NAME).write_text("")
    logs = LogFolder(tmp_path)
    real_fstat = os.fstat

    def fstat(fd: int) -> os.stat_result:
        state = real_fstat(fd)
        return state if os.path.isdir(f"/proc/self/fd/{fd}") else _of_another_user(state)

    monkeypatch.setattr(os, "fstat", fstat)
    with pytest.raises(LogFolderError, match=f"{NAME} is not used: it belongs to user 1234"):
        logs.open(NAME)


def test_no_refusal_leaves_a_descriptor_open(tmp_path: Path) -> None:
    (tmp_path / NAME).symlink_to(tmp_path / "target")
    logs = LogFolder(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(LogFolderError):
            logs.open(NAME)
    assert len(os.listdir("/proc/self/fd")) == before


def test_up_says_which_folder_it_refuses(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    ended = _run(UP, tmp_path)
    assert ended.returncode == EXIT_USAGE, ended.stderr
    assert f"--log-dir: {tmp_path} is not used: others than its owner may write there" in ended.stderr


def test_a_process_whose_log_is_a_link_is_not_started(tmp_path: Path) -> None:
    (tmp_path / "unified-0.log").symlink_to(tmp_path / "target")
    ended = _run(CLUSTER, tmp_path)
    assert ended.returncode == 1, ended.stderr
    assert f"unified-0 can't be started: --log-dir: {tmp_path}/unified-0.log is not used: it is a link" in ended.stderr
    assert not (tmp_path / "target").exists()


def _run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-P", "-c", code, str(folder)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=limit(60))
