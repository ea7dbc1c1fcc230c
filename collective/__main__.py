"""``python -m collective`` is the command ``collective``."""

import sys

from collective.cli.main import main

sys.exit(main())
