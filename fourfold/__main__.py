"""`python -m fourfold` is the command line."""

import sys

from fourfold.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
