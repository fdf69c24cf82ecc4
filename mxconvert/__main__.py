"""``python -m mxconvert``."""

from mxconvert.cli import main

if __name__ == "__main__":
    main()
