"""Every declared option has a help text, a heading and a check of its bounds, whichever command it is of."""

from __future__ import annotations

from dataclasses import dataclass, fields

import pytest

from pdserve.router.options import RouterOptions
from pdserve.runtime.options import HIDDEN, OptionError, check_options, heading_of, opt, section
from pdserve.server.cli import app
from pdserve.server.cluster_options import ClusterOptions
from pdserve.server.options import ServerOptions

COMMANDS = {"server": ServerOptions, "router": RouterOptions, "up": ClusterOptions}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_has_a_help_text_and_a_heading(command):
    for field in fields(COMMANDS[command]):
        assert field.metadata.get("help", "").strip(), f"{field.name} has no help text: declare it with opt()"
        assert heading_of(COMMANDS[command], field.name).title, f"{field.name} is declared in a class without @section"


@pytest.mark.parametrize("command", COMMANDS)
def test_the_command_line_shows_what_is_declared(command):
    declared = {field.name: field.metadata["help"] for field in fields(COMMANDS[command])}
    shown = {
        argument.name.removeprefix("--").replace("-", "_"): argument.parameter
        for argument in app[command].assemble_argument_collection()
        if argument.parse and argument.name not in ("*", "--config")
    }
    assert shown.keys() == {name for name, text in declared.items() if text != HIDDEN}
    for name, parameter in shown.items():
        assert parameter.help == declared[name]
        assert [group.name for group in parameter.group] == [heading_of(COMMANDS[command], name).title]


def test_headings_of_one_order_are_one_heading():
    headings = {heading_of(options, field.name) for options in COMMANDS.values() for field in fields(options)}
    assert len({heading.title for heading in headings}) == len({heading.order for heading in headings}) == len(headings)


@section("Ponds", order=1)
@dataclass(frozen=True, kw_only=True)
class PondOptions:
    """Options of a pond."""

    most_fish: int = opt(default=3, help="Most fish.", at_least=1)
    depth: float | None = opt(default=None, help="Metres.", above=0)
    name: str = opt(default="pond", help="Its name.", not_empty=True)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"most_fish": 0}, "--most-fish is 0: it must be 1 or more"),
        ({"depth": 0.0}, "--depth is 0.0: it must be above 0"),
        ({"depth": float("inf")}, "--depth is inf: it must be above 0"),
        ({"depth": float("nan")}, "--depth is nan: it must be above 0"),
        ({"name": "  "}, "--name is empty: give a value or leave the flag out"),
    ],
)
def test_a_value_out_of_its_bounds_is_refused_with_its_flag(given, complaint):
    check_options(PondOptions())
    with pytest.raises(OptionError) as raised:
        check_options(PondOptions(**given))
    assert str(raised.value) == complaint


def test_a_field_without_opt_and_one_without_section_are_found():
    @dataclass(frozen=True, kw_only=True)
    class Bare:
        fish: int = 3

    assert "help" not in fields(Bare)[0].metadata
    with pytest.raises(KeyError):
        heading_of(Bare, "fish")
