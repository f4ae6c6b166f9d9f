"""A run's model, loaded from its folder: it predicts as the run did, goes to files, and starts other runs."""

import json
import shutil
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import cfl
from cfl import models
from cfl.contract import Strategy
from cfl.core import CheckpointError, ConfigError, DataError
from cfl.methods.strategies.ewc import EWC
from cfl.models.handle import NO_CLASS
from cfl.runtime import export
from cfl.streams import with_scenario
from tests import toy

STREAM = toy.stream(3, multi_head=True)


@dataclass(frozen=True)
class KeepsTasks(Strategy):
    """A strategy of one's own, which serves each task the parameters that it ended with."""

    def init_server(self, params, model):
        return {f"of{task}": params for task in range(3)}

    def absorb(self, server, mean, info, lr):
        new = super().absorb(server, mean, info, lr)
        return {**new, f"of{info.task}": new["params"]}

    def serve(self, server, task):
        return server[f"of{task}"]


def trained(folder, *options, method="fedavg", stream=STREAM, **more):
    config = toy.config(f"tasks={len(stream)}", "local.lr=0.3", *options, method=method)
    return cfl.run(config, stream=stream, output=folder, **more)


def normalised():
    """A network with running statistics; each task has its own by default."""
    return nn.Sequential(nn.Linear(toy.DIMENSIONS, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))


def samples(stream, task):
    test = stream.tasks[task].test
    return test.gather(torch.arange(len(test)))


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("fot", ["scenario=task"]),
        ("fot", ["scenario=domain"]),
        ("fot", ["scenario=class"]),
        ("fot", ["scenario=class", "strategy.infer_tasks=true"]),
        ("gpm", ["scenario=domain", "strategy.infer_tasks=true"]),
        ("rgo", ["scenario=task"]),
    ],
)
def test_a_loaded_model_predicts_as_in_the_last_evaluation_of_its_run(method, options, tmp_path):
    result = trained(tmp_path, *options, method=method)
    run = cfl.load(tmp_path)
    last = result.accuracy_matrix[-1].tolist()
    assert run.accuracies(STREAM) == last and run.metrics["acc"] == result.metrics["acc"]
    stream = with_scenario(STREAM, run.config.scenario)
    for task in range(3):
        x, y = samples(stream, task)
        given = task if stream.scenario == "task" else None
        assert float((run.predict(x, given) == y).double().mean()) == last[task]
    assert all(torch.equal(leaf, result.params[name]) for name, leaf in run.params.items())
    if method == "fot":
        use = {name: basis.shape[1] / basis.shape[0] for name, basis in run.bases.items()}
        assert use == result.metrics["subspace_use"] and max(use.values()) > 0


def test_the_task_of_a_sample_rules_out_classes_of_other_tasks(tmp_path):
    trained(tmp_path, "scenario=class")
    run, x = cfl.load(tmp_path), samples(STREAM, 1)[0]
    every, own = run.logits(x), run.logits(x, task=1)
    classes = run.model.classes_of(1)
    assert torch.equal(own[:, classes], every[:, classes]) and own.shape == every.shape
    assert (own == NO_CLASS).sum(dim=1).eq(every.shape[1] - len(range(*classes.indices(99)))).all()
    assert [sorted(head) for head in run.heads.values()] == [[f"5.bias@{t}", f"5.weight@{t}"] for t in range(3)]


