"""Conformance kit: valid methods pass; for broken methods, it names the hook and the fault."""

import itertools
import os
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import pytest
import torch

import cfl
from cfl.contract import MEMORY
from cfl.core import plugins, rng, tree
from cfl.methods.strategies import GPM
from cfl.methods.strategies.replay import Replay
from cfl.testing import ConformanceError, check_strategy, toy_config, toy_stream
from cfl.testing.hooks import Faults, watched
from cfl.testing.runs import check_engines, check_rounds, planned, session
from tests import toy

CALLS = itertools.count()
BEFORE = [-2, -1]
VELOCITY: dict = {}


def faults(method):
    with pytest.raises(ConformanceError) as caught:
        check_strategy(method)
    return caught.value.faults


class WritesGradients(cfl.LocalRegularizer):
    def adjust(self, grads, params, ctx):
        for leaf in grads.values():
            leaf.mul_(2)
        return grads


class WritesServer(cfl.Strategy):
    def absorb(self, server, mean, info, lr):
        for name, step in mean["strategy"].items():
            server["params"][name] -= step
        return server


class WritesState(cfl.LocalRegularizer):
    def init_client(self, params, model):
        return {"rounds": torch.zeros(())}

    def finish(self, params, ctx, steps):
        ctx.state["rounds"] = ctx.state["rounds"] + 1
        return {}, ctx.state


class AddsToState(cfl.LocalRegularizer):
    def finish(self, params, ctx, steps):
        ctx.state["seen"] = torch.ones(())
        return {}, ctx.state


class DrawsGlobally(cfl.LocalRegularizer):
    def adjust(self, grads, params, ctx):
        return {name: leaf + 0.1 * torch.randn_like(leaf) for name, leaf in grads.items()}


class DrawsUnkeyed(cfl.LocalRegularizer):
    def adjust(self, grads, params, ctx):
        source = rng.generator(next(CALLS))
        return {name: leaf + 0.1 * torch.randn(leaf.shape, generator=source) for name, leaf in grads.items()}


class SeedsGlobally(cfl.Strategy):
    def broadcast(self, server, info):
        torch.manual_seed(0)
        return super().broadcast(server, info)


class ReportsByDraws(cfl.Strategy):
    def report(self, server, model):
        return {"draw": torch.rand(()).item(), "undefined": float("nan")}


class PaintsByDraws(cfl.Strategy):
    def images(self, server, model):
        return torch.randint(255, (2, 1, 1, 4, 4), dtype=torch.uint8)


@dataclass(frozen=True)
class KeepsField(cfl.Strategy):
    history: list = field(default_factory=list)

    def absorb(self, server, mean, info, lr):
        self.history.append(info.round)
        return super().absorb(server, mean, info, lr)


class KeepsOnClass(cfl.LocalRegularizer):
    last: ClassVar[dict] = {}

    def finish(self, params, ctx, steps):
        self.last.update(params)
        return {}, ctx.state


class GrowingUpload(cfl.LocalRegularizer):
    def init_client(self, params, model):
        return {"rounds": torch.zeros(0)}

    def finish(self, params, ctx, steps):
        rounds = torch.cat([ctx.state["rounds"], torch.ones(1)])
        return {"rounds": rounds}, {"rounds": rounds}


class UploadByClient(cfl.Strategy):
    def plan(self, task, tasks, rounds):
        return [cfl.Phase("train", rounds), cfl.Phase("count", train=False, work=True)]

    def work(self, params, client, shared, state, info):
        return {"counts": torch.ones(1 + client.id % 2)}, state


class UnknownCohort(cfl.Strategy):
    def plan(self, task, tasks, rounds):
        return [cfl.Phase("train", rounds, cohort="availble")]


class PhasesByName(cfl.Strategy):
    def plan(self, task, tasks, rounds):
        return ["train", "consolidate"]


