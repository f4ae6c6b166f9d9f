"""Layer inputs: weight times unfolded inputs against torch's own layers, for all geometries, and sums over patches."""

import pytest
import torch
from torch import nn

import cfl
from cfl import models
from cfl.contract import Batch, Client
from cfl.core import tree
from cfl.methods.subspace import input_sums
from cfl.methods.subspace.input_sums import ImageEnergies
from cfl.methods.subspace.layer_inputs import Patches, slides, some_patches, stream, watch
from tests import toy


def _handle(module, input_shape, outputs):
    return cfl.Model(module.double(), input_shape, [outputs], multi_head=False)


def _seen(model, x):
    """Inputs of each layer in one pass, by name, and outputs of each module, by path."""
    inputs, outputs = {}, {}
    paths = {layer.path for layer in model.layers}
    hooks = [
        model.module.get_submodule(path).register_forward_hook(
            lambda module, args, out, path=path: outputs.update({path: out.detach()})
        )
        for path in paths
    ]
    with watch(model, model.layers, lambda layer, seen: inputs.update({layer.name: seen})):
        model.logits(model.params, x, 0)
    for hook in hooks:
        hook.remove()
    return inputs, outputs


def _assert_products(model, x):
    """Assert that weight times inputs, plus bias, is the module's output."""
    inputs, outputs = _seen(model, x)
    assert set(inputs) == {layer.name for layer in model.layers}
    for layer in model.layers:
        weight = model.params[layer.weight][layer.rows].flatten(1)
        assert inputs[layer.name].shape[2] == layer.size == weight.shape[1]
        product = inputs[layer.name] @ weight.T  # (batch, positions, outputs)
        if layer.bias:
            product = product + model.params[layer.bias][layer.rows]
        out = outputs[layer.path]
        if isinstance(layer.module, nn.Conv2d):
            out = out.flatten(2).transpose(1, 2)
        out = out.reshape(len(x), -1, out.shape[-1])[..., layer.rows]
        torch.testing.assert_close(product, out, atol=1e-12, rtol=1e-12)


def _conv_model(conv, side=8):
    module = nn.Sequential(conv, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(conv.out_channels, 3)).double()
    return _handle(module, (conv.in_channels, side, side), 3)


def _random_images(count, channels, size):
    """Images that float32 holds exactly, in float64."""
    return torch.randn(count, channels, *size, generator=torch.Generator().manual_seed(0)).double()


def _images(channels, side=8):
    return torch.randn(2, channels, side, side, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.filterwarnings("ignore:Using padding='same'")  # torch copies the input once; the result is the same
@pytest.mark.parametrize("kernel", [1, 2, 3, 4])
@pytest.mark.parametrize("stride,padding", [(1, 0), (1, 1), (2, 0), (2, 1), (1, "same"), (1, "valid")])
def test_unfold_times_weight_is_the_convolution(kernel, stride, padding):
    _assert_products(_conv_model(nn.Conv2d(3, 5, kernel, stride, padding)), _images(3))


@pytest.mark.parametrize(
    "options",
    [
        dict(dilation=2),
        dict(dilation=2, padding="same"),
        dict(dilation=(1, 2), padding=(0, 2), stride=(2, 1)),
        dict(groups=2),
        dict(groups=4, bias=False),
        dict(padding=1, padding_mode="reflect"),
        dict(padding=(2, 1), padding_mode="circular"),
        dict(padding="same", padding_mode="replicate"),
    ],
    ids=str,
)
def test_unusual_convolutions(options):
    _assert_products(_conv_model(nn.Conv2d(4, 8, 3, **options)), _images(4))


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("size", [(8, 8), (7, 5), (3, 6)], ids=str)
@pytest.mark.parametrize("kernel", [2, 3, (1, 4), (3, 2), (5, 3)])
@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(padding=1),
        dict(padding=(2, 3)),
        dict(padding="same"),
        dict(groups=2),
        dict(padding=(1, 0), padding_mode="reflect"),
        dict(padding="same", padding_mode="circular"),
    ],
    ids=str,
)
def test_gram_matrix_and_energies_of_whole_images_are_those_of_unfolded_patches(kernel, options, size):
    conv = nn.Conv2d(4, 8, kernel, **options)
    if conv.padding in ((0, 0), (1, 0)) and conv.kernel_size[0] > size[0] + 2 * conv.padding[0]:
        pytest.skip("the kernel is larger than the image")
    module = nn.Sequential(conv, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)).double()
    model = _handle(module, (4, *size), 3)
    x = _random_images(3, 4, size)
    for layer in model.layers[:-1]:  # one for each group
        assert slides(layer)
        rows, sums = layer.inputs(x).flatten(0, 1), Patches(layer, size, torch.float64)
        basis = torch.linalg.qr(_random_images(layer.size, 2, ())).Q
        energies, nothing = ImageEnergies(basis, layer), ImageEnergies(basis[:, :0], layer)
        for part in x.split(2):
            sums.add(part)
            energies.add_images(part)
            nothing.add_images(part)
        torch.testing.assert_close(sums.gram(), rows.T @ rows, atol=1e-11, rtol=0)
        whole, rest = (each.square().sum() for each in (rows, rows - rows @ basis @ basis.T))
        torch.testing.assert_close(energies.energies, torch.stack([whole, rest]), atol=0, rtol=1e-11)
        torch.testing.assert_close(nothing.energies, torch.stack([whole, whole]), atol=0, rtol=1e-11)


