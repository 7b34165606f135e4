"""Make the screenshots of the docs: ``python scripts/screenshots.py RUN``

Needs Chromium and Pillow. Writes ``docs/report.png``: the page of a finished run, such as one of ``make demo``.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

from recipe.atropos.report.page import write_report

DOCS = Path(__file__).resolve().parents[1] / "docs"
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_WIDTH, _HEIGHT = 1280, 1330  # of the page, in CSS pixels: verdict, alarms and the first curves
_COLORS = 128  # of the picture; with 64, the verdict's green became gray


def report_picture(run: Path, target: Path) -> None:
    """Write the upper part of a run's page as a small PNG."""
    browser = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if browser is None:
        raise SystemExit(f"none of {', '.join(_BROWSERS)} is installed")
    with tempfile.TemporaryDirectory() as folder:
        page, picture = write_report(run, output=Path(folder) / "report.html"), Path(folder) / "report.png"
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += [f"--user-data-dir={folder}/browser", f"--window-size={_WIDTH},{_HEIGHT}"]
        subprocess.run(
            [*command, f"--screenshot={picture}", page.as_uri()], check=True, timeout=120, capture_output=True
        )
        Image.open(picture).convert("RGB").quantize(_COLORS).save(target, optimize=True)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    report_picture(Path(sys.argv[1]), DOCS / "report.png")
    print(DOCS / "report.png")
