"""`python -m triax` is the command `triax`."""

import sys

from triax.cli import main

sys.exit(main())