class SamePhaseTwice(cfl.Strategy):
    def plan(self, task, tasks, rounds):
        return [cfl.Phase("train", rounds), cfl.Phase("train", rounds)]


class PhaseWithoutWork(cfl.Strategy):
    def plan(self, task, tasks, rounds):
        return [cfl.Phase("train", rounds), cfl.Phase("gather", train=False, work=True)]


class BranchesOnValues(cfl.LocalRegularizer):
    def adjust(self, grads, params, ctx):
        return {name: leaf / 2 if float(leaf.norm()) > 1e-3 else leaf for name, leaf in grads.items()}


class CountsPadding(cfl.LocalRegularizer):
    def penalty(self, params, logits, ctx):
        return logits.square().mean()


class DependsOnTheOthers(cfl.Strategy):
    """Remember the previous client in a module variable, which no snapshot of the object contains."""

    def plan(self, task, tasks, rounds):
        return [cfl.Phase("train", rounds), cfl.Phase("gather", train=False, work=True)]

    def work(self, params, client, shared, state, info):
        if client.id != BEFORE[-1]:
            BEFORE.append(client.id)
        return {}, {"before": torch.tensor(BEFORE[-2])}


class PullsWithPadding(cfl.LocalRegularizer):
    """The penalty has no gradient in the first step, at the weights of the global model."""

    def penalty(self, params, logits, ctx):
        return (logits - ctx.forward(ctx.shared["params"], ctx.batch)).square().mean()


class BranchesLater(cfl.LocalRegularizer):
    def adjust(self, grads, params, ctx):
        if ctx.step == 0:
            return grads
        return {name: leaf if leaf.norm().item() > 1 else 2 * leaf for name, leaf in grads.items()}


@dataclass(frozen=True)
class LooksUpItsWeight(cfl.LocalRegularizer):
    """Weight the term by the client's own entry of what the server sends."""

    as_row: bool = True

    def provide(self, own, info):
        return {"weights": torch.arange(info.population) / info.population}

    def penalty(self, params, logits, ctx):
        own = ctx.sent["weights"][ctx.client[None] if self.as_row else ctx.client]
        return (own * logits.square().mean(dim=1, keepdim=True) * ctx.batch.mask[:, None]).sum()


class BranchesInFinish(cfl.LocalRegularizer):
    def finish(self, params, ctx, steps):
        return {"norm": torch.tensor(float(sum(leaf.norm() for leaf in params.values())))}, ctx.state


class ReadsWhatIsHidden(cfl.LocalRegularizer):
    """Declares that steps do not see its state, but uses the state if it is there."""

    steps_see_state = False

    def init_client(self, params, model):
        return {"factor": torch.tensor(2.0)}

    def adjust(self, grads, params, ctx):
        return tree.map(lambda leaf: leaf * ctx.state.get("factor", 1.0), grads)


class ModuleState(cfl.Strategy):
    """Server momentum in a dictionary of the module, which is lost when a run resumes."""

    def absorb(self, server, mean, info, lr):
        place = (info.task, info.round)
        before = VELOCITY.get((info.task, info.round - 1), 0.0)
        VELOCITY[place] = tree.map(lambda step: step + 0.9 * before, mean["strategy"])["1.weight"].mean()
        steps = {name: step + VELOCITY[place].to(step.dtype) for name, step in mean["strategy"].items()}
        return super().absorb(server, {**mean, "strategy": steps}, info, lr)


class WritesStatistics(cfl.Strategy):
    def broadcast(self, server, info):
        for name in info.model.buffers(info.task):
            server["params"][name].mul_(1)
            server["params"][name].add_(1)
        return super().broadcast(server, info)


class LooksBack(cfl.Strategy):
    """Store every sample of the first task at the end of the second task."""

    def plan(self, task, tasks, rounds):
        return [cfl.Phase("train", rounds), cfl.Phase("store", train=False, work=True)]

    def heads(self, task, tasks):
        return tuple(range(task + 1))

    def work(self, params, client, shared, state, info):
        past = client.shares[0].rows if info.task else client.shares[0].rows[:0]
        return {}, {MEMORY: torch.stack([torch.zeros_like(past), torch.arange(len(past))], dim=1)}


