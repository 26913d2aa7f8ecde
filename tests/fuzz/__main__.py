"""`python -m tests.fuzz`."""

import sys

from tests.fuzz.runner import main

# Processes that are spawned import this file under another name.
if __name__ == "__main__":
    sys.exit(main())
