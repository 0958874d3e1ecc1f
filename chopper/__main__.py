"""``python -m chopper``."""

from chopper.cli import main

if __name__ == "__main__":
    main()
