"""Entry point of ``python -m collective``, the same as the command ``collective``."""

import sys

from collective.tools.cli.main import main

sys.exit(main())
