"""``python -m collective`` is the command ``collective``."""

import sys

from collective.tools.cli.main import main

sys.exit(main())