def image_stream(*means):
    """A task of 8-bit images for each mean that they are normalised with; half of them are for the test."""
    labels, tasks = torch.arange(40) % 2, []
    for task, mean in enumerate(means):
        images = torch.randint(0, 256, (40, 1, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(task))
        own = cfl.streams.Pool(images, torch.tensor([[[mean]]]), torch.tensor([[[0.2]]]))
        parts = (cfl.streams.TaskSamples(own, rows, labels[rows]) for rows in torch.arange(40).split(20))
        tasks.append(cfl.streams.Task(f"t{task}", *parts, 2))
    return cfl.Stream("normalised", tuple(tasks), (1, 4, 4), False)


@pytest.mark.parametrize("means", [(0.3,), (0.3, 0.3), (0.3, 0.7)])
def test_raw_images_are_normalised_as_in_training_of_their_task(means, tmp_path):
    stream = image_stream(*means)
    trained(tmp_path, stream=stream)
    run = cfl.load(tmp_path)
    assert len(run.about["pixels"]) == len(set(means))
    for task, one in enumerate(stream.tasks):
        raw = one.test.pool.images[20:].numpy()
        assert torch.equal(run.logits(raw, task), run.logits(samples(stream, task)[0]))
        if len(set(means)) == 1:
            assert torch.equal(run.logits(raw), run.logits(raw, task))
        else:
            with pytest.raises(ConfigError, match="normalise images differently; pass the task of x"):
                run.logits(raw)


def test_raw_images_are_refused_if_the_run_has_seen_none(tmp_path):
    """It may have seen numbers from 0 to 255, or from 0 to 1: nothing tells."""
    trained(tmp_path)
    raw = torch.zeros(3, toy.DIMENSIONS, dtype=torch.uint8)
    with pytest.raises(DataError, match=r"x is uint8, but the run in .* has not seen images of this type"):
        cfl.load(tmp_path).logits(raw, 0)


def test_a_last_single_sample_is_predicted_with_the_batch_before(tmp_path):
    """With the statistics of the batch, one sample has none."""
    stream = toy.stream(2)
    trained(tmp_path, "model.norm_stats=batch", "eval_batch_size=4", model=normalised(), stream=stream)
    run, x = cfl.load(tmp_path, model=normalised()), samples(stream, 0)[0][:5]
    assert torch.equal(run.logits(x, 0), run.model.predict(run.params, x, 0))
    with pytest.raises(DataError, match="x is one sample, and the model normalises by the statistics of a batch"):
        run.logits(x[:1], 0)


def test_a_description_of_one_normalisation_for_all_tasks_is_read(tmp_path):
    """As earlier versions wrote it."""
    trained(tmp_path, stream=image_stream(0.3))
    about = json.loads((tmp_path / "model.json").read_text())
    (about["pixels"],) = about["pixels"]
    (tmp_path / "model.json").write_text(json.dumps(about))
    assert cfl.load(tmp_path).about["pixels"] == [{"mean": [[[pytest.approx(0.3)]]], "std": [[[pytest.approx(0.2)]]]}]


def test_an_interrupted_run_gives_the_model_of_its_last_checkpoint(tmp_path):
    class Stops(cfl.sinks.NullSink):
        def round(self, row):
            if row["task"] == 1:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path, sink=Stops())
    run = cfl.load(tmp_path)
    assert run.latest == 0 and run.metrics == {} and len(run.accuracies(STREAM)) == 1
    with pytest.raises(ConfigError, match=r"task is 1; the run in .* has trained tasks 0 to 0"):
        run.predict(samples(STREAM, 1)[0], task=1)
    with pytest.raises(ConfigError, match=r"task is 1; the run in .* has trained tasks 0 to 0"):
        run.export(tmp_path / "untrained.safetensors", task=1)
    assert not (tmp_path / "untrained.safetensors").exists()


