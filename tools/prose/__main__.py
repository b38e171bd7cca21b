"""Entry point of ``python -m tools.prose``, which runs in the repository's root."""

import gc
import sys

from .command import main

gc.disable()  # A syntax tree is many objects and no garbage: a fifth of the time.
sys.exit(main())
