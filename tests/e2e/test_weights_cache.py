"""Instances of one model on one host: one copy of the weights, one instance that packs, and one answer."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.processes import ONE_THREAD, Launched, launched
from support.tiny_model import tiny_args

PROMPT = [(7 * i) % 90 + 3 for i in range(100)]
WAKE = {"tags": ["weights"]}


def ask(server: Launched) -> list[int]:
    sampling = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
    return server.generate(input_ids=PROMPT, sampling_params=sampling)["output_ids"]


def mapped(server: Launched, file: Path) -> dict[str, int]:
    """KiB of the file in the worker's memory, by kind; {} if it does not map the file."""
    found: dict[str, int] = {}
    inside = False
    smaps = Path(f"/proc/{server.family()['worker'].pid}/smaps").read_text()
    for words in map(str.split, smaps.splitlines()):
        if "-" in words[0]:
            inside = words[-1] == str(file)
        elif inside and words[-1] == "kB":
            found[words[0].rstrip(":")] = int(words[1])
    return found


@pytest.mark.slow
def test_a_second_instance_maps_what_the_first_has_packed(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    folder = tmp_path / "weights"
    args = (*ONE_THREAD, *tiny_args(tmp_path / "model", hidden_size=256), "--max-total-tokens", "4096")
    cached = (*args, "--weights-cache", str(folder))
    with launched(tmp_path, "a", "server", *cached) as first:
        first.wait_healthy()
        (file,) = folder.glob("*.weights")
        written = file.stat().st_ino
        assert "shared in" in first.log()
        expected = ask(first)
        with launched(tmp_path, "b", "server", *cached) as second:
            second.wait_healthy()
            assert ask(second) == expected
            assert [path.stat().st_ino for path in folder.glob("*.weights")] == [written]
            kib = file.stat().st_size // 1024
            for server in (first, second):
                use = mapped(server, file)
                assert use["Rss"] > 0.9 * kib
                # Half of each page is the other instance's, and none of it was copied.
                assert use["Pss"] < 0.6 * kib
                assert use["Private_Dirty"] == use["Anonymous"] == 0
                assert server.info()["memory"]["weights"] == file.stat().st_size
            assert second.post("/release_memory_occupation", WAKE).status_code == 200
            assert mapped(second, file) == {}
            assert second.post("/resume_memory_occupation", WAKE).status_code == 200
            second.wait_healthy(5)
            assert ask(second) == expected


@pytest.mark.slow
def test_an_instance_without_a_cache_answers_the_same(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    folder = tmp_path / "weights"
    args = (*ONE_THREAD, *tiny_args(tmp_path / "model", hidden_size=256), "--max-total-tokens", "4096")
    with launched(tmp_path, "a", "server", *args, "--weights-cache", str(folder)) as first:
        first.wait_healthy()
        (file,) = folder.glob("*.weights")
        expected = ask(first)
    with launched(tmp_path, "b", "server", *args, "--weights-cache", "off") as alone:
        alone.wait_healthy()
        assert ask(alone) == expected
        assert mapped(alone, file) == {}