class OneHead(Replay):
    """Replay samples of earlier tasks without sending their heads."""

    def heads(self, task, tasks):
        return (task,)


class BareOption(cfl.Strategy):
    beta: float = cfl.option(0.5, "an option of a class that is no dataclass")


class Raises(cfl.LocalRegularizer):
    def penalty(self, params, logits, ctx):
        return ctx.state["nothing"]


class OtherNames(cfl.Strategy):
    """Valid, with names of its own for all arguments."""

    def plan(self, t, n, number):
        return [cfl.Phase("train", number), cfl.Phase("gather", train=False, work=True)]

    def adjust(self, g, p, c):
        return {name: leaf / 2 for name, leaf in g.items()}

    def finish(self, *given):
        return super().finish(*given)

    def work(self, p, c, sent, own, about, scale=1.0):
        return {"ones": scale * torch.ones(3)}, own

    def absorb(self, trees, sums, about, rate):
        return super().absorb(trees, sums, about, rate)


class OtherNamesWrite(cfl.LocalRegularizer):
    def adjust(self, g, p, c):
        for leaf in g.values():
            leaf.mul_(2)
        return g


class FewArguments(cfl.LocalRegularizer):
    def adjust(self, grads, params):
        return grads


class WholeNumbers(cfl.LocalRegularizer):
    def finish(self, params, ctx, steps):
        return {"steps": torch.tensor(steps)}, ctx.state


class NoGradient(cfl.LocalRegularizer):
    def adjust(self, grads, params, ctx):
        return {}


class NotANumber(cfl.LocalRegularizer):
    def penalty(self, params, logits, ctx):
        return float("nan")


class InfiniteAround(cfl.LocalRegularizer):
    def around(self, grad_fn):
        return lambda params, ctx: {name: leaf / 0 for name, leaf in grad_fn(params, ctx).items()}


class InfersByDraws(cfl.Strategy):
    def infer_task(self, server, x, task, model):
        return torch.randint(0, task + 1, (len(x),))


