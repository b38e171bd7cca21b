"""Exit codes of ``pdserve``'s commands, beside 0."""

EXIT_FAILED = 1
EXIT_USAGE = 2
"""The options are wrong; nothing was started."""
