"""`make bench`: how fast the MoE ops are, against the memory they run on and against others."""

import sys

from benchmarks.ops.run import main

sys.exit(main())
