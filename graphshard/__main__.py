"""``python -m graphshard`` is the command ``graphshard``."""

from .cli import entry

if __name__ == "__main__":
    entry()
