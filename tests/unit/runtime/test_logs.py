"""Log lines name their process and their request, as text and as JSON."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import pytest

from pdserve.runtime.logs import REQUEST_ID, JsonFormatter, TextFormatter


def record(message: str, *args: object, **extra: Any) -> logging.LogRecord:
    made = logging.getLogger("pdserve.x").makeRecord(
        "pdserve.x", logging.INFO, "f", 1, message, args, None, extra=extra
    )
    made.created = 1_700_000_000.5
    return made


def test_text_ends_with_the_request() -> None:
    formatter = TextFormatter("decode:1 http")
    assert formatter.format(record("done in %d ms", 3, rid="abc"))[8:] == " I [decode:1 http] done in 3 ms rid=abc"
    assert formatter.format(record("idle"))[8:] == " I [decode:1 http] idle"


@pytest.mark.parametrize("formatter", [TextFormatter("p"), JsonFormatter("p")])
def test_a_line_that_names_no_request_is_about_the_one_that_is_served(formatter: logging.Formatter) -> None:
    served = REQUEST_ID.set("served")
    try:
        assert "served" in formatter.format(record("a library's line"))
        assert "served" not in formatter.format(record("another's", rid="mine"))
    finally:
        REQUEST_ID.reset(served)
    assert "served" not in formatter.format(record("later"))


def test_json_is_an_object_a_line() -> None:
    line = JsonFormatter("router:8000").format(record("%s\nand \ud800", "two", rid="abc", fields={"status": 200}))
    assert "\n" not in line
    assert json.loads(line) == {
        "time": "2023-11-14T22:13:20.500+00:00",
        "level": "info",
        "process": "router:8000",
        "logger": "pdserve.x",
        "message": "two\nand \ud800",
        "rid": "abc",
        "status": 200,
    }


def test_a_traceback_stays_in_the_object_and_behind_the_line() -> None:
    try:
        raise ValueError("broken")
    except ValueError:
        failed = record("it failed", rid="abc")
        failed.exc_info = sys.exc_info()
    assert "ValueError: broken" in json.loads(JsonFormatter("p").format(failed))["exception"]
    first, *rest = TextFormatter("p").format(failed).splitlines()
    assert first.endswith("it failed rid=abc")
    assert rest[-1] == "ValueError: broken"


FORGED = "x\n12:00:00 I [p] forged\x1b[2J\u2028\x9b"


def test_text_stays_on_its_line_whatever_it_says() -> None:
    for forged in (record(FORGED), record("%s", FORGED), record("it", rid=FORGED)):
        assert TextFormatter("p").format(forged).isprintable()
    served = REQUEST_ID.set(FORGED)
    try:
        assert TextFormatter("p").format(record("it")).isprintable()
    finally:
        REQUEST_ID.reset(served)


def test_a_traceback_has_no_control_characters_but_its_line_ends() -> None:
    try:
        raise ValueError("\x1b[2J\r\u2028")
    except ValueError:
        failed = record("it failed")
        failed.exc_info = sys.exc_info()
    assert all(line.isprintable() for line in TextFormatter("p").format(failed).split("\n"))