def test_products_of_patches_in_float32_are_summed_in_float64():
    # Each addition rounds by half an ulp, 2^-24 of the sum. There are 16 + 2 x 16 in each of two transforms (across and
    # down), 2 x 40 over images, and 18 x 10 back from 18 x 10 frequencies: 356 in a row. Batches are added in float64.
    x = _random_images(40, 4, (16, 16)).abs()
    layer = _conv_model(nn.Conv2d(4, 8, 3, padding=1)).layers[0]
    rows, sums = layer.inputs(x).flatten(0, 1), Patches(layer, (16, 16), torch.float32)
    sums.add(x)
    exact = rows.T @ rows
    error = (sums.gram() - exact).abs().max() / exact.max()
    assert 0 < error < 1e-5 < 356 * 2**-24
    for _ in range(9):
        sums.add(x)
    again = (sums.gram() - 10 * exact).abs().max() / (10 * exact.max())
    assert again.item() == pytest.approx(error.item(), rel=1e-6)


def test_only_kernels_that_move_a_pixel_at_a_time_slide():
    for conv in (nn.Conv2d(4, 8, 3, 2), nn.Conv2d(4, 8, 3, dilation=2), nn.Conv2d(4, 8, 1)):
        assert not slides(_conv_model(conv).layers[0])


def test_a_kernel_that_is_not_square():
    _assert_products(_conv_model(nn.Conv2d(3, 4, (1, 4), stride=(1, 3), padding=(0, 2))), _images(3))


def test_each_group_has_a_layer_of_its_own():
    model = _conv_model(nn.Conv2d(4, 8, 3, groups=2))
    first, second = model.layers[:2]
    assert (first.rows, second.rows) == (slice(0, 4), slice(4, 8))
    assert first.name != second.name and first.path == second.path == "0"
    assert first.size == 2 * 3 * 3


@pytest.mark.parametrize("norm", [False, True])
def test_whole_residual_network_with_strided_shortcuts(norm):
    model = _handle(models.build("resnet18", (3, 16, 16), 4, {"width": 4, "norm": norm}), (3, 16, 16), 4)
    model.module.eval()
    shortcuts = [layer for layer in model.layers if "shortcut" in layer.path]
    assert [layer.module.stride for layer in shortcuts] == [(2, 2)] * 3
    assert {layer.module.kernel_size for layer in shortcuts} == {(1, 1)}
    _assert_products(model, _images(3, 16))


