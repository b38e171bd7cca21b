"""Runs before any test module is imported."""

import os

# The machine that runs the tests has few cores: a team of OpenMP threads with another busy process beside it waits for
# whole scheduler ticks at every barrier. OpenMP reads this when torch is loaded.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import HealthCheck, settings

# How long examples take to make says how busy the machine is; two test files run at a time.
settings.register_profile("shared", suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")
# CI judges a change, not the day's luck: there the same examples every time, elsewhere new ones.
settings.register_profile("ci", settings.get_profile("shared"), derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")
