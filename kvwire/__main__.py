"""``python -m kvwire``."""

from kvwire.cli.app import main

if __name__ == "__main__":
    main()
