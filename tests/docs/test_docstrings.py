"""Docstrings as Markdown."""


def test_described_names_become_items_of_a_list(script):
    markdown = script("tools/docs/docstrings.py").markdown
    text = """Do a *big* thing to X* and z*_s.

x, y: (n, d) the first, which
goes on here; z: one of
- this_one;
- `that_one`, a_b.
Raises DataError for none of them.

other: is no argument.
"""
    assert markdown(text, ["x", "y", "z"]).split("\n\n") == [
        r"Do a *big* thing to X\* and z\*\_s.",
        "- `x`, `y`: (n, d) the first, which goes on here",
        "- `z`: one of",
        r"    - this\_one",
        r"    - `that_one`, a\_b.",
        "Raises DataError for none of them.",
        "other: is no argument.",
    ]


def test_lines_of_a_module_that_are_set_in_stay_as_they_are(script):
    markdown = script("tools/docs/docstrings.py").markdown
    assert markdown("The step is\n    w <- w - g,\n    g <- 0\nin each round.", []) == (
        "The step is\n\n    w <- w - g,\n    g <- 0\n\nin each round."
    )
