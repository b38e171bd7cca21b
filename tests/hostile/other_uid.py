"""What a user of another uid can open of the cluster's processes: nothing."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

STRANGER = 65534
"""The uid ``nobody``."""
SECONDS = 60.0


def intrusions(pids: Sequence[int], files: Sequence[Path], readable: Sequence[Path] = ()) -> list[str]:
    """Return what the uid ``nobody`` can do to processes and files; runs a child, as root.

    ``readable``: files that it may read, in folders where it may make others.
    """
    facts = json.dumps(
        [list(pids), [str(file) for file in files], unix_sockets(pids), [str(file) for file in readable]]
    )
    child = subprocess.run(
        [sys.executable, "-P", __file__],
        input=facts.encode(),
        stdout=subprocess.PIPE,
        timeout=SECONDS,
        check=True,
    )
    found: list[str] = json.loads(child.stdout)
    return found


def unix_sockets(pids: Sequence[int]) -> list[str]:
    """Return the Unix sockets that processes listen on; an abstract name begins with ``@``."""
    inodes = set()
    for pid in pids:
        with suppress(OSError):
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    inodes.add(os.readlink(entry).removeprefix("socket:[").rstrip("]"))
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    listening = "00010000"  # __SO_ACCEPTCON
    return sorted({words[7] for words in lines if len(words) > 7 and words[3] == listening and words[6] in inodes})


def _tries(
    pids: Sequence[int], files: Sequence[str], sockets: Sequence[str], readable: Sequence[str]
) -> Iterator[tuple[str, Callable[[], object]]]:
    for pid in pids:
        for name in ("environ", "mem", "maps", "auxv", "stack"):
            yield f"read /proc/{pid}/{name}", lambda pid=pid, name=name: Path(f"/proc/{pid}/{name}").read_bytes()
        yield f"list /proc/{pid}/fd", lambda pid=pid: list(Path(f"/proc/{pid}/fd").iterdir())
        yield f"signal {pid}", lambda pid=pid: os.kill(pid, 0)
    for file in files:
        yield (
            f"read {file}",
            lambda file=file: list(Path(file).iterdir()) if Path(file).is_dir() else Path(file).read_bytes(),
        )
        yield f"write beside {file}", lambda file=file: Path(file + ".planted").touch()
    for file in readable:
        for flags in ("O_CREAT", "O_APPEND", "O_TRUNC"):
            how = os.O_WRONLY | getattr(os, flags)
            yield f"open {file} with {flags}", lambda file=file, how=how: os.close(os.open(file, how))
        yield f"change the mode of {file}", lambda file=file: os.chmod(file, 0o666)
        yield f"remove {file}", lambda file=file: os.unlink(file)
        yield f"make a link of {file}", lambda file=file: os.symlink(_planted(file), file)
        yield f"replace {file}", lambda file=file: os.replace(_planted(file), file)
        yield f"replace the folder of {file}", lambda file=file: Path(file).parent.rename(Path(file).parent / "../x")
    for name in sockets:
        yield f"talk at {name}", lambda name=name: _talk(name)


def _planted(file: str) -> str:
    """Make a file in the same folder, and return its path."""
    planted = Path(file + ".planted")
    planted.write_text("[]")
    return str(planted)


def _talk(name: str) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(5)
        sock.connect("\0" + name[1:] if name.startswith("@") else name)
        # Abstract names let any process connect: their owner must hang up, and send nothing.
        sock.sendall(b"\x10\x00\x00\x00" + b"x" * 16)
        if not sock.recv(1):
            raise PermissionError(name)


def main() -> None:
    """Read what to try, as JSON, become ``nobody``, and print what was not refused."""
    # Not before the interpreter runs: it may lie where only root can read.
    os.setgroups([])
    os.setgid(STRANGER)
    os.setuid(STRANGER)
    found = []
    for what, attempt in _tries(*json.loads(sys.stdin.read())):
        try:
            attempt()
        except OSError:
            continue
        found.append(what)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
