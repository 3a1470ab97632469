"""The documentation's pages, and the code blocks in them."""

import pathlib
import re

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
#: A block's language, its title (the name of the file that the block makes up, wholly or in part), and its text.
FENCE = re.compile(r'^```(\w*)(?: title="([^"]*)")?\n(.*?)^```', re.MULTILINE | re.DOTALL)
