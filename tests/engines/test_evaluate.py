"""Accuracies of several tasks at once, and measurements on the clients' models of a round."""

import pytest
import torch
from torch import nn

import cfl
from cfl.core import UpdateError, rng
from cfl.engines.evaluate import Inference, LocalModels, accuracies, accuracy
from cfl.models import Model
from cfl.streams.store import Pool, TaskSamples
from tests import toy

MODEL = Model(toy.net(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)), (2,), [2, 2], multi_head=False)
INFO = toy.consolidation(MODEL, task=1)


def moved(**by):
    """The global model with numbers added to leaves; two underscores stand for a dot in a name."""
    return {name: leaf + by.get(name.replace(".", "__"), 0) for name, leaf in MODEL.params.items()}


def test_figures_by_hand():
    # drift: 2 x 3 weights moved by 1 and 2 biases by 3: sqrt(6 + 18); running statistics do not count
    scored = []

    def score(params, task):
        scored.append((params, task))
        return 0.25 * len(scored)

    look = LocalModels(INFO, MODEL.params, score, None)
    far = moved(**{"0__weight": 1.0, "2__bias": 3.0, "1__running_mean@1": 50.0})
    look(4, far)
    look(6, MODEL.params)
    assert look.figures["client"] == [4, 6] and look.figures["accuracy"] == [0.25, 0.5]
    assert look.figures["drift"] == pytest.approx([24**0.5, 0.0])
    assert [task for _, task in scored] == [1, 1] and scored[0][0] is far


def test_an_observer_gets_a_copy():
    seen = []
    look = LocalModels(INFO, MODEL.params, None, lambda *given: seen.append(given))
    mine = moved()
    look(4, mine)
    info, client, params = seen[0]
    assert info is INFO and client == 4 and look.figures == {}
    for name, leaf in params.items():
        assert torch.equal(leaf, mine[name]) and leaf.data_ptr() != mine[name].data_ptr()


def parts_of(*sizes):
    """Test samples of tasks over one pool, with a pixel permutation for each task, and random labels."""
    pool = Pool(torch.randint(0, 256, (sum(sizes), 6), dtype=torch.uint8, generator=rng.generator(0)))
    parts, rows = {}, torch.arange(sum(sizes)).split(sizes)
    for task, index in enumerate(rows):
        source = rng.generator(task)
        labels = torch.randint(0, 3, (len(index),), generator=source)
        parts[task] = TaskSamples(pool, index, labels, torch.randperm(6, generator=source))
    return parts


def by_hand(model, params, part, task):
    """The fraction of samples whose largest logit is that of the label, computed one sample at a time."""
    model.module.eval()
    with torch.no_grad():
        found = [model.logits(params, part.gather(torch.tensor([row]))[0], task).argmax() for row in range(len(part))]
    return sum(int(label == y) for label, y in zip(found, part.targets, strict=True)) / len(part)


def counted(model):
    """A list that receives the size of each batch that goes through the model."""
    sizes = []
    model.module.register_forward_pre_hook(lambda _, given: sizes.append(len(given[0])))
    return sizes


