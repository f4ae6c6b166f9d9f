"""The callbacks of a run: called in order, with checked results and errors that name the callback and the round."""

from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from types import MappingProxyType
from typing import Any, cast, get_args

from cfl.config.schema import RunConfig
from cfl.contract.hook_names import check_names
from cfl.core import CallbackError, ConfigError, content, unknown
from cfl.core.errors import reason
from cfl.core.typed import described
from cfl.runtime.callbacks import Callback, EarlyStopping, Row, Stop, View
from cfl.runtime.run_folder import plain
from cfl.runtime.serving import Predictor
from cfl.streams import Stream

UNPROTECTED = ("loss", "local", "clipped", "shortened", "excluded", "missing", "aborted")
"""Figures in a row that come from clients' data or models, and that differential privacy does not protect."""
COHORT = ("clients", "dropped", "bytes_up", "bytes_down", "wire_bytes_up", "wire_bytes_down", "seconds")
"""Figures in a row that tell the size of a cohort, which has to be secret where sampling amplifies privacy."""


class CallbackSet:
    """The callbacks of a run, by name. Raises ConfigError if two have one name, or if one refuses the configuration."""

    def __init__(self, callbacks: Sequence[Callback], config: RunConfig, stream: Stream) -> None:
        dp, self._stream = config.dp, stream
        secret = dp.level == "client" and dp.amplify and config.sampling == "poisson"
        self._hidden = {*(UNPROTECTED if dp.level != "none" else ()), *(COHORT if secret else ())}
        self._members: dict[str, Callback] = {}
        self._rows: list[Row] = []  # of the current task
        for callback in callbacks:
            name = callback.name or type(callback).__name__
            if name in self._members:
                raise ConfigError(f"two callbacks have the name '{name}'; set `name` of one of them")
            self._members[name] = callback
            check_names(callback, Callback)
            try:
                callback.check(config.model_copy(deep=True))
            except ConfigError:
                raise
            except Exception as error:
                raise CallbackError(f"callback '{name}' failed in check: {reason(error)}", name) from error

        for name, callback in self._members.items():
            watched = callback.metric if isinstance(callback, EarlyStopping) else ""
            if "." in watched and not any(watched.startswith(f"{own}.") for own in self._members):
                raise unknown(
                    f"callback in the metric '{watched}' of '{name}'", watched.partition(".")[0], self._members
                )

    def __bool__(self) -> bool:
        return bool(self._members)

    def begin(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Take the rows of the rounds before this session."""
        self._rows = [_read_only(row) for row in rows if row["task"] == rows[-1]["task"]]

    def digests(self) -> dict[str, str]:
        """Hashes of the callbacks that the results depend on, by name; empty if none can stop a run.

        Beside those that decide, the code of the others counts: a decision may use their metrics.
        """
        if not any(map(_decides, self._members.values())):
            return {}
        return {
            name: content.digest(member if _decides(member) else type(member)) for name, member in self._members.items()
        }

    def call(self, hook: str, predictor: Predictor, row: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Call a method of each callback, and return the metrics of those that have any, by name.

        row: of the round in progress, None if the last round is recorded. Raises CallbackError.
        """
        rows, found = self._public(self._with(row)), dict[str, Any]()
        for name, member in self._members.items():
            if getattr(type(member), hook) is not getattr(Callback, hook):
                made = _guarded(name, hook, rows, getattr(member, hook), View(rows, predictor, self._stream))
                if metrics := plain(_metrics(name, hook, rows, made)):  # as they are recorded
                    found[name] = metrics
        return found

    def stop(self, row: Mapping[str, Any]) -> tuple[str, Stop] | None:
        """Ask the callbacks after a round. Returns the first that stops the run, else the first that stops the phase.

        Raises CallbackError.
        """
        rows, found = self._public(self._with(row)), dict[Stop, str]()
        for name, member in self._members.items():
            answer = _guarded(name, "stop", rows, member.stop, rows)
            if answer is not None:
                if not isinstance(answer, str) or answer not in get_args(Stop):
                    raise _wrong(name, "stop", rows, answer, "'phase', 'run' or None")
                found.setdefault(cast(Stop, answer), name)
        return next(((found[kind], kind) for kind in ("run", "phase") if kind in found), None)

    def _public(self, rows: Sequence[Row]) -> Sequence[Row]:
        """The rows without figures that nothing protects, if the run is private and a callback may stop it."""
        if not self._hidden or not any(map(_decides, self._members.values())):
            return rows
        return [_read_only({key: own for key, own in row.items() if key not in self._hidden}) for row in rows]

    def keep(self, row: Mapping[str, Any]) -> None:
        """Add the row of a round, as it is recorded."""
        self._rows = [*self._with(row)]

    def _with(self, row: Mapping[str, Any] | None) -> Sequence[Row]:
        if row is None:
            return tuple(self._rows)
        return (*(own for own in self._rows if own["task"] == row["task"]), _read_only(row))


def _decides(callback: Callback) -> bool:
    return type(callback).stop is not Callback.stop


def _guarded(name: str, hook: str, rows: Sequence[Row], method: Callable[[Any], Any], given: Any) -> Any:
    try:
        return method(given)
    except Exception as error:  # of any kind: it is the user's code
        raise CallbackError(f"callback '{name}' failed in {hook} ({_place(rows)}): {reason(error)}", name) from error


def _metrics(name: str, hook: str, rows: Sequence[Row], made: Any) -> dict[str, float]:
    """The metrics as numbers of Python; a tensor without dimensions counts as a number."""
    if made is None:
        return {}
    found = {}
    for key, value in made.items() if isinstance(made, Mapping) else ():
        value = value.item() if getattr(value, "ndim", None) == 0 else value
        if isinstance(key, str) and isinstance(value, Real):
            found[key] = float(value)
    if not isinstance(made, Mapping) or len(found) < len(made):
        raise _wrong(name, hook, rows, made, "a mapping from names to numbers, or None")
    return found


def _wrong(name: str, hook: str, rows: Sequence[Row], made: Any, wanted: str) -> CallbackError:
    values = (
        " and ".join(f"'{key}': {described(value)}" for key, value in made.items()) if isinstance(made, Mapping) else ""
    )
    got = f"{{{values}}}" if values else described(made)
    return CallbackError(f"{hook} of callback '{name}' must return {wanted}, not {got} ({_place(rows)})", name)


def _place(rows: Sequence[Row]) -> str:
    return f"task {rows[-1]['task']}, phase {rows[-1]['phase']}, round {rows[-1]['round']}"


def _read_only(value: Any) -> Any:
    """The value with read-only mappings, and tuples in place of lists."""
    if isinstance(value, Mapping):
        return MappingProxyType({key: _read_only(item) for key, item in value.items()})
    return tuple(map(_read_only, value)) if isinstance(value, list | tuple) else value
