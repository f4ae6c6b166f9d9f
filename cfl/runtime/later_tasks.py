"""A finished run goes on with tasks that have arrived since, and ends like a run that had all tasks from the start."""

from cfl.assembly import network
from cfl.contract import Server
from cfl.core import CheckpointError, tree
from cfl.runtime.fingerprint import CHECKPOINTS, Fingerprint
from cfl.runtime.rounds import Rounds
from cfl.runtime.run_folder import RunFolder, read_rows
from cfl.runtime.state import RunState


def extend(state: RunState, fresh: Server, rounds: Rounds, fingerprint: Fingerprint, folder: RunFolder) -> None:
    """Let the state of a finished run go on with the tasks that it lacks.

    state: of the last checkpoint; fresh: the server's trees before the first round of a run with all tasks;
    rounds, fingerprint: of that run.
    Raises CheckpointError if the run cannot go on, or would not end like that run.
    """
    done = len(state.accuracy_matrix)
    before = _first_server(done, rounds, fingerprint)
    cannot = f"the run in '{folder.path}' cannot go on with more tasks than its {done}"
    if why := _obstacle(state, rounds, fingerprint, folder) or _unlike(fresh, before):
        raise CheckpointError(f"{cannot}: {why}; begin a run with all tasks in another --output")
    task, phase, _ = rounds.schedule[state.position]
    if task < done and phase.train:  # a regularizer's trees of this task lack the leaves of later tasks
        raise CheckpointError(f"{cannot}: it is not finished; resume it with its own tasks first")
    for name, leaves in fresh.items():  # such as the heads of the later tasks
        new = {leaf: value for leaf, value in leaves.items() if leaf not in before.get(name, {})}
        both = {**state.server.get(name, {}), **new}
        if new:
            state.server[name] = tree.select(both, dict.fromkeys(each for each in (*leaves, *both) if each in both))
    state.widen(rounds.tasks)
    if task == done:  # else rounds at the end of the last task come first
        rounds.begin_task(done, state)


def _first_server(tasks: int, rounds: Rounds, fingerprint: Fingerprint) -> Server:
    """The server's trees before the first round of a run with the first tasks alone."""
    known, stream = rounds.model.params, fingerprint.stream
    device, heads = next(iter(known.values())).device, stream.heads[:tasks]
    own = network.handle(rounds.config, fingerprint.network, stream.input_shape, heads, stream.scenario, device)
    own.start_from(tree.select(known, own.params))
    return {"params": own.params, **rounds.composed.strategy.init_server(own.params, own)}


def _obstacle(state: RunState, rounds: Rounds, fingerprint: Fingerprint, folder: RunFolder) -> str:
    """Why the run cannot go on; empty if it can."""
    done, strategy, config = len(state.accuracy_matrix), rounds.strategy, rounds.config
    if strategy.not_extendable:
        return f"{rounds.label}: {strategy.not_extendable}"
    if fingerprint.states != CHECKPOINTS:
        return f"its clients keep their states {fingerprint.states}"
    if config.dp.level != "none" and config.dp.target_epsilon is not None:
        return "the noise for dp.target_epsilon was computed for its rounds"
    if config.eval_later:
        return "eval_later=true evaluates all tasks from the first one on"
    if any(stop["skips"] == "run" for stop in state.stops):
        return "a callback ended it"
    for task in range(done):
        if tuple(strategy.sees(task, done)) != rounds.sees(task):
            return f"{rounds.label} trains on the data of other tasks in task {task}"
    repeat = "(if `rounds` differs, repeat that of the run)"
    for stop in state.stops:
        task, name, last = stop["task"], stop["phase"], stop["round"]
        later = sum(number > last and (task, name) == (at, phase.name) for at, phase, number in rounds.schedule)
        if stop["rounds"] != later:
            was = f"it skipped {stop['rounds']} of the rounds of phase {name} in task {task}"
            return f"{was} where a run of all tasks skips {later} {repeat}"
    places = (place for place in range(state.position) if place not in state.skipped)
    for row, place in zip(read_rows(folder.path), places, strict=True):
        task, phase, number = rounds.schedule[place]
        if (row["task"], row["phase"], row["round"]) != (task, phase.name, number):
            was = f"round {row['round']} of phase {row['phase']} in task {row['task']}"
            now = f"round {number} of phase {phase.name} in task {task}"
            return f"it has {was} where a run of all tasks has {now} {repeat}"
    return ""


def _unlike(fresh: Server, before: Server) -> str:
    """Name a tree of the server that begins otherwise with more tasks; empty if all begin alike."""
    for name, leaves in before.items():
        own = {leaf: value for leaf, value in fresh.get(name, {}).items() if leaf in leaves}
        if not tree.equal(leaves, own):
            return f"the server's tree '{name}' depends on the number of tasks"
    return ""
