"""Writes ``docs/flags.md`` from the options' declarations. Run it with ``make docs``; a test compares the two."""

from __future__ import annotations

import re
from pathlib import Path

from pdserve.server.cli import app

PAGE = Path(__file__).with_name("flags.md")
FIRST = ("server", "router", "up")
WITHOUT_FLAGS = ("version",)
PREAMBLE = """\
# Flags

<!-- Written by `make docs` from the declarations of the options, in */*options.py: edit those. -->

`pdserve COMMAND --help` shows the same in a terminal. Names are SGLang's where it has the flag.

Every option can also come from a YAML file, given with `--config FILE`. A key is the flag's name without its dashes.
The command line wins over the file, and the file over the defaults (`--api-key` can also come from the variable
`PDSERVE_API_KEY`, which wins over the file):

```yaml
model-path: smollm2
page-size: 32
disaggregation-mode: prefill
```

An option that takes several values is a list in the file: `prefill: ["http://10.0.0.5:30000", "8998"]`.

A flag or key that does not exist is refused, and so is a combination that can't work; the message says what to write
instead.

| exit code | meaning |
|---|---|
| 0 | it was asked to stop, and did |
| 1 | it failed; the last line of the log says why |
| 2 | the options are wrong; nothing was started |

[keyboard.md](keyboard.md) has those of `pdserve chat` and `pdserve check`.
"""


def render() -> str:
    """Return the page's text."""
    # Usage lines name the program as it was started, which the page must not depend on.
    text = re.sub(r"```console\n.*\n```\n+", "", app.generate_docs())
    sections = re.split(r"^## pdserve ([\w-]+)\n", text, flags=re.MULTILINE)[1:]
    texts = dict(zip(sections[::2], sections[1::2], strict=True))
    commands = [*FIRST, *sorted(texts.keys() - {*FIRST, *WITHOUT_FLAGS})]
    return PREAMBLE + "".join(f"\n## pdserve {command}\n\n{texts[command].strip()}\n" for command in commands)


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
