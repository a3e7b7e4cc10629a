"""`python -m quantkit`."""

from quantkit.cli.main import entry

if __name__ == "__main__":
    entry()
