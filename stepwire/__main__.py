"""``python -m stepwire`` is the console command ``stepwire``."""

import sys

from stepwire.cli import main

sys.exit(main())
