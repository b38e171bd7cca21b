"""How metrics are declared, read, sent and shown."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
from support.scrape import page_of

from pdserve.messages.metrics import Family, Histogram
from pdserve.runtime.metrics import Metrics, counter, gauge, histogram, one_of, read

TABLE: Metrics[SimpleNamespace] = (
    counter("pdserve_a_total", "A.", lambda owner: owner.a),
    gauge("pdserve_b", "B.", lambda owner: {"x": owner.a, "y": 2.5}, "of"),
    gauge("pdserve_c", "C.", lambda owner: {("x", "y"): 3}, "source", "target"),
    gauge("pdserve_d", "D.", lambda owner: owner.d),
    histogram("pdserve_e_seconds", "E.", lambda owner: owner.e),
    gauge("pdserve_f", "F.", lambda owner: one_of("on", ("on", "off")), "state"),
)


def owner(d: float | None = None) -> SimpleNamespace:
    return SimpleNamespace(a=1, d=d, e=Histogram((1.0,), [2, 3], 4.0))


def test_values_are_shown_with_their_labels() -> None:
    page = page_of(read(TABLE, owner()))
    assert page.total("pdserve_a_total") == 1
    assert (page.total("pdserve_b", of="x"), page.total("pdserve_b", of="y")) == (1, 2.5)
    assert page.total("pdserve_c", source="x", target="y") == 3
    assert (page.total("pdserve_e_seconds_bucket", le="1.0"), page.total("pdserve_e_seconds_count")) == (2, 5)
    assert (page.total("pdserve_f", state="on"), page.total("pdserve_f", state="off")) == (1, 0)
    types = {family.name: (family.type, family.documentation) for family in page.families}
    assert types["pdserve_a"] == ("counter", "A.")
    assert types["pdserve_b"] == ("gauge", "B.")
    assert types["pdserve_e_seconds"] == ("histogram", "E.")


def test_a_metric_without_a_value_is_not_shown() -> None:
    assert "pdserve_d" not in page_of(read(TABLE, owner())).names()
    assert page_of(read(TABLE, owner(d=0))).total("pdserve_d") == 0


def test_an_owner_that_is_absent_has_no_metrics() -> None:
    assert read(TABLE, None) == []


def test_what_was_read_stands_still_and_travels() -> None:
    counted = owner()
    families = read(TABLE, counted)
    sent = msgspec.msgpack.encode(families)
    counted.e.observe(0.5)
    assert msgspec.msgpack.decode(sent, type=list[Family]) == families
