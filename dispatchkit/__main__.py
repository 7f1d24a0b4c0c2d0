"""``python -m dispatchkit``: the command line."""

from dispatchkit.cli import main

if __name__ == "__main__":
    main()