class InfersFromTheOthers(cfl.Strategy):
    """One task for a whole batch: that of most samples."""

    def infer_task(self, server, x, task, model):
        return (x.argmax(dim=1) // 2).clamp(max=task).mode().values.expand(len(x))


class InfersLaterTasks(cfl.Strategy):
    def infer_task(self, server, x, task, model):
        return x.argmax(dim=1) // 2


class InfersByBatch(cfl.Strategy):
    """Standardises the batch, which a sample alone does not survive."""

    def infer_task(self, server, x, task, model):
        return (x - x.mean(dim=0)).argmax(dim=1).clamp(max=task) if len(x) > 1 else None


class InfersInPlace(cfl.Strategy):
    def infer_task(self, server, x, task, model):
        return x.mul_(2).argmax(dim=1).clamp(max=task)


class KeepsMoving(cfl.Strategy):
    """Says that clients keep a tree, and changes it in every round."""

    kept: ClassVar = ("numbers",)

    def broadcast(self, server, info):
        return {**super().broadcast(server, info), "numbers": {"n": torch.tensor(float(info.round))}}


class KeepsSometimes(cfl.Strategy):
    kept: ClassVar = ("numbers",)

    def broadcast(self, server, info):
        down = super().broadcast(server, info)
        return {**down, "numbers": {"n": torch.ones(2)}} if info.round else down


class OneHeadGrown(cfl.Strategy):
    """Trains the classes of a task alone where a head grows, by a name that is not there."""

    def frozen(self, task, model):
        return super().frozen(task, model) | ({f"head@{task}"} if model.growing else set())


class Infers(cfl.Strategy):
    """Valid, with names of its own for all arguments; most tasks are inferred right."""

    def infer_task(self, trees, images, last, network):
        return (images.argmax(dim=1) // 2).clamp(max=last)


class Halves(cfl.LocalRegularizer):
    """Returns a gradient of one row only, on a stream with one head."""

    def adjust(self, grads, params, ctx):
        return grads if ctx.model.multi_head else {name: leaf[:1] for name, leaf in grads.items()}


BROKEN = [
    (OtherNamesWrite(), "adjust", "writes to grads['1.weight'], grads['1.bias'] and 4 more in place"),
    (FewArguments(), "adjust", "does not take the arguments (grads, params, ctx): too many positional arguments"),
    (WholeNumbers(), "finish", "an upload whose leaf 'steps' is an int64 tensor of shape (), where sums take"),
    (NoGradient(), "adjust", "returned a tree without '1.weight' and 5 more; it has to return a tree with the names"),
    (NotANumber(), "penalty", "returns NaN or infinity"),
    (InfiniteAround(), "around", "returns NaN or infinity in 1.weight, 1.bias and 4 more"),
    (
        Halves(),
        "adjust",
        "a tree whose leaf '1.weight' is a float32 tensor of shape (1, 8) instead of a float32 tensor",
    ),
    (WritesGradients(), "adjust", "writes to grads['1.weight'], grads['1.bias'] and 4 more in place"),
    (WritesServer(), "absorb", "writes to server['params']['1.weight'], "),
    (ReportsByDraws(), "report", "draws from a global generator"),
    (PaintsByDraws(), "images", "draws from a global generator"),
    (WritesState(), "finish", "writes to ctx.state['rounds'] in place"),
    (AddsToState(), "finish", "adds ctx.state['seen'] to its arguments"),
    (DrawsGlobally(), "adjust", "draws from a global generator"),
    (DrawsUnkeyed(), "adjust", "returns different results for the same arguments"),
    (SeedsGlobally(), "broadcast", "draws from a global generator"),
    (KeepsField(), "absorb", "keeps state on the object"),
    (KeepsOnClass(), "finish", "keeps state on the object or its class"),
    (GrowingUpload(), "finish", "names, shapes or types of its upload differ between calls (rounds)"),
    (UploadByClient(), "work", "names, shapes or types of its upload differ between calls (counts)"),
    (UnknownCohort(), "plan", "unknown cohort of phase 'train' 'availble'; did you mean 'available'?"),
    (PhasesByName(), "plan", "returned a list with a str ('train'); it has to return a list of cfl.Phase"),
    (SamePhaseTwice(), "plan", "plans phases ['train', 'train'] for task 0"),
    (PhaseWithoutWork(), "plan", "phase 'gather' has work=True, but the class has no hook `work`"),
    (
        ReadsWhatIsHidden(),
        "adjust",
        "a state that steps do not see, which changes 'params/1.weight'; see `steps_see_state`",
    ),
    (BranchesOnValues(), "adjust", "cannot run under vmap for many clients"),
    (CountsPadding(), "penalty", "padding in a batch changes 'params/1.weight'"),
    (PullsWithPadding(), "penalty", "padding in a batch changes 'params/1.weight'"),
    (BranchesLater(), "adjust", "cannot run under vmap for many clients"),
    (BranchesInFinish(), "finish", "cannot run under vmap for many clients"),
    (ModuleState(), "absorb", "and resumed, the run ends with another 'server/params/1.weight'"),
    (WritesStatistics(), "broadcast", "writes to server['params']['1.running_mean']"),
    (LooksBack(), "run", "stores samples that it does not hold (task 1, phase store, round 0)"),
    (OneHead(), "run", "its memory holds samples of tasks {0}, whose heads are not broadcast"),
    (BareOption(), "plan", "BareOption.beta is an option, but BareOption is not a dataclass; add @dataclass"),
    (GPM(apply="nothing"), "plan", "unknown value of strategy.apply 'nothing'"),
    (Raises(), "penalty", "raises KeyError: 'nothing'"),
    (InfersByDraws(), "infer_task", "draws from a global generator"),
    (InfersFromTheOthers(), "infer_task", "the task of a sample depends on the other samples of the batch"),
    (InfersByBatch(), "infer_task", "the task of a sample depends on the other samples of the batch"),
    (InfersLaterTasks(), "infer_task", "returned the task 3, where tasks are 0 to 1; it has to return None, or an"),
    (InfersInPlace(), "infer_task", "writes to x in place"),
    (KeepsMoving(), "broadcast", "a tree in `kept` changes within a task ('numbers/n')"),
    (KeepsSometimes(), "broadcast", "a tree in `kept` changes within a task ('numbers')"),
    (OneHeadGrown(), "frozen", "returned the unknown parameter 'head@0'"),
]


LONG = {InfersByDraws, InfersFromTheOthers, InfersByBatch, InfersLaterTasks, OneHeadGrown, WritesStatistics}
BROKEN_QUICK = [one for one in BROKEN if type(one[0]) not in LONG]  # the others take seconds each


@pytest.mark.parametrize(
    ("method", "hook", "text"), toy.quick(*BROKEN_QUICK, of=BROKEN), ids=lambda value: type(value).__name__
)
def test_a_broken_rule_is_named_with_its_hook(method, hook, text):
    found = faults(method)
    assert any(where == hook and text in what for where, what in found), found
    assert {where for where, _ in found} == {hook}  # no other hook is blamed


def test_a_client_that_depends_on_earlier_clients_is_found():
    found = faults(DependsOnTheOthers())
    assert any(hook == "work" and "depends on the other clients in the round" in text for hook, text in found), found


PARENT = os.getpid()


class KnowsItsProcess(cfl.LocalRegularizer):
    def adjust(self, grads, params, ctx):
        return grads if os.getpid() == PARENT else {name: 2 * leaf for name, leaf in grads.items()}


class MasksByKey(cfl.LocalRegularizer):
    """Draw a mask with NumPy: the key is an integer of one client under every engine."""

    def adjust(self, grads, params, ctx):
        source = np.random.default_rng(ctx.key)
        return {name: leaf * torch.from_numpy(source.random(leaf.shape) < 0.5) for name, leaf in grads.items()}


@pytest.mark.slow
def test_a_mask_drawn_with_numpy_from_the_key_is_the_same_under_all_engines():
    check_strategy(MasksByKey())
    ends = []
    for engine in ("loop", "vmapped"):
        config = toy_config("tasks=1", f"engine={engine}", "block=3")
        ends.append(cfl.run(config, stream=toy_stream(1), regularizers={"masks": MasksByKey()}).params)
    assert all(torch.equal(ends[0][name], leaf) for name, leaf in ends[1].items())


class NudgesByKey(cfl.LocalRegularizer):
    """Keys 0 and 1 change a step by a millionth, less than the kit's tolerance; draws under vmap differ by up to 1."""

    def penalty(self, params, logits, ctx):
        slope = torch.rand((), generator=rng.generator(7)) + 1e-6 * (ctx.key % 2)
        return slope * sum(leaf.sum() for leaf in params.values())


def test_a_hook_that_reads_the_key_is_not_compared_under_vmap_however_small_the_effect():
    """Engines train the clients of such a hook one at a time, so it breaks no rule."""
    check_strategy(NudgesByKey())


@pytest.mark.parametrize(
    ("method", "pool", "texts"),
    [
        (KnowsItsProcess(), True, ("engine 'pool' gives '1.weight' that differs by", "keep nothing outside client")),
        (BranchesLater(), True, ("engine 'vmapped' fails: local training failed at", "use torch.where")),
        (LooksUpItsWeight(as_row=False), True, ("engine 'vmapped' fails", "index by ctx.client[None]")),
        (LooksUpItsWeight(), True, ()),
        (KnowsItsProcess(), False, ()),
        (MasksByKey(), True, ()),
    ],
)
def test_an_engine_with_different_results_is_named_with_a_remedy(method, pool, texts):
    found = Faults()
    check_engines(toy_config("tasks=1", "rounds=1", "local.lr=0.1"), toy_stream(1), method, pool, found)
    assert len(found.found) == bool(texts)
    for hook, text in found.found:
        assert hook == "run" and all(part in text for part in texts), text


@pytest.mark.slow
def test_arguments_may_have_any_names():
    check_strategy(OtherNames())


@pytest.mark.slow
def test_tasks_may_be_inferred_from_each_sample():
    check_strategy(Infers())


@pytest.mark.slow
def test_the_growing_head_is_left_out_where_it_is_refused():
    class TaskLabels(OneHeadGrown):
        not_class_incremental: ClassVar = "it needs the task"

    check_strategy(TaskLabels())


def test_the_toy_stream_is_named():
    with pytest.raises(ConformanceError, match=r"^Halves breaks 1 rule on the toy stream with one head:\n  adjust: "):
        check_strategy(Halves())


def test_work_finds_the_model_in_evaluation_mode_in_every_call_of_the_kit():
    """In training mode, batch normalisation writes running statistics, which torch.func.grad refuses.

    The first of two rounds is not evaluated, and an evaluation would leave the model in evaluation mode.
    """
    training, settings, found = [], toy_config("tasks=1", "rounds=2"), Faults()
    module = torch.nn.Linear(8, 2)  # in training mode, like the network of a user

    class Asks(cfl.Strategy):
        def plan(self, task, tasks, rounds):
            return [cfl.Phase("ask", rounds, train=False, work=True)]

        def work(self, params, client, shared, state, info):
            training.append(info.model.module.training)
            return {}, state

    run = planned(settings, toy_stream(1), watched(Asks(), found), module, found)
    check_rounds(run, session(settings, toy_stream(1), Asks(), module), found)
    assert not found and training and not any(training), (found.found, training)


@pytest.mark.parametrize(
    ("given", "text"), [(cfl.Strategy, r"check_strategy\(Strategy\(\)\)"), ("ewc", r"a str \('ewc'\)")]
)
def test_what_is_no_method_is_an_error(given, text):
    with pytest.raises(TypeError, match=text):
        check_strategy(given)


def test_one_message_contains_all_faults():
    class Both(WritesGradients, AddsToState):
        pass

    first = "Both breaks 2 rules on the toy stream with a head for each task:"
    with pytest.raises(ConformanceError, match=f"(?s){first}.*  adjust: writes .*  finish: adds "):
        check_strategy(Both())


SHORT = {
    "target": dict(rounds=2, warmup=1, g_steps=2, samples=8, latent=4, width=4, student_steps=2, batch=4),
    "fedcil": dict(iterations=1, consolidation=1, width=4),
    "fedrcl": dict(tau=0.5),  # at 0.05 similarities count twenty times, and so does their rounding
}
BUILT_IN = [*((plugins.strategies, name) for name in plugins.strategies.names())]
BUILT_IN += [*((plugins.local, name) for name in plugins.local.names())]


QUICK = {"fot", "scaffold"}  # a strategy, and a regularizer with states
each_built_in = pytest.mark.parametrize(("registry", "name"), BUILT_IN, ids=[name for _, name in BUILT_IN])


@pytest.mark.parametrize(("registry", "name"), toy.quick(*(one for one in BUILT_IN if one[1] in QUICK), of=BUILT_IN))
def test_every_built_in_method_keeps_the_rules(registry, name):
    check_strategy(registry.get(name)(**SHORT.get(name, {})), config=toy_config("tasks=2"))


@pytest.mark.slow
@each_built_in
def test_every_built_in_method_keeps_the_rules_for_three_tasks(registry, name):
    check_strategy(registry.get(name)(**SHORT.get(name, {})))
