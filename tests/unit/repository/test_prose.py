"""The prose check finds a planted example of each kind, and lets no file get worse."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.prose.check import READERS, prose_files, read_repository
from tools.prose.command import main
from tools.prose.rules import RULES

ROOT = Path(__file__).parents[3]
GLOSSARY = """
| term | meaning | instead of |
|---|---|---|
| access log | a line for each response | `visit`, `log of visits`, rest |
"""
CLEAN = '''"""Pages of the pool."""


def release(page: int) -> None:
    """Release one pin."""
'''
LONG = "The scheduler " + "very " * 25 + "often waits."


def repository(folder: Path, baseline: str = "{}", **files: str) -> Path:
    """Write a repository; a file is named like ``room__file_py``."""
    files = {"docs__glossary_md": GLOSSARY, "tools__prose__baseline_json": baseline} | files
    for name, text in files.items():
        path = folder / ".".join(name.replace("__", "/").rsplit("_", 1))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def findings(folder: Path, **files: str) -> list[tuple[str, str, int]]:
    reports = read_repository(repository(folder, **files))
    return [(f.rule.name, r.path, f.line) for r in reports for f in r.findings if r.path != "docs/glossary.md"]


def check(folder: Path, *arguments: str) -> int:
    return main([*arguments, "--root", str(folder)])


def baseline_of(folder: Path) -> str:
    return (folder / "tools/prose/baseline.json").read_text(encoding="utf-8")


def test_plain_english_is_clean(tmp_path):
    assert findings(tmp_path, room__a_py=CLEAN) == []
    assert check(tmp_path) == 0


@pytest.mark.parametrize(
    ("rule", "line", "text"),
    [
        ("fragments", 1, '"""Of the store."""\n'),
        ("fragments", 2, 'MAX_PEERS = 3\n"""That are connected."""\n'),
        ("fragments", 2, 'class A:\n    """Those of every change."""\n'),
        ("fragments", 3, 'class A:\n    limit = 3\n    """The same of a peer."""\n'),
        ("fragments", 6, '"""Options.\n\nParameters\n----------\nhost\n    Of it.\n"""\n'),
        ("fragments", 1, 'counter("pdserve_x_total", "Those of them that were there.", 3)\n'),
        ("fragments", 2, 'parser.add_argument(\n    "--only", help="For tests."\n)\n'),
        ("verbless", 2, 'def f():\n    """The oldest request."""\n'),
        ("verbless", 2, 'def f():\n    """Whether it waits."""\n'),
        ("verbless", 2, 'def f():\n    """``x`` over the root of its mean square."""\n'),
        ("who", 1, "# Nobody waits.\n"),
        ("who", 2, "x = 1\ny = '#'  # whose pages are free\n"),
        ("banned", 2, "# Each line\n# is in the log of\n# visits.\n"),
        ("long", 2, f"# Short.\n# {LONG}\n"),
        ("long", 1, "# The scheduler " + "very " * 13 + "often, e.g.\n# " + "very " * 13 + "often, waits.\n"),
    ],
)
def test_a_planted_example_is_found(tmp_path, capsys, rule, line, text):
    assert findings(tmp_path, room__a_py=text) == [(rule, "room/a.py", line)]
    assert check(tmp_path) == 1
    shown = capsys.readouterr().out
    advice = next(r.advice for r in RULES if r.name == rule) or "write: access log"
    assert f'room/a.py:{line}: {rule}: "' in shown
    assert advice in shown


@pytest.mark.parametrize(
    ("rule", "line", "text"),
    [
        ("who", 3, "# Title\n\nIt is for whoever asks.\n"),
        ("who", 3, "| a |\n|---|\n| nobody |\n"),
        ("banned", 1, "The visit is answered.\n"),
        ("long", 4, f"Short.\n\n- one\n- {LONG}\n"),
    ],
)
def test_a_planted_example_on_a_page_is_found(tmp_path, rule, line, text):
    assert findings(tmp_path, page_md=text) == [(rule, "page.md", line)]
    assert check(tmp_path) == 1


@pytest.mark.parametrize(
    "text",
    [
        'class A:\n    @property\n    def size(self):\n        """Bytes of a page."""\n',
        '@pytest.fixture(scope="module")\ndef engine():\n    """An engine."""\n',
        'def test_x():\n    """Without a peer, nothing is sent."""\n',
        'class A:\n    """Pages of the pool."""\n',
        'x = "# nobody"\ny = """# nobody"""\nz = \'\'\'\n# nobody\n\'\'\'\n',
        "# ``nobody`` and `who(visit)`: https://who.example/visit\n",
        f"# A drawing is no sentence ──▶ {LONG}\n",
        f'"""Usage::\n\n    {LONG} nobody\n\nThis is all.\n"""\n',
        "import a  # noqa: whose\n",
        "# Rest, revisit and forensic are no words of the glossary.\n",
        "# " + "A short sentence ends here. " * 12 + "\n",
        "# " + "warn: the log names it. --policy chooses. " * 8 + "\n",
        "# none of these is long.\n" * 8,
    ],
)
def test_what_is_right_is_left_alone(tmp_path, text):
    assert findings(tmp_path, room__a_py=text) == []


