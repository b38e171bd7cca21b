"""What is refused, with the messages that docs/models.md lists."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import models_page
from support.model_refusals import REFUSED, asked

PAGE = models_page.read(models_page.PAGE.read_text(encoding="utf-8"))


def test_the_page_lists_all_of_them() -> None:
    assert {heading: list(messages) for heading, messages in PAGE.refused.items()} == {
        heading: list(asks) for heading, asks in REFUSED.items()
    }


@pytest.mark.parametrize(("heading", "what"), [(heading, what) for heading, asks in REFUSED.items() for what in asks])
def test_the_message_is_what_the_page_says(heading: str, what: str, tmp_path: Path) -> None:
    assert asked(REFUSED[heading][what], tmp_path) == PAGE.refused[heading][what], "run make models"


def test_what_is_not_refused_is_no_message(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        asked(lambda _: None, tmp_path)
