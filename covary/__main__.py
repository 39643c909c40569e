"""`python -m covary`."""

from covary.cli import main

if __name__ == "__main__":
    main()