def three_heads(**options):
    module = toy.net(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    return Model(module, (6,), [3, 3, 3], **options)


# 23 + 7 + 12 = 42 samples: batches of 10 span tasks (23 + 7 ends at a batch border), a batch of 100 takes all
@pytest.mark.parametrize(("size", "batches"), [(1, [1] * 42), (10, [10] * 4 + [2]), (100, [42])])
def test_tasks_with_the_same_model_share_batches(size, batches):
    model, parts = three_heads(multi_head=False), parts_of(23, 7, 12)
    expected = [by_hand(model, model.params, part, task) for task, part in parts.items()]
    assert len(set(expected)) == 3  # so that swapped tasks would fail
    sizes = counted(model)
    served = {task: dict(model.params) for task in parts}  # other dictionaries of the same tensors
    assert accuracies(model, served, parts, size) == expected
    assert sizes == batches
    assert [accuracy(model, model.params, parts[task], task, size) for task in parts] == expected


def test_tasks_with_different_models_or_heads_do_not():
    parts = parts_of(23, 7, 12)
    heads = three_heads(multi_head=True)
    single = three_heads(multi_head=False)
    other = {name: -leaf for name, leaf in single.params.items()}
    for model, served, batches in (
        (heads, dict.fromkeys(parts, heads.params), [10, 10, 3, 7, 10, 2]),
        (single, {0: single.params, 1: other, 2: single.params}, [10, 10, 10, 5, 7]),  # 23 + 12, then 7
    ):
        expected = [by_hand(model, served[task], part, task) for task, part in parts.items()]
        sizes = counted(model)
        assert accuracies(model, served, parts, 10) == expected
        assert sizes == batches


@pytest.mark.parametrize(("stats", "batches"), [("batch", [23, 7]), ("running", [30]), ("per_task", [23, 7])])
def test_batch_statistics_come_from_one_task(stats, batches):
    module = toy.net(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    model = Model(module, (6,), [3, 3], multi_head=False, norm_stats=stats)
    parts, expected = parts_of(23, 7), []
    for task, part in parts.items():
        model.module.eval()
        with torch.no_grad():
            x, y = part.gather(torch.arange(len(part)))
            expected.append(float((model.logits(model.params, x, task).argmax(1) == y).float().mean()))
    sizes = counted(model)
    assert accuracies(model, dict.fromkeys(parts, model.params), parts, 100) == pytest.approx(expected)
    assert sizes == batches


def test_batches_with_batch_statistics_are_drawn_at_random():
    """Samples of class 0 lie around 0, of class 1 around 4; normalising a batch of one class hides its class."""
    module = toy.net(nn.BatchNorm1d(1), nn.Linear(1, 2))
    model = Model(module, (1,), [2], multi_head=False, norm_stats="batch", seed=5)
    params = {**model.params, "1.weight": torch.tensor([[-1.0], [1.0]]).double()}
    params["1.bias"] = torch.zeros(2).double()
    y = torch.arange(40) // 20
    x = 4.0 * y[:, None] + torch.linspace(-1, 1, 40)[:, None]
    part = cfl.from_tensors([(x, y, x, y)]).tasks[0].test

    def right(order):
        """Correct predictions in batches of 8: weights of -1 and 1 predict class 1 above the mean of the batch."""
        return sum(int(((x[rows, 0] > x[rows, 0].mean()) == y[rows]).sum()) for rows in order.split(8))

    drawn = torch.randperm(40, generator=rng.generator(rng.key(5, "evaluation", 0)))
    assert accuracy(model, params, part, 0, 8) == right(drawn) / 40 > 0.9
    assert right(torch.arange(40)) / 40 < 0.7
    sizes = counted(model)
    assert accuracy(model, params, part, 0, 13) > 0.9
    assert sizes == [13, 13, 14]  # a single sample has no statistics
    assert accuracy(model, params, part, 0, 40) == 1.0  # one batch has both classes in any order


@pytest.mark.parametrize("label", [0, 1])
def test_a_task_with_a_single_test_sample_is_evaluated(label):
    """Normalised over its pixels, the image is -1, 1, -1, 1; the classes' outputs are its second and third pixel."""
    module = toy.net(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(4, 2))
    model = Model(module, (1, 2, 2), [2], multi_head=False, norm_stats="batch")
    params = {**model.params, "2.weight": torch.eye(4).double()[1:3], "2.bias": torch.zeros(2).double()}
    image = torch.tensor([3.0, 5.0, 3.0, 5.0]).view(1, 1, 2, 2)
    part = TaskSamples(Pool(image), torch.tensor([0]), torch.tensor([label]))
    assert accuracy(model, params, part, 0, 8) == (label == 0)


def test_outputs_that_are_not_finite_are_an_error_and_no_accuracy():
    """Weights of 1e38 are finite; x = 1 through two layers of them gives 1e76, which float32 does not hold."""
    model = Model(
        nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 2, bias=False)), (1,), [2, 2], multi_head=False
    )
    pool = Pool(torch.tensor([[0.0], [1.0], [2.0]]))
    parts = {task: TaskSamples(pool, torch.arange(3), torch.zeros(3, dtype=torch.int64)) for task in (0, 1)}
    large = {name: torch.full_like(leaf, 1e38) for name, leaf in model.params.items()}
    spoiled = large | {"1.weight": torch.full((2, 1), float("nan"))}
    for params, why in ((large, "its weights are finite, but too large"), (spoiled, "its parameter '1.weight'")):
        message = (
            f"NaN or infinity for {2 if params is large else 3} of 3 test samples of task 1: {why}.*lower local.lr"
        )
        with pytest.raises(UpdateError, match=message):
            accuracies(model, {0: model.params, 1: params}, parts, 2)
    look = LocalModels(INFO, model.params, lambda params, task: accuracy(model, params, parts[1], 1, 2), None)
    look(4, large)  # a client's own model does not stop the run
    assert look.figures["client"] == [4] and look.figures["accuracy"] == [None]


