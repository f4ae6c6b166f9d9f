"""`benchmarks/readme.py`: README's table is what the script writes."""


def test_the_table_of_readme_is_made_from_the_stored_runs(script):
    module = script("readme")
    table = module.HEAD + "".join(module.lines(module.cells()))
    assert f"\n{table}\n" in module.PAGE.read_text(encoding="utf-8")
