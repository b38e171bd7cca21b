"""The judge of chat templates: what it calls equal, exempt, refused, different and unfounded."""

from __future__ import annotations

import pytest
from template_campaign import __main__ as campaign
from template_campaign.conversations import KINDS, TOOLS
from template_campaign.drawn import draw_bodies
from template_campaign.judge import Verdict, compare

from pdserve.model_files.text.chat_template import ChatTemplate
from pdserve.model_files.text.errors import PromptError

STRINGS = "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content + '|' }}{% endfor %}"
PARTS = "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
NO_SYSTEM = "{% for m in messages %}{% if m.role != 'system' %}{{ m.content }}{% endif %}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "kind", "verdict", "group"),
    [
        (STRINGS, "plain", Verdict.EQUAL, ""),
        (STRINGS, "prefill", Verdict.EQUAL, ""),
        (STRINGS, "parts", Verdict.EXEMPT, "transformers refuses it"),
        (PARTS, "parts", Verdict.EQUAL, ""),
        (PARTS, "plain", Verdict.EXEMPT, "transformers loses a part of it"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "parts", Verdict.EXEMPT, "transformers prints a list"),
        (NO_SYSTEM, "system", Verdict.REFUSED, "transformers loses a part of it"),
        (STRINGS, "tools ignored", Verdict.REFUSED, "transformers loses a part of it"),
        (STRINGS + "{{ tools | tojson }}", "tools ignored", Verdict.REFUSED, "the format of its tool calls"),
        ("{{ raise_exception('no') }}", "plain", Verdict.REFUSED, "both refuse it"),
    ],
)
def test_verdicts(source: str, kind: str, verdict: Verdict, group: str) -> None:
    result = compare(source, KINDS[kind])
    assert (result.verdict, result.group[: len(group)]) == (verdict, group)


def test_another_text_and_an_unfounded_refusal_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChatTemplate, "_render", lambda self, chat, turns: "".join(str(turn) for turn in turns))
    assert compare(STRINGS, KINDS["plain"]).verdict is Verdict.DIFFERENT

    def refuse(self: ChatTemplate, chat: object) -> str:
        raise PromptError("messages", "no")

    monkeypatch.setattr(ChatTemplate, "render", refuse)
    assert compare(STRINGS, KINDS["plain"]).verdict is Verdict.UNFOUNDED


def test_drawn_bodies_are_those_of_their_seed_and_can_be_rendered() -> None:
    bodies = list(draw_bodies(7, 40))
    assert bodies == list(draw_bodies(7, 40))
    assert any(body.get("tools") == TOOLS for body in bodies)
    assert {compare(STRINGS, body).verdict for body in bodies} <= {Verdict.EQUAL, Verdict.REFUSED, Verdict.EXEMPT}


def test_without_a_folder_the_campaign_is_skipped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["template_campaign"])
    assert campaign.main() == 0
    assert "skipped" in capsys.readouterr().out
