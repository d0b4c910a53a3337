"""Draws the picture of the inspection page: the upper part of a report's page in a headless Chromium.

For the one in the docs: ``make inspect``, then
``python benchmarks/draw_inspect_page.py out/llama_3_8b.html --out docs/inspect.png``.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
from pathlib import Path

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def draw(page: Path, out: Path, width: int, height: int) -> None:
    """Writes a PNG of this size, in pixels.

    Raises:
        SystemExit: no browser is installed, or it wrote no picture.
    """
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise SystemExit("Chromium is not installed (apt install chromium)")
    out.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as profile:
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}"]
        drawn = [f"--window-size={width},{height}", f"--screenshot={out.resolve()}", page.resolve().as_uri()]
        done = subprocess.run([browser, *flags, *drawn], capture_output=True, text=True, timeout=120, check=False)
    if not out.exists():
        raise SystemExit(f"{browser} wrote no picture:\n{done.stderr}")


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path, help="a page that graphshard inspect --html has written")
    parser.add_argument("--out", type=Path, default=Path("docs/inspect.png"))
    parser.add_argument("--width", type=int, default=1200)
    parser.add_argument("--height", type=int, default=1190)
    asked = parser.parse_args()
    if not asked.page.exists():
        parser.error(f"there is no {asked.page}: write it with graphshard inspect --html")
    draw(asked.page, asked.out, asked.width, asked.height)


if __name__ == "__main__":
    main()
