"""``python -m kvwire``."""

from kvwire.cli import main

if __name__ == "__main__":
    main()
