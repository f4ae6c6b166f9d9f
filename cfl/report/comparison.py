"""Results of a comparison: the file `compare.json`, the picture and the tables for the terminal."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.table import Table

from cfl.experiments.compare import Group
from cfl.experiments.grid import Choice
from cfl.experiments.settings import label
from cfl.report import paired, plots, searched, tables
from cfl.runtime import notebook
from cfl.runtime.run_folder import write_json


class Comparison:
    """Results of the finished runs of some groups. results: label of a group to the metrics of its runs.

    reference: method of the paired differences; scale: as given to the command, for the title; choices: of a grid, from
    which the groups are.
    """

    def __init__(
        self,
        benchmark: str,
        scale: str | None,
        groups: Sequence[Group],
        reference: str,
        choices: Sequence[Choice] = (),
    ) -> None:
        self.results = {group.label: found for group in groups if (found := group.results())}
        self._benchmark, self._groups, self._choices = benchmark, groups, choices
        self._summaries = {label: tables.summary(found) for label, found in self.results.items()}
        self._matrices = {label: tables.mean_matrix(found) for label, found in self.results.items()}
        self._differences = paired.against(groups, reference)
        most = max(map(len, self.results.values()), default=0)
        self._title = f"{benchmark}, {most} seed{'s' * (most > 1)}" + (f", {scale} scale" if scale else "")
        self._title += ", settings chosen by validation ACC" if choices else ""

    def write(self, path: Path, command: str) -> None:
        """Write the figures of the tables, the names of the runs' folders and the command to a JSON file."""
        finished = {
            group.label: [run.folder.name for run in group.runs if run.config.seed in summary["seeds"]]
            for group in self._groups
            if (summary := self._summaries.get(group.label))
        }
        data = {"benchmark": self._benchmark, "command": command, "runs": finished}
        data |= {"methods": self._summaries, "paired": self._differences}
        write_json(path, {**data, **({"grid": searched.stored(self._choices)} if self._choices else {})})

    def draw(self, path: Path) -> None:
        """Draw the summaries and the mean accuracy on the tasks seen to a PNG file; of a grid only what was chosen."""
        short = {group.label: label(group.method, group.varied) for group in self._groups}
        summaries = {short[name]: own for name, own in self._summaries.items()}
        matrices = {short[name]: own for name, own in self._matrices.items()}
        plots.comparison(summaries, matrices, self._title, path)

    def _repr_html_(self) -> str:
        """Tables for a notebook: the summary, and paired differences if known."""
        parts = [notebook.table(*tables.compared_texts(self._summaries), title=self._title)]
        if self._differences:
            parts.append(notebook.table(*paired.texts(self._differences), title=paired.TITLE))
        return "".join(parts)

    def tables(self, matrices: bool) -> Iterator[Table | str]:
        """Tables for the terminal: mean accuracy matrices if wanted, summaries, and what is known of the rest.

        The rest: the settings of a grid, methods without a choice, and paired differences.
        """
        if matrices:
            yield from (tables.matrix(rows, f"Accuracy: {label}") for label, rows in self._matrices.items())
        yield tables.filled(*tables.compared_texts(self._summaries), self._title)
        if self._choices:
            yield searched.table(self._choices)
            yield from searched.notes(self._choices)
        if self._differences:
            yield tables.filled(*paired.texts(self._differences), paired.TITLE)
