"""A process that reads damaged files: ``python -P -m readers.worker FOLDER SEED READER:FIRST:END …``.

Each case may take ``CPU_SECONDS`` of its time, after which the kernel ends it, and ``MEMORY_BYTES`` beside what it has
at its start. FOLDER/case names the case that is being read, for the time after a crash.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sys
from pathlib import Path

from pdserve.model_files.errors import ModelError
from pdserve.model_files.text.errors import TextError

from .cases import LIMITED_READERS, READERS, Reader

CPU_SECONDS = 5.0
MEMORY_BYTES = 1 << 30
MAX_MESSAGE = 700
CASES_OF = {limited: direct for direct, limited in LIMITED_READERS.items()}


def damaged(reader: Reader, name: str, seed: int, number: int) -> tuple[bytes, bytes]:
    """Return the good and the damaged content of a case. A limited reader has those of the other one."""
    rng = random.Random(f"{CASES_OF.get(name, name)}/{seed}/{number}")
    good = rng.choice(reader.good)
    return good, reader.damage(rng, good)


def verdict(reader: Reader, good: bytes, broken: bytes) -> str | None:
    """Read a damaged file; returns what is wrong with how it was read, or None."""
    reader.file.write_bytes(broken)
    try:
        reader.read()
    except (ModelError, TextError) as e:
        return fault_of(str(e), reader.folder)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as e:  # noqa: BLE001  # panics of extensions have no other base
        return f"{type(e).__name__}: {str(e)[:300]} {_place(e)}"
    found = None if broken == good else reader.accepted_damage(good, broken)
    return None if found is None else f"accepted: {found}"


def fault_of(message: str, folder: Path) -> str | None:
    """Return what is wrong with a message about a file in ``folder``, or None."""
    if str(folder) not in message:
        return f"no file is named: {message}"
    if "\n" in message or len(message) > MAX_MESSAGE:
        return f"not one sentence: {message[:2000]}"
    return None


def _place(error: BaseException) -> str:
    trace = error.__traceback__
    frames = []
    while trace is not None:
        frames.append(f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}")
        trace = trace.tb_next
    return " < ".join(reversed(frames[-3:]))


def limit_memory() -> None:
    """Allow this process ``MEMORY_BYTES`` more than it has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def main() -> None:
    """Read the cases that the command line names; prints a line of JSON for each failure."""
    folder, seed = Path(sys.argv[1]), int(sys.argv[2])
    todo = [entry.split(":") for entry in sys.argv[3:]]
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    readers = {name: READERS[name](folder / name) for name, _, _ in todo}
    for name, reader in readers.items():
        for good in reader.good:
            if (wrong := verdict(reader, good, good)) is not None:
                sys.exit(f"a good file of {name}: {wrong}")
    limit_memory()
    place = os.open(folder / "case", os.O_WRONLY | os.O_CREAT)
    for name, first, end in todo:
        for number in range(int(first), int(end), readers[name].step):
            os.pwrite(place, f"{name} {number}".ljust(64).encode(), 0)
            good, broken = damaged(readers[name], name, seed, number)
            signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
            wrong = verdict(readers[name], good, broken)
            signal.setitimer(signal.ITIMER_PROF, 0)
            if wrong is not None:
                print(json.dumps({"reader": name, "case": number, "wrong": wrong}), flush=True)


if __name__ == "__main__":
    main()
