"""End-to-end tests: a package, so that servers of its ``conftest.py`` end before unit tests begin."""
