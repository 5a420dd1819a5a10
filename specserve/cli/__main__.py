"""`python -m specserve.cli` is the command `specserve`."""

from specserve.cli.main import main

if __name__ == "__main__":
    main()
