"""`python -m thinpoint` is the command line."""

from thinpoint.cli.main import main

if __name__ == "__main__":
    main()