def test_own_networks_and_strategies_are_passed_again(tmp_path):
    network = toy.mlp(toy.DIMENSIONS, 5, toy.CLASSES)
    result = trained(tmp_path, model=network, strategy=KeepsTasks())
    with pytest.raises(ConfigError, match=r"has a model of its own, Net; pass it to cfl.load as model="):
        cfl.load(tmp_path, strategy=KeepsTasks())
    with pytest.raises(ConfigError, match=r"has a strategy of its own, KeepsTasks; pass it to cfl.load as strategy="):
        cfl.load(tmp_path, model=network)
    with pytest.raises(ConfigError, match="has a strategy KeepsTasks; pass an object of it, not of Strategy"):
        cfl.load(tmp_path, model=network, strategy=cfl.Strategy)
    with pytest.raises(ConfigError, match="the network does not fit the parameters"):
        cfl.load(tmp_path, model=toy.mlp(toy.DIMENSIONS, 6, toy.CLASSES), strategy=KeepsTasks)
    cfl.run(toy.config(method="ewc"), stream=toy.stream(1), output=tmp_path / "named")
    assert isinstance(cfl.load(tmp_path / "named").strategy, EWC)
    with pytest.raises(ConfigError, match="has a strategy EWC; pass an object of it, not of KeepsTasks"):
        cfl.load(tmp_path / "named", strategy=KeepsTasks)
    run = cfl.load(tmp_path, model=network, strategy=KeepsTasks)
    # Each task keeps the model with which it ended: nothing is forgotten.
    assert run.accuracies(STREAM) == result.accuracy_matrix.diagonal().tolist()


def test_a_network_of_length_0_is_loaded(tmp_path):
    class Short(nn.Sequential):
        def __len__(self):
            return 0

    network = Short(*toy.mlp(toy.DIMENSIONS, 5, toy.CLASSES)).float()
    result = trained(tmp_path, model=network)
    run = cfl.load(tmp_path, model=network)
    assert isinstance(run.model.module, Short)
    assert run.accuracies(STREAM) == result.accuracy_matrix[-1].tolist()


