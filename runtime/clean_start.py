"""Prepares a process of pdserve before it imports anything else.

Entry modules import this module first. It acts only if the main program is pdserve's, so a test or a notebook that
imports an entry module is left alone.

- The current directory leaves the import path, where ``python -m`` puts it: no file beside a model is ever run. What
  Python imports before it runs a module (``importlib``, ``__future__``) can't be helped here; ``python -P`` and the
  script ``pdserve`` never look there.
- A current directory that was deleted is left.
- Standard streams that the parent closed are opened on /dev/null. Otherwise the next socket would get their number, and
  log lines would be written into it.
- Signals that the parent blocked are let in, and SIGCHLD has its default: where it is ignored, no process can wait for
  its children. SIGINT has its default in the command line's program.
- Text is UTF-8 whatever the locale is: if the locale says otherwise, Python is started again in its UTF-8 mode.
"""

import os
import sys

PROGRAM = "pdserve"


def is_own_program() -> bool:
    """Tell whether the main program is a module of pdserve or its console script."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is None:
        return os.path.basename(sys.argv[0]) == PROGRAM
    return str(spec.name).startswith(f"{PROGRAM}.")


def drop_current_directory() -> None:
    """Take the current directory out of ``sys.path``, unless PYTHONPATH names it. If it was deleted, change to ``/``.

    An empty entry of PYTHONPATH means the current directory, too. It is hardly ever written on purpose, but left by
    ``PYTHONPATH=$PYTHONPATH:/folder`` if the variable was empty. It is dropped for this process and for its children.
    """
    try:
        here = os.getcwd()
    except FileNotFoundError:  # it was deleted: Python has not added it, and some libraries can't load without one
        os.chdir("/")
        return
    if getattr(sys.modules.get("__main__"), "__spec__", None) and not sys.flags.safe_path and sys.path[0] == here:
        del sys.path[0]
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    named = [entry for entry in entries if entry]
    if len(named) < len(entries) and len(entries) > 1:
        os.environ["PYTHONPATH"] = os.pathsep.join(named)
        # The entries of PYTHONPATH come first. Python has made them absolute.
        if here in sys.path[: len(entries)] and here not in map(os.path.abspath, named):
            sys.path.remove(here)


def open_closed_streams() -> None:
    """Open /dev/null for each standard stream that is closed."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
            os.set_inheritable(null, True)
            stream = os.fdopen(number, mode, encoding="utf-8", errors="backslashreplace", closefd=False)
            setattr(sys, name, stream)


def use_utf8() -> None:
    """Start this program again in Python's UTF-8 mode if the locale's encoding is another; that call does not return.

    Otherwise, have standard output and error write escapes for characters that they can't encode.
    """
    if sys.getfilesystemencoding() != "utf-8" and not sys.flags.utf8_mode and sys.executable:
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    for stream in (sys.stdout, sys.stderr):
        # PYTHONIOENCODING may still name an encoding that lacks most characters.
        if stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


def let_signals_in() -> None:
    """Unblock all signals, and give SIGCHLD its default. Both are inherited from the parent.

    In the command line's program, Ctrl-C ends the process without a traceback from now on, unless it is ignored. The
    imports take a few tenths of a second, and servers have no handler sooner.
    """
    import signal  # no sooner: this file would be looked for in the current directory

    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    is_command_line = spec is None or spec.name == f"{PROGRAM}.server.cli"
    if is_command_line and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


if is_own_program():
    drop_current_directory()
    let_signals_in()
    open_closed_streams()
    use_utf8()
