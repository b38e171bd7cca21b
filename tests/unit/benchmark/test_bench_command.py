"""What commands of measurements end with."""

from __future__ import annotations

import pytest

from pdserve.benchmark.command import exit_code
from pdserve.benchmark.errors import BenchError, BenchOptionsError
from pdserve.runtime.exit_codes import EXIT_FAILED, EXIT_USAGE


def test_the_exit_code_says_what_went_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    def raises(error: Exception) -> None:
        raise error

    assert exit_code("x", lambda: None) == exit_code("x", lambda: True) == 0
    assert exit_code("x", lambda: False) == EXIT_FAILED
    assert exit_code("x", lambda: raises(BenchOptionsError("--n: too many"))) == EXIT_USAGE
    assert exit_code("x", lambda: raises(BenchError("it died"))) == EXIT_FAILED
    assert capsys.readouterr().err == "x: --n: too many\nx: it died\n"
