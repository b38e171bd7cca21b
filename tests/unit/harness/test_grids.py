"""What ``make test`` runs of a grid of parameters."""

from __future__ import annotations

import pytest

pytest_plugins = ["pytester"]

CONFTEST = """
    import pytest
    from support.sampling import is_in_sample

    def pytest_collection_modifyitems(items):
        for item in items:
            if not is_in_sample(item):
                item.add_marker(pytest.mark.slow)
"""
GRID = """
    import pytest

    @pytest.mark.sample({one_in})
    @pytest.mark.parametrize("row", [5, pytest.param(5.0, id="five"), "text"])
    @pytest.mark.parametrize(("column", "more"), [(1, 2), (1, 3)])
    def test_of_a_grid(row, column, more):
        pass
"""


def sample(pytester: pytest.Pytester, one_in: int) -> pytest.RunResult:
    pytester.makeini("[pytest]\nmarkers =\n  sample\n  slow")
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(GRID.format(one_in=one_in))
    return pytester.runpytest_inprocess("-m", "not slow", "-v", "-p", "no:xdist", "-p", "no:cacheprovider")


def test_every_value_is_in_the_sample_by_turns(pytester: pytest.Pytester) -> None:
    result = sample(pytester, one_in=2).stdout.str()
    found = [line.partition("[")[2].partition("]")[0] for line in result.splitlines() if "PASSED" in line]
    assert found == ["1-2-5", "1-2-text", "1-3-five"], result


def test_a_sample_that_would_leave_out_values_is_refused(pytester: pytest.Pytester) -> None:
    result = sample(pytester, one_in=3)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "one in 3 leaves out values" in result.stderr.str()