def test_code_on_a_page_is_left_alone(tmp_path):
    page = f"```console\nwho {LONG}\n```\n<!-- nobody\n{LONG} -->\n\n`who` [text](who.md)\n"
    assert findings(tmp_path, page_md=page, docs__flags_md="Nobody visits.\n") == []


def test_environments_and_build_folders_are_left_alone(tmp_path):
    files = {f"{folder}__a_md": "Nobody.\n" for folder in (".venv", "build", "dist")}
    assert findings(tmp_path, **files) == []


def test_a_long_file_may_have_one_word_for_people_in_a_thousand(tmp_path):
    words = "# A page.\n" * 500
    repository(tmp_path, room__a_py=words + "\n# Nobody waits.\n")
    assert check(tmp_path) == 0
    repository(tmp_path, room__a_py=words + "\n# Nobody waits, whoever asks.\n")
    assert check(tmp_path) == 1


def test_a_file_may_keep_what_the_baseline_allows_and_no_more(tmp_path, capsys):
    allowed = '{"room/a.py": {"who": 1}}'
    repository(tmp_path, allowed, room__a_py="# Nobody waits.\n")
    assert check(tmp_path) == 0
    repository(tmp_path, allowed, room__a_py="# Nobody waits.\n\n# Nobody asks.\n")
    assert check(tmp_path) == 1
    assert "room/a.py: who: 2, 1 more than allowed" in capsys.readouterr().out
    repository(tmp_path, allowed, room__a_py=CLEAN, room__b_py="# Nobody waits.\n")
    assert check(tmp_path) == 1


def test_an_update_lowers_the_baseline_and_never_raises_it(tmp_path):
    allowed = '{"room/a.py": {"who": 3, "long": 1}, "shed/gone.py": {"who": 2}, "room/b.py": {"who": 1}}'
    repository(tmp_path, allowed, room__a_py="# Nobody waits.\n", room__b_py="# Nobody asks whom.\n")
    assert check(tmp_path, "--update") == 1
    assert baseline_of(tmp_path) == '{\n"room/a.py": {"who": 1},\n"room/b.py": {"who": 1}\n}\n'
    assert check(tmp_path, "--update") == 1


def test_a_baseline_with_a_merge_conflict_says_what_to_do(tmp_path):
    repository(tmp_path, "<<<<<<< HEAD\n{}\n", room__a_py=CLEAN)
    with pytest.raises(SystemExit, match="take either side, then run --update"):
        check(tmp_path)


def test_a_file_that_is_gone_leaves_its_allowance_to_its_folder(tmp_path):
    allowed = '{"room/old.py": {"who": 3}, "shed/old.py": {"who": 3}}'
    repository(
        tmp_path, allowed, room__a_py="# Nobody.\n", room__b_py="# Nobody asks whom.\n", barn__c_py="# Nobody.\n"
    )
    assert check(tmp_path, "--update") == 1
    assert baseline_of(tmp_path) == '{\n"room/a.py": {"who": 1},\n"room/b.py": {"who": 2}\n}\n'


def test_text_that_moves_keeps_its_allowance(tmp_path):
    allowed = '{"old/a.py": {"who": 2}, "old/b.py": {"who": 1}}'
    repository(tmp_path, allowed, old__b_py="# Nobody.\n", new__a_py="# Nobody.\n", new__b_py="# Nobody.\n")
    assert check(tmp_path) == 1
    # b is still in its old place and uses its allowance.
    assert check(tmp_path, "--move", "old", "new") == 1
    assert baseline_of(tmp_path).splitlines()[1:-1] == [
        '"new/a.py": {"who": 1},',
        '"old/a.py": {"who": 1},',
        '"old/b.py": {"who": 1}',
    ]
    assert check(tmp_path, "--move", "old/a.py", "new/b.py", "--update") == 0
    assert len(baseline_of(tmp_path).splitlines()) == 5


def test_findings_of_chosen_files_are_listed(tmp_path, capsys):
    repository(tmp_path, '{"room/a.py": {"who": 1}}', room__a_py="# Nobody.\n", shed__b_py="# Nobody.\n")
    assert check(tmp_path, "room") == 0
    assert capsys.readouterr().out.startswith('room/a.py:1: who: "Nobody.": name the thing')


def test_figures_by_room(tmp_path, capsys):
    repository(tmp_path, room__a_py="# Nobody waits here now.\n")
    assert check(tmp_path, "--figures") == 0
    assert "room" in (shown := capsys.readouterr().out)
    assert "250.0" in shown


def test_the_check_needs_no_history(tmp_path):
    assert not (repository(tmp_path, room__a_py=CLEAN) / ".git").exists()
    assert check(tmp_path) == 0


def test_every_folder_of_the_repository_is_read():
    """``make lint`` checks what they say."""
    paths = list(prose_files(ROOT))
    assert {path.split("/")[0] for path in paths} >= {"README.md", "docs", "router", "scheduler", "tests", "tools"}
    assert not [path for path in paths if path.startswith(".") or Path(path).suffix not in READERS]
