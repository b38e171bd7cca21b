"""Entry point of ``python -m tools.house``, which runs in the repository's root."""

import sys

from .command import main

sys.exit(main())