def test_a_linear_layer_over_positions():
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.each, self.head = nn.Linear(6, 5), nn.Linear(5, 3)

        def forward(self, x):  # x: (batch, tokens, 6)
            return self.head(torch.relu(self.each(x)).mean(1))

    model = _handle(Tokens(), (7, 6), 3)
    _assert_products(model, torch.randn(2, 7, 6, dtype=torch.float64))


def test_patches_run_channel_row_column():
    conv = nn.Conv2d(2, 1, 2, stride=2, bias=False)
    model = _conv_model(conv, side=4)
    x = torch.arange(32.0, dtype=torch.float64).reshape(1, 2, 4, 4)
    inputs, _ = _seen(model, x)
    # Second patch of the first row: columns 2, 3 of rows 0, 1, in channel 0 (from 0) and channel 1 (from 16).
    assert inputs["0"][0, 1].tolist() == [2, 3, 6, 7, 18, 19, 22, 23]


# Sums of d^2 over the layers, and of d x round(mult d), for the networks of FOT's experiments (arithmetic on their
# published shapes: for the MLP 784^2 + 3 x 400^2 = 1,094,656).
SIZES = {
    "mlp": ((1, 28, 28), {"hidden": [400, 400, 400]}, False, 1_094_656, 1_094_656, 1.0),
    "alexnet_cl": ((3, 32, 32), {}, True, 5_839_104, 29_195_520, 5.0),
    "resnet18 20": ((3, 32, 32), {"width": 20}, True, 8_983_929, 44_919_645, 5.0),
    "resnet18 32": ((3, 84, 84), {"width": 32, "stem_stride": 2, "norm": True}, True, 22_997_721, 114_988_605, 5.0),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_of_full_bases_and_sketches(name):
    shape, options, multi_head, full, sketch, mult = SIZES[name]
    module = models.build(name.split()[0], shape, 10, options)
    model = cfl.Model(module, shape, [10], multi_head=multi_head)
    assert sum(layer.size**2 for layer in model.layers) == full
    assert sum(layer.size * round(mult * layer.size) for layer in model.layers) == sketch


def test_stream_goes_through_all_batches_in_evaluation_mode():
    module = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.9), nn.ReLU(), nn.Linear(6, 3)).double()
    model = _handle(module, (4,), 3)
    x = torch.randn(10, 4, dtype=torch.float64)
    batches = [Batch(part, torch.zeros(len(part)), torch.ones(len(part)), part[:, 0]) for part in x.split(4)]
    seen = {layer.name: [] for layer in model.layers}

    def see(layer, inputs, batch):
        assert torch.equal(batch.ids, batches[len(seen[layer.name])].ids)
        seen[layer.name].append(inputs[:, 0])

    before = tree.clone(model.params)
    model.module.train()
    stream(model, model.params, 0, iter(batches), model.layers, see)
    assert model.module.training  # as it was
    assert torch.equal(torch.cat(seen["0"]), x)
    hidden = torch.relu(x @ model.params["0.weight"].T + model.params["0.bias"])  # without dropout
    torch.testing.assert_close(torch.cat(seen["3"]), hidden, atol=1e-14, rtol=0)
    assert all(torch.equal(before[name], leaf) for name, leaf in model.params.items())


def test_stream_leaves_running_statistics_alone_and_uses_the_task_it_is_told():
    module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
    model = cfl.Model(module, (4,), [3, 3], multi_head=False)
    params = {**model.params, "1.running_mean@1": torch.full((6,), 10.0, dtype=torch.float64)}
    x, outputs = torch.randn(8, 4, dtype=torch.float64), {}
    for task in (0, 1):
        batch = Batch(x, torch.zeros(8), torch.ones(8), torch.arange(8))
        stream(
            model,
            params,
            task,
            iter([batch]),
            model.layers[1:],
            lambda *seen, task=task: outputs.update({task: seen[1]}),
        )
    # Fresh statistics are mean 0, variance 1, so a mean of 10 shifts the normalised values by 10 / sqrt(1 + 1e-5).
    torch.testing.assert_close(outputs[0] - outputs[1], torch.full_like(outputs[0], 10 / (1 + 1e-5) ** 0.5))
    assert torch.equal(params["1.running_mean@0"], torch.zeros(6, dtype=torch.float64))