def test_a_class_whose_output_is_minus_infinity_is_never_predicted():
    masked = toy.Net(nn.Linear(1, 3))
    masked.register_forward_hook(lambda _, given, out: out + torch.tensor([0.0, float("-inf"), 0.0]))
    model = Model(masked, (1,), [3], multi_head=False)
    part = TaskSamples(Pool(torch.zeros(2, 1)), torch.arange(2), torch.tensor([1, 1]))
    assert accuracy(model, model.params, part, 0, 2) == 0.0


def inferring(model, *tasks, shift=1.0):
    """Predictions by the inferred tasks; task t is served the model with its last bias moved by t times `shift`."""
    last = list(model.params)[-1]
    served = {task: {**model.params, last: model.params[last] + task * shift * torch.arange(2)} for task in range(2)}
    return served, Inference(served, lambda x: torch.tensor(tasks))


def test_each_sample_is_predicted_by_the_model_of_its_inferred_task():
    model = Model(toy.mlp(3, 4, 2), (3,), [2, 2], multi_head=False)
    served, inference = inferring(model, 1, 0, 0, 1, 0)
    x = toy.random(5, 3)
    found = inference(model, x, {0: 3, 1: 2})
    for sample, row, task in zip(x, found, (1, 0, 0, 1, 0), strict=True):
        torch.testing.assert_close(row, model.logits(served[task], sample[None], 0)[0])
    # true tasks are 0, 0, 0, 1, 1: samples 1, 2 and 3 of five are right
    assert inference.figures == {"task_accuracy": pytest.approx(3 / 5)}


def test_a_growing_head_predicts_among_the_classes_of_the_inferred_task():
    model = Model(toy.mlp(3, 4, 2), (3,), [2, 2, 2], multi_head=True, growing=True)
    x, none = toy.random(3, 3), -torch.inf
    served = dict.fromkeys(range(3), model.params)
    found = Inference(served, lambda x: torch.tensor([1, 0, 2]))(model, x, {0: 1, 1: 2})
    (_, _, c, d, *_), (e, f, *_), (*_, g, h) = model.logits(model.params, x, 2).tolist()
    expected = torch.tensor([[none, none, c, d, none, none], [e, f, *[none] * 4], [*[none] * 4, g, h]])
    torch.testing.assert_close(found, expected.to(found))


def test_batch_statistics_are_those_of_the_batch_and_not_of_the_samples_of_one_inferred_task():
    """One sample alone has no statistics."""
    module = toy.net(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model = Model(module, (3,), [2, 2], multi_head=False, norm_stats="batch")
    served, inference = inferring(model, 0, 0, 1, 0)
    x = toy.random(4, 3)
    model.module.eval()
    with torch.no_grad():
        found = inference(model, x, {0: 4})
        whole = {task: model.logits(params, x, 0) for task, params in served.items()}
    assert found.equal(torch.stack([whole[task][row] for row, task in enumerate((0, 0, 1, 0))]))


def test_without_inference_there_is_no_prediction_and_no_figure():
    model = Model(toy.mlp(3, 4, 2), (3,), [2, 2], multi_head=False)
    inference = Inference({0: model.params}, lambda x: None)
    assert inference(model, toy.random(4, 3), {0: 4}) is None and inference.figures == {}


def test_a_negative_variance_is_named():
    """Uploads of hostile clients can make it so; outputs are then NaN."""
    model = Model(nn.BatchNorm1d(2), (2,), [2], multi_head=False, norm_stats="running")
    part = TaskSamples(Pool(torch.ones(3, 2)), torch.arange(3), torch.zeros(3, dtype=torch.int64))
    params = model.params | {"running_var": torch.tensor([1.0, -1.0])}
    with pytest.raises(UpdateError, match=r"its variance 'running_var' is negative, as uploads of hostile clients"):
        accuracy(model, params, part, 0, 3)
