"""`benchmarks/README.md`: its table has every script and every folder of results, and pages that name the script."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROWS = re.findall(
    r"^\| `(\w+\.py)` \|[^|]+\|([^|]*)\|([^|]*)\|$", (ROOT / "benchmarks/README.md").read_text(), re.MULTILINE
)


def test_table_has_each_script_once():
    files = {file.name for file in (ROOT / "benchmarks").glob("*.py")}
    parts = {name for name in files if re.match(r"fidelity_|throughput_(?!versions)|soak_|host", name)}
    assert sorted(name for name, *_ in ROWS) == sorted(files - parts)


def test_table_has_each_folder_of_results():
    named = {folder for _, folders, _ in ROWS for folder in re.findall(r"`([\w-]+)`", folders)}
    assert named == {folder.name for folder in (ROOT / "benchmarks/results").iterdir()}


def test_pages_name_the_script():
    for script, _, page in ROWS:
        assert page.isspace() or script in (ROOT / "docs" / page.strip(" `")).read_text(), f"{page}: {script}"