@pytest.mark.parametrize("constant", [True, False])
def test_tasks_with_equal_buffers_need_not_be_named(constant, tmp_path):
    """A buffer that never changes is the same in all tasks; running statistics are not."""

    class Centred(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("centre", torch.ones(toy.DIMENSIONS))
            self.layer = nn.Linear(toy.DIMENSIONS, 2)

        def forward(self, x):
            return self.layer(x - self.centre)

    stream, network = toy.stream(3), Centred() if constant else normalised()
    trained(tmp_path, stream=stream, model=network)
    run, (x, _) = cfl.load(tmp_path, model=network), samples(stream, 1)
    if constant:
        assert run.predict(x).equal(run.predict(x, task=1))
        assert {*load_file(run.export(tmp_path / "net.safetensors"))} == {"centre", "layer.weight", "layer.bias"}
    else:
        with pytest.raises(ConfigError, match="has parts for each task; pass task=0 to 2"):
            run.predict(x)


def test_wrong_samples_and_tasks_are_named(tmp_path):
    trained(tmp_path)
    run = cfl.load(tmp_path)
    with pytest.raises(DataError, match=rf"x has samples of shape \(3,\), and the run .* has \({toy.DIMENSIONS},\)"):
        run.predict(np.zeros((2, 3)), task=0)
    with pytest.raises(ConfigError, match="has a head for each task; pass task=0 to 2"):
        run.predict(samples(STREAM, 0)[0])
    with pytest.raises(DataError, match=r"has classes \[2, 2\], and the run .* has \[2, 2, 2\]"):
        run.accuracies(toy.stream(2, multi_head=True))
    with pytest.raises(ConfigError, match="holds no run"):
        cfl.load(tmp_path / "elsewhere")
    (tmp_path / "model.json").unlink()
    with pytest.raises(ConfigError, match=r"has no model\.json: an earlier version made the run; continue it with"):
        cfl.load(tmp_path)


@pytest.mark.parametrize("scenario", ["task", "class"])
def test_exported_parameters_load_into_the_plain_network(scenario, tmp_path):
    trained(tmp_path / "run", f"scenario={scenario}")
    run, x = cfl.load(tmp_path / "run"), samples(STREAM, 1)[0]
    task = 1 if scenario == "task" else None
    path = run.export(tmp_path / "new" / "model.safetensors", task)
    outputs = 2 if scenario == "task" else 6  # of three tasks with two classes each
    network = models.build("mlp", (toy.DIMENSIONS,), outputs, run.config.model.options).eval()
    network.load_state_dict(load_file(path))
    assert torch.equal(network(x), run.logits(x, task))


def test_a_file_of_a_network_with_statistics_of_the_batch_loads_without_buffers(tmp_path):
    trained(tmp_path, "model.norm_stats=batch", model=normalised(), stream=toy.stream(2))
    run, plain = cfl.load(tmp_path, model=normalised()), normalised().eval()
    plain[1].track_running_stats = False
    plain[1].running_mean = plain[1].running_var = plain[1].num_batches_tracked = None
    plain.load_state_dict(load_file(run.export(tmp_path / "model.safetensors")))
    x = samples(toy.stream(2), 0)[0]
    assert torch.equal(plain(x), run.logits(x))


class Tied(nn.Module):
    """A network with a weight under two names, and a buffer that its state_dict leaves out."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(toy.DIMENSIONS, toy.DIMENSIONS), nn.Linear(toy.DIMENSIONS, toy.DIMENSIONS)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.full((toy.DIMENSIONS,), 0.5), persistent=False)
        self.head = nn.Linear(toy.DIMENSIONS, 2)

    def forward(self, x):
        return self.head(self.second(self.first(x * self.scale).relu()).relu())


def test_files_have_the_names_of_the_networks_state_dict(tmp_path):
    torch.manual_seed(0)
    trained(tmp_path, model=(given := Tied()), stream=toy.stream(1))
    run, plain, x = cfl.load(tmp_path, model=given), Tied().eval(), samples(toy.stream(1), 0)[0]
    plain.load_state_dict(load_file(run.export(tmp_path / "model.safetensors")))
    assert torch.equal(plain(x), run.logits(x))
    held = export._holding(given, run.params)  # the network of an .onnx file
    assert torch.equal(held(x), run.logits(x)) and not torch.equal(given(x), run.logits(x))


@pytest.mark.slow
def test_an_onnx_file_computes_the_same_logits(tmp_path):
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    reference = pytest.importorskip("onnx.reference", reason="onnx is not installed")
    trained(tmp_path, "scenario=class")
    run, x = cfl.load(tmp_path), samples(STREAM, 2)[0]
    path = run.export(tmp_path / "model.onnx")
    (found,) = reference.ReferenceEvaluator(str(path)).run(["logits"], {"x": x.numpy()})
    assert len(x) > 2 and np.allclose(found, run.logits(x).numpy(), atol=1e-6)


@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        ('"model"', '"modem"', "model"),
        ('"input_shape": [', '"input_shape": [0,', "input_shape.0"),
        ('"scenario": "task"', '"scenario": "tusk"', "scenario"),
        (": [\n    {}\n  ]", ': [{"mead": 0.5}]', r"pixels\.0\.mead\.\[key\]"),
    ],
)
def test_a_damaged_description_of_the_model_is_refused(old, new, place, tmp_path):
    trained(tmp_path)
    text = (tmp_path / "model.json").read_text()
    assert old in text
    (tmp_path / "model.json").write_text(text.replace(old, new))
    with pytest.raises(CheckpointError, match=rf"model.json' is damaged \({place}: .*; continue the run with --resume"):
        cfl.load(tmp_path)
    trained(tmp_path, resume=True)
    assert cfl.load(tmp_path).about["model"] is None


def test_the_error_for_an_unknown_method_of_a_run_names_plug_ins(tmp_path):
    """Its file may be missing; a name that a user types gets no such hint."""
    trained(tmp_path)
    file = tmp_path / "config.yaml"
    file.write_text(file.read_text().replace("method: fedavg", "method: mine"))
    hint = r"unknown method 'mine'; .* \(if a Python file of yours registers it, give that file to cfl-run --plugin"
    for read in (lambda: cfl.load(tmp_path), lambda: cfl.resolve(file=file)):
        with pytest.raises(ConfigError, match=hint):
            read()
    with pytest.raises(ConfigError, match="unknown method 'mine'; [^(]*$"):
        cfl.resolve("split-digits", method="mine")


def test_an_export_that_is_not_clear_is_refused(tmp_path):
    trained(tmp_path)
    run = cfl.load(tmp_path)
    with pytest.raises(ConfigError, match=r"has a head for each task; pass task=0 to 2"):
        run.export(tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"unknown suffix of an exported file '\.safetensor'.*\.safetensors"):
        run.export(tmp_path / "model.safetensor", task=0)


def test_predictions_of_tasks_with_statistics_of_their_own_need_the_task(tmp_path):
    stream = toy.stream(2)
    found = trained(tmp_path, stream=stream, model=normalised())
    run = cfl.load(tmp_path, model=normalised())
    with pytest.raises(ConfigError, match=r"the model has parts for each task; pass task=0 to 1"):
        run.predict(samples(stream, 0)[0])
    for task, recorded in enumerate(found.accuracy_matrix[-1]):
        x, y = samples(stream, task)
        assert float((run.predict(x, task) == y).double().mean()) == recorded


@pytest.mark.parametrize("multi_head", [False, True])
def test_a_run_of_a_single_task_needs_no_task(multi_head, tmp_path):
    stream = toy.stream(1, multi_head=multi_head)
    trained(tmp_path, stream=stream, model=normalised())
    run, x = cfl.load(tmp_path, model=normalised()), samples(stream, 0)[0]
    assert torch.equal(run.logits(x), run.logits(x, task=0))
    paths = [run.export(tmp_path / f"{task}.safetensors", task=task) for task in (None, 0)]
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_texts_are_predicted_as_a_stream_gives_them(tmp_path):
    """A stream cuts texts to the longest of a batch: 4 tokens, rounded up to 8, of samples that may have 16."""
    pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    config = cfl.resolve("split-topics", overrides=["tasks=1", "rounds=1", "cohort=1", "text.max_length=16"])
    cfl.run(config, output=tmp_path)
    run = cfl.load(tmp_path)
    words = run.about["vocabulary"]
    whole = torch.zeros(3, 2, 16)
    whole[:, :, :4] = 1.0
    assert torch.allclose(run.logits(whole[:, :, :8], task=0), run.logits(whole, task=0), atol=1e-6)
    with pytest.raises(DataError, match=r"x has samples of shape \(2, 17\), and the run .* has \(2, 16\)"):
        run.predict(torch.ones(3, 2, 17), task=0)
    with pytest.raises(DataError, match=f"x has token ids outside of 0 to {words - 1}; make it with the tokenizer of"):
        run.predict(torch.full((3, 2, 8), float(words)), task=0)


@pytest.mark.parametrize("multi_head", [False, True])
@pytest.mark.parametrize("task", [-1, 2])
def test_an_export_for_a_task_that_the_run_lacks_is_refused(multi_head, task, tmp_path):
    trained(tmp_path, stream=toy.stream(2, multi_head=multi_head))
    with pytest.raises(ConfigError, match=rf"task is {task}; the run in .* has trained tasks 0 to 1"):
        cfl.load(tmp_path).export(tmp_path / "model.safetensors", task=task)


@pytest.mark.parametrize(("method", "option"), [("single_task", []), ("rgo", ["strategy.encode=true"])])
def test_an_export_of_a_method_with_weights_for_each_task_needs_the_task(method, option, tmp_path):
    few = ["tasks=2", "rounds=1", "model.hidden=[8]", "partition.clients=2"]
    config = cfl.resolve("permuted-digits", method=method, overrides=[*few, *option])
    with pytest.warns(UserWarning, match="accuracies are those with the task of each test sample given"):
        cfl.run(config, output=tmp_path)
    with pytest.raises(ConfigError, match="has parts for each task; pass task=0 to 1"):
        cfl.load(tmp_path).export(tmp_path / "model.safetensors")
    first, last = (load_file(cfl.load(tmp_path).export(tmp_path / f"{task}.safetensors", task=task)) for task in (0, 1))
    assert any(not torch.equal(leaf, last[name]) for name, leaf in first.items())


class Pruned(torch.nn.Linear):
    def __init__(self, kept):
        super().__init__(64, 10)
        self.register_buffer("kept", kept)

    def forward(self, input):
        return torch.nn.functional.linear(input, self.weight * self.kept, self.bias)


def test_a_network_with_other_masks_is_refused(tmp_path):
    masks = [torch.arange(640).reshape(10, 64) % 3 == rest for rest in (0, 1)]
    config = cfl.resolve("permuted-digits", overrides=["tasks=2", "rounds=2", "partition.clients=2"])
    cfl.run(config, model=Pruned(masks[0]), output=tmp_path / "run")
    assert cfl.load(tmp_path / "run", model=Pruned(masks[0])).metrics["acc"]
    with pytest.raises(ConfigError, match="the masks kept of the network differ from those of the run in"):
        cfl.load(tmp_path / "run", model=Pruned(masks[1]))
    start = cfl.resolve("permuted-digits", overrides=["tasks=2", "rounds=2", f"start={tmp_path / 'run'}"])
    with pytest.raises(ConfigError, match="the masks kept of the network differ from those of the run in"):
        cfl.run(start, model=Pruned(masks[1]))
    with pytest.raises(CheckpointError, match="a mask of the network changed since the run began"):
        cfl.run(config, model=Pruned(masks[1]), output=tmp_path / "run", resume=True)


def test_a_run_starts_from_the_model_of_another(tmp_path):
    first = trained(tmp_path / "first")
    seen = []
    config = {"options": [f"start={tmp_path / 'first'}", "seed=5"]}

    def observe(info, client, params):
        seen.append(info.round)

    class Starts(Strategy):
        def init_server(self, params, model):
            seen.append(params)
            return super().init_server(params, model)

    trained(tmp_path / "second", *config["options"], strategy=Starts(), observe=observe)
    assert all(torch.equal(leaf, first.params[name]) for name, leaf in seen[0].items())


def test_heads_that_do_not_fit_start_anew_and_bodies_must_fit(tmp_path):
    first = trained(tmp_path / "first")
    start = f"start={tmp_path / 'first'}"
    plain = toy.stream(2)  # a single head, which the first run has not
    notes = []

    class Notes(cfl.sinks.NullSink):
        def start(self, config, texts, total_rounds):
            notes.extend(texts)

    trained(tmp_path / "second", start, "local.lr=1e-30", stream=plain, sink=Notes())
    assert notes[0] == f"starts from the model in '{tmp_path / 'first'}'; new: 5.weight, 5.bias"
    params = cfl.load(tmp_path / "second").params
    assert torch.equal(params["1.weight"], first.params["1.weight"])  # a step of 1e-30 changes no float32 of a weight
    with pytest.raises(ConfigError, match=r"start: '1.weight' has shape \(7, 8\) here, and .* has shape \(6, 8\)"):
        trained(tmp_path / "third", start, "model.hidden=[7,7]", stream=plain)


def test_a_run_without_adapters_cannot_start_from_one_with_adapters(tmp_path):
    trained(tmp_path / "first", "model.adapter=lora", "model.adapter_rank=4")
    remedy = "that run has adapters: set model.adapter=lora, model.adapter_rank=4 here, too"
    with pytest.raises(ConfigError, match=f"has no such parameter; {remedy}"):
        trained(tmp_path / "second", f"start={tmp_path / 'first'}")


@pytest.mark.parametrize("there", ["per_task", "batch"])
def test_a_run_with_shared_statistics_needs_them_in_the_run_it_starts_from(there, tmp_path):
    """Both runs have one network: only the option gives the statistics other names, or leaves them out."""
    stream = toy.stream(2)
    trained(tmp_path / "first", f"model.norm_stats={there}", stream=stream, model=normalised())
    options = [f"start={tmp_path / 'first'}", "model.norm_stats=running"]
    with pytest.raises(ConfigError, match=f"has no such parameter; set model.norm_stats={there}, as in that run"):
        trained(tmp_path / "second", *options, stream=stream, model=normalised())


def test_adapters_of_another_rank_or_alpha_are_no_start(tmp_path):
    """Else the run would lose what the adapters there learned, or count it another number of times."""
    lora = ["model.adapter=lora", "model.adapter_rank=4"]
    trained(tmp_path / "first", *lora)
    start = f"start={tmp_path / 'first'}"
    trained(tmp_path / "same", start, *lora, "model.adapter_alpha=4")  # alpha is the rank by default
    remedy = "set model.adapter_rank=4, model.adapter_alpha=null here, too"
    others = {"model.adapter_rank=2": "rank 2 and alpha 2", "model.adapter_alpha=8": "rank 4 and alpha 8"}
    for option, here in others.items():
        with pytest.raises(ConfigError, match=f"{here} here, and rank 4 and alpha 4 in .*; {remedy}"):
            trained(tmp_path / "other", start, *lora, option)


def test_the_note_on_new_parameters_is_short(tmp_path):
    """Three tasks more than there: three weights and biases of heads, and three times three statistics; 15 in all."""
    notes = []

    class Notes(cfl.sinks.NullSink):
        def start(self, config, texts, total_rounds):
            notes.extend(texts)

    trained(tmp_path / "first", stream=toy.stream(1, multi_head=True), model=normalised())
    more = {"stream": toy.stream(4, multi_head=True), "model": normalised(), "sink": Notes()}
    trained(tmp_path / "second", f"start={tmp_path / 'first'}", **more)
    assert notes[0].endswith(" and 7 more") and notes[0].count(",") == 7  # 8 names of 15


def test_a_resumed_run_notices_that_its_starting_model_changed(tmp_path):
    trained(tmp_path / "first")
    start = f"start={tmp_path / 'first'}"
    whole = trained(tmp_path / "second", start)
    again = trained(tmp_path / "second", start, resume=True)
    assert torch.equal(toy.flat(again.params), toy.flat(whole.params))
    trained(tmp_path / "other", "seed=8")
    (tmp_path / "first").rename(tmp_path / "moved")
    (tmp_path / "other").rename(tmp_path / "first")
    with pytest.raises(CheckpointError, match="the model in '.*first' changed since the run began"):
        trained(tmp_path / "second", start, resume=True)


def test_stored_results_alone_hold_no_model(tmp_path):
    cfl.run(toy.config(), stream=toy.stream(), output=tmp_path / "run")
    for name in ("checkpoints", "model.json"):
        shutil.move(tmp_path / "run" / name, tmp_path)
        with pytest.raises(ConfigError, match="has no checkpoints: only options and results of a run are there"):
            cfl.load(tmp_path / "run")
        with pytest.raises(CheckpointError, match="holds the results of a run, and no checkpoint of it"):
            cfl.run(toy.config(), stream=toy.stream(), output=tmp_path / "run", resume=True)


def test_a_damaged_last_checkpoint_is_reported(tmp_path):
    cfl.run(toy.config(), stream=toy.stream(), output=tmp_path)
    last = max((tmp_path / "checkpoints").glob("checkpoint-*.safetensors"))
    last.write_bytes(last.read_bytes()[:100])
    with pytest.warns(UserWarning, match=last.name):
        cfl.load(tmp_path)


def test_a_task_without_a_client_is_a_task_too(tmp_path):
    """All clients drop out of the last task, whose head stays as it began."""
    options = ("cohort=1", "drop_rate=0.9", "rounds=1", "tasks=2")
    for seed in range(9):
        found = cfl.run(toy.config(*options, f"seed={seed}"), stream=toy.stream(2), output=tmp_path / str(seed))
        saved = cfl.load(tmp_path / str(seed))
        assert saved.latest == 1
        accuracies = saved.accuracies(toy.stream(2))
        assert accuracies == pytest.approx(found.metrics["accuracy_matrix"][-1])
