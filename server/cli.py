"""The command line: ``pdserve server | router | up | chat | check | calibrate | bench | router-key |
completion | version``.

What a command runs is imported inside it: ``pdserve router`` never loads what only a server needs.
"""

from __future__ import annotations

from ..runtime import clean_start  # isort: skip  # noqa: F401

import errno
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter

from ..model_runner.calibration.options import CalibrateOptions, CalibrateOptionsError
from ..router.options import RouterOptions, RouterOptionsError
from ..runtime.cluster_secret import ClusterSecretError, RouterKeys
from ..runtime.config_file import apply_config
from ..runtime.exit_codes import EXIT_FAILED, EXIT_USAGE
from ..runtime.options import OptionError, check_options
from ..runtime.web.ports import LOOPBACK
from ..terminal.chat.options import ChatOptions, ChatOptionsError
from ..terminal.check.options import CheckOptions, CheckOptionsError
from .cluster_options import ClusterOptions, ClusterOptionsError
from .commands import BENCH_HELP, Config, refuse
from .option_headings import show_headings
from .options import ServerOptions

show_headings(ServerOptions, RouterOptions, ClusterOptions)
SERVER_DEFAULTS, ROUTER_DEFAULTS, CLUSTER_DEFAULTS = ServerOptions(), RouterOptions(), ClusterOptions()
SERVERS = (["server"], ["router"], ["up"])
"""Commands with their own handling of Ctrl-C."""
CHAT_DEFAULTS, CHECK_DEFAULTS, CALIBRATE_DEFAULTS = ChatOptions(), CheckOptions(), CalibrateOptions()


def _show_default(value: Any) -> Any:
    """Format a default for ``--help``. A flag that is off, and an empty list, need no "[default: …]"."""
    return None if value is False or value == [] else value


app = App(
    name="pdserve",
    help=(
        "LLM inference server with prefill and decode phases in separate instances.\n\n"
        "pdserve COMMAND --help lists the options of a command."
    ),
    group_parameters="Options",
    version_flags=[],
    config=apply_config,
    default_parameter=Parameter(negative=(), consume_multiple=True, show_default=_show_default),
)


@app.command
def server(*, options: Annotated[ServerOptions, Parameter(name="*")] = SERVER_DEFAULTS, config: Config = None) -> int:
    """Run one instance: unified, prefill or decode."""
    try:
        check_options(options)
    except OptionError as e:
        return refuse("server", e)
    from .instance import run_instance

    return run_instance(options)


@app.command
def router(*, options: Annotated[RouterOptions, Parameter(name="*")] = ROUTER_DEFAULTS, config: Config = None) -> int:
    """Run the router, which pairs prefill and decode instances for each request."""
    try:
        options.check()
    except RouterOptionsError as e:
        return refuse("router", e)
    from ..router.process import run_router

    return run_router(options)


@app.command
def up(*, options: Annotated[ClusterOptions, Parameter(name="*")] = CLUSTER_DEFAULTS, config: Config = None) -> int:
    """Run a whole cluster on this host: prefill and decode instances behind a router."""
    try:
        options.check()
        # Instances listen on this host alone, whatever the router does.
        check_options(options.instance_options(host=LOOPBACK))
    except (ClusterOptionsError, OptionError) as e:
        return refuse("up", e)
    from .cluster import run_cluster

    return run_cluster(options)


@app.command
def chat(*, options: Annotated[ChatOptions, Parameter(name="*")] = CHAT_DEFAULTS, config: Config = None) -> int:
    """Talk to a running server or router in the terminal."""
    try:
        options.check()
    except ChatOptionsError as e:
        return refuse("chat", e)
    from ..terminal.chat.run import run_chat

    return run_chat(options)


@app.command
def check(*, options: Annotated[CheckOptions, Parameter(name="*")] = CHECK_DEFAULTS, config: Config = None) -> int:
    """Look at this machine, a model or a server, and say what is wrong."""
    try:
        options.check()
    except CheckOptionsError as e:
        return refuse("check", e)
    from ..terminal.check.run import run_check

    return run_check(options)


@app.command
def calibrate(
    *, options: Annotated[CalibrateOptions, Parameter(name="*")] = CALIBRATE_DEFAULTS, config: Config = None
) -> int:
    """Find out which channels of a model's keys --enable-double-sparsity should look at."""
    try:
        options.check()
    except CalibrateOptionsError as e:
        return refuse("calibrate", e)
    from ..model_runner.calibration.calibrate import run_calibrate

    return run_calibrate(options)


app.command(f"{__package__}.bench_cli:bench", name="bench", help=BENCH_HELP)


@app.command
def router_key(*, cluster_secret_file: Path) -> int:
    """Print the key of a cluster's routers, made of the cluster's secret. A router with it can't act as an instance.

    Parameters
    ----------
    cluster_secret_file
        File with the secret, as instances have it. The output is the file for a router's --cluster-secret-file.
    """
    try:
        keys = RouterKeys.load(str(cluster_secret_file))
    except ClusterSecretError as e:
        return refuse("router-key", e)
    print(keys.text(), end="")
    return 0


@app.command
def completion(shell: Literal["bash", "zsh", "fish"], /) -> int:
    """Print a script that completes commands and options in a shell.

    Parameters
    ----------
    shell
        In bash: eval "$(pdserve completion bash)". README.md says where the others want it.
    """
    script = app.generate_completion(shell=shell)
    # If the script has no suggestions, as for --model-path, bash then offers file names.
    print(script.replace("\ncomplete -F ", "\ncomplete -o default -F "))
    return 0


@app.command
def version() -> int:
    """Print the version."""
    from importlib.metadata import version as package_version

    print(package_version("pdserve"))
    return 0


def main() -> None:
    """Run the console script ``pdserve``: run the command of ``sys.argv``, and exit the process with its exit code."""
    for word in map(os.fsencode, sys.argv[1:]):
        try:
            word.decode()
        except UnicodeDecodeError:  # options go to the processes of an instance as JSON
            print(f"pdserve: {word!r} is not UTF-8: give files and folders another name", file=sys.stderr)
            sys.exit(EXIT_USAGE)
    if sys.argv[1:2] not in SERVERS and signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # KeyboardInterrupt, so that they can clean up
    try:
        code = app(result_action="return_value")
        sys.stdout.flush()
    except OSError as e:
        if e.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        code = _end_output(e)
    sys.exit(code)


def _end_output(error: OSError) -> int:
    """Report that standard output can't be written, send the rest of it to /dev/null, and return the exit code.

    Nothing is reported if the output's reader has left, as `head` does.
    """
    if error.errno != errno.EPIPE:
        print(f"pdserve: can't write what there is to say: {error.strerror}", file=sys.stderr)
    # Python would complain once more when it writes the rest at its end.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return EXIT_FAILED


if __name__ == "__main__":
    main()