def test_watch_takes_its_hooks_away_even_after_an_error():
    model = _handle(nn.Sequential(nn.Linear(4, 3)), (4,), 3)
    with pytest.raises(ZeroDivisionError), watch(model, model.layers, lambda layer, inputs: 1 / 0):
        model.logits(model.params, torch.zeros(1, 4, dtype=torch.float64), 0)
    assert model.logits(model.params, torch.zeros(1, 4, dtype=torch.float64), 0).shape == (1, 3)


def _dropping():
    layers = (nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))
    return _handle(nn.Sequential(*layers), (6,), 3)


def _streamed(model, x, **options):
    seen = {}
    batch = Batch(x, torch.zeros(len(x), dtype=torch.int64), torch.ones(len(x)), torch.arange(len(x)))
    stream(
        model, model.params, 0, iter([batch]), model.layers, lambda layer, i, _: seen.update({layer.name: i}), **options
    )
    return {name: inputs[:, 0] for name, inputs in seen.items()}


def test_dropout_is_drawn_on_request_before_a_layer_but_for_its_own():
    """As FOT's code collects: outputs of the ReLUs, in training mode."""
    model, x = _dropping(), _random_images(50, 6, ())
    first, third = model.module[0], model.module[3]
    torch.manual_seed(7)
    seen = _streamed(model, x, dropout=True)
    torch.manual_seed(7)
    with torch.no_grad():
        one = first(x).relu()
        two = third(nn.functional.dropout(one, 0.3)).relu()
    assert torch.equal(seen["0"], x) and torch.equal(seen["3"], one)  # no dropout in the inputs of the second layer
    assert torch.equal(seen["6"], two)  # the second layer's dropout, but not the third layer's own
    assert all(layer.training for layer in model.module.modules())  # as they were


def test_dropout_that_is_called_with_a_keyword():
    """Its input, which is that of the model, enters the layer after it."""
    x, module = _random_images(50, 6, ()), toy.ByKeyword(nn.Dropout(0.5), nn.Linear(6, 3))
    assert torch.equal(_streamed(_handle(module, (6,), 3), x, dropout=True)["1"], x)


def test_without_dropout_layers_see_what_they_multiply():
    model, x = _dropping(), _random_images(50, 6, ())
    model.module.eval()
    watched, _ = _seen(model, x)
    seen = _streamed(model, x)
    assert all(torch.equal(seen[name], inputs[:, 0]) for name, inputs in watched.items())


@pytest.mark.parametrize("method", ["fot", "gpm", "rgo", "fedprotip", "lorm"])
@pytest.mark.parametrize(("positions", "sizes"), [(1, {12}), (2, {11, 1})])  # one position has no statistics
def test_a_last_single_sample_joins_the_pass_before_for_batch_statistics(method, positions, sizes, monkeypatch):
    monkeypatch.setattr(input_sums, "BATCH", 11)
    body = (nn.Linear(8, 6), nn.Unflatten(1, (-1, positions)), nn.BatchNorm1d(6 // positions), nn.Flatten())
    own, seen = ["strategy.batch_size=11"] if method == "rgo" else [], set()
    batches = Client.batches

    def watched(client, *given, **options):
        for batch in batches(client, *given, **options):
            seen.add(len(batch.y))
            yield batch

    monkeypatch.setattr(Client, "batches", watched)
    config = toy.config("model.norm_stats=batch", *own, method=method)
    cfl.run(config, stream=toy.stream(2), model=nn.Sequential(*body, nn.Linear(6, 2)))
    assert seen == sizes  # a client has 12 samples


def test_each_sample_draws_its_own_patches():
    inputs = torch.arange(20.0).view(1, 20, 1).expand(64, 20, 1)
    found = some_patches(inputs, torch.arange(64), 3, key=5)[:, :, 0]
    assert len({tuple(row.tolist()) for row in found}) > 32  # of 20 x 19 x 18 = 6840 draws
