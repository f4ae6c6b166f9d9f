"""`benchmarks/readme.py`: README's table is what the script writes."""

import pytest


def test_the_table_of_readme_is_made_from_the_stored_runs(script):
    module = script("readme")
    table = module.HEAD + "".join(module.lines(module.cells()))
    assert f"\n{table}\n" in module.PAGE.read_text(encoding="utf-8")


def test_help_writes_nothing(script, monkeypatch, capsys):
    module = script("readme")
    monkeypatch.setattr(module, "cells", lambda: pytest.fail("the README is made"))
    monkeypatch.setattr("sys.argv", ["readme.py", "--help"])
    with pytest.raises(SystemExit):
        module.main()
    assert "Renew README's table" in capsys.readouterr().out
